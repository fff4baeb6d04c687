"""The stress and the stability suites, in small."""

import json

import pytest
import torch

import lrd_kernels as lrd
from benchmarks import stability, stress
from lrd_kernels import testing

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")


def test_no_adversarial_covariance_is_answered_wrong():
    counts, failures = stress.run(300, seed=7)
    assert failures == []
    assert set(counts) == {f.__name__ for f in (*stress.FAMILIES, *stress.BREAKS)}
    assert all(sum(c.values()) == 20 for c in counts.values())


def test_stress_notices_wrong_answers(monkeypatch):
    real = lrd.log_prob
    monkeypatch.setattr(lrd, "log_prob", lambda *a, **k: real(*a, **k) * (1 + 1e-5))
    _, failures = stress.run(30, seed=0)
    assert len(failures) > 15
    monkeypatch.setattr(lrd, "log_prob", lambda *a, **k: real(*a, **k) + 1e-3 * (a[2] - a[2].detach()).sum())
    assert any("gradient for cov_factor" in failure for failure in stress.run(30, seed=0)[1])


def test_stress_report(tmp_path, capsys):
    assert stress.main(["--count", "30", "--output", str(tmp_path / "stress.md")]) == 0
    text = (tmp_path / "stress.md").read_text()
    assert "30 covariances, seed 0, 0 answered wrong" in text
    assert "| dead pixel |" in text
    assert text in capsys.readouterr().out


def test_exact_arithmetic_is_the_reference():
    inputs = testing.make_inputs((), 9, 3)
    stress.mpmath.mp.dps = 60
    for actual, wanted in zip(testing.value_and_grads(lrd.log_prob, inputs), stress.exact(inputs), strict=True):
        torch.testing.assert_close(actual, torch.tensor(wanted.astype(float)))


def test_stability_counts_lost_steps(monkeypatch):
    pictures = torch.rand(64, 28, 28, generator=torch.Generator().manual_seed(0))

    def raises(*_):
        raise torch.linalg.LinAlgError("singular")

    def breaks(mean, *_):
        return mean.sum() * torch.inf

    monkeypatch.setitem(stability.LOSSES, "raises", raises)
    monkeypatch.setitem(stability.LOSSES, "breaks", breaks)
    assert stability.train(pictures, 4, 0.01, 3, "raises", 0)[1]["raised"] == 3
    assert stability.train(pictures, 4, 0.01, 3, "breaks", 0)[1]["not_finite"] == 3
    assert stability.train(pictures, 4, 0.01, 3, "lrd", 0)[1]["raised"] == 0


@pytest.mark.slow
def test_stability_suite(tmp_path):
    pytest.importorskip("mlxtend")
    pytest.importorskip("matplotlib")
    options = ["--ranks", "20", "64", "--floors", "1e-4", "--steps", "40", "--count", "40", "--output", str(tmp_path)]
    assert stability.main(options) == 0
    document = json.loads((tmp_path / "stability.json").read_text())
    assert document["enclosed"] == {"trained": [40, 40], "random": [40, 40]}
    assert all(run["raised"] + run["not_finite"] == 0 for run in document["runs"] if run["loss"] == "lrd")
    assert (tmp_path / "condition_bounds.png").stat().st_size > 10_000
