"""Gaussians with low-rank-plus-diagonal covariance in very high dimensions, with fused kernels for PyTorch."""

from lrd_kernels import kl  # registers the divergences
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
    rsample,
    solve,
)
from lrd_kernels.gradients import filter_gradients
from lrd_kernels.graphs import warm_up
from lrd_kernels.joint import JointAccumulator, JointNormal, SemidefiniteNormal, joint, mixture_log_prob
from lrd_kernels.ops.dispatch import backends, use_backend
from lrd_kernels.ops.load import release_memory
from lrd_kernels.swap import patch_torch
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
    "patch_torch",
    "positive_diag",
    "release_memory",
    "rsample",
    "solve",
    "truncate",
    "use_backend",
    "warm_up",
]
