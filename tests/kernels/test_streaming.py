"""Gaussians that are read in blocks of rows, beside the same Gaussian at once."""

import itertools

import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import streaming, testing

S, R = 101, 5
CUTS = [0, 0, 40, 41, 101]  # uneven, with an empty block


def blocks_of(*tensors):
    """The blocks of tensors [..., S] and factors [..., S, R]."""
    return [
        tuple(t[..., a:b, :] if t.shape[-2:] == (S, R) else t[..., a:b] for t in tensors)
        for a, b in itertools.pairwise(CUTS)
    ]


@pytest.mark.parametrize(
    ("dtype", "layout", "masked", "batch"),
    [
        (torch.float32, "row", False, ()),
        (torch.float64, "rank", True, (2, 3)),
        (torch.bfloat16, "rank", False, (2,)),
        (torch.float32, "row", True, (2, 3)),
    ],
)
def test_log_prob_and_gradients_are_those_of_all_rows(dtype, layout, masked, batch):
    inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout, value_batch=(4, *batch), requires_grad=True)
    mask = torch.rand(S, generator=torch.Generator().manual_seed(1)) < 0.7
    given = (*inputs, mask) if masked else tuple(inputs)
    wanted = lrd.log_prob(*inputs, mask=mask if masked else None, precision="float64")
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(wanted)
    for precision in ("auto", "qr"):
        found = streaming.log_prob(blocks_of(*given), precision=precision)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(streaming.log_prob(iter(blocks_of(*given))), wanted.detach(), rtol=1e-6, atol=0)
    found = list(streaming.gradients(blocks_of(*given), weights))
    grads = torch.autograd.grad((wanted * weights).sum(), inputs)
    for k, whole in enumerate(grads):
        joined = torch.cat([block[k] for block in found], -2 if k == 2 else -1)
        torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max()))


def test_truncate_and_joint():
    _, _, factor, diag = testing.make_inputs((2,), S, R)
    for kept in (None, 2):
        found = streaming.truncate(blocks_of(factor, diag), kept)
        wanted = lrd.truncate(factor, diag, kept)
        torch.testing.assert_close(found.singular_values, wanted[2])
        for k, part in enumerate(zip(*found.blocks, strict=True)):
            torch.testing.assert_close(torch.cat(part, k - 2), wanted[k])
    means, factors, diags = torch.randn(6, S), torch.randn(6, S, R), 0.1 + torch.rand(6, S)
    for kept in (None, 4):
        found = streaming.joint(blocks_of(means, factors, diags), rank=kept)
        wanted = lrd.joint(means, factors, diags, rank=kept)
        mean, columns, diagonal = (
            torch.cat(part, -2 if k == 1 else -1) for k, part in enumerate(zip(*found.blocks, strict=True))
        )
        torch.testing.assert_close(mean, wanted.loc)
        covariance = columns @ columns.mT + torch.diag(diagonal)
        torch.testing.assert_close(covariance, wanted.covariance_matrix, rtol=1e-4, atol=1e-4)


class Mapped:
    """Blocks of rows from memory-mapped files."""

    def __init__(self, folder, rows):
        self.files, self.rows = [folder / f"{name}.npy" for name in ("value", "loc", "factor", "diag")], rows

    def __iter__(self):
        mapped = [np.load(file, mmap_mode="r") for file in self.files]
        for begin in range(0, len(mapped[0]), self.rows):
            yield [torch.from_numpy(array[begin : begin + self.rows].copy()) for array in mapped]


def test_memory_mapped_files(tmp_path):
    inputs = testing.make_inputs((), 1000, 4, dtype=torch.float32)
    chunks = Mapped(tmp_path, 300)
    for file, tensor in zip(chunks.files, inputs, strict=True):
        np.save(file, tensor.numpy())
    torch.testing.assert_close(streaming.log_prob(chunks), lrd.log_prob(*inputs), rtol=1e-6, atol=0)
    assert [len(found.value) for found in streaming.gradients(chunks)] == [300, 300, 300, 100]


@pytest.mark.parametrize("smallest", [1e-6, 1e-14, 1e-30])
def test_ill_conditioned_values(smallest):
    generator = torch.Generator().manual_seed(0)
    factor, diag, loc = torch.randn(S, R, generator=generator), torch.ones(S), torch.zeros(S)
    diag[70] = smallest
    value = 1e4 * factor @ torch.randn(R, generator=generator) + torch.randn(S, generator=generator)
    blocks = blocks_of(value, loc, factor, diag)
    torch.testing.assert_close(streaming.log_prob(blocks), lrd.log_prob(value, loc, factor, diag), rtol=1e-6, atol=0)
    if smallest < 1e-10:
        with pytest.raises(RuntimeError, match="too ill-conditioned for gradients"):
            streaming.gradients(blocks)
        with pytest.raises(TypeError, match="more than once"):
            streaming.log_prob(iter(blocks))


def test_refuses_blocks_that_do_not_fit():
    blocks = blocks_of(*testing.make_inputs((2,), S, R))
    broken = [list(block) for block in blocks]
    broken[2][3] = -broken[2][3]
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"block 2: cov_diag\[0, 0\] must be positive"):
        streaming.log_prob(broken)
    with pytest.raises(lrd.NotPositiveDefiniteError, match="a number of a block is invalid"):
        streaming.log_prob(iter(broken))
    assert streaming.log_prob(iter(broken), on_failure="nan").isnan().all()
    broken[2][3], broken[2][0] = blocks[2][3], blocks[2][0] * torch.nan
    with pytest.raises(ValueError, match=r"block 2: value\[0, 0\] must be finite"):
        streaming.log_prob(broken)
    for chunks, error, message in (
        ([], ValueError, "no blocks"),
        ([blocks[0][:3]], TypeError, r"every block of chunks must be \(value, loc, cov_factor, cov_diag\[, mask\]\)"),
        ([3.0], TypeError, "got float"),
        ([blocks[1], [t.float() for t in blocks[2]]], ValueError, "value of block 1 must have"),
        ([blocks[1], [t[:1] for t in blocks[2]]], ValueError, "value of block 1 must have"),
        ([blocks[1], (*blocks[2], torch.ones(1, dtype=torch.bool))], ValueError, "block 1 has a mask, unlike block 0"),
    ):
        with pytest.raises(error, match=message):
            streaming.log_prob(chunks)
    for function in (streaming.gradients, streaming.truncate, lambda chunks: streaming.joint(chunks, rank=2)):
        with pytest.raises(TypeError, match="more than once"):
            function(iter(blocks))
    with pytest.raises(ValueError, match="rank must not be negative"):
        streaming.truncate([block[2:] for block in blocks], -1)
