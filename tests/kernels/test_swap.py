"""patch_torch: in place, nested, exception-safe, undone exactly."""

import copy
import pickle
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributions import LowRankMultivariateNormal as Torchs
from torch.distributions import kl_divergence

import lrd_kernels as lrd
from lrd_kernels import swap, testing

LOC, FACTOR, DIAG = testing.make_inputs((2,), 12, 3, dtype=torch.float32)[1:]


def state():
    return {name: value for name, value in vars(Torchs).items() if name != "__slotnames__"}  # a cache of copy()


class Heir(Torchs):
    """Inherited long before any patch."""


def test_replaces_and_restores_exactly():
    before = state()
    with lrd.patch_torch():
        assert Torchs.log_prob is lrd.LowRankMultivariateNormal.log_prob
        assert "_capacitance_tril" not in vars(Torchs(LOC, FACTOR, DIAG))
        assert "_capacitance_tril" not in vars(Heir(LOC, FACTOR, DIAG))
    assert state() == before
    handle = lrd.patch_torch()
    assert state() != before
    handle.undo()
    handle.undo()
    assert state() == before


def test_nested_and_exception_safe():
    before = state()
    with pytest.raises(KeyError), lrd.patch_torch():
        raise KeyError
    assert state() == before
    outer, inner = lrd.patch_torch(), lrd.patch_torch()
    outer.undo()
    assert state() != before
    inner.undo()
    assert state() == before


@pytest.mark.parametrize("kind", [Torchs, Heir])
def test_same_answers_and_the_kernels_are_used(kind, monkeypatch):
    value = torch.randn(2, 12)
    plain = kind(LOC, FACTOR, DIAG)
    expected = [plain.log_prob(value), plain.entropy(), plain.variance, plain.scale_tril, plain.precision_matrix]
    expected.append(kl_divergence(plain, kind(LOC + 1, FACTOR * 2, DIAG)))
    torch.manual_seed(0)
    expected.append(plain.rsample((3,)))
    used = []
    original = lrd.functional.terms
    monkeypatch.setattr(lrd.functional, "terms", lambda *a, **k: used.append(1) or original(*a, **k))
    with lrd.patch_torch():
        d = kind(LOC, FACTOR, DIAG)
        actual = [d.log_prob(value), d.entropy(), d.variance, d.scale_tril, d.precision_matrix]
        actual.append(kl_divergence(d, kind(LOC + 1, FACTOR * 2, DIAG)))
        torch.manual_seed(0)
        actual.append(d.rsample((3,)))
        assert type(d.expand((5, 2))) is kind
        assert d.expand((5, 2)).log_prob(value).shape == (5, 2)
    assert used
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


def test_instances_cross_the_border_both_ways():
    value = torch.randn(2, 12)
    before = Torchs(LOC, FACTOR, DIAG)
    expected = before.log_prob(value)
    with lrd.patch_torch():
        torch.testing.assert_close(before.log_prob(value), expected)
        made = Torchs(LOC, FACTOR, DIAG)
        assert "_capacitance_tril" not in vars(made)
        copies = [copy.deepcopy(made), made.expand((4, 2))]
    torch.testing.assert_close(made.log_prob(value), expected)
    for other in copies:
        torch.testing.assert_close(other.log_prob(value), expected.expand(other.batch_shape))
        torch.testing.assert_close(other.entropy(), before.entropy().expand(other.batch_shape))


def test_refuses_a_class_that_has_changed(monkeypatch):
    before = state()

    def changed(self, loc, cov_factor, cov_diag, jitter=0.0, validate_args=None):
        raise AssertionError

    with monkeypatch.context() as m:
        m.setattr(Torchs, "__init__", changed)
        with pytest.raises(RuntimeError, match=r"differs from the class that patch_torch supports.*jitter"):
            lrd.patch_torch()
    original = Torchs.__init__

    def renamed(self, loc, cov_factor, cov_diag, validate_args=None):
        original(self, loc, cov_factor, cov_diag, validate_args)
        self._factor = self.__dict__.pop("_unbroadcasted_cov_factor")

    with monkeypatch.context() as m:
        m.setattr(Torchs, "__init__", renamed)
        with pytest.raises(RuntimeError, match="_unbroadcasted_cov_factor"):
            lrd.patch_torch()
    assert state() == before
    assert not swap.patch_torch._active


def test_a_model_in_float32_no_longer_fails():
    """Equal columns over a tiny diagonal: torch's Cholesky throws, the patched class answers."""
    column = torch.randn(500, 1, generator=torch.Generator().manual_seed(0))
    factor, diag = torch.cat([column] * 6, 1) * 100, torch.full((500,), 1e-5)
    with pytest.raises(torch.linalg.LinAlgError):
        Torchs(torch.zeros(500), factor, diag)
    with lrd.patch_torch():
        d = Torchs(torch.zeros(500), factor, diag)
        truth = Torchs(torch.zeros(500).double(), factor.double(), diag.double()).log_prob(torch.ones(500).double())
        torch.testing.assert_close(d.log_prob(torch.ones(500)).double(), truth, rtol=1e-6, atol=0)


def test_pyro_guide_trains_to_the_same_answer():
    """Pyro imported torch's class long ago: its low-rank guide gives the same losses before and after the swap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyro = pytest.importorskip("pyro")
        from pyro.infer import SVI, Trace_ELBO
        from pyro.infer.autoguide import AutoLowRankMultivariateNormal
    data = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(6, 6) + 1

    def model():
        mean = pyro.sample("mean", pyro.distributions.Normal(torch.zeros(6), 3.0).to_event(1))
        scale = pyro.sample("scale", pyro.distributions.LogNormal(torch.zeros(6), 1.0).to_event(1))
        with pyro.plate("rows", 40):
            pyro.sample("data", pyro.distributions.Normal(mean, scale).to_event(1), obs=data)

    def train():
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoLowRankMultivariateNormal(model, rank=3)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
        losses = torch.tensor([svi.step() for _ in range(60)])
        posterior = guide.get_posterior()
        return losses, posterior.loc.detach(), posterior.covariance_matrix.detach()

    plain = train()
    calls = []
    original = lrd.functional.terms
    try:
        lrd.functional.terms = lambda *a, **k: calls.append(1) or original(*a, **k)
        with lrd.patch_torch():
            patched = train()
    finally:
        lrd.functional.terms = original
    assert len(calls) >= 60
    assert plain[0][-10:].mean() < plain[0][:10].mean()
    for a, b in zip(patched, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_threads_that_enter_and_leave_leave_torchs_class_as_it_was(monkeypatch):
    before = dict(vars(Torchs))
    monkeypatch.setattr("lrd_kernels.swap._complete_instances", lambda: time.sleep(1e-4))  # a window for the others
    start = threading.Barrier(4)

    def enter_and_leave():
        start.wait()
        for _ in range(50):
            with lrd.patch_torch():
                time.sleep(1e-5)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(enter_and_leave) for _ in range(4)]:
            done.result()
    assert dict(vars(Torchs)) == before


def test_a_distribution_pickled_under_the_patch_opens_without_the_package(tmp_path):
    loc, factor, diag = torch.randn(5), torch.randn(5, 2), torch.rand(5) + 0.5
    with lrd.patch_torch():
        made = torch.distributions.LowRankMultivariateNormal(loc, factor, diag)
        wanted = made.log_prob(loc + 1)
        (tmp_path / "made").write_bytes(pickle.dumps(made))
        assert torch.equal(copy.deepcopy(made).log_prob(loc + 1), wanted)
    torch.save(loc + 1, tmp_path / "value")
    code = (
        "import pickle, sys, torch\n"
        "made = pickle.loads(open('made', 'rb').read())\n"
        "print(float(made.log_prob(torch.load('value'))))\n"
        "assert 'lrd_kernels' not in sys.modules\n"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert float(said) == pytest.approx(float(wanted), rel=1e-5)
