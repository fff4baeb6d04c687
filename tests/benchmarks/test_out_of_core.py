"""The benchmark of a Gaussian in files, in small."""

import json

import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from benchmarks import out_of_core

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")


def test_scores_files_in_blocks(tmp_path):
    output = tmp_path / "result.json"
    options = ["--folder", str(tmp_path / "files"), "--outputs", "1000", "--rank", "3", "--rows", "300"]
    for _ in range(2):  # the second time the files are there
        assert out_of_core.main([*options, "--output", str(output)]) == 0
    files = out_of_core.Files(tmp_path / "files", 1000, 3, 1000)
    (whole,) = files
    inputs = [tensor.requires_grad_() for tensor in whole]
    wanted = lrd.log_prob(*inputs)
    found = json.loads(output.read_text())["results"]
    assert found["log_prob"] == pytest.approx(float(wanted), rel=1e-6)
    grad = torch.autograd.grad(wanted, inputs[2])[0].numpy()
    written = np.fromfile(tmp_path / "files" / "gradients.f32", np.float32).reshape(1000, 3)
    np.testing.assert_allclose(written, grad, rtol=1e-4, atol=1e-6 * np.abs(grad).max())
