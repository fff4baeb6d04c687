"""The joint of T predictions against the dense law of total covariance, whole, truncated and streamed."""

import gc
import math
import weakref

import pytest
import torch

import lrd_kernels as lrd
from lrd_kernels import testing
from lrd_kernels.linalg.stack import Stack


def predictions(T=5, S=30, R=3, batch=(), dtype=torch.float64, layout="row", seed=0):
    inputs = testing.make_inputs((T, *batch), S, R, dtype=dtype, layout=layout, seed=seed)
    return inputs.loc, inputs.cov_factor, inputs.cov_diag


def dense(means, factors, diags):
    """Mean, aleatoric and epistemic covariance."""
    means, diags = means.double(), diags.double()
    aleatoric = torch.diag_embed(diags)
    if factors is not None:
        aleatoric = aleatoric + factors.double() @ factors.double().mT
    centred = (means - means.mean(0)).movedim(0, -1)
    epistemic = centred @ centred.mT / max(len(means) - 1, 1)
    return means.mean(0), aleatoric.mean(0), epistemic


def covariance(model):
    factor = model.cov_factor.double()
    return torch.diag_embed(model.cov_diag.double()) + factor @ factor.mT


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("rank", [None, 40])
def test_joint_is_the_law_of_total_covariance(layout, batch, rank):
    samples = predictions(batch=batch, layout=layout)
    joint = lrd.joint(*samples, rank=rank)
    mean, aleatoric, epistemic = dense(*samples)
    torch.testing.assert_close(joint.mean, mean)
    torch.testing.assert_close(covariance(joint), aleatoric + epistemic)
    torch.testing.assert_close(covariance(joint.aleatoric), aleatoric)
    torch.testing.assert_close(covariance(joint.epistemic), epistemic)
    assert isinstance(joint, lrd.LowRankMultivariateNormal)


@pytest.mark.parametrize("layout", ["row", "rank"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_truncated_joint_is_that_of_the_stacked_matrix(dtype, layout):
    samples = predictions(dtype=dtype, layout=layout, batch=(2,))
    full = lrd.joint(*samples)
    wanted = lrd.truncate(full.cov_factor.double(), full.cov_diag.double(), 4)
    joint = lrd.joint(*samples, rank=4)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert joint.cov_factor.shape == (2, 30, 4)
    wide = wanted[0] @ wanted[0].mT + torch.diag_embed(wanted[1])
    assert testing.relative_error(covariance(joint), wide) <= tolerance
    assert testing.relative_error(joint.variance, full.variance) <= tolerance
    assert testing.relative_error(joint.aleatoric.variance, full.aleatoric.variance) <= tolerance
    assert testing.relative_error(joint.epistemic.variance, full.epistemic.variance) <= tolerance
    assert joint.aleatoric.cov_factor.shape[-1] == joint.epistemic.cov_factor.shape[-1] == 4


def test_one_prediction_has_no_epistemic_part():
    means, factors, diags = predictions(T=1)
    joint = lrd.joint(means, factors, diags)
    assert joint.epistemic.cov_factor.shape[-1] == 0
    assert not joint.epistemic.variance.any()
    value = torch.zeros(30, dtype=torch.float64)
    torch.testing.assert_close(joint.log_prob(value), lrd.log_prob(value, means[0], factors[0], diags[0]))
    assert lrd.joint(means, factors, diags, rank=2).cov_factor.shape[-1] == 2


def test_diagonal_predictions():
    means, _, diags = predictions()
    joint = lrd.joint(means, None, diags)
    _, aleatoric, epistemic = dense(means, None, diags)
    torch.testing.assert_close(covariance(joint), aleatoric + epistemic)
    assert joint.aleatoric.cov_factor.shape[-1] == 0


def test_expected_weights_in_the_place_of_the_samples():
    means, factors, diags = predictions()
    one = lrd.LowRankMultivariateNormal(means[0], factors[0], diags[0])
    for aleatoric in (one, (factors[0], diags[0])):
        joint = lrd.joint(means, None, None, aleatoric=aleatoric)
        _, _, epistemic = dense(means, factors, diags)
        torch.testing.assert_close(covariance(joint), one.covariance_matrix + epistemic)
        torch.testing.assert_close(covariance(joint.aleatoric), one.covariance_matrix)


def test_the_epistemic_part_has_samples_and_modes_but_no_density():
    epistemic = lrd.joint(*predictions()).epistemic
    draws = epistemic.sample((4000,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.var(0), epistemic.variance, rtol=0.15, atol=0)
    assert epistemic.modes(2).vectors.shape == (30, 2)
    with pytest.raises(NotImplementedError, match="no density"):
        epistemic.log_prob(torch.zeros(30).double())
    with pytest.raises(NotImplementedError, match="no density"):
        epistemic.entropy()


@pytest.mark.parametrize("rank", [None, 4])
def test_a_joint_may_do_without_its_parts(rank):
    samples = predictions()
    whole, alone = lrd.joint(*samples, rank=rank), lrd.joint(*samples, rank=rank, parts=False)
    torch.testing.assert_close(covariance(alone), covariance(whole))
    for model in (alone, alone.expand((2,))):
        with pytest.raises(ValueError, match="parts=False"):
            _ = model.aleatoric
    accumulator = lrd.JointAccumulator(4).update(*(t[0] for t in samples))
    with pytest.raises(ValueError, match="parts=False"):
        _ = accumulator.finalize(parts=False).epistemic


def test_gradients_of_the_joint():
    samples = [t.requires_grad_() for t in predictions(T=3, S=8, R=2)]
    value = torch.zeros(8, dtype=torch.float64)
    for rank in (None, 3):
        assert torch.autograd.gradcheck(lambda *a, r=rank: lrd.joint(*a, rank=r).log_prob(value), samples)


def test_joint_expands():
    joint = lrd.joint(*predictions())
    wide = joint.expand((3,))
    assert isinstance(wide, lrd.JointNormal)
    assert wide.epistemic.batch_shape == wide.aleatoric.batch_shape == (3,)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"means": torch.zeros(5)}, ValueError, "means must have shape"),
        ({"cov_diags": None}, ValueError, "cov_diags must be given"),
        ({"cov_diags": torch.ones(4, 30)}, ValueError, "cov_diags must have shape"),
        ({"cov_factors": torch.ones(5, 29, 3)}, ValueError, "cov_factors must have shape"),
        ({"cov_diags": torch.ones(5, 30)}, TypeError, "cov_diags must have the dtype of means"),
    ],
)
def test_wrong_arguments(change, error, message):
    arguments = dict(zip(("means", "cov_factors", "cov_diags"), predictions(), strict=True)) | change
    with pytest.raises(error, match=message):
        lrd.joint(**arguments)


def fill(accumulator, samples):
    for mean, factor, diag in zip(*samples, strict=True):
        accumulator.update(mean, factor, diag)
    return accumulator


@pytest.mark.parametrize("batch", [(), (2,)])
def test_accumulator_is_exact_while_nothing_is_dropped(batch):
    samples = predictions(T=4, batch=batch)
    found = fill(lrd.JointAccumulator(rank=16), samples).finalize()
    mean, aleatoric, epistemic = dense(*samples)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(covariance(found), aleatoric + epistemic)
    torch.testing.assert_close(covariance(found.aleatoric), aleatoric)
    torch.testing.assert_close(covariance(found.epistemic), epistemic)


def test_accumulator_keeps_variances_and_memory():
    samples = predictions(T=40, S=200)
    accumulator = lrd.JointAccumulator(rank=6, oversample=4)
    for mean, factor, diag in zip(*samples, strict=True):
        accumulator.update(mean, factor, diag)
        assert all(p.columns is None or p.columns.shape[-1] <= 10 for p in accumulator._parts.values())
    found = accumulator.finalize()
    exact = lrd.joint(*samples)
    assert found.cov_factor.shape[-1] == 6
    torch.testing.assert_close(found.variance, exact.variance)
    torch.testing.assert_close(found.aleatoric.variance, exact.aleatoric.variance)
    torch.testing.assert_close(found.epistemic.variance, exact.epistemic.variance)
    torch.testing.assert_close(found.mean, exact.mean)


def test_accumulators_merge():
    samples = predictions(T=7)
    one = fill(lrd.JointAccumulator(rank=40), samples).finalize()
    first = fill(lrd.JointAccumulator(rank=40), [t[:3] for t in samples])
    second = fill(lrd.JointAccumulator(rank=40), [t[3:] for t in samples])
    both = first.merge(second)
    assert both.count == 7
    torch.testing.assert_close(covariance(both.finalize()), covariance(one))
    torch.testing.assert_close(covariance(both.finalize().epistemic), covariance(one.epistemic))
    empty = lrd.JointAccumulator(rank=40)
    torch.testing.assert_close(covariance(empty.merge(both).finalize()), covariance(one))
    assert both.merge(lrd.JointAccumulator(rank=40)).count == 7


def test_accumulator_state(tmp_path):
    samples = predictions(T=6, S=40)
    whole = fill(lrd.JointAccumulator(rank=4, oversample=3), samples).finalize()
    half = fill(lrd.JointAccumulator(rank=4, oversample=3), [t[:3] for t in samples])
    torch.save(half.state_dict(), tmp_path / "state.pt")
    other = lrd.JointAccumulator(rank=1)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    again = fill(other, [t[3:] for t in samples]).finalize()
    assert torch.equal(again.cov_factor, whole.cov_factor)
    assert torch.equal(again.cov_diag, whole.cov_diag)


def test_accumulator_of_diagonal_predictions_and_errors():
    means, _, diags = predictions(T=4)
    accumulator = lrd.JointAccumulator(rank=8)
    with pytest.raises(ValueError, match="no predictions have been added"):
        accumulator.finalize()
    for mean, diag in zip(means, diags, strict=True):
        accumulator.update(mean, None, diag)
    torch.testing.assert_close(covariance(accumulator.finalize()), covariance(lrd.joint(means, None, diags)))
    one = lrd.JointAccumulator(rank=8).update(means[0], None, diags[0]).finalize()
    assert one.loc.dtype == one.cov_diag.dtype == torch.float64
    with pytest.raises(ValueError, match="shape of those before"):
        accumulator.update(means[0, :5], None, diags[0, :5])
    with pytest.raises(ValueError, match="rank must be at least 1"):
        lrd.JointAccumulator(0)


def test_mixture():
    means, factors, diags = predictions(T=5, batch=(2,))
    value = testing.make_inputs((7, 2), 30, 3, seed=3).value
    parts = torch.stack([lrd.log_prob(value, m, f, d) for m, f, d in zip(means, factors, diags, strict=True)])
    wanted = parts.logsumexp(0) - math.log(5)
    torch.testing.assert_close(lrd.mixture_log_prob(value, means, factors, diags), wanted)
    torch.testing.assert_close(lrd.mixture_log_prob(value, means, factors, diags, chunk=2), wanted)
    torch.testing.assert_close(lrd.mixture_log_prob(value[0], means, factors, diags), wanted[0])


def test_gradients_of_the_mixture():
    value = torch.zeros(6, dtype=torch.float64)
    samples = [t.requires_grad_() for t in predictions(T=3, S=6, R=2)]
    assert torch.autograd.gradcheck(lambda *a: lrd.mixture_log_prob(value, *a, chunk=2), samples)


def test_mixtures_of_unequal_numbers_are_refused():
    means, factors, diags = (torch.rand(8, 5), torch.rand(4, 5, 2), torch.rand(8, 5))
    with pytest.raises(ValueError, match="cov_factors must have the 8 Gaussians of means, or one; got 4"):
        lrd.mixture_log_prob(torch.zeros(5), means, factors, diags)
    with pytest.raises(ValueError, match="chunk must be at least 1; got 0"):
        lrd.mixture_log_prob(torch.zeros(5), means, factors[:1], diags, chunk=0)


def stream(count):
    """Mean, factor and diagonal of one prediction after the other."""
    for seed in range(count):
        yield testing.make_inputs((2,), 30, 3, seed=seed, dtype=torch.float32)[1:]


def state_of(accumulator):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in accumulator.state_dict().items()}


def same(a, b):
    return all(torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items())


@pytest.mark.parametrize("moment", range(4))
def test_a_failed_update_changes_nothing(monkeypatch, moment):
    """Memory runs out at one of the truncations: the update tried again gives what it would have given."""
    accumulator, whole = lrd.JointAccumulator(4), lrd.JointAccumulator(4)
    real, calls = Stack.truncate, []

    def truncate(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == moment + 1:
            raise MemoryError
        return real(self, *args, **kwargs)

    failed = 0
    for prediction in stream(12):
        whole.update(*prediction)
        before = state_of(accumulator)
        with monkeypatch.context() as patch:
            patch.setattr(Stack, "truncate", truncate)
            try:
                accumulator.update(*prediction)
                continue
            except MemoryError:
                failed += 1
        assert same(state_of(accumulator), before)
        accumulator.update(*prediction)
    assert failed == 1
    assert same(state_of(accumulator), state_of(whole))


def test_predictions_of_another_kind_are_refused():
    first, (mean, factor, diag) = stream(2)
    accumulator = lrd.JointAccumulator(4).update(*first)
    before = state_of(accumulator)
    for wrong, error in [
        ((mean.double(), factor.double(), diag.double()), TypeError),
        ((mean[:, :-1], factor[:, :-1], diag[:, :-1]), ValueError),
        ((mean[0], factor, diag), ValueError),
        ((mean, None, diag.double()), TypeError),
        ((mean, factor * torch.nan, diag), ValueError),
        ((mean, factor, -diag), ValueError),
        ((mean, None, diag * 0), ValueError),
        ((mean * torch.inf, None, diag), ValueError),
    ]:
        with pytest.raises(error):
            accumulator.update(*wrong)
        assert same(state_of(accumulator), before)
    with pytest.raises(ValueError, match="the other accumulator must hold"):
        accumulator.merge(lrd.JointAccumulator(4).update(mean.double(), None, diag.double()))


def test_a_dropped_accumulator_is_freed_at_once():
    accumulator = lrd.JointAccumulator(4).update(*next(stream(1)))
    alive = weakref.ref(accumulator)
    gc.disable()
    try:
        del accumulator
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("rank", "error"), [(-1, ValueError), (2.0, TypeError)])
@pytest.mark.parametrize("gradients", [False, True])
def test_wrong_ranks_are_refused(rank, error, gradients):
    means, factors, diags = torch.zeros(3, 5), torch.ones(3, 5, 2, requires_grad=gradients), torch.ones(3, 5)
    with pytest.raises(error, match="rank must"):
        lrd.joint(means, factors, diags, rank=rank)


@pytest.mark.parametrize("layout", ["row", "rank"])
def test_gradients_of_a_truncated_joint_are_those_of_its_stacked_columns(layout):
    """Through the samples where they lie, beside autograd through the singular value decomposition."""
    inputs = testing.make_inputs((4, 2), 30, 3, dtype=torch.float64, layout=layout)
    means = torch.randn(4, 2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leaves = [t.requires_grad_() for t in (means, inputs.cov_factor, inputs.cov_diag)]

    def loss(factor, diag):
        return (factor @ factor.mT).square().sum() + (diag + factor.square().sum(-1)).log().sum() + diag.log().sum()

    joint = lrd.joint(*leaves, rank=5)
    found = torch.autograd.grad(loss(joint.cov_factor, joint.cov_diag), leaves)
    X, diag = lrd.joint(*leaves, parts=False).cov_factor, leaves[2].mean(0)
    U, s, _ = torch.linalg.svd(X, full_matrices=False)
    kept = U[..., :5] * s[..., None, :5]
    folded = diag + X.square().sum(-1) - kept.square().sum(-1)
    wanted = torch.autograd.grad(loss(kept, folded), leaves)
    torch.testing.assert_close(found, wanted)
    joint = lrd.joint(*leaves, rank=5)
    parts = torch.autograd.grad(loss(joint.aleatoric.cov_factor, joint.aleatoric.cov_diag), leaves[1:])
    assert all(g.isfinite().all() and g.any() for g in parts)
