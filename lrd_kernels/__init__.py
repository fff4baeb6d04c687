"""Gaussians over many correlated outputs, such as the pixels of a picture, with fused kernels for PyTorch.

A Gaussian has a mean `loc` [..., S], a factor `cov_factor` [..., S, R] and a diagonal `cov_diag` [..., S]. Its
covariance is `diag(cov_diag) + cov_factor cov_factor^T`: S x S numbers, described by S (R + 1) and never formed.

Three lines to try: a Gaussian over 10,000 outputs, the density of a sample, and the error bar of the sum of all. They
and all examples of this package assume `import torch` and `import lrd_kernels as lrd`.

    >>> d = lrd.LowRankMultivariateNormal(torch.zeros(10_000), 0.1 * torch.ones(10_000, 4), torch.ones(10_000))
    >>> log_density = d.log_prob(d.sample())
    >>> d.aggregate(torch.ones(1, 10_000)).stddev
    tensor([2002.4984])

What is here:
    distributions: LowRankMultivariateNormal, with methods to sample, condition, aggregate, truncate and look at it;
        joint and JointAccumulator make one JointNormal of several predictions; SemidefiniteNormal is a part of it.
        torch.distributions.kl_divergence has closed forms for them (module kl).
    densities: log_prob, nll_loss (the loss of a network), mahalanobis, logdet, entropy, mixture_log_prob.
    linear algebra: solve, matvec, capacitance_cholesky, truncate. Samples: rsample.
    training: positive_diag for a network's raw diagonal, filter_gradients for steps with invalid gradients.
    diagnostics: diagnose (returns a Diagnosis to print), condition_bounds, capacitance_condition, extreme_eigenvalues
        (returns ExtremeEigenvalues).
    swap: patch_torch puts the kernels into torch's own class, patch_linear_operator into linear_operator's.
    scale: the module distributed, for outputs that are divided among processes, and the module streaming, for factors
        that are read in blocks.
    machine: backends, use_backend, release_memory; warm_up before the capture of a CUDA graph. On the command line,
        `python -m lrd_kernels.info` tests the backends.
    errors: NotPositiveDefiniteError.

`help(lrd.log_prob)` and so on give shapes, equations, errors and an example each.
"""

from typing import TYPE_CHECKING

from lrd_kernels import distributed, kl, streaming  # kl registers the divergences
from lrd_kernels._validate import NotPositiveDefiniteError
from lrd_kernels.diagnostics import (
    Diagnosis,
    ExtremeEigenvalues,
    capacitance_condition,
    condition_bounds,
    diagnose,
    extreme_eigenvalues,
)
from lrd_kernels.distribution import LowRankMultivariateNormal
from lrd_kernels.functional import (
    capacitance_cholesky,
    entropy,
    log_prob,
    logdet,
    mahalanobis,
    matvec,
    nll_loss,
    positive_diag,
    solve,
)
from lrd_kernels.gradients import filter_gradients
from lrd_kernels.graphs import warm_up
from lrd_kernels.joint import JointAccumulator, JointNormal, SemidefiniteNormal, joint
from lrd_kernels.mixture import mixture_log_prob
from lrd_kernels.ops.dispatch import backends, use_backend
from lrd_kernels.ops.load import release_memory
from lrd_kernels.sampling import rsample
from lrd_kernels.swap import patch_torch
from lrd_kernels.swap_linear_operator import patch_linear_operator
from lrd_kernels.truncation import truncate

__version__ = "0.1.0"

__all__ = [
    "Diagnosis",
    "ExtremeEigenvalues",
    "JointAccumulator",
    "JointNormal",
    "LowRankMultivariateNormal",
    "NotPositiveDefiniteError",
    "SemidefiniteNormal",
    "backends",
    "capacitance_cholesky",
    "capacitance_condition",
    "condition_bounds",
    "diagnose",
    "distributed",
    "entropy",
    "extreme_eigenvalues",
    "filter_gradients",
    "joint",
    "kl",
    "log_prob",
    "logdet",
    "mahalanobis",
    "matvec",
    "mixture_log_prob",
    "nll_loss",
    "patch_linear_operator",
    "patch_torch",
    "positive_diag",
    "release_memory",
    "rsample",
    "solve",
    "streaming",
    "truncate",
    "use_backend",
    "warm_up",
]

if not TYPE_CHECKING:  # mypy would take every name for an attribute

    def __getattr__(name: str) -> None:
        """Names close matches in the error for a missing attribute."""
        hint = ""
        if not name.startswith("_"):
            import difflib

            known = {public.lower(): public for public in __all__}
            close = difflib.get_close_matches(name.lower(), known)
            hint = "; did you mean " + " or ".join(known[match] for match in close) + "?" if close else ""
            hint = hint or "; help(lrd_kernels) lists what there is"
        raise AttributeError(f"module 'lrd_kernels' has no attribute {name!r}{hint}")
