"""Times of every function, and of torch's class for `log_prob`. Run by `make bench`.

Results are compared with the reference before they are timed.
"""

import pytest
import torch

import lrd_kernels as lrd
from benchmarks.measure import admit, truth
from benchmarks.registry import CONTESTANTS, DIRECTIONS, LAYOUTS, QUICK_CASES, Case
from lrd_kernels import reference, testing

B, S, R, N = 8, 16384, 16, 1000  # N values against one Gaussian
TOLERANCE = 1e-5  # float32 results of float64 sums

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason=lrd.backends()["cpu"].detail)


@pytest.fixture(scope="module", params=[f"{case.name} {layout}" for case in QUICK_CASES for layout in LAYOUTS])
def case(request):
    """Name of the case, its inputs, and the expected results."""
    name, layout = request.param.split()
    case = Case.parse(name)
    inputs = case.inputs(layout)
    return request.param, inputs, truth(inputs)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["lrd", "torch"])
def test_log_prob(benchmark, case, name, direction):
    where, inputs, wanted = case
    prepared, record = admit(CONTESTANTS[name], inputs, wanted)
    assert record["status"] == "ok", record
    benchmark.group = f"log_prob {direction} {where}-major"
    benchmark(getattr(prepared, direction))


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def inputs(layout):
    return testing.make_inputs((B,), S, R, dtype=torch.float32, layout=layout)


@pytest.fixture(scope="module")
def mask():
    return torch.rand(B, S, generator=torch.Generator().manual_seed(1)) < 0.9


def time_op(benchmark, what, function, wanted):
    """Times `function()` after comparing its result with `wanted`, computed in float64."""
    with torch.no_grad():
        assert testing.relative_error(function(), wanted) <= TOLERANCE
        benchmark.group = what
        benchmark(function)


def test_many_values(benchmark, layout):
    value, loc, factor, diag = testing.make_inputs((), S, R, dtype=torch.float32, layout=layout, value_batch=(N,))
    wanted = reference.log_prob(value.double(), loc.double(), factor.double(), diag.double())
    time_op(benchmark, f"log_prob of {N} values", lambda: lrd.log_prob(value, loc, factor, diag), wanted)


@pytest.mark.parametrize("name", ["mahalanobis", "solve", "matvec"])
def test_vector_op(benchmark, inputs, name):
    arguments = (inputs.value, inputs.cov_factor, inputs.cov_diag)
    wanted = getattr(reference, name)(*(t.double() for t in arguments))
    time_op(benchmark, name, lambda: getattr(lrd, name)(*arguments), wanted)


@pytest.mark.parametrize("name", ["logdet", "entropy"])
def test_scalar_op(benchmark, inputs, name):
    arguments = (inputs.cov_factor, inputs.cov_diag)
    wanted = getattr(reference, name)(*(t.double() for t in arguments))
    time_op(benchmark, name, lambda: getattr(lrd, name)(*arguments), wanted)


def test_capacitance_cholesky(benchmark, inputs):
    arguments = (inputs.cov_factor, inputs.cov_diag)
    wanted = reference.capacitance_cholesky(*(t.double() for t in arguments))[0]
    time_op(benchmark, "capacitance_cholesky", lambda: lrd.capacitance_cholesky(*arguments)[0], wanted)


def test_nll_loss_with_mask(benchmark, inputs, mask):
    eps = 0.01
    value, loc, factor, diag = (t.double() for t in inputs)
    log_prob = reference.log_prob(value, loc, factor, diag.log(), mask=mask, eps=eps)
    raw_diag = inputs.cov_diag.log()

    def loss():
        return lrd.nll_loss(inputs.loc, raw_diag, inputs.cov_factor, inputs.value, eps=eps, mask=mask)

    time_op(benchmark, "nll_loss with a mask", loss, (-log_prob / mask.sum(-1)).mean())


def test_rsample(benchmark, inputs):
    arguments = (inputs.loc, inputs.cov_factor, inputs.cov_diag)
    # torch's class draws the same numbers from the same state of the generator.
    torch.manual_seed(0)
    wanted = torch.distributions.LowRankMultivariateNormal(*arguments, validate_args=False).rsample((4,))

    def sample():
        return lrd.rsample(*arguments, (4,), generator=torch.Generator().manual_seed(0))

    time_op(benchmark, "rsample of 4", sample, wanted)
