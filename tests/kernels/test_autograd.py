"""gradcheck in float64, second derivatives, torch.func transforms, compiled graphs."""

import gc
import weakref

import pytest
import torch
from contract import FUNCTIONS, SCALARS, arguments

import lrd_kernels as lrd
from lrd_kernels import functional, reference, testing
from lrd_kernels.ops import load, registry

BATCHES = [((), ()), ((2,), (3, 2))]


@pytest.mark.parametrize(("batch", "value_batch"), BATCHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(name, batch, value_batch):
    inputs = testing.make_inputs(batch, 6, 3, value_batch=value_batch, requires_grad=True)
    tensors = arguments(name, inputs)
    assert torch.autograd.gradcheck(FUNCTIONS[name][0], tensors)
    assert torch.autograd.gradgradcheck(FUNCTIONS[name][0], tensors)


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_of_nll_loss(masked):
    value, loc, P, D = testing.make_inputs((2,), 6, 3, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, True]) if masked else None

    def loss(*tensors):
        return lrd.nll_loss(*tensors, mask=mask)

    assert torch.autograd.gradcheck(loss, (loc, D, P, value))
    assert torch.autograd.gradgradcheck(loss, (loc, D, P, value))


def test_gradcheck_of_the_capacitance_and_the_precision_diagonal():
    _, _, P, D = testing.make_inputs((2,), 6, 3, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: lrd.capacitance_cholesky(*a)[0], (P, D))
    assert torch.autograd.gradgradcheck(lambda *a: lrd.capacitance_cholesky(*a)[0], (P, D))
    assert torch.autograd.gradcheck(functional.precision_diag, (P, D))
    torch.testing.assert_close(
        functional.precision_diag(P, D),
        torch.linalg.inv(torch.diag_embed(D) + P @ P.mT).diagonal(dim1=-2, dim2=-1),
    )


def test_only_what_is_needed_gets_a_gradient():
    inputs = testing.make_inputs((2,), 9, 3)
    for i in range(4):
        tensors = [t.clone().requires_grad_(j == i) for j, t in enumerate(inputs)]
        (grad,) = torch.autograd.grad(lrd.log_prob(*tensors).sum(), tensors[i])
        every = testing.value_and_grads(lrd.log_prob, inputs)[1 + i]
        assert torch.equal(grad, every)


@pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))
def test_backward_frees_what_the_forward_pass_saved(monkeypatch):
    """As torch's own functions do, while the loss lives; not if the graph is retained."""
    made = []
    ops = registry.OPS["cpu"]

    def forward(*arguments):
        outputs = ops.log_prob_fwd(*arguments)
        made.append([weakref.ref(outputs[1]), weakref.ref(outputs[3])])  # L^-1 and z
        return outputs

    monkeypatch.setitem(registry.OPS, "cpu", ops._replace(log_prob_fwd=forward))
    inputs = testing.make_inputs((2,), 9, 3, requires_grad=True)
    loss = lrd.log_prob(*inputs, backend="cpu").sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    del second
    gc.collect()
    loss.backward()
    assert [ref() for ref in made[0]] == [None, None]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_third_derivatives():
    value, loc, P, D = testing.make_inputs((), 4, 2)

    def along(function):
        def scalar(t):
            return function(value * t, loc, P * (1 + t), D + t * t)

        derivative = scalar
        for _ in range(3):
            derivative = torch.func.grad(derivative)
        return derivative(torch.tensor(0.7, dtype=torch.float64))

    torch.testing.assert_close(along(lrd.log_prob), along(reference.log_prob))


@pytest.mark.parametrize("argnum", range(4))
def test_func_grad_jacrev_and_hessian(argnum):
    inputs = testing.make_inputs((2,), 5, 2)
    close = torch.testing.assert_close

    def both(transform):
        return transform(lrd.log_prob)(*inputs), transform(reference.log_prob)(*inputs)

    close(*both(lambda f: torch.func.grad(lambda *a: f(*a).sum(), argnum)))
    close(*both(lambda f: torch.func.jacrev(f, argnum)))
    close(*both(lambda f: torch.func.jacrev(torch.func.grad(lambda *a: f(*a).sum(), argnum), argnum)))


def test_jacrev_of_the_others():
    _, _, P, D = inputs = testing.make_inputs((2,), 5, 2)
    for name in ("logdet", "entropy"):
        function, truth, _ = FUNCTIONS[name]
        torch.testing.assert_close(torch.func.jacrev(function, (0, 1))(P, D), torch.func.jacrev(truth, (0, 1))(P, D))
    for name in ("mahalanobis", "solve"):
        function, truth, _ = FUNCTIONS[name]
        actual = torch.func.jacrev(function, (0, 1, 2))(inputs.value, P, D)
        torch.testing.assert_close(actual, torch.func.jacrev(truth, (0, 1, 2))(inputs.value, P, D))


# where value, loc, factor and diag are mapped
MAPS = [
    (0, 0, 0, 0),
    (0, None, None, None),
    (None, None, 0, 0),
    (None, None, None, 0),
    (None, None, 0, None),
    (1, 0, None, None),
    (None, 0, 2, 1),
]


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("in_dims", MAPS, ids=str)
def test_vmap(in_dims, batch):
    inputs = []
    for i, dim in enumerate(in_dims):
        plain = testing.make_inputs(batch if i != 1 else (), 5, 3, seed=i)[i]
        if dim is not None:
            dim = min(dim, plain.dim())
            plain = torch.stack([plain, plain * 1.5, plain + 0.25, plain * 2], dim)
        inputs.append(plain)
    dims = tuple(None if d is None else min(d, t.dim() - 1) for d, t in zip(in_dims, inputs, strict=True))
    close = torch.testing.assert_close
    close(torch.func.vmap(lrd.log_prob, dims)(*inputs), torch.func.vmap(reference.log_prob, dims)(*inputs))
    for argnum in range(4):

        def grad(f, argnum=argnum):
            return torch.func.vmap(torch.func.grad(lambda *a: f(*a).sum(), argnum), dims)(*inputs)

        close(grad(lrd.log_prob), grad(reference.log_prob))

    def others(f_logdet, f_solve):
        logdet = torch.func.vmap(torch.func.grad(lambda *a: f_logdet(*a).sum()), dims[2:])
        solve = torch.func.vmap(f_solve, (dims[0], *dims[2:]))
        return (logdet(*inputs[2:]) if any(d is not None for d in dims[2:]) else 0, solve(inputs[0], *inputs[2:]))

    if dims[0] is not None or any(d is not None for d in dims[2:]):
        close(others(lrd.logdet, lrd.solve), others(reference.logdet, reference.solve))


def test_vmap_of_one_and_nested():
    inputs = testing.make_inputs((3, 1), 5, 2)
    nested = torch.func.vmap(torch.func.vmap(lrd.log_prob))(*inputs)
    torch.testing.assert_close(nested, reference.log_prob(*inputs))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*SCALARS, "nll_loss", "solve"])
def test_compiled_graphs_are_whole(name, compiler):
    torch._dynamo.reset()
    inputs = testing.make_inputs((2,), 40, 4, dtype=torch.float32, layout="rank")
    if name == "nll_loss":
        mask = torch.arange(40) % 3 > 0

        def function(value, loc, P, D):
            return lrd.nll_loss(loc, D, P, value, mask=mask)

        tensors = list(inputs)
    else:
        function, tensors = FUNCTIONS[name][0], arguments(name, inputs)
    compiled = torch.compile(lambda *a: function(*a), fullgraph=True, backend=compiler)
    actual = testing.value_and_grads(compiled, tensors)
    for a, e in zip(actual, testing.value_and_grads(function, tensors), strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_for_any_size():
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: lrd.log_prob(*a), fullgraph=True, backend="aot_eager", dynamic=True)
    for S in (10, 31, 64):
        inputs = testing.make_inputs((3,), S, 4)
        actual = testing.value_and_grads(compiled, inputs)
        for a, e in zip(actual, testing.value_and_grads(lrd.log_prob, inputs), strict=True):
            torch.testing.assert_close(a, e)


def test_a_compiled_distribution():
    torch._dynamo.reset()

    def score(value, loc, P, D):
        return lrd.LowRankMultivariateNormal(loc, P, D).log_prob(value)

    inputs = testing.make_inputs((2,), 20, 3)
    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), lrd.log_prob(*inputs))


def test_a_failure_in_a_compiled_graph_is_nan():
    torch._dynamo.reset()
    inputs = testing.make_inputs((2,), 20, 3)
    inputs.cov_diag[1, 4] = -1
    compiled = torch.compile(lambda *a: lrd.log_prob(*a), fullgraph=True, backend="aot_eager")
    assert compiled(*inputs).isnan().tolist() == [False, True]
