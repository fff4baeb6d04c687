"""Gaussians whose outputs are divided among processes, beside the same Gaussian on one."""

import os

import pytest
import torch
import torch.distributed as dist
from group import together

import lrd_kernels as lrd
from lrd_kernels import distributed, testing

S, R = 101, 5
CUTS = {1: [0, S], 2: [0, 37, S], 4: [0, 0, 40, 41, S]}  # uneven, with an empty shard


def shard(world, rank):
    return slice(*CUTS[world][rank : rank + 2])


def rows(tensor, own):
    """The own rows of a vector [..., S] or a factor [..., S, R], as a new leaf."""
    part = tensor[..., own, :] if tensor.shape[-2:] == (S, R) else tensor[..., own]
    return part.detach().clone().requires_grad_(tensor.requires_grad)


@pytest.mark.parametrize(
    ("world", "dtype", "layout", "masked", "batch"),
    [
        (1, torch.float32, "rank", True, (1,)),
        (2, torch.float32, "row", False, ()),
        (2, torch.float64, "rank", True, (2, 3)),
        (4, torch.float32, "row", True, (2, 3)),
        (4, torch.bfloat16, "rank", False, (2, 3)),
        (4, torch.float64, "row", False, ()),
    ],
)
def test_log_prob_and_gradients_are_those_of_one_process(world, dtype, layout, masked, batch):
    inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout, value_batch=(3, *batch), requires_grad=True)
    mask = torch.rand(S, generator=torch.Generator().manual_seed(1)) < 0.7 if masked else None
    wanted = lrd.log_prob(*inputs, mask=mask, precision="float64")
    grads = torch.autograd.grad(wanted.square().sum(), inputs)

    def run(rank):
        own = shard(world, rank)
        parts = [rows(t, own) for t in inputs]
        if layout == "rank":
            parts[2] = parts[2].detach().mT.contiguous().mT.requires_grad_()
        found = distributed.log_prob(*parts, mask=None if mask is None else mask[own])
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
        for grad, whole in zip(torch.autograd.grad(found.square().sum(), parts), grads, strict=True):
            torch.testing.assert_close(grad, rows(whole, own), rtol=1e-5, atol=1e-5 * float(whole.abs().max()))

    together(run, world)


@pytest.mark.parametrize("world", [2, 4])
def test_every_function_is_that_of_one_process(world):
    value, loc, factor, diag = (t.float() for t in testing.make_inputs((2,), S, R, value_batch=(3, 2)))
    inputs = [t.requires_grad_() for t in (value, factor, diag)]
    mask = torch.rand(S, generator=torch.Generator().manual_seed(1)) < 0.7
    target, weights = torch.randn(3, 2, S, generator=torch.Generator().manual_seed(2)), torch.randn(3, 2, S)
    means, factors, diags = torch.randn(6, S), torch.randn(6, S, 2), 0.1 + torch.rand(6, S)

    def run(rank):
        own = shard(world, rank)
        v, P, D = (rows(t, own) for t in inputs)
        for ours, theirs in ((distributed.logdet, lrd.logdet), (distributed.entropy, lrd.entropy)):
            torch.testing.assert_close(ours(P, D, mask=mask[own]), theirs(factor, diag, mask=mask), rtol=1e-6, atol=0)
        torch.testing.assert_close(
            distributed.mahalanobis(v, P, D), lrd.mahalanobis(value, factor, diag), rtol=1e-6, atol=0
        )
        for reduction in ("mean", "sum", "none"):
            ours = distributed.nll_loss(
                rows(loc, own), D, P, rows(target, own), eps=0.1, mask=mask[own], reduction=reduction
            )
            theirs = lrd.nll_loss(loc, diag, factor, target, eps=0.1, mask=mask, reduction=reduction)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        for ours, theirs in ((distributed.solve, lrd.solve), (distributed.matvec, lrd.matvec)):
            found, wanted = ours(v, P, D), theirs(*inputs)
            torch.testing.assert_close(found, rows(wanted, own), rtol=1e-5, atol=1e-5)
            grads = torch.autograd.grad((found * rows(weights, own)).sum(), (v, P, D))
            for grad, whole in zip(grads, torch.autograd.grad((wanted * weights).sum(), inputs), strict=True):
                torch.testing.assert_close(grad, rows(whole, own), rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
        with torch.no_grad():
            kept, folded, values = distributed.truncate(P.detach(), D.detach(), 2)
            whole = lrd.truncate(factor, diag, 2)
            torch.testing.assert_close(kept @ kept.mT, (whole[0] @ whole[0].mT)[..., own, own], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(folded, rows(whole[1], own))
            torch.testing.assert_close(values, whole[2])
            for rank_kept in (None, 4):
                found = distributed.joint(means[:, own], factors[:, own], diags[:, own], rank=rank_kept)
                wanted = lrd.joint(means, factors, diags, rank=rank_kept)
                ours = found.cov_factor @ found.cov_factor.mT + torch.diag(found.cov_diag)
                torch.testing.assert_close(ours, wanted.covariance_matrix[own, own], rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(found.loc, wanted.loc[own])
            for chosen in (None, mask):
                ours = distributed.condition_bounds(P, D, mask=None if chosen is None else chosen[own])
                torch.testing.assert_close(ours, lrd.condition_bounds(factor, diag, mask=chosen))

    together(run, world)


def test_few_outputs_in_the_bounds():
    factor, diag = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0.3, 2.0, 1.0], dtype=torch.float64)

    def run(rank):
        own = slice(0, 1) if rank == 0 else slice(1, 3)
        found = distributed.condition_bounds(factor[own], diag[own])
        torch.testing.assert_close(found, lrd.condition_bounds(factor, diag))

    together(run, 2)


def test_samples_share_the_noise_of_the_columns():
    factor, diag = torch.ones(40, 1), torch.full((40,), 1e-12)

    def run(rank):
        generator = torch.Generator().manual_seed(rank)
        own = slice(0, 15) if rank == 0 else slice(15, 40)
        samples = distributed.rsample(torch.zeros(40)[own], factor[own], diag[own], (1000,), generator=generator)
        first = samples[:, 0].contiguous()
        everywhere = [torch.empty_like(first) for _ in range(2)]
        dist.all_gather(everywhere, first)
        assert float((everywhere[0] - everywhere[1]).abs().max()) < 1e-4
        assert 0.9 < float(first.std()) < 1.1
        noise = distributed.rsample(torch.zeros(15), torch.zeros(15, 1), torch.ones(15), (50,), generator=generator)
        both = [torch.empty_like(noise) for _ in range(2)]
        dist.all_gather(both, noise)
        assert not torch.equal(*both)  # the noise of the outputs is each process's own

    together(run, 2)


@pytest.mark.parametrize("smallest", [1e-6, 1e-14, 1e-30])
def test_ill_conditioned_values(smallest):
    generator = torch.Generator().manual_seed(0)
    factor, diag, loc = torch.randn(300, 4, generator=generator), torch.ones(300), torch.zeros(300)
    diag[170] = smallest
    value = 1e4 * factor @ torch.randn(4, generator=generator) + torch.randn(300, generator=generator)
    wanted = lrd.log_prob(value, loc, factor, diag)

    def run(rank):
        own = slice(0, 150) if rank == 0 else slice(150, 300)
        parts = [t[own].clone() for t in (value, loc, factor, diag)]
        torch.testing.assert_close(distributed.log_prob(*parts), wanted, rtol=1e-6, atol=0)
        torch.testing.assert_close(distributed.log_prob(*parts, precision="qr"), wanted, rtol=1e-6, atol=0)
        if smallest < 1e-10:
            with pytest.raises(RuntimeError, match="too ill-conditioned for gradients"):
                distributed.log_prob(*(t.requires_grad_() for t in parts))

    together(run, 2)


def test_invalid_numbers_raise_everywhere():
    tensors = list(testing.make_inputs((), 30, 3))

    def run(rank):
        own = slice(0, 10) if rank == 0 else slice(10, 30)
        for at, bad in ((3, -1.0), (3, torch.nan), (2, torch.inf), (0, torch.nan)):
            broken = [t.clone() for t in tensors]
            broken[at][20] = bad
            parts = [t[own] for t in broken]
            name = ("value", "loc", "cov_factor", "cov_diag")[at]
            wanted = rf"{name}\[10.*must be" if rank == 1 else "those of another process"
            with pytest.raises(ValueError, match=wanted):
                distributed.log_prob(*parts)
            assert distributed.log_prob(*parts, on_failure="nan").isnan()
            with pytest.raises(ValueError, match=wanted.replace("value", "rhs").replace("loc", "rhs")):
                distributed.solve(parts[1 if at == 1 else 0], *parts[2:])
        found = distributed.log_prob(*(t[own] for t in tensors))  # and the next call is right
        torch.testing.assert_close(found, lrd.log_prob(*tensors))

    together(run, 2)


def test_a_process_that_dies_is_an_error_of_the_others():
    inputs = testing.make_inputs((), 30, 3)

    def run(rank):
        if rank == 1:
            os._exit(3)
        with pytest.raises(RuntimeError):
            distributed.log_prob(*inputs)
        os._exit(0)  # the group cannot be destroyed any more

    together(run, 2, seconds=20, may_die=(1,))


def test_one_all_reduce_whatever_the_number_of_outputs():
    def run(rank):
        sizes = []
        original = dist.all_reduce

        def counting(tensor, *args, **kwargs):
            sizes.append(tensor.numel() * tensor.element_size())
            return original(tensor, *args, **kwargs)

        dist.all_reduce = counting
        for outputs in (40, 4000):
            inputs = testing.make_inputs((), outputs, 8, requires_grad=True)
            distributed.log_prob(*inputs).backward()
        assert sizes == [8 * (8 * 9 // 2 + 8 + 3)] * 2  # 376 bytes; none in the backward pass

    together(run, 2)


def test_refuses_what_would_be_wrong():
    inputs = testing.make_inputs((), 30, 3)
    with pytest.raises(RuntimeError, match="init_process_group"):
        distributed.log_prob(*inputs)

    def run(rank):
        with pytest.raises(RuntimeError, match="compiled kernels"):
            distributed.log_prob(*inputs, backend="reference")
        with pytest.raises(ValueError, match="detach cov_factor"):
            distributed.truncate(inputs.cov_factor.clone().requires_grad_(), inputs.cov_diag, 2)
        with pytest.raises(ValueError, match="detach means"):
            distributed.joint(torch.ones(2, 4).requires_grad_(), None, torch.ones(2, 4))
        with pytest.raises(TypeError, match="dtype"):
            distributed.log_prob(inputs.value.float(), *inputs[1:])

    together(run, 1)
