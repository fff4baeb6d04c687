"""The stability suite, in small."""

import json

import pytest
import torch

import lrd_kernels as lrd
from benchmarks import stability

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")


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
