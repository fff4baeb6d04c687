"""Every wrong call is answered by an error that names the argument, what was wanted and what came."""

import subprocess
import sys
import threading

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.ops import dispatch

GOOD = testing.make_inputs((2,), 10, 3)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"value": [1.0]}, TypeError, "value must be a torch.Tensor; got list"),
        ({"cov_factor": None}, TypeError, "cov_factor must be a torch.Tensor; got NoneType"),
        ({"cov_factor": torch.zeros(10)}, ValueError, r"cov_factor must have shape \[..., S, R\]; got \(10,\)"),
        ({"cov_diag": torch.ones(9).double()}, ValueError, r"cov_diag must have shape .* S = 10.*; got \(9,\)"),
        ({"cov_diag": torch.tensor(1.0)}, ValueError, r"cov_diag must have shape .*; got \(\)"),
        ({"loc": torch.zeros(2, 11).double()}, ValueError, r"loc must have shape .*; got \(2, 11\)"),
        ({"value": torch.zeros(3, 10).double()}, ValueError, r"batch dimensions of value \(3, 10\)"),
        (
            {"value": torch.zeros(2, 10)},
            TypeError,
            "value must have cov_factor's dtype torch.float64; got torch.float32",
        ),
        ({"cov_factor": torch.zeros(2, 10, 3).long()}, TypeError, "cov_factor must be float32.*got torch.int64"),
        ({"cov_factor": torch.zeros(2, 10, 3).cfloat()}, TypeError, "cov_factor must be float32.*got torch.complex64"),
        ({"cov_diag": torch.ones(2, 10).double().to_sparse()}, TypeError, "cov_diag must be a dense"),
        ({"loc": torch.zeros(2, 10, device="meta").double()}, ValueError, "loc must be on .*cpu; got meta"),
        ({"mask": torch.ones(10)}, TypeError, "mask must be bool.*got torch.float32"),
        ({"mask": torch.ones(9).bool()}, ValueError, "mask must have shape"),
        (
            {"precision": "double"},
            ValueError,
            "precision must be one of 'auto', 'float64', 'float32', 'qr'; got 'double'",
        ),
        ({"on_failure": "ignore"}, ValueError, "on_failure must be one of 'raise', 'nan'; got 'ignore'"),
        ({"backend": "tpu"}, ValueError, "backend must be one of .*; got 'tpu'"),
    ],
)
def test_wrong_arguments(change, kind, message):
    with pytest.raises(kind, match=message):
        lrd.log_prob(**{**GOOD._asdict(), **change})


MEND = [
    ("cov_factor", lambda t: t.mT, ".mT"),
    ("cov_factor", lambda t: t[0, :, 0], "cov_factor[:, None]"),
    ("cov_factor", lambda t: t.long(), "cov_factor.float()"),
    ("cov_factor", lambda t: t.float(), "cov_diag.to(torch.float32)"),
    ("cov_factor", lambda t: t.numpy(), "torch.as_tensor(cov_factor)"),
    ("cov_diag", lambda t: 0.1, "torch.tensor(cov_diag)"),
    ("cov_diag", lambda t: torch.tensor(0.1).double(), "cov_diag.expand(10)"),
    ("cov_diag", lambda t: t[..., None], "cov_diag.squeeze(-1)"),
    ("cov_diag", lambda t: torch.eye(10).double(), "cov_diag.diagonal(dim1=-2, dim2=-1)"),
    ("cov_diag", lambda t: t.float(), "cov_diag.to(torch.float64)"),
    ("value", lambda t: t.tolist(), "torch.tensor(value)"),
    ("value", lambda t: t.view(2, 1, 2, 5), "value.flatten(-2)"),
    ("value", lambda t: t.view(2, 5, 1, 2), "value.flatten(-3)"),
    ("value", lambda t: t.to("meta"), "value.to('cpu')"),
    ("loc", lambda t: t.long(), "loc.to(torch.float64)"),
    ("mask", lambda t: torch.ones(10), "mask.bool()"),
]


@pytest.mark.parametrize(("name", "change", "advice"), MEND, ids=[f"{name} {advice}" for name, _, advice in MEND])
def test_an_error_says_what_to_do(name, change, advice):
    with pytest.raises((TypeError, ValueError)) as caught:
        lrd.log_prob(**{**GOOD._asdict(), name: change(getattr(GOOD, name, None))})
    assert advice in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "advice"),
    [
        ("cov_factor", lambda t: t.mT, ".mT"),
        ("cov_factor", lambda t: t.numpy(), "torch.as_tensor(cov_factor)"),
        ("cov_diag", lambda t: 0.1, "torch.tensor(cov_diag)"),
        ("cov_diag", lambda t: torch.tensor(0.1), "cov_diag.expand(10)"),
        ("cov_diag", lambda t: t[..., None], "cov_diag.squeeze(-1)"),
        ("cov_diag", lambda t: torch.eye(10), "cov_diag.diagonal(dim1=-2, dim2=-1)"),
        ("loc", lambda t: t.view(2, 2, 5), "loc.flatten(-2)"),
        ("loc", lambda t: t.tolist(), "torch.tensor(loc)"),
    ],
)
def test_the_constructor_says_what_to_do(name, change, advice):
    arguments = {"loc": GOOD.loc, "cov_factor": GOOD.cov_factor, "cov_diag": GOOD.cov_diag}
    with pytest.raises((TypeError, ValueError)) as caught:
        lrd.LowRankMultivariateNormal(**{**arguments, name: change(arguments[name])})
    assert advice in str(caught.value)


@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_a_backend_asked_for_by_name_does_not_fall_back(name):
    if lrd.backends()[name].available:
        pytest.skip(f"{name} is here")
    with pytest.raises(RuntimeError, match=f"backend '{name}' is not available.*reference: plain torch"):
        lrd.log_prob(*GOOD, backend=name)
    with pytest.raises(RuntimeError, match=f"backend '{name}' is not available"):
        lrd.use_backend(name)
    assert lrd.log_prob(*GOOD).isfinite().all()


def test_the_cpu_backend_refuses_other_devices():
    meta = [t.to("meta") for t in GOOD]
    with pytest.raises(RuntimeError, match="backend 'cpu' supports tensors on 'cpu', not on 'meta'"):
        lrd.log_prob(*meta, backend="cpu")


def test_use_backend_nests_and_restores():
    calls = []
    original = lrd.reference.terms

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    lrd.reference.terms = counted
    try:
        with lrd.use_backend("reference"):
            lrd.log_prob(*GOOD)
            with lrd.use_backend("cpu"):
                lrd.log_prob(*GOOD)
            lrd.log_prob(*GOOD)
            lrd.log_prob(*GOOD, backend="cpu")
        lrd.log_prob(*GOOD)
        assert len(calls) == 2
        lrd.use_backend("reference")
        lrd.log_prob(*GOOD)
        lrd.use_backend(None)
        lrd.log_prob(*GOOD)
        assert len(calls) == 3
        with pytest.raises(KeyError), lrd.use_backend("reference"):
            raise KeyError
        lrd.log_prob(*GOOD)
        assert len(calls) == 3
    finally:
        lrd.reference.terms = original
        lrd.use_backend(None)


def test_use_backend_is_left_in_any_order():
    first, second = lrd.use_backend("reference"), lrd.use_backend("cpu")
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert dispatch.choose(None, torch.device("cpu")) == "cpu"
    second.__exit__(None, None, None)
    assert dispatch.forced() is None
    with lrd.use_backend("cpu"):
        lrd.use_backend("reference")  # a plain call lasts to the end of its block
        assert dispatch.choose(None, torch.device("cpu")) == "reference"
    assert dispatch.forced() is None


def test_use_backend_is_the_setting_of_its_thread():
    seen, stop = set(), threading.Event()

    def other():
        while not stop.is_set():
            with lrd.use_backend("reference"):
                pass

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(2000):
        seen.add(dispatch.choose(None, torch.device("cpu")))
    stop.set()
    thread.join()
    assert seen == {"cpu"}


NORMAL = lrd.LowRankMultivariateNormal(torch.zeros(6), torch.ones(6, 2), torch.ones(6))


def mixture(*gaussians):
    return lrd.mixture_log_prob(torch.zeros(6), *gaussians)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: NORMAL.condition([0, 1], [1.0, 2.0]), TypeError, "value must be a torch.Tensor; got list"),
        (lambda: NORMAL.condition([0, 1], torch.zeros(3)), ValueError, r"value must have shape \[..., 2\]"),
        (lambda: NORMAL.condition([0, 1], torch.tensor([torch.nan, 0.0])), ValueError, r"value\[0\] must be finite"),
        (lambda: NORMAL.condition([6], torch.zeros(1)), IndexError, "out of bounds"),
        (lambda: NORMAL.condition([1, 1], torch.zeros(2)), ValueError, "index must not name an output twice"),
        (lambda: NORMAL.marginal([0.5]), TypeError, "index must be a slice, integer positions or a bool mask"),
        (lambda: NORMAL.marginal(torch.ones(5, dtype=torch.bool)), ValueError, r"bool index must have shape \[6\]"),
        (lambda: NORMAL.aggregate([1.0] * 6), TypeError, "weights must be a torch.Tensor; got list"),
        (lambda: NORMAL.aggregate(torch.ones(5)), ValueError, r"weights must be \[K, 6\], or labels \[6\]"),
        (lambda: NORMAL.aggregate(torch.tensor(1.0)), ValueError, r"weights must be \[K, 6\], or labels \[6\]"),
        (
            lambda: NORMAL.aggregate(torch.full((6,), 2**40)),
            ValueError,
            "labels must be numbers of regions",
        ),
        (lambda: NORMAL.aggregate(torch.ones(6, dtype=torch.bool)), TypeError, "weights must be .* got torch.bool"),
        (lambda: NORMAL.correlation(1.5), TypeError, "index must be an integer; got float"),
        (lambda: NORMAL.correlation(6), IndexError, "index must be from -6 to 5; got 6"),
        (lambda: NORMAL.whiten([0.0] * 6), TypeError, "value must be a torch.Tensor; got list"),
        (lambda: NORMAL.unwhiten(torch.zeros(5)), ValueError, r"noise must have shape \[..., 6\]; got \(5,\)"),
        (lambda: NORMAL.correlation(torch.tensor([1, 2])), TypeError, "index must be an integer; got Tensor"),
        (lambda: NORMAL.marginal(None), TypeError, "index must be a slice, integer positions or a bool mask; got None"),
        (lambda: NORMAL.expand([2]).condition([0], torch.zeros(3, 1)), ValueError, r"value must have batch .* \(2,\)"),
        (lambda: NORMAL.energy_score(torch.zeros(5)), ValueError, r"value must have shape \[..., 6\]; got \(5,\)"),
        (lambda: NORMAL.energy_score(0.0), TypeError, "value must be a torch.Tensor; got float"),
        (lambda: lrd.matvec(1.0, torch.ones(6, 2), torch.ones(6)), TypeError, "vec must be a torch.Tensor; got float"),
        (lambda: mixture(0.0, torch.ones(4, 6, 2), torch.ones(4, 6)), TypeError, "means must be a torch.Tensor"),
        (lambda: mixture(torch.zeros(4, 6), 1.0, torch.ones(4, 6)), TypeError, "cov_factors must be a torch.Tensor"),
        (
            lambda: mixture(torch.zeros(4, 6), torch.ones(4, 6, 2), torch.ones(())),
            ValueError,
            "cov_diags must have the 4 Gaussians",
        ),
    ],
)
def test_methods_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_positions_of_any_integer_type(kind):
    chosen = torch.tensor([4, 2], dtype=kind)
    assert NORMAL.marginal(chosen).loc.shape == (2,)
    assert NORMAL.condition(chosen, torch.zeros(2)).loc.shape == (4,)


def test_nothing_at_all_has_a_defined_result():
    P, D = torch.zeros(0, 3), torch.zeros(0)
    assert lrd.log_prob(D, D, P, D) == 0
    assert lrd.solve(D, P, D).shape == lrd.matvec(D, P, D).shape == (0,)
    assert lrd.condition_bounds(P[None], D)[0].isnan()
    with pytest.raises(ValueError, match="cov_diag must have at least one output"):
        lrd.diagnose(P, D)
    batch = torch.zeros(0, 5, 2), torch.ones(0, 5)
    assert lrd.logdet(*batch).shape == (0,)
    assert lrd.solve(torch.ones(0, 5), *batch).shape == lrd.rsample(torch.zeros(0, 5), *batch).shape == (0, 5)
    assert lrd.truncate(*batch, 1)[0].shape == (0, 5, 1)
    empty = lrd.LowRankMultivariateNormal(torch.zeros(0, 5), *batch)
    assert empty.whiten(torch.zeros(0, 5)).shape == empty.correlation(1).shape == (0, 5)
    assert empty.condition([1], torch.zeros(0, 1)).loc.shape == (0, 4)


BAD = [
    ("cov_diag", (1, 4), 0.0, lrd.NotPositiveDefiniteError, r"cov_diag\[1, 4\] must be positive and finite; got 0"),
    ("cov_diag", (0, 2), -3.0, lrd.NotPositiveDefiniteError, r"cov_diag\[0, 2\].*got -3; smallest diagonal entry -3"),
    ("cov_diag", (1, 4), float("nan"), lrd.NotPositiveDefiniteError, r"cov_diag\[1, 4\].*got nan"),
    ("cov_diag", (1, 4), float("inf"), lrd.NotPositiveDefiniteError, r"cov_diag\[1, 4\].*got inf"),
    ("cov_factor", (1, 9, 2), float("nan"), lrd.NotPositiveDefiniteError, r"cov_factor\[1, 9, 2\] must be finite"),
    ("cov_factor", (0, 0, 0), float("-inf"), lrd.NotPositiveDefiniteError, r"cov_factor\[0, 0, 0\].*got -inf"),
    ("value", (1, 3), float("nan"), ValueError, r"value\[1, 3\] must be finite; got nan"),
    ("loc", (0, 9), float("inf"), ValueError, r"loc\[0, 9\] must be finite; got inf"),
]


@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize(("name", "index", "number", "kind", "message"), BAD)
def test_a_bad_number_is_named(backend, dtype, name, index, number, kind, message):
    inputs = type(GOOD)(*(t.clone().to(dtype) for t in GOOD))
    getattr(inputs, name)[index] = number
    with pytest.raises(kind, match=message):
        lrd.log_prob(*inputs, backend=backend)
    assert issubclass(lrd.NotPositiveDefiniteError, torch.linalg.LinAlgError)


@pytest.mark.parametrize(("name", "index", "number", "kind", "message"), BAD)
def test_on_failure_nan_spares_the_other_items(backend, name, index, number, kind, message):
    inputs = type(GOOD)(*(t.clone() for t in GOOD))
    getattr(inputs, name)[index] = number
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, on_failure="nan", backend=backend), inputs)
    expected = testing.value_and_grads(lrd.log_prob, GOOD)
    bad, good = index[0], 1 - index[0]
    assert actual[0][bad].isnan()
    torch.testing.assert_close(actual[0][good], expected[0][good])
    for a, e in zip(actual[1:], expected[1:], strict=True):
        torch.testing.assert_close(a[good], e[good])
        assert not a[bad].any()


def test_one_bad_value_of_many_spares_the_others(backend):
    inputs = testing.make_inputs((), 10, 3, value_batch=(4,))
    expected = testing.value_and_grads(lambda *a: lrd.log_prob(*a)[[0, 1, 3]], inputs)
    inputs.value[2, 5] = torch.inf
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, on_failure="nan", backend=backend), inputs)
    assert actual[0].isnan().tolist() == [False, False, True, False]
    torch.testing.assert_close(actual[0][[0, 1, 3]], expected[0])
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e)
    assert not actual[1][2].any()


def test_the_error_tells_what_it_knows():
    D = GOOD.cov_diag.clone()
    D[1, 4] = -2.0
    with pytest.raises(lrd.NotPositiveDefiniteError) as caught:
        lrd.logdet(GOOD.cov_factor, D)
    assert caught.value.index == (1, 4)
    assert caught.value.smallest_diag == -2.0
    huge = torch.full((10, 3), 1e300, dtype=torch.float64)
    with pytest.raises(lrd.NotPositiveDefiniteError, match="exceed the range of float64") as caught:
        lrd.logdet(huge, torch.full((10,), 1e-30).double())
    assert caught.value.index is None
    assert caught.value.condition > 1e300


def test_nll_loss_names_its_own_arguments():
    inputs = type(GOOD)(*(t.clone() for t in GOOD))
    inputs.cov_diag[0, 1] = torch.nan
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"raw_diag\[0, 1\]"):
        lrd.nll_loss(inputs.loc, inputs.cov_diag, inputs.cov_factor, inputs.value)
    with pytest.raises(ValueError, match=r"raw_diag must have shape \[..., S\]"):
        lrd.nll_loss(GOOD.loc, GOOD.cov_diag[..., :3], GOOD.cov_factor, GOOD.value)
    with pytest.raises(ValueError, match="reduction must be one of"):
        lrd.nll_loss(GOOD.loc, GOOD.cov_diag, GOOD.cov_factor, GOOD.value, reduction="max")
    with pytest.raises(ValueError, match="eps must be finite and not negative; got -1"):
        lrd.nll_loss(GOOD.loc, GOOD.cov_diag, GOOD.cov_factor, GOOD.value, eps=-1)


@pytest.mark.parametrize("name", ["value", "loc", "cov_factor", "cov_diag", "mask"])
def test_nothing_crashes_the_interpreter(name):
    """Whatever is passed: a result or a Python exception."""
    candidates = [
        None, 1, "x", [], object(),
        torch.zeros(()), torch.zeros(0), torch.zeros(10), torch.zeros(2, 10, 0), torch.zeros(0, 10, 3),
        torch.zeros(2, 10, 3).half(), torch.zeros(2, 10).bool(), torch.zeros(2, 10, 3, 1, 1).double(),
        torch.zeros(1).double().expand(2, 10), torch.zeros(10, 2).double().mT, torch.zeros(2, 10).to_sparse(),
        torch.zeros(2, 10, device="meta"), torch.quantize_per_tensor(torch.zeros(2, 10), 0.1, 0, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)]), torch.zeros(2, 10, dtype=torch.complex64),
    ]  # fmt: skip
    for candidate in candidates:
        message = ""
        try:
            result = lrd.log_prob(**{**GOOD._asdict(), name: candidate})
        except Exception as error:
            result, message = None, str(error)
        assert message or result.shape[-1:] in ((2,), (0,))


def test_an_empty_rank_of_outputs():
    """S of 0: a Gaussian over nothing, whose density is 1."""
    P, D, v = torch.zeros(2, 0, 3), torch.ones(2, 0), torch.zeros(2, 0)
    assert lrd.log_prob(v, v, P, D).tolist() == [0, 0]


@pytest.mark.parametrize("precision", ["auto", "qr"])
@pytest.mark.parametrize("function", [lrd.logdet, lrd.entropy])
def test_a_diagonal_of_zeros_has_no_determinant(function, precision):
    with pytest.raises(lrd.NotPositiveDefiniteError, match=r"cov_diag\[0\] must be positive"):
        function(torch.ones(3, 1), torch.zeros(3), precision=precision)


def test_bad_numbers_raise_without_assertions_too():
    """`python -O` removes assertions, and nothing else."""
    script = "import torch, lrd_kernels as lrd\ntry: lrd.logdet(torch.ones(3, 1), -torch.ones(3))\n"
    script += "except lrd.NotPositiveDefiniteError: print('raised')"
    done = subprocess.run([sys.executable, "-O", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "raised\n"
