"""The distributions of this package in Pyro, without a patch."""

import pickle
import subprocess
import sys

import pytest
import torch

import lrd_kernels as lrd

pyro = pytest.importorskip("pyro")


def normal(*batch):
    return lrd.LowRankMultivariateNormal(torch.zeros(*batch, 4), torch.ones(4, 1), torch.ones(4))


def test_sample_plate_event_and_mask():
    assert pyro.sample("x", normal()).shape == (4,)
    with pyro.plate("rows", 3):
        assert pyro.sample("y", normal()).shape == (3, 4)
    assert pyro.sample("z", normal(5).to_event(1)).shape == (5, 4)
    mask = torch.tensor([True, False, True])
    masked = normal(3).mask(mask).log_prob(torch.zeros(3, 4))
    torch.testing.assert_close(masked, torch.where(mask, normal().log_prob(torch.zeros(4)), 0))


def test_a_guide_trains_to_the_posterior():
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    data = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def model():
        z = pyro.sample("z", normal())
        pyro.sample("y", pyro.distributions.Normal(z, 0.5).to_event(1), obs=data)

    def guide():
        positive = pyro.distributions.constraints.positive
        loc, factor = pyro.param("loc", torch.zeros(4)), pyro.param("factor", 0.1 * torch.ones(4, 2))
        diag = pyro.param("diag", torch.ones(4), constraint=positive)
        pyro.sample("z", lrd.LowRankMultivariateNormal(loc, factor, diag))

    objective = pyro.infer.Trace_ELBO(num_particles=8)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), objective)
    for _ in range(250):
        svi.step()
    exact = normal().condition(slice(0, 4), data, noise=0.25)
    torch.testing.assert_close(pyro.param("loc").detach(), exact.mean, rtol=0, atol=0.15)
    assert pyro.infer.Predictive(model, guide=guide, num_samples=7)()["z"].shape == (7, 4)


def test_methods_and_pickles_are_those_without_pyro():
    d = normal()
    copy = pickle.loads(pickle.dumps(d))
    assert isinstance(copy, lrd.LowRankMultivariateNormal)
    assert torch.equal(copy.log_prob(torch.ones(4)), d.log_prob(torch.ones(4)))
    assert d.expand((3,)).truncate(1).batch_shape == (3,)
    assert float(torch.distributions.kl_divergence(d, normal())) == pytest.approx(0, abs=1e-6)
    joint = lrd.joint(torch.randn(4, 5), None, torch.ones(4, 5))
    assert pyro.sample("joint", joint).shape == (5,)
    code = "import pickle, sys; d = pickle.load(sys.stdin.buffer); print(type(d).__name__, 'pyro' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(d), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["LowRankMultivariateNormal", "False"]
