"""A small run of the demo, and its report."""

import json

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
    sizes = ["--steps", str(STEPS), "--samples", str(SAMPLES), "--images", str(IMAGES), "--workers", "1", "--seed", "3"]
    assert cli.main(["demo", "--output", str(folder), *sizes]) == 0
    return folder


def test_report_has_every_row_and_picture(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    results = json.loads((output / "results.json").read_text())
    for name in demo_report.ROWS:
        assert f"| {name} " in text
        assert f" {results['rows'][name]['mean']:.1f} |" in text
    for columns in (8, 16, 32, 64):
        for folded in ("folded", "not folded"):
            assert f"joint, {columns} columns, {folded}" in text
    for picture in PICTURES:
        assert f"]({picture})" in text
        assert (output / picture).read_bytes().startswith(b"\x89PNG")
        assert (output / picture).stat().st_size > 20_000


def test_report_says_how_it_was_made(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    facts = json.loads((output / "results.json").read_text())["facts"]
    assert {"date", "machine", "kernels", "versions", "allocator", "command", "seconds in all"} == set(facts)
    for fact in facts.values():
        assert str(fact) in text
    assert torch.__version__ in facts["versions"]
    assert f"--steps {STEPS} --samples {SAMPLES} --images {IMAGES}" in facts["command"]


def test_claims_are_judged_by_the_numbers(output):
    text = (output / "report.md").read_text(encoding="utf-8")
    results = json.loads((output / "results.json").read_text())
    for claim, found in results["claims"].items():
        better, worse = claim.split(" above ")
        assert found["mean"] == pytest.approx(
            results["rows"][better]["mean"] - results["rows"][worse]["mean"], abs=1e-3
        )
        assert (f"DOES NOT HOLD here: {claim}" in text) == (found["mean"] <= 0)


def test_ordering_that_fails_is_said(tmp_path):
    """All rows are equal, except for the joint, which is below the expected weights."""
    keys = {"single", "diagonal", "expected", "joint", "mixture", "joint 8", "joint 8 unfolded"}
    rows = {key: Row(key, torch.arange(5.0) - 10 * (key == "joint"), torch.ones(5)) for key in keys}
    scored = demo.Scored(Evaluation(rows, 0.1, 0.1, 0.5, None, None), 0.0, 1.0, 1.0, 0)
    names = [spec.name for spec in demo.specs(tmp_path, 1, 0, 0, 2, 5)]
    lines = demo_report.write(tmp_path, dict.fromkeys(names, scored), {}, {"images": 5})
    wanted = "LR+D, MC dropout, joint, all columns above LR+D, MC dropout, expected weights (-10.0"
    assert any(line.startswith(f"- DOES NOT HOLD here: {wanted}") for line in lines)


def test_networks_are_the_configs_ones(tmp_path):
    """The demo trains the network of the shipped config."""
    spec = demo.specs(tmp_path, 1000, 0, 0, 64, 200)[0]
    cli_module = settings.configure(["--config", "digits_dropout"]).model
    ours = spec.configure().model
    assert {k: v.shape for k, v in ours.net.named_parameters()} == {
        k: v.shape for k, v in cli_module.net.named_parameters()
    }
    assert vars(ours.objective) == vars(cli_module.objective)
    assert ours.learning_rate == cli_module.learning_rate


@pytest.mark.parametrize("option", ["--steps", "--samples", "--images"])
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
