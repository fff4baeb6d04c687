"""The benchmark of a training step, in small: both losses are the same number, and the file is written."""

import json

import pytest
import torch

import lrd_kernels as lrd
from benchmarks import training

pytest.importorskip("monai")
pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")


def test_losses_and_gradients_are_the_same():
    net, x, target = training.setting(16, 2, 3)
    gradients, losses = [], []
    for loss in (training.our_loss, training.torch_loss):
        net.zero_grad()
        losses.append(loss(net.head, net(x), target))
        losses[-1].backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(*losses)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_report(tmp_path, capsys):
    output = tmp_path / "training.json"
    sizes = ["--side", "16", "--batch", "2", "--rank", "2", "--repeats", "1"]
    assert training.main([*sizes, "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert set(results) == {"lrd", "torch", "predict"}
    assert results["lrd"]["first_step"] == pytest.approx(results["torch"]["first_step"], rel=1e-4)
    assert results["predict"]["seconds"] > 0
    assert "times as fast" in capsys.readouterr().out
