"""torch's own class is the oracle on every method the two share."""

import copy
import pickle

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence
from torch.distributions import LowRankMultivariateNormal as Torchs

import lrd_kernels as lrd
from lrd_kernels import reference, testing
from lrd_kernels.ops import load, registry

# (loc, factor, diag) batches
BATCHES = [((), (), ()), ((3,), (3,), (3,)), ((3,), (), ()), ((), (3,), (1,)), ((2, 1), (3,), ()), ((0,), (), ())]


def make(batches, S=6, R=2, dtype=torch.float64, seed=0):
    loc, factor, diag = (testing.make_inputs(b, S, R, dtype=dtype, seed=seed)[i + 1] for i, b in enumerate(batches))
    # torch validates no empty batch
    return lrd.LowRankMultivariateNormal(loc, factor, diag), Torchs(loc, factor, diag, validate_args=False)


@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize(
    "name", ["mean", "mode", "variance", "stddev", "covariance_matrix", "precision_matrix", "scale_tril"]
)
def test_properties(batches, name):
    ours, torchs = make(batches)
    torch.testing.assert_close(getattr(ours, name), getattr(torchs, name))


@pytest.mark.parametrize("name", ["_capacitance_tril", "_unbroadcasted_cov_factor", "_unbroadcasted_cov_diag"])
@pytest.mark.parametrize("name_batch", BATCHES, ids=str)
def test_attributes_that_others_read(name_batch, name):
    ours, torchs = make(name_batch)
    torch.testing.assert_close(getattr(ours, name), getattr(torchs, name))


@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_methods(batches):
    ours, torchs = make(batches)
    assert (ours.batch_shape, ours.event_shape, repr(ours)) == (torchs.batch_shape, torchs.event_shape, repr(torchs))
    for shape in ((), (4,), (2, 3)):
        torch.manual_seed(0)
        expected = torchs.rsample(shape)
        torch.manual_seed(0)
        samples = ours.rsample(shape)
        torch.testing.assert_close(samples, expected)
        torch.manual_seed(0)
        assert torch.equal(ours.sample(shape), samples)
        torch.testing.assert_close(ours.log_prob(samples), torchs.log_prob(samples))
    torch.testing.assert_close(ours.entropy(), torchs.entropy())


def test_generator_argument():
    ours, _ = make(((2,), (2,), (2,)))
    draws = [ours.sample((3,), generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], ours.sample((3,), generator=torch.Generator().manual_seed(8)))
    assert torch.equal(ours.rsample((3,), generator=torch.Generator().manual_seed(7)), draws[0])


@pytest.mark.parametrize("batches", BATCHES[:-1], ids=str)
def test_expand(batches):
    ours, torchs = make(batches)
    shape = (5, *ours.batch_shape)
    for warm in (False, True):
        if warm:
            _ = ours._capacitance_tril
        wide, wide_torchs = ours.expand(shape), torchs.expand(shape)
        assert type(wide) is lrd.LowRankMultivariateNormal
        assert ("_capacitance_tril" in vars(wide)) == warm
        value = torch.randn(6, dtype=torch.float64)
        torch.testing.assert_close(wide.log_prob(value), wide_torchs.log_prob(value))
        torch.testing.assert_close(wide.entropy(), wide_torchs.entropy())
        torch.testing.assert_close(wide.variance, wide_torchs.variance)
        assert wide.rsample((2,)).shape == (2, *shape, 6)


def test_gradients_flow_as_in_torchs_class():
    inputs = testing.make_inputs((2,), 8, 3)

    def score(kind):
        def function(value, loc, factor, diag):
            d = kind(loc, factor, diag)
            torch.manual_seed(0)
            extra = d.rsample().square().sum(-1) + d.entropy() + d._capacitance_tril.sum((-2, -1))
            return d.log_prob(value) + extra + d.precision_matrix.sum((-2, -1)) + d.scale_tril.sum((-2, -1))

        return function

    ours = testing.value_and_grads(score(lrd.LowRankMultivariateNormal), inputs)
    torchs = testing.value_and_grads(score(Torchs), inputs)
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_factorisation_is_lazy():
    """What only samples never pays for a Cholesky, nor fails in one."""
    loc, factor, diag = torch.zeros(4), torch.full((4, 2), 1e30), torch.ones(4)
    ours = lrd.LowRankMultivariateNormal(loc, factor, diag)
    assert "_capacitance_tril" not in vars(ours)
    assert ours.sample((3,)).shape == (3, 4)
    ours.expand((2,)).variance  # noqa: B018
    assert "_capacitance_tril" not in vars(ours)
    with pytest.raises(torch.linalg.LinAlgError):
        Torchs(loc, torch.cat([factor, factor], -1), diag).log_prob(loc)


def test_copies_and_pickles():
    ours, _ = make(((2,), (2,), (2,)))
    value = torch.randn(2, 6, dtype=torch.float64)
    for other in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(other) is lrd.LowRankMultivariateNormal
        assert torch.equal(other.log_prob(value), ours.log_prob(value))


def test_an_instance_of_torchs_class_and_a_base_for_others():
    ours, _ = make(((), (), ()))
    assert isinstance(ours, Torchs)

    class Mine(lrd.LowRankMultivariateNormal):
        pass

    mine = Mine(ours.loc, ours.cov_factor, ours.cov_diag)
    assert type(mine.expand((3,))) is Mine
    assert torch.equal(mine.log_prob(ours.loc), ours.log_prob(ours.loc))


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.tensor(0.0), torch.zeros(1, 1), torch.ones(1)),
        (torch.zeros(3), torch.zeros(3), torch.ones(3)),
        (torch.zeros(3), torch.zeros(4, 2), torch.ones(3)),
        (torch.zeros(3), torch.zeros(3, 2), torch.ones(4)),
        (torch.zeros(2, 3), torch.zeros(5, 3, 2), torch.ones(3)),
    ],
)
def test_wrong_shapes_raise_as_in_torchs_class(arguments):
    with pytest.raises(ValueError) as torchs:  # noqa: PT011
        Torchs(*arguments)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        lrd.LowRankMultivariateNormal(*arguments)
    assert str(ours.value)[:25] == str(torchs.value)[:25]


def test_validate_args():
    loc, factor, diag = torch.zeros(3), torch.ones(3, 1), torch.tensor([1.0, -1.0, 1.0])
    nan_factor = torch.tensor([[1.0], [torch.nan], [1.0]])
    for bad in ((loc, factor, diag), (loc, nan_factor, diag.abs()), (loc * torch.nan, factor, diag.abs())):
        with pytest.raises(ValueError, match=r"Expected parameter .* to satisfy the constraint"):
            lrd.LowRankMultivariateNormal(*bad, validate_args=True)
        lenient = lrd.LowRankMultivariateNormal(*bad, validate_args=False)
        assert lenient.log_prob(loc).isnan()
    # Explicitly: torch.compile switches torch's default off for the whole process.
    good = lrd.LowRankMultivariateNormal(loc, factor, diag.abs(), validate_args=True)
    with pytest.raises(ValueError, match=r"value\[1\] must be finite"):
        good.log_prob(torch.tensor([0.0, torch.nan, 0.0]))
    with pytest.raises(ValueError, match="value must have shape"):
        good.log_prob(torch.zeros(4))
    big = torch.full((3, 1), 3e38)
    assert lrd.LowRankMultivariateNormal(loc, big, diag.abs(), validate_args=True).sample().shape == (3,)


def test_value_is_promoted_as_by_torch():
    ours, torchs = make(((), (), ()))
    value = torch.randn(6)
    torch.testing.assert_close(ours.log_prob(value), torchs.log_prob(value))
    torch.testing.assert_close(ours.log_prob(value.long()), torchs.log_prob(value.long()))
    narrow = lrd.LowRankMultivariateNormal(*(t.float() for t in (ours.loc, ours.cov_factor, ours.cov_diag)))
    with pytest.raises(TypeError, match=r"value must have cov_factor's dtype torch.float32"):
        narrow.log_prob(value.double())


@pytest.mark.parametrize("batches", BATCHES[:-1], ids=str)
def test_kl_in_every_pairing(batches):
    p, p_torchs = make(batches)
    q, q_torchs = make(batches, R=3, seed=1)
    dense_p = MultivariateNormal(p.loc, p.covariance_matrix)
    dense_q = MultivariateNormal(q.loc, q.covariance_matrix)
    truth = kl_divergence(dense_p, dense_q)
    pairs = [(p, q), (p, q_torchs), (p_torchs, q), (p, dense_q), (dense_p, q), (p_torchs, q_torchs)]
    for left, right in pairs:
        torch.testing.assert_close(kl_divergence(left, right), truth, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros(p.batch_shape).double(), rtol=0, atol=1e-10)
    diagonal = Independent(Normal(q.loc, q.stddev), 1)
    dense_diagonal = MultivariateNormal(q.loc, torch.diag_embed(q.variance))
    torch.testing.assert_close(kl_divergence(p, diagonal), kl_divergence(dense_p, dense_diagonal))
    torch.testing.assert_close(kl_divergence(diagonal, p), kl_divergence(dense_diagonal, dense_p))


def test_kl_gradients():
    a = testing.make_inputs((2,), 5, 2, requires_grad=True)[1:]
    b = testing.make_inputs((2,), 5, 3, seed=1, requires_grad=True)[1:]

    def divergence(*parameters):
        return kl_divergence(
            lrd.LowRankMultivariateNormal(*parameters[:3]), lrd.LowRankMultivariateNormal(*parameters[3:])
        )

    assert torch.autograd.gradcheck(divergence, (*a, *b))

    def to_diagonal(loc, factor, diag, mean, scale):
        low_rank = lrd.LowRankMultivariateNormal(loc, factor, diag)
        diagonal = Independent(Normal(mean, scale), 1)
        return kl_divergence(low_rank, diagonal) + kl_divergence(diagonal, low_rank)

    assert torch.autograd.gradcheck(to_diagonal, (*a, b[0], b[2]))


def test_kl_refuses_what_it_cannot_do():
    p, _ = make(((), (), ()))
    q, _ = make(((), (), ()), S=7)
    with pytest.raises(ValueError, match="equal event shapes"):
        kl_divergence(p, q)
    with pytest.raises(NotImplementedError, match="Independent"):
        kl_divergence(p, Independent(torch.distributions.Laplace(p.loc, p.stddev), 1))


class Counted:
    """How often the forward op was called with, and without, a factorisation."""

    def __init__(self, monkeypatch):
        self.fresh, self.known = 0, 0
        original = registry.OPS["cpu"].log_prob_fwd

        def count(*args):
            self.fresh += args[7] is None
            self.known += args[7] is not None
            return original(*args)

        monkeypatch.setitem(registry.OPS, "cpu", registry.OPS["cpu"]._replace(log_prob_fwd=count))


@pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))
@pytest.mark.parametrize(("S", "R", "batch"), [(500, 6, ()), (3000, 40, (2,)), (18000, 35, ())])
def test_one_factorisation_serves_all_calls(S, R, batch, monkeypatch):
    inputs = testing.make_inputs(batch, S, R, dtype=torch.float32, requires_grad=True)
    value, *parameters = inputs
    counted = Counted(monkeypatch)
    distribution = lrd.LowRankMultivariateNormal(*parameters)
    first = distribution.log_prob(value)
    many = torch.stack([value.detach(), *(value.detach() + i * torch.ones(S) for i in range(1, 20))])
    for values in (value, many, distribution.cov_factor.detach().sum(-1) * 1e3):
        fresh, again = lrd.log_prob(values, *parameters), distribution.log_prob(values)
        torch.testing.assert_close(again, fresh, rtol=1e-6, atol=0)
        for a, b in zip(
            torch.autograd.grad(again.sum(), parameters),
            torch.autograd.grad(fresh.sum(), parameters),
            strict=True,
        ):
            assert testing.relative_error(a, b) < 1e-5
    entropy = distribution.entropy()
    torch.testing.assert_close(entropy, lrd.entropy(*parameters[1:]), rtol=1e-6, atol=0)
    expanded = distribution.expand((3, *batch)).log_prob(value)
    torch.testing.assert_close(expanded, first.expand(3, *batch), rtol=1e-6, atol=0)
    assert (counted.fresh, counted.known) == (1 + 3 + 1, 3 + 2)


@pytest.mark.skipif(load.cpu_error is not None, reason=str(load.cpu_error))
def test_a_factorisation_ends_with_a_write_to_the_parameters(monkeypatch):
    value, loc, factor, diag = testing.make_inputs((), 50, 3, dtype=torch.float32)
    counted = Counted(monkeypatch)
    distribution = lrd.LowRankMultivariateNormal(loc, factor, diag)
    for change in (lambda: None, lambda: factor.mul_(2), lambda: diag.add_(1), lambda: setattr(diag, "data", diag * 3)):
        change()
        distribution.log_prob(value)
        torch.testing.assert_close(distribution.log_prob(value), reference.log_prob(value, loc, factor, diag))
    assert (counted.fresh, counted.known) == (4, 4)
    with torch.inference_mode():  # writes to tensors made here are not counted, so nothing is kept
        distribution = lrd.LowRankMultivariateNormal(loc * 1, factor * 1, diag * 1)
        distribution.log_prob(value)
        distribution.log_prob(value)
    assert (counted.fresh, counted.known) == (6, 4)


def test_a_used_distribution_can_be_copied_and_pickled():
    value, *parameters = testing.make_inputs((2,), 20, 3)
    distribution = lrd.LowRankMultivariateNormal(*parameters)
    wanted = distribution.log_prob(value)
    for other in (copy.deepcopy(distribution), pickle.loads(pickle.dumps(distribution))):
        torch.testing.assert_close(other.log_prob(value), wanted)
        other._unbroadcasted_cov_diag.mul_(2)
        assert (other.log_prob(value) != wanted).all()
