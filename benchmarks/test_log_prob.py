"""Times of `log_prob`, forward and with gradients, beside torch's own class. Run by `make bench`."""

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import reference, testing

SHAPES = [(1, 256, 8), (8, 65536, 8)]  # B, S, R


def torch_log_prob(value, loc, cov_factor, cov_diag):
    return torch.distributions.LowRankMultivariateNormal(loc, cov_factor, cov_diag, validate_args=False).log_prob(value)


FUNCTIONS = {"lrd": lrd.log_prob, "torch": torch_log_prob}


def shape_of(inputs):
    return "x".join(map(str, inputs.cov_factor.shape))


def assert_agree(inputs):
    """No time of a wrong result: values and gradients of the kernels within their budget, torch's within its own."""
    truth = testing.value_and_grads(reference.log_prob, [t.double() for t in inputs])
    plain = testing.value_and_grads(torch_log_prob, inputs)
    results = testing.value_and_grads(lrd.log_prob, inputs)
    for what, a, t, p in zip(("log_prob", *inputs._fields), results, truth, plain, strict=True):
        testing.assert_within_budget(a, t, p, what)
        assert testing.relative_error(p, t) < 1e-3, f"torch's {what} is not the same quantity"


@pytest.fixture(scope="module", params=["row", "rank"])
def layout(request):
    return request.param


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def inputs(request, layout):
    B, S, R = request.param
    inputs = testing.make_inputs((B,), S, R, dtype=torch.float32, layout=layout)
    assert_agree(inputs)
    return inputs


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward(benchmark, inputs, layout, name):
    benchmark.group = f"forward {shape_of(inputs)} {layout}-major"
    with torch.no_grad():
        benchmark(FUNCTIONS[name], *inputs)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_backward(benchmark, inputs, layout, name):
    benchmark.group = f"forward and backward {shape_of(inputs)} {layout}-major"
    benchmark(testing.value_and_grads, FUNCTIONS[name], inputs)
