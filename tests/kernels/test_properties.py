"""Hypothesis over shapes, strides, dtypes and masks: the kernels agree with the reference, and identities hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lrd_kernels as lrd
from lrd_kernels import reference, testing

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason=lrd.backends()["cpu"].detail)


@st.composite
def problems(draw):
    """Inputs with odd strides in every argument, and perhaps a mask."""
    S = draw(st.integers(1, 70))
    R = draw(st.integers(0, 34))
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from(testing.DTYPES))
    layout = draw(st.sampled_from(testing.LAYOUTS))
    step = draw(st.integers(1, 3))
    seed = draw(st.integers(0, 1000))
    inputs = testing.make_inputs(batch, S, R, dtype=dtype, layout=layout, seed=seed)
    vectors = [t.repeat_interleave(step, -1)[..., ::step] for t in (inputs.value, inputs.loc, inputs.cov_diag)]
    shared = [draw(st.booleans()) and len(batch) > 0 and batch[0] > 0 for _ in range(4)]
    tensors = [vectors[0], vectors[1], inputs.cov_factor, vectors[2]]
    tensors = [t[:1] if s else t for t, s in zip(tensors, shared, strict=True)]
    mask = None
    if draw(st.booleans()):
        mask = torch.rand(*batch, S, generator=torch.Generator().manual_seed(seed)) < draw(st.floats(0, 1))
    return testing.Inputs(*tensors), mask


@given(problems())
def test_log_prob_agrees_with_the_reference(problem):
    inputs, mask = problem
    actual = testing.value_and_grads(lambda *a: lrd.log_prob(*a, mask=mask, backend="cpu"), inputs)
    wide = [t.double() for t in inputs]
    truth = testing.value_and_grads(lambda *a: reference.log_prob(*a, mask=mask), wide)
    tolerance = 1e-12 if inputs.value.dtype == torch.float64 else 4 * torch.finfo(torch.float32).eps
    for what, a, t in zip(("log_prob", *inputs._fields), actual, truth, strict=True):
        assert a.shape == t.shape
        limit = tolerance if what == "log_prob" else max(tolerance, 2 * torch.finfo(a.dtype).eps)
        # gradients summed over a shared batch may cancel: measure them against what was summed
        assert testing.relative_error(a, t) <= 30 * limit, what


@given(problems())
def test_precision_undoes_covariance(problem):
    inputs, _ = problem
    v, _, P, D = (t.double() for t in inputs)
    torch.testing.assert_close(
        lrd.solve(lrd.matvec(v, P, D), P, D), v.expand_as(lrd.matvec(v, P, D)), rtol=1e-8, atol=1e-8
    )


@given(problems())
def test_parts_add_up(problem):
    """log p = -1/2 (M + log det + S log 2 pi), the entropy is its expectation, and M is a quadratic form."""
    inputs, mask = problem
    value, loc, P, D = (t.double() for t in inputs)
    outputs = D.shape[-1] if mask is None else mask.sum(-1).double()
    maha = lrd.mahalanobis(value - loc, P, D, mask=mask)
    logdet = lrd.logdet(P, D, mask=mask)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(
        lrd.log_prob(value, loc, P, D, mask=mask), -0.5 * (maha + logdet + outputs * reference.LOG_2PI), **close
    )
    torch.testing.assert_close(
        lrd.entropy(P, D, mask=mask), 0.5 * (logdet + outputs * (1 + reference.LOG_2PI)), **close
    )
    torch.testing.assert_close(lrd.mahalanobis(3 * (value - loc), P, D, mask=mask), 9 * maha, **close)
    if mask is None:
        torch.testing.assert_close(maha, ((value - loc) * lrd.solve(value - loc, P, D)).sum(-1), **close)
