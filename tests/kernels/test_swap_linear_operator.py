"""linear_operator's low-rank-plus-diagonal operator under the patch, by that library's own contract suite."""

import unittest

import pytest
import torch

import lrd_kernels as lrd

pytest.importorskip("linear_operator")
from linear_operator.operators import (
    DiagLinearOperator,
    LowRankRootAddedDiagLinearOperator,
    LowRankRootLinearOperator,
)
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase


@pytest.fixture(autouse=True)
def patched():
    with lrd.patch_linear_operator():
        yield


class Contract(LinearOperatorTestCase):
    """What every operator of the library has to do."""

    seed = 0
    should_test_sample = True
    should_call_cg = False  # it solves directly, as the original does
    batch = ()

    def create_linear_op(self):
        factor, diag = torch.randn(*self.batch, 5, 2), torch.tensor([1.0, 2.0, 4.0, 2.0, 3.0]).expand(*self.batch, 5)
        return LowRankRootLinearOperator(factor).add_diagonal(diag.clone())

    def evaluate_linear_op(self, operator):
        factor, diag = operator._linear_op.root.to_dense(), operator._diag_tensor.diagonal(dim1=-2, dim2=-1)
        return factor @ factor.mT + torch.diag_embed(diag)


class TestOne(Contract, unittest.TestCase):
    pass


class TestBatch(Contract, unittest.TestCase):
    batch = (3,)


class TestTwoBatches(Contract, unittest.TestCase):
    batch = (4, 3)
    skip_slq_tests = True


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_results_and_gradients_are_those_of_the_library(batch):
    generator = torch.Generator().manual_seed(0)
    factor, rhs = (torch.randn(*batch, *shape, generator=generator).double() for shape in ((30, 4), (30, 5)))
    diag = 0.1 + torch.rand(*batch, 30, generator=generator).double()
    inputs = [t.requires_grad_() for t in (factor, rhs, diag)]

    def results():
        operator = LowRankRootAddedDiagLinearOperator(LowRankRootLinearOperator(factor), DiagLinearOperator(diag))
        found = [operator.solve(rhs), operator.logdet(), *operator.inv_quad_logdet(rhs, logdet=True)]
        found.append(operator.inv_quad_logdet(rhs, logdet=False, reduce_inv_quad=False)[0])
        return found, torch.autograd.grad(sum(part.square().sum() for part in found), inputs)

    ours = results()
    patch = lrd.patch_linear_operator()
    while lrd.patch_linear_operator._active:
        lrd.patch_linear_operator._active[0].undo()
    theirs = results()
    patch.undo()
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(list(mine), list(its), rtol=1e-9, atol=1e-9)


def test_the_kernels_compute(monkeypatch):
    called = []
    original = lrd.functional.terms
    monkeypatch.setattr(lrd.functional, "terms", lambda *a, **k: called.append(1) or original(*a, **k))
    operator = LowRankRootLinearOperator(torch.randn(9, 2)).add_diagonal(torch.ones(9))
    operator.inv_quad_logdet(torch.randn(9, 1), logdet=True)
    assert len(called) == 2


def test_float32_where_the_library_fails():
    generator = torch.Generator().manual_seed(0)
    factor, diag = 1e3 * torch.randn(500, 3, generator=generator).repeat(1, 2), torch.full((500,), 1e-3)
    operator = LowRankRootAddedDiagLinearOperator(LowRankRootLinearOperator(factor), DiagLinearOperator(diag))
    wanted = lrd.logdet(factor.double(), diag.double())
    torch.testing.assert_close(operator.logdet().double(), wanted, rtol=1e-6, atol=0)


def test_sparse_gaussian_process_trains_to_the_same_loss():
    gpytorch = pytest.importorskip("gpytorch")
    x = torch.linspace(0, 1, 200, dtype=torch.float64)
    y = torch.sin(12 * x) + 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.covar_module = gpytorch.kernels.InducingPointKernel(kernel, x[::20, None].clone(), likelihood)

        def forward(self, points):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))

    def loss():
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        model = Model(likelihood).double().train()
        objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(10):
            optimiser.zero_grad()
            result = -objective(model(x), y)
            result.backward()
            optimiser.step()
        return float(result.detach())

    ours = loss()
    lrd.patch_linear_operator._active[0].undo()
    assert ours == pytest.approx(loss(), rel=1e-8)


def test_undone_at_the_end_of_the_block():
    lrd.patch_linear_operator._active[0].undo()
    before = LowRankRootAddedDiagLinearOperator._solve
    with lrd.patch_linear_operator():
        assert LowRankRootAddedDiagLinearOperator._solve is not before
    assert LowRankRootAddedDiagLinearOperator._solve is before
