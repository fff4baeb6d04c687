"""float32 inputs against extended precision, where float32 sums fail, and the certificate on both sides of its edge."""

import hard_truth
import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import reference, testing
from lrd_kernels.ops import load, registry

OPS = registry.OPS["cpu"]
pytestmark = pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))

SIZES = [(4000, 5), (4000, 20), (4096, 64), (60, 100), (37, 38)]


def errors(inputs, **options):
    """Relative error of the log-density, and of each gradient against its largest entry."""
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, **options), inputs)
    truth = testing.extended_log_prob(inputs)
    found = [np.abs(a.double().numpy() - t).max() / np.abs(t).max() for a, t in zip(actual, truth, strict=True)]
    return float(found[0]), max(map(float, found[1:]))


def bound(inputs):
    """For gradients: 1e-15 times the condition number is where exact float64 arithmetic itself ends."""
    scaled = inputs.cov_factor.double() / inputs.cov_diag.double().sqrt()[:, None]
    condition = 1 + float(torch.linalg.matrix_norm(scaled, 2)) ** 2
    return max(1e-4, 1e-15 * condition)


def cases(sizes):
    return [pytest.param(*f, *size, id=hard_truth.name_of(*f, *size)) for f in hard_truth.FAMILIES for size in sizes]


def check_auto(family, hardness, S, R):
    inputs = testing.hard_inputs(family, hardness, S, R)
    value, gradients = errors(inputs)
    assert value <= 1e-6
    assert gradients <= bound(inputs)


@pytest.mark.parametrize(("family", "hardness", "S", "R"), cases(SIZES))
def test_auto_is_right_where_float32_is_not(family, hardness, S, R):
    check_auto(family, hardness, S, R)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "hardness", "S", "R"), cases(hard_truth.KEPT_SIZES))
def test_auto_is_right_in_every_row_of_large_inputs(family, hardness, S, R):
    check_auto(family, hardness, S, R)


@pytest.mark.parametrize(("family", "hardness", "S", "R"), cases(hard_truth.KEPT_SIZES))
def test_auto_is_right_in_some_rows_of_large_inputs(family, hardness, S, R):
    inputs = testing.hard_inputs(family, hardness, S, R)
    truth = hard_truth.load(hard_truth.name_of(family, hardness, S, R), inputs)
    actual, *gradients = testing.value_and_grads(lrd.log_prob, inputs)
    assert abs(actual.item() - truth.log_prob) <= 1e-6 * abs(truth.log_prob)
    for name, gradient in zip(hard_truth.GRADIENTS, gradients, strict=True):
        off = np.abs(gradient.double().numpy()[truth.rows] - truth.gradients[name]).max()
        assert off <= bound(inputs) * truth.largest[name], name


def forward(inputs, precision):
    """The raw forward op: result, L^-1, (growth, log det), z, value_info."""
    value, loc, factor, diag = inputs
    index = ("auto", "float64", "float32").index(precision)
    arguments = (factor[None], diag[None], value[None, None], loc[None, None], None, None, index)
    return OPS.log_prob_fwd(*arguments, None, None, -0.5, -0.5, 0.0)


def taken(inputs):
    """Which route `auto` took for the Gram matrix, told bit for bit."""
    auto = forward(inputs, "auto")
    (route,) = (p for p in ("float32", "float64") if torch.equal(auto[1], forward(inputs, p)[1]))
    return route


def with_growth(growth, S=8192, R=64, seed=0):
    """Columns of which two nearly coincide, as far as to give the capacitance this growth."""
    inputs = testing.hard_inputs("diagonal", 1.0, S, R, seed)
    P = inputs.cov_factor
    mix = (1 - 2 / (growth + 1)) ** 0.5
    P[:, 1] = mix * P[:, 0] + (1 - mix * mix) ** 0.5 * P[:, 1]
    return inputs


def test_the_certificate_on_both_sides_of_its_edge():
    """Growth tells how near columns are to coincide. Below 8 float32 is taken and good, above it is not taken."""
    for growth, route in ((1.0, "float32"), (6.0, "float32"), (11.0, "float64"), (1e4, "float64")):
        inputs = with_growth(growth)
        measured = float(forward(inputs, "float64")[2][0, 0])
        assert measured == pytest.approx(growth, rel=0.6)
        assert taken(inputs) == route
        value, gradients = errors(inputs)
        assert value <= 1e-6
        assert gradients <= 1e-4
    # the edge is not idle: far above it, forced float32 is out of its bounds
    bad = with_growth(1e5)
    assert max(errors(bad, precision="float32")) > 1e-4
    assert max(errors(bad)) <= 1e-4


def test_cancellation_in_the_mahalanobis_term_is_seen():
    """A value far along the factor: r^T D^-1 r exceeds M by far. The differences are then put relative to P C^-1 u."""
    inputs = testing.hard_inputs("diagonal", 1.0, 8192, 64)
    noise = torch.randn(8192, generator=torch.Generator().manual_seed(0))
    near = inputs._replace(value=inputs.loc + noise)
    far = inputs._replace(value=inputs.loc + noise + inputs.cov_factor.sum(-1) * 1000)
    for inputs_ in (near, far):
        assert taken(inputs_) == "float32"
        assert errors(inputs_)[0] <= 1e-6
    assert errors(far, precision="float32")[0] > 1e-6
    large = inputs.cov_factor[:, :8] * 1e4
    few = inputs._replace(cov_factor=large, value=inputs.loc + noise + large.sum(-1))
    assert taken(few) == "float64"
    assert errors(few)[0] <= 1e-6


@pytest.mark.parametrize("layout", testing.LAYOUTS)
@pytest.mark.parametrize("sample", ["typical", "empty", "bad"])
def test_a_sample_of_rows_may_mislead(layout, sample):
    """Large S: the differences are put relative to an estimate from a few rows, whatever those rows are like."""
    S, R = 20000, 33
    inputs = testing.hard_inputs("diagonal", 1.0, S, R)
    P = inputs.cov_factor.clone()
    sampled = (torch.arange(S) % (S // 16)) < R
    if sample == "empty":
        P[sampled] = 0
    if sample == "bad":  # there the factor says the opposite of what it says elsewhere
        P[sampled] *= -1000
    value = inputs.loc + torch.where(sampled, 1, P.sum(-1) * 100)
    inputs = inputs._replace(cov_factor=testing.in_layout(P, layout), value=value)
    value_error, gradients = errors(inputs)
    assert value_error <= 1e-6
    assert gradients <= 1e-4


def test_small_problems_and_ranks_are_summed_in_float64():
    assert taken(testing.hard_inputs("diagonal", 1.0, 8192, 8)) == "float64"
    assert taken(testing.hard_inputs("diagonal", 1.0, 200, 64)) == "float64"


def test_each_item_of_a_batch_has_its_own_route():
    """A hard item does not change its neighbour, not by one bit."""
    easy, hard = with_growth(1.0), with_growth(1e6, seed=1)
    both = [torch.stack(pair) for pair in zip(easy, hard, strict=True)]
    batched = testing.value_and_grads(lrd.log_prob, both)
    for i, inputs in enumerate((easy, hard)):
        for whole, alone in zip(batched, testing.value_and_grads(lrd.log_prob, inputs), strict=True):
            assert torch.equal(whole[i], alone)


def test_rows_of_high_leverage():
    """A few outputs that a column explains almost alone: 1 - h cancels, and is redone in float64."""
    inputs = testing.hard_inputs("diagonal", 1.0, 8192, 64)
    P = inputs.cov_factor.clone()
    P[:32, :32] += 300 * torch.eye(32)
    inputs = inputs._replace(
        cov_factor=P, value=inputs.loc + torch.randn(8192, generator=torch.Generator().manual_seed(0))
    )
    assert taken(inputs) == "float32"
    assert errors(inputs)[1] <= 1e-5


@pytest.mark.parametrize("R", [2, 8, 16])
def test_small_ranks_differentiate_rows_of_high_leverage_in_float64(R):
    """float32 products are certified, but 1 - h of this one row cancels."""
    P, D = testing.make_inputs((), 4000, R, dtype=torch.float32)[2:]
    P[1] = 0.0
    P[1, 0] = 1e4
    _, *grads = testing.value_and_grads(lambda *a: lrd.logdet(*a, backend="cpu"), (P, D))
    _, *wanted = testing.value_and_grads(reference.logdet, (P.double(), D.double()))
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad[1].double(), expected[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-12, 3e-20, 1e17])
def test_small_ranks_near_the_limits_of_float32(scale):
    """Weights or entries of L^-1 beyond what float32 products bear: the gradients scale with the inputs."""
    value, loc, P, D = testing.make_inputs((), 600, 4, dtype=torch.float32)
    inputs = (value * scale, loc * scale, P * scale, D * (scale * scale))
    _, *grads = testing.value_and_grads(lambda *a: lrd.log_prob(*a, backend="cpu"), inputs)
    _, *wanted = testing.value_and_grads(reference.log_prob, [t.double() for t in inputs])
    for grad, expected in zip(grads, wanted, strict=True):
        if expected.abs().max() < torch.finfo(torch.float32).max:
            assert testing.relative_error(grad, expected) < 1e-5
