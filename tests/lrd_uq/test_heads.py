"""Heads: shapes and memory layout of the outputs, and the loss against the density of the Gaussian."""

import math

import pytest
import torch
from torch import nn

import lrd_kernels as lrd
from lrd_uq.heads import PARAMETRISATIONS, DiagonalHead, LowRankHead, MeanHead
from lrd_uq.nets import MONAI_UNETS, DigitsUNet, MonaiUNet, wrap
from lrd_uq.objectives import Objective

LAYOUTS = {
    "image": ((3, 5, 6, 7), False, 42),
    "volume": ((3, 5, 2, 3, 4), False, 24),
    "nodes": ((3, 9, 5), True, 9),
    "table": ((3, 5), True, 1),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    shape, features_last, positions = LAYOUTS[request.param]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)), features_last, positions


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_shapes_and_memory(layout, parametrisation):
    features, features_last, positions = layout
    head = LowRankHead(5, 4, 2, parametrisation=parametrisation, features_last=features_last)
    output = head(features)
    S = 2 * positions
    assert output.mean.shape == output.raw_diag.shape == (3, S)
    assert output.factor.shape == (3, S, 4)
    assert output.factor.stride() == (4 * S, 1, S)  # rank-major, and all of it in one piece
    assert output.factor.mT.is_contiguous()


def test_factor_reaches_the_kernel_where_the_product_wrote_it(monkeypatch):
    """The factor is not transposed or copied between the product in the head and the loss."""
    written, read = [], []
    bmm, nll_loss = torch.bmm, lrd.nll_loss
    monkeypatch.setattr(torch, "bmm", lambda *a: written.append(bmm(*a)) or written[-1])
    monkeypatch.setattr(
        lrd, "nll_loss", lambda m, d, factor, *a, **k: read.append(factor) or nll_loss(m, d, factor, *a, **k)
    )
    head = LowRankHead(5, 4)
    head.nll(head(torch.randn(3, 5, 6, 7)), torch.randn(3, 42))
    assert read[0].data_ptr() == written[0].data_ptr()
    assert read[0].untyped_storage().nbytes() == 3 * 42 * 4 * 4


def test_outputs_are_those_of_a_convolution():
    head = LowRankHead(5, 4, 2)
    features = torch.randn(3, 5, 6, 7)
    output = head(features)
    factor = nn.functional.conv2d(features, head.factor_weight[:, :, None, None])  # [3, rank outputs, 6, 7]
    torch.testing.assert_close(output.factor.mT.reshape(3, 8, 6, 7), factor)
    mean = nn.functional.conv2d(features, head.mean_weight[:, :, None, None], head.mean_bias)
    torch.testing.assert_close(output.mean, head.flat(mean))


def test_nodes_and_targets_share_their_order():
    head = LowRankHead(5, 4, 2, features_last=True)
    features = torch.randn(3, 9, 5)
    mean = nn.functional.linear(features, head.mean_weight, head.mean_bias)  # [3, 9, 2], as a target would be
    torch.testing.assert_close(head(features).mean, head.flat(mean))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("make", [MeanHead, DiagonalHead, *(f"low rank, {p}" for p in PARAMETRISATIONS)])
def test_nll_is_that_of_the_gaussian(make, masked):
    head = LowRankHead(5, 4, parametrisation=make.split(", ")[1]) if isinstance(make, str) else make(5)
    if isinstance(head, LowRankHead):
        nn.init.normal_(head.factor_weight)
    output = head(torch.randn(3, 5, 6, 7))
    target = torch.randn(3, 42)
    mask = torch.rand(3, 42) > 0.4 if masked else torch.ones(3, 42, dtype=torch.bool)
    for i in range(3):
        mean, factor, diag = (t[i].double()[mask[i]] for t in head.gaussian(output))
        factor = factor if factor.shape[-1] else torch.zeros(len(mean), 1, dtype=torch.float64)
        wanted = torch.distributions.LowRankMultivariateNormal(mean, factor, diag).log_prob(target[i][mask[i]].double())
        got = head.nll(output, target, mask if masked else None)[i].double()
        torch.testing.assert_close(-got * mask[i].sum(), wanted, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("parametrisation", PARAMETRISATIONS)
def test_masked_outputs_may_be_nan_and_get_no_gradient(parametrisation):
    head = LowRankHead(5, 4, parametrisation=parametrisation)
    features = torch.randn(2, 5, 6, 7, requires_grad=True)
    mask = torch.rand(2, 42) > 0.5
    target = torch.where(mask, torch.randn(2, 42), torch.nan)
    losses = Objective()(head, head(features), target, mask)
    losses.total.backward()
    assert losses.total.isfinite()
    assert all(p.grad.isfinite().all() for p in head.parameters())
    gone = features.grad.flatten(2).abs().sum(1)[~mask]
    assert (gone == 0).all()
    assert (features.grad.flatten(2).abs().sum(1)[mask] > 0).all()


def test_masked_gaussian_has_nothing_outside():
    head = LowRankHead(5, 4)
    mask = torch.rand(2, 42) > 0.5
    mean, factor, diag = head.gaussian(head(torch.randn(2, 5, 6, 7)), mask)
    assert (mean[~mask] == 0).all()
    assert (factor[~mask] == 0).all()
    assert (diag[~mask] == 1).all()
    assert factor.mT.is_contiguous()


def test_scaled_capacitance_does_not_depend_on_the_diagonal():
    head = LowRankHead(5, 4, parametrisation="scaled")
    output = head(torch.randn(2, 5, 6, 7))
    near, far = (head.gaussian(output._replace(raw_diag=output.raw_diag + shift)) for shift in (0.0, 5.0))
    conditions = [lrd.capacitance_condition(g.factor, g.diag) for g in (near, far)]
    torch.testing.assert_close(*conditions, rtol=1e-4, atol=0)
    assert (far.diag > 2 * near.diag).all()


def test_rank_in_use_and_eps_are_saved_with_the_weights():
    head = LowRankHead(5, 4)
    head.rank_in_use, head.eps = 2, 0.5
    other = LowRankHead(5, 4)
    other.load_state_dict(head.state_dict())
    output = other(torch.randn(2, 5, 6, 7))
    assert output.factor.shape[-1] == 2
    assert other.gaussian(output).diag.min() >= 0.5
    head.rank_in_use = 0
    assert head(torch.randn(2, 5, 6, 7)).factor.shape == (2, 42, 0)


def test_half_precision_features_give_float32_outputs():
    head = LowRankHead(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = head(torch.randn(2, 5, 6, 7).bfloat16())
    assert output.mean.dtype == output.factor.dtype == torch.float32


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="rank must be at least 1; got 0"):
        LowRankHead(5, 0)
    with pytest.raises(ValueError, match="parametrisation must be one of plain, scaled; got 'other'"):
        LowRankHead(5, 4, parametrisation="other")


@pytest.mark.parametrize("name", MONAI_UNETS)
@pytest.mark.parametrize("dims", [2, 3])
def test_monai_unets_by_name(name, dims):
    pytest.importorskip("monai")
    net = wrap(MonaiUNet(name, 1, 6, dims), LowRankHead(6, 4, 2))
    output = net(torch.randn(2, 1, *(32,) * dims))
    assert output.factor.shape == (2, 2 * 32**dims, 4)


def test_unknown_unet_is_named():
    with pytest.raises(ValueError, match=r"name must be one of UNet, .*; got 'VNet'"):
        MonaiUNet("VNet", 1, 6)


def test_any_module_can_be_wrapped():
    net = wrap(nn.Sequential(nn.Linear(3, 6), nn.Tanh()), LowRankHead(6, 2, 4, features_last=True))
    assert net(torch.randn(5, 3)).factor.shape == (5, 4, 2)


def test_small_unet_has_the_size_of_its_recipe():
    net = wrap(DigitsUNet(), LowRankHead(24, 8))
    assert sum(p.numel() for p in net.parameters()) == 88_802
    assert net(torch.rand(2, 2, 28, 28)).factor.shape == (2, 784, 8)


def test_objective_is_the_weighted_sum():
    head = LowRankHead(5, 4)
    output, target = head(torch.randn(2, 5, 6, 7)), torch.randn(2, 42)
    losses = Objective(alpha=0.125, factor_penalty=0.01)(head, output, target)
    identity = 0.5 * (target - output.mean).square().mean() + 0.5 * math.log(2 * math.pi)
    low_rank = head.nll(output, target).mean()
    penalty = output.factor.square().sum(-1).mean()
    torch.testing.assert_close(losses.total, identity + 0.125 * low_rank + 0.01 * penalty)
    torch.testing.assert_close(losses.identity, identity)
    assert penalty > 0


def test_penalty_of_a_scaled_factor_is_that_of_the_variance():
    head = LowRankHead(5, 4, parametrisation="scaled")
    output = head(torch.randn(2, 5, 6, 7))
    torch.testing.assert_close(head.low_rank_variance(output), head.gaussian(output).factor.square().sum(-1))
