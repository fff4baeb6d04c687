"""Forward mode, Hessians and batched gradients: those of torch's class, or an error, never a zero."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

import lrd_kernels as lrd
from lrd_kernels import reference, testing

Normal = lrd.LowRankMultivariateNormal
SHAPES = [
    ((), (), (), ()),
    ((3,), (3,), (3,), (3,)),
    ((4, 3), (3,), (), (3,)),
    ((2, 1), (3,), (2, 1), (1,)),
    ((), (5,), (), ()),
]


def draw(batches, S=5, R=2, dtype=torch.float64):
    parts = [testing.make_inputs(batch, S, R, seed=seed, dtype=dtype) for seed, batch in enumerate(batches)]
    return tuple(parts[i][i] for i in range(4))


def tangents_of(inputs):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in inputs)


FUNCTIONS = {
    "log_prob": (lrd.log_prob, reference.log_prob, lambda x: x),
    "mahalanobis": (lrd.mahalanobis, reference.mahalanobis, lambda x: (x[0], *x[2:])),
    "logdet": (lrd.logdet, reference.logdet, lambda x: x[2:]),
    "entropy": (lrd.entropy, reference.entropy, lambda x: x[2:]),
}


@pytest.mark.parametrize("batches", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_of_any_broadcast(name, batches):
    function, wanted, chosen = FUNCTIONS[name]
    inputs = chosen(draw(batches))
    along = tangents_of(inputs)
    for kept in (range(len(inputs)), [0], [len(inputs) - 1]):
        part = tuple(inputs[i] for i in kept)

        def of(call, kept=kept):
            def run(*given):
                full = list(inputs)
                for i, t in zip(kept, given, strict=True):
                    full[i] = t
                return call(*full)

            return run

        found = torch.func.jvp(of(function), part, tuple(along[i] for i in kept))
        expected = torch.func.jvp(of(wanted), part, tuple(along[i] for i in kept))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"precision": "qr"}, {"mask": torch.tensor([True, False, True, True, True])}])
@pytest.mark.parametrize("sizes", [(5, 2), (5, 8)])
def test_forward_mode_with_options(options, sizes):
    inputs = draw([(3,)] * 4, *sizes)
    mask = {k: v for k, v in options.items() if k == "mask"}
    along = tangents_of(inputs)
    found = torch.func.jvp(lambda *a: lrd.log_prob(*a, **options), inputs, along)
    torch.testing.assert_close(found, torch.func.jvp(lambda *a: reference.log_prob(*a, **mask), inputs, along))


def test_forward_mode_of_the_loss_and_of_dual_tensors():
    value, loc, P, D = draw([(3,)] * 4)
    inputs = (loc, D.log(), P, value)
    along = tangents_of(inputs)

    def plain(loc, raw, P, value):
        return -reference.log_prob(value, loc, P, 0.01 + raw.exp()).mean() / 5

    wanted = torch.func.jvp(plain, inputs, along)
    torch.testing.assert_close(torch.func.jvp(lrd.nll_loss, inputs, along), wanted)
    with forward_ad.dual_level():
        result = lrd.nll_loss(*map(forward_ad.make_dual, inputs, along))
        torch.testing.assert_close(tuple(forward_ad.unpack_dual(result)), wanted)


def test_forward_mode_in_narrow_types():
    inputs = draw([(3,)] * 4, 40, 4, torch.float32)
    along = tangents_of(inputs)
    wide = [tuple(t.double() for t in ts) for ts in (inputs, along)]
    found, wanted = torch.func.jvp(lrd.log_prob, inputs, along), torch.func.jvp(reference.log_prob, *wide)
    assert found[1].dtype == torch.float32
    torch.testing.assert_close(found[1].double(), wanted[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("argument", range(4))
def test_hessians_are_those_of_torchs_class(argument):
    inputs = draw([()] * 4)

    def by_class(kind):
        return lambda y, loc, P, D: kind(loc, P, D, validate_args=False).log_prob(y)

    wanted = torch.func.hessian(by_class(torch.distributions.LowRankMultivariateNormal), argument)(*inputs)
    for function in (lrd.log_prob, by_class(Normal)):
        torch.testing.assert_close(torch.func.hessian(function, argument)(*inputs), wanted)
        torch.testing.assert_close(torch.func.jacfwd(torch.func.jacfwd(function, argument), argument)(*inputs), wanted)
    batched = draw([(2,)] * 4)
    found = torch.func.vmap(torch.func.hessian(lrd.log_prob, argument))(*batched)
    items = [torch.func.hessian(reference.log_prob, argument)(*(t[i] for t in batched)) for i in range(2)]
    torch.testing.assert_close(found, torch.stack(items))


CALLS = {
    "condition_bounds": lambda loc, P, D: lrd.condition_bounds(P, D)[0],
    "capacitance_condition": lambda loc, P, D: lrd.capacitance_condition(P, D),
    "extreme_eigenvalues": lambda loc, P, D: lrd.extreme_eigenvalues(P, D).largest,
    "diagnose": lambda loc, P, D: lrd.diagnose(P, D).largest_leverage,
    "whiten": lambda loc, P, D: Normal(loc, P, D).whiten(torch.ones(5, dtype=loc.dtype)),
    "unwhiten": lambda loc, P, D: Normal(loc, P, D).unwhiten(torch.ones(5, dtype=loc.dtype)),
    "truncate": lambda loc, P, D: lrd.truncate(P, D, 1)[1],
    "joint": lambda loc, P, D: lrd.joint(*(t.expand(3, *t.shape) for t in (loc, P, D)), rank=2).cov_diag,
    "solve": lambda loc, P, D: lrd.solve(loc, P, D),
    "capacitance_cholesky": lambda loc, P, D: lrd.capacitance_cholesky(P, D)[0],
}


def accumulated(loc, P, D):
    accumulator = lrd.JointAccumulator(1, 1)
    for scale in (1.0, 2.0, 3.0):
        accumulator.update(scale * loc, P, D)
    return accumulator.finalize().cov_diag


@pytest.mark.parametrize("name", [*CALLS, "accumulator"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_tangent_is_lost(name, backend):
    """Right, or refused."""
    inputs = draw([()] * 4)[1:]
    along = tangents_of(inputs)
    call = accumulated if name == "accumulator" else CALLS[name]
    with lrd.use_backend(backend):
        for kept in (slice(0, 3), slice(1, 2), slice(2, 3)):
            rest = inputs[: kept.start], inputs[kept.stop :]

            def part(*given, rest=rest):
                return call(*rest[0], *given, *rest[1])

            try:
                found = torch.func.jvp(part, inputs[kept], along[kept])[1]
            except (NotImplementedError, RuntimeError):
                continue
            h = 1e-6
            ends = [part(*(t + s * h * d for t, d in zip(inputs[kept], along[kept], strict=True))) for s in (1, -1)]
            torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * h), rtol=1e-4, atol=1e-6)


JACOBIANS = {
    "log_prob": lambda y, loc, P, D: lrd.log_prob(y, loc, P, D),
    "several values": lambda y, loc, P, D: lrd.log_prob(y, loc[0], P[0], D[0]),
    "class": lambda y, loc, P, D: Normal(loc[0], P[0], D[0]).log_prob(y),
    "factor": lambda y, loc, P, D: lrd.log_prob(loc, loc, P + y[..., None], D),
    "nll_loss": lambda y, loc, P, D: lrd.nll_loss(loc, D.log(), P, y, reduction="none"),
    "logdet": lambda y, loc, P, D: lrd.logdet(P + y[..., None], D[0]),
    "solve": lambda y, loc, P, D: lrd.solve(y, P, D),
    "precision_matrix": lambda y, loc, P, D: Normal(loc, P + y[..., None], D).precision_matrix,
    "truncate": lambda y, loc, P, D: lrd.truncate(P + y[..., None], D, 1)[1],
    "joint": lambda y, loc, P, D: lrd.joint(y, P, D, rank=2).variance,
    "condition": lambda y, loc, P, D: Normal(loc, P, D).condition([0], y[..., :1]).loc,
}


@pytest.mark.parametrize("name", JACOBIANS)
def test_gradients_of_several_results_at_once(name):
    value, *others = draw([(3,)] * 4)

    def call(y):
        return JACOBIANS[name](y, *others)

    wanted = torch.autograd.functional.jacobian(call, value)
    torch.testing.assert_close(torch.autograd.functional.jacobian(call, value, vectorize=True), wanted)
    leaf = value.requires_grad_()
    result = call(leaf)
    rows = torch.eye(result.numel(), dtype=result.dtype).reshape(-1, *result.shape)
    (found,) = torch.autograd.grad(result, leaf, rows, is_grads_batched=True)
    torch.testing.assert_close(found.reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, loc, P, D: lrd.log_prob(y, loc, P, D),
        lambda y, loc, P, D: lrd.nll_loss(loc, D, P[0], y, mask=y > 0),
        lambda y, loc, P, D: Normal(loc, P, D).expand((2, 3)).entropy(),
        lambda y, loc, P, D: Normal(loc, P, D).rsample((2,)),
    ],
)
def test_one_graph_serves_any_size(function):
    """More sizes than torch.compile would make graphs for."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for S in (10, 31, 64, 77, 80, 99, 120, 121, 122, 123, 124):
        inputs = draw([(3,)] * 4, S, 4)
        torch.manual_seed(0)
        found = compiled(*inputs)
        torch.manual_seed(0)
        torch.testing.assert_close(found, function(*inputs))
    assert counter.frame_count <= 2
