"""The adversarial search, in small: every function answers right, and wrong answers are noticed."""

import math
import re
import resource
import zlib
from decimal import Decimal
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

import lrd_kernels as lrd
from benchmarks.stress import __main__ as stress
from benchmarks.stress import budgets, damaged, exact, inputs, runner
from lrd_kernels import testing

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _precision():
    exact.precise()


@pytest.mark.parametrize("name", runner.QUICK)
def test_nothing_is_answered_wrong(name):
    outcome = runner.run(name, 7, range(45))
    assert outcome.failures == []
    assert sum(outcome.counts.values()) == 45


def test_every_public_function_is_searched():
    aside = {"backends", "filter_gradients", "release_memory", "use_backend", "warm_up"}
    aside |= {"patch_linear_operator", "patch_torch"}
    functions = {name for name in lrd.__all__ if name[0].islower() and callable(getattr(lrd, name))} - aside
    names = {"kl": "kl", "JointAccumulator": "accumulator"}
    assert functions | set(names.values()) <= set(runner.CHECKS)
    assert set(runner.QUICK) <= set(runner.CHECKS)


def test_every_family_and_every_kind_of_call_is_drawn():
    seen = set()
    for number in range(60):
        g = inputs.Draw(0, "log_prob", number)
        x = inputs.covariances(g)
        S, R = x.cov_factor.shape[-2:]
        seen |= {g.family, x.cov_diag.dtype, "wide" if R > S else "tall", f"{x.cov_factor.dim()} dimensions"}
        seen.add("rank-major" if S > 1 < R and x.cov_factor.stride(-2) == 1 else "row-major")
        assert all(bool(t.isfinite().all()) for t in x)
        assert bool((x.cov_diag > 0).all())
    assert {family.__name__ for family in inputs.FAMILIES} | set(testing.DTYPES) <= seen
    assert {"wide", "tall", "rank-major", "row-major", "2 dimensions", "3 dimensions"} <= seen


def test_a_case_depends_on_its_number_alone():
    first, again, other = (inputs.covariances(inputs.Draw(3, "solve", number)) for number in (5, 5, 20))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert first.cov_diag.shape != other.cov_diag.shape or not torch.equal(first.cov_diag, other.cov_diag)


@pytest.mark.parametrize(
    "name", ["log_prob", "mahalanobis", "logdet", "solve", "matvec", "rsample", "mixture_log_prob"]
)
def test_wrong_answers_are_noticed(monkeypatch, name):
    real = getattr(lrd, name)
    monkeypatch.setattr(lrd, name, lambda *a, **k: real(*a, **k) * (1 + 3e-2))
    assert runner.run(name, 0, range(20)).counts["wrong"] > 10


def test_wrong_gradients_are_noticed(monkeypatch):
    real = lrd.logdet
    monkeypatch.setattr(lrd, "logdet", lambda *a, **k: real(*a, **k) + 1e-2 * (a[1] - a[1].detach()).sum())
    assert any("gradient for cov_diag" in failure for failure in runner.run("logdet", 0, range(20)).failures)


@pytest.mark.parametrize(
    ("name", "method"),
    [("aggregate", "aggregate"), ("marginal", "marginal"), ("to", "to")],
)
def test_wrong_methods_are_noticed(monkeypatch, name, method):
    real = getattr(lrd.LowRankMultivariateNormal, method)

    def broken(self, *args, **options):
        other = lrd.LowRankMultivariateNormal(self.loc, self.cov_factor * 1.1 + 1, self.cov_diag)
        return real(other, *args, **options)

    monkeypatch.setattr(lrd.LowRankMultivariateNormal, method, broken)
    assert runner.run(name, 0, range(20)).counts["wrong"] > 5


def test_command(tmp_path, capsys):
    file = tmp_path / "stress.md"
    options = ["--functions", "marginal", "rsample", "--count", "12", "--isas", "baseline", "--output", str(file)]
    assert stress.main(options) == 0
    text = file.read_text()
    assert "24 calls, seed 0, 0 answered wrong" in text
    assert re.search(r"\| `marginal` \| \d+ \| \d+ \| \d+ \| 0 \|", text)
    assert "| dead pixel |" in text
    assert text in capsys.readouterr().out
    assert stress.main(["--functions", "marginal", "--number", "3"]) == 0
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("error", [KeyError("x"), zlib.error("x"), ValueError("x"), MemoryError(), None])
def test_readers_that_fail_otherwise_are_noticed(monkeypatch, error):
    def read(path):
        if error is not None:
            raise error
        held = bytearray(damaged.MOST_MB * 2**20 + resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        held[:: 2**12] = bytes(len(held[:: 2**12]))

    kind = damaged.KINDS["damaged_flow"]._replace(read=read)
    (found,) = damaged.check(kind, inputs.Draw(0, "damaged_flow", 0))
    assert found.error == math.inf


def test_every_file_and_every_damage_is_drawn():
    for name, kind in damaged.KINDS.items():
        seen = set()
        for number in range(45):
            g = inputs.Draw(7, name, number)
            seen |= {g.pick(tuple(kind.files())), g.pick(damaged.DAMAGES)}
        assert seen == {*kind.files(), *damaged.DAMAGES}


def test_a_process_that_dies_is_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(runner, "CHECKS", {})  # here alone: the worker knows neither name
    outcomes = runner.run_all(["no_such_function"], 3, 0, ["baseline"], 1)
    assert outcomes["no_such_function"].counts["wrong"] == 1
    assert "the process ended with 1" in outcomes["no_such_function"].failures[0]


def test_documentation_holds_the_table_of_budgets():
    assert budgets.table() in (ROOT / "docs/safety.md").read_text()


def test_exact_gaussian_is_the_reference():
    inputs_ = testing.make_inputs((), 9, 3)
    model = exact.Gaussian(exact.exact(inputs_.cov_factor), exact.exact(inputs_.cov_diag))
    r = exact.exact(inputs_.value) - exact.exact(inputs_.loc)
    sigma = torch.diag(inputs_.cov_diag) + inputs_.cov_factor @ inputs_.cov_factor.mT
    as_float = lambda a: torch.tensor(np.asarray(a, dtype=object).astype(float))  # noqa: E731
    torch.testing.assert_close(as_float(model.covariance), sigma)
    torch.testing.assert_close(as_float(model.precision), sigma.inverse())
    torch.testing.assert_close(as_float(model.solve(r)), sigma.inverse() @ (inputs_.value - inputs_.loc))
    assert math.isclose(model.logdet, float(sigma.logdet()))
    values, columns = exact.jacobi(model.P)
    torch.testing.assert_close(as_float(values), torch.linalg.svdvals(inputs_.cov_factor))
    torch.testing.assert_close(as_float(exact.times(columns, columns.T)), inputs_.cov_factor @ inputs_.cov_factor.mT)
    eigenvalues = torch.linalg.eigvalsh(sigma)
    middle = Decimal(float(eigenvalues[3:5].mean()))
    assert exact.eigenvalues_below(model.covariance, middle) == 4


def test_exact_arithmetic_has_its_digits():
    with mpmath.workdps(120):
        A = mpmath.matrix([[mpmath.mpf(1), mpmath.mpf(10) ** -40], [mpmath.mpf(10) ** -40, mpmath.mpf(10) ** -79]])
        right = mpmath.cholesky(A)[1, 1]
        small = Decimal(10) ** -40
        L = exact.cholesky(np.array([[exact.ONE, small], [small, small * small * 10]], dtype=object))
        assert abs(mpmath.mpf(str(L[1, 1])) / right - 1) < mpmath.mpf(10) ** -100


def test_deviation_knows_overflow_and_underflow():
    def off(actual, truth):
        return exact.deviation(torch.tensor(actual), exact.array(map(Decimal, truth), (len(truth),)), exact.ONE)

    assert off([1.0, 2.0], [1, 2.5]) == 0.5
    assert off([math.inf], ["1e40"]) == 0
    assert off([-math.inf], ["1e40"]) == off([math.inf], ["1e30"]) == off([math.nan], ["1e40"]) == math.inf
    assert off([0.0], ["1e-40"]) == 0
