"""The benchmark itself: what it writes down, that no wrong result gets a time, and the arithmetic of its rooflines."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

from benchmarks import accuracy, machine, measure, memory, registry, roofline, run
from benchmarks.registry import CONTESTANTS, DIRECTIONS, Case
from lrd_kernels import reference

SMALL = Case(1, 256, 8)


class Reference(registry.Contestant):
    """In the place of this package where its library is not there: these tests are about the benchmark."""

    name = "lrd"
    tolerance = 1e-5

    def log_prob(self, value, loc, cov_factor, cov_diag):
        return reference.log_prob(value, loc, cov_factor, cov_diag)


@pytest.fixture(autouse=True)
def _small_peaks(monkeypatch):
    """Rates of tensors that fit into a cache: quick, and no less a number."""
    full = roofline.Peaks.measure
    monkeypatch.setattr(roofline.Peaks, "measure", lambda self: full(self, elements=1 << 18, size=64, repeats=2))
    if CONTESTANTS["lrd"].available():
        monkeypatch.setitem(CONTESTANTS, "lrd", Reference())


@pytest.fixture
def run_quick(tmp_path):
    """Runs the smallest case; the exit code and the document."""

    def run_it(*options):
        output = tmp_path / "results" / "run.json"
        code = run.main(
            ["--quick", "--cases", SMALL.name, "--repeats", "3", "--seconds", "0.1", "--output", str(output), *options]
        )
        return code, json.loads(output.read_text())

    return run_it


def test_document_has_all_figures(run_quick, capsys):
    code, document = run_quick("--contestants", "lrd", "torch", "linear_operator")
    assert code == 0
    known = document["machine"]
    assert {"cpu", "threads", "kernels", "versions", "allocator", "transparent_huge_pages", "commit"} <= set(known)
    assert known["versions"]["torch"] == torch.__version__
    assert known["date"].endswith("+00:00")
    assert known["instruction_set"] in ("baseline", "avx2", "avx512", None)
    assert document["settings"]["cases"] == [SMALL.name]
    assert all(rate > 0 for rate in document["rooflines"].values())
    assert [(r["case"], r["layout"]) for r in document["results"]] == [(SMALL.name, "row"), (SMALL.name, "rank")]
    for result in document["results"]:
        assert result["contestants"]["linear_operator"]["status"] in ("ok", "skipped")
        for name in ("lrd", "torch"):
            record = result["contestants"][name]
            assert record["status"] == "ok"
            assert set(record["errors"]) == {"log_prob_forward", "log_prob", "loc", "cov_factor", "cov_diag"}
            for direction in DIRECTIONS:
                timing = record[direction]
                assert 0 < timing["min"] <= timing["median"]
                assert len(timing["samples"]) == 3
        forward = result["contestants"]["lrd"]["forward"]["min"]
        assert result["roofline"]["forward_fraction"] == pytest.approx(
            result["roofline"]["forward_seconds"] / forward, rel=1e-12
        )
    table = capsys.readouterr().out
    assert f"{SMALL.name}, row-major" in table
    assert f"{SMALL.name}, rank-major" in table


def test_earlier_run_beside_this_one(run_quick, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "time_calls", lambda call, number: 0.02)  # seconds, whatever the machine is doing
    _, document = run_quick("--contestants", "lrd", "--layouts", "row")
    for direction in DIRECTIONS:
        document["results"][0]["contestants"]["lrd"][direction]["min"] = 1.0  # a second: this run is faster
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(document))
    capsys.readouterr()
    run_quick("--contestants", "lrd", "--compare", str(earlier))
    table = capsys.readouterr().out
    assert "forward 1000 ms, now 0.0" in table  # row-major, as then
    assert "earlier run: nothing to compare with" in table  # rank-major


def test_contestant_that_disagrees_gets_no_time(run_quick, monkeypatch, capsys):
    right = CONTESTANTS["torch"].log_prob
    monkeypatch.setattr(CONTESTANTS["torch"], "log_prob", lambda *a: 1.01 * right(*a))
    code, document = run_quick("--contestants", "lrd", "torch", "--layouts", "row")
    assert code == 1
    records = document["results"][0]["contestants"]
    assert records["torch"]["status"] == "disagrees"
    assert "log_prob by 0.01" in records["torch"]["reason"]
    assert not set(DIRECTIONS) & set(records["torch"])
    assert records["lrd"]["status"] == "ok"
    assert "disagrees: off by more than 0.001" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda result, loc: result + (loc - loc.detach()).sum(-1), id="gradient"),
        pytest.param(lambda result, loc: result * torch.nan, id="nan"),
        pytest.param(lambda result, loc: result[..., None], id="shape"),
        # right with gradients, wrong without: the forward pass is another graph
        pytest.param(lambda result, loc: result if loc.requires_grad else 2 * result, id="forward"),
    ],
)
def test_every_result_is_compared(wrong):
    class Wrong(registry.Torch):
        def log_prob(self, value, loc, cov_factor, cov_diag):
            return wrong(super().log_prob(value, loc, cov_factor, cov_diag), loc)

    inputs = SMALL.inputs("row")
    wanted = measure.truth(inputs)
    assert measure.admit(registry.Torch(), inputs, wanted)[1]["status"] == "ok"
    prepared, record = measure.admit(Wrong(), inputs, wanted)
    assert prepared is None
    assert record["status"] in ("disagrees", "failed")


def test_absent_peer_is_skipped_with_its_reason(run_quick, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)  # as if it were not installed
    code, document = run_quick("--contestants", "lrd", "jax", "--layouts", "row")
    assert code == 0
    assert document["results"][0]["contestants"]["jax"] == {"status": "skipped", "reason": "jax is not installed"}
    assert "skipped: jax is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("layout", registry.LAYOUTS)
@pytest.mark.parametrize("name", ["linear_operator", "jax"])
def test_optional_peers_agree(name, layout):
    if reason := CONTESTANTS[name].available():
        pytest.skip(reason)
    inputs = Case(3, 200, 4).inputs(layout)
    assert measure.admit(CONTESTANTS[name], inputs, measure.truth(inputs))[1]["status"] == "ok"


def test_rounds_are_interleaved():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = measure.interleave(calls, repeats=4, seconds=0.0)
    assert all(len(t["samples"]) == measure.LEAST_ROUNDS for t in timings.values())
    changes = sum(x != y for x, y in itertools.pairwise(order))
    assert changes == 2 * (1 + measure.LEAST_ROUNDS) - 1  # an estimate each, then the rounds


def test_rooflines_by_hand():
    peaks = roofline.Peaks(read_bytes=1e9, write_bytes=5e8, flops=1e10)
    thin = Case(2, 1000, 4)  # P: 32000 bytes, a vector: 8000
    assert roofline.forward_seconds(thin, peaks) == pytest.approx(56e-6)  # (32000 + 3 * 8000) / 1e9
    assert roofline.backward_seconds(thin, peaks) == pytest.approx(152e-6)  # 56e-6 + (32000 + 2 * 8000) / 5e8
    wide = Case(1, 1000, 500)  # S R^2 = 2.5e8
    assert roofline.forward_seconds(wide, peaks) == pytest.approx(25e-3)
    assert roofline.backward_seconds(wide, peaks) == pytest.approx(50e-3)
    reached = roofline.fractions(wide, peaks, forward=50e-3, forward_backward=150e-3)
    assert reached["forward_fraction"] == pytest.approx(0.5)
    assert reached["backward_fraction"] == pytest.approx(0.5)


@pytest.mark.alone
def test_other_work_is_noticed():
    watch = machine.OtherWork()
    command = "import time; end = time.time() + 0.5\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", command], check=True)
    assert watch.cores() > 0.3


def test_disturbed_times_are_marked(run_quick, monkeypatch, capsys):
    monkeypatch.setattr(machine.OtherWork, "cores", lambda self: 0.05)
    run_quick("--contestants", "lrd", "--layouts", "row")
    assert "DISTURBED" not in capsys.readouterr().out
    monkeypatch.setattr(machine.OtherWork, "cores", lambda self: 0.9)
    _, document = run_quick("--contestants", "lrd", "--layouts", "row")
    assert document["results"][0]["cores_busy_with_other_work"] == 0.9
    assert capsys.readouterr().out.count("DISTURBED") == 2  # the case, and its line in the overview


@pytest.mark.alone
def test_memory_of_a_call_is_measured(monkeypatch):
    """A known allocation: 64 MiB on top of inputs, held for the duration of a call that returns next to nothing."""

    class Hungry(registry.Contestant):
        name = "hungry"

        def log_prob(self, value, loc, cov_factor, cov_diag):
            return value.sum(-1) + 0 * torch.ones(1 << 24).sum()

    monkeypatch.setitem(CONTESTANTS, "hungry", Hungry())
    extra = memory.extra_bytes(Case(1, 1000, 4), "row", "hungry", "forward")["extra_bytes"]
    assert extra == pytest.approx(1 << 26, rel=0.05)


@pytest.mark.alone
def test_memory_is_told_from_a_fresh_process():
    told = memory.in_fresh_process(Case(1, 1 << 18, 1), "row", "torch", "forward_backward")
    assert told["extra_bytes"] >= 3 << 20  # the gradients of loc, factor and diag, 1 MiB each
    assert len(told["calls"]) == memory.CALLS


def test_accuracy_table(tmp_path, capsys):
    output = tmp_path / "accuracy.json"
    assert accuracy.main(["--sizes", "300x5", "--families", "condition", "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert [r["hardness"] for r in results] == list(accuracy.FAMILIES["condition"])
    assert all(r["methods"]["torch float64"]["log_prob"] < 1e-5 for r in results)
    assert "S=300, R=5" in capsys.readouterr().out


def test_failure_of_torch_is_told():
    inputs = registry.testing.hard_inputs("condition", 1e12, 300, 5)
    wanted = registry.testing.extended_log_prob(inputs)
    assert "fails" in accuracy.errors("torch float32", inputs, wanted)


def test_json_is_strict(tmp_path):
    machine.write_json(tmp_path / "x.json", {"a": [1.0, float("nan")], "b": {"c": float("inf")}})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [1.0, None], "b": {"c": None}}


@pytest.mark.parametrize("text", ["1x2", "1x2x3x4", "0x2x3", "ax2x3", ""])
def test_bad_case_is_refused(text):
    with pytest.raises(ValueError, match="BATCHxSxR"):
        Case.parse(text)
