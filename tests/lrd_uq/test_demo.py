"""A small run of the demo, and its report."""

import json
import math
import statistics

import pytest
import torch

from lrd_uq import cli, demo, demo_report, plots, settings
from lrd_uq.bayes import Dropout, predict_joint
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.evaluate import Evaluation, Row

STEPS, SAMPLES, IMAGES = 12, 12, 6
PICTURES = ("panel.png", "curves.png", "condition.png", "sweep.png")


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "not" / "there"
    sizes = ["--steps", str(STEPS), "--samples", str(SAMPLES), "--images", str(IMAGES), "--workers", "1"]
    assert cli.main(["demo", "--output", str(folder), *sizes, "--seed", "3", "--seeds", "2"]) == 0
    return folder


def test_report_has_every_row_and_picture(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    results = json.loads((output / "results.json").read_text())
    for name in demo_report.ROWS:
        means = [seed["mean"] for seed in results["rows"][name]]
        assert len(means) == 2
        assert means[0] != means[1]  # trained with other seeds
        assert f"| {name} " in text
        assert f" {statistics.fmean(means):.1f} |" in text
        assert f" {statistics.stdev(means):.1f} |" in text
    for columns in (8, 16, 32, 64):
        for folded in ("folded", "not folded"):
            assert f"joint, {columns} columns, {folded}" in text
    for picture in PICTURES:
        assert f"]({picture})" in text
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
        assert (output / picture).stat().st_size > 20_000
    assert sorted(run.name for run in (output / "runs").iterdir()) == sorted(
        f"{name}-seed{seed}"
        for name in ("diagonal", "diagonal_dropout", "low_rank", "low_rank_dropout")
        for seed in (3, 4)
    )


def test_report_says_how_it_was_made(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    facts = json.loads((output / "results.json").read_text())["facts"]
    assert {"date", "machine", "kernels", "versions", "allocator", "command", "seconds in all"} == set(facts)
    for fact in facts.values():
        assert str(fact) in text
    assert torch.__version__ in facts["versions"]
    assert f"--steps {STEPS} --samples {SAMPLES} --images {IMAGES}" in facts["command"]


def cells_of(text, name):
    """The cells of the row with this name."""
    (line,) = (line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_claims_are_judged_by_the_numbers(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    results = json.loads((output / "results.json").read_text())
    for claim, found in results["claims"].items():
        better, worse = (results["rows"][side] for side in claim.split(" above "))
        gains = [a["mean"] - b["mean"] for a, b in zip(better, worse, strict=True)]
        assert found["per_seed"] == pytest.approx(gains, abs=1e-3)
        assert cells_of(text, claim)[:2] == [f"{sum(gain > 0 for gain in gains)} of 2", f"{found['mean']:+.1f}"]
        assert found["over_seeds"][0] <= found["mean"] <= found["over_seeds"][1]


def lines_of(tmp_path, gains):
    """What is printed if all rows are equal, but for the joint, which is above the expected weights by a gain for each
    seed."""
    keys = {"single", "diagonal", "expected", "joint", "mixture", "joint 8", "joint 8 unfolded"}

    def scored(gain):
        rows = {key: Row(key, torch.arange(5.0) + gain * (key == "joint"), torch.ones(5)) for key in keys}
        return demo.Scored(Evaluation(rows, 0.1, 0.1, 0.5, None, None), 0.0, 1.0, 1.0, 0)

    names = {spec.name for spec in demo.specs(tmp_path, 1, [0], 0, 2, 5)}
    runs = {name: [scored(gain) for gain in gains] for name in names}
    return demo_report.write(tmp_path, runs, {}, {"images": 5, "seeds": len(gains), "seed": 0})


def test_what_holds_says_in_how_many_seeds(tmp_path):
    claim = "LR+D, MC dropout, joint, all columns above LR+D, MC dropout, expected weights"

    def said(gains):
        lines = lines_of(tmp_path, gains)
        return cells_of("\n".join(lines), claim)[:3], lines

    cells, _ = said([4.0, 5.0, 6.0])
    assert cells == ["3 of 3", "+5.0", "+2.5 to +7.5"]  # 4.303 / sqrt(3)
    cells, lines = said([-10.0, -11.0, -9.0])
    assert cells == ["0 of 3", "-10.0", "-12.5 to -7.5"]
    assert f"- {claim.replace(' above ', ' is above ')} IN NO SEED." in lines
    cells, lines = said([-1.0, 2.0, 2.0])
    assert cells == ["2 of 3", "+1.0", "-3.3 to +5.3"]
    assert f"- {claim.replace(' above ', ' is above ')} only in 2 of 3 seeds." in lines
    assert any(line.startswith("- The interval over seeds does not exclude") and claim in line for line in lines)


def test_one_seed_makes_no_claim(tmp_path):
    said = lines_of(tmp_path, [5.0])
    assert "- One seed says nothing of others: the table shows the spread over images alone." in said
    assert not any(" seeds." in line for line in said)


def test_image_without_a_likelihood_is_named(tmp_path):
    said = lines_of(tmp_path, [5.0, math.nan])
    assert any(line.startswith("LR+D, MC dropout, joint, all columns: the log-likelihood of 5 of 5") for line in said)
    assert (
        json.loads((tmp_path / "results.json").read_text())["claims"][
            "LR+D, MC dropout, joint, all columns above LR+D, MC dropout, expected weights"
        ]["mean"]
        is None
    )


def test_networks_are_the_configs_ones(tmp_path):
    """The demo trains the network of the shipped config."""
    spec = demo.specs(tmp_path, 1000, [0], 0, 64, 200)[0]
    cli_module = settings.configure(["--config", "digits_dropout"]).model
    ours = spec.configure().model
    assert {k: v.shape for k, v in ours.net.named_parameters()} == {
        k: v.shape for k, v in cli_module.net.named_parameters()
    }
    assert vars(ours.objective) == vars(cli_module.objective)
    assert ours.learning_rate == cli_module.learning_rate


@pytest.mark.parametrize("option", ["--steps", "--samples", "--images", "--seeds"])
def test_options_must_be_positive(option, capsys):
    with pytest.raises(SystemExit):
        demo.main([option, "0"])
    assert "must be at least 1" in capsys.readouterr().err


def test_panel_shows_what_it_is_given(tmp_path, make_net):
    """Missing modes and a missing truth are left blank."""
    data, net = DigitInpainting(test=2), make_net(dropout=0.3)
    batch = data.part("test")
    mask = batch.mask[:1].flatten(1)
    joint = plots.item_of(predict_joint(Dropout(), net, batch.input[:1], 3, 20, mask=mask))
    assert joint.epistemic.cov_factor.shape[-1] == 2
    item = data.dataset("test")[0]
    item = item._replace(target=torch.full_like(item.target, torch.nan))
    plots.save(plots.panel([plots.subject(item, joint, data.style)]), tmp_path / "panel.png")
    assert (tmp_path / "panel.png").stat().st_size > 5_000
