"""More than 2^31 elements in one factor: indices are 64 bits wide everywhere."""

import math
import os

import pytest
import torch

import lrd_kernels as lrd

BASE, COPIES, R = 2**20, 2**8, 8


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("layout", ["row", "rank"])
def test_two_to_the_28_outputs(layout):
    """A small problem repeated 256 times, whose sums are 256 times those of the small one."""
    wanted = 4 * BASE * COPIES * (R + 3)
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 1.2 * wanted:
        pytest.skip(f"needs {wanted / 2**30:.0f} GiB of free memory")
    generator = torch.Generator().manual_seed(0)
    P = torch.randn(BASE, R, generator=generator)
    D = 0.5 + torch.rand(BASE, generator=generator)
    value = torch.randn(BASE, generator=generator)
    wide_P, wide_D, r = P.double(), D.double(), value.double()
    C = torch.eye(R, dtype=torch.float64) + COPIES * wide_P.mT @ (wide_P / wide_D[:, None])
    u = COPIES * wide_P.mT @ (r / wide_D)
    maha = COPIES * (r * r / wide_D).sum() - u @ torch.linalg.solve(C, u)
    logdet = torch.logdet(C) + COPIES * wide_D.log().sum()
    truth = -0.5 * (maha + logdet + BASE * COPIES * math.log(2 * math.pi))
    factor = P.repeat(COPIES, 1) if layout == "row" else P.mT.contiguous().repeat(1, COPIES).mT
    assert factor.numel() == 2**31
    actual = lrd.log_prob(value.repeat(COPIES), torch.zeros(1).expand(BASE * COPIES), factor, D.repeat(COPIES))
    torch.testing.assert_close(actual.double(), truth, rtol=1e-7, atol=0)
