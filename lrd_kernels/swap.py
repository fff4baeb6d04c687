"""Puts the kernels into torch's own class, for models whose code should not change."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import torch
from torch.distributions import LowRankMultivariateNormal as Target

from lrd_kernels._patching import Patch
from lrd_kernels.distribution import LowRankMultivariateNormal

__all__ = ["patch_torch"]

_REPLACED = (
    "__init__",
    "expand",
    "log_prob",
    "entropy",
    "rsample",
    "sample",
    "scale_tril",
    "precision_matrix",
    "_capacitance_tril",
    "__getstate__",
)
# The signatures and instance attributes that torch's class must have for its methods to be replaced.
_PARAMETERS = {
    "__init__": ["self", "loc", "cov_factor", "cov_diag", "validate_args"],
    "expand": ["self", "batch_shape", "_instance"],
    "log_prob": ["self", "value"],
    "entropy": ["self"],
    "rsample": ["self", "sample_shape"],
}
_ATTRIBUTES = {
    *("loc", "cov_factor", "cov_diag", "_capacitance_tril"),
    *("_unbroadcasted_cov_factor", "_unbroadcasted_cov_diag", "_batch_shape", "_event_shape"),
}


class patch_torch(Patch):
    """Makes `torch.distributions.LowRankMultivariateNormal` use the kernels, in place.

    The patch also applies to subclasses of torch's class and to code that imported the class earlier. After a plain
    call the patch stays active until `undo()` is called on the returned object; as a context manager it is undone at
    the end of the block. Patches can be nested. Distributions created while the patch is active keep working after it
    is undone, and distributions created before it work while it is active.

    Raises:
        RuntimeError: if torch's class does not have the expected methods and attributes.
            `lrd_kernels.LowRankMultivariateNormal` does not depend on them and can be used directly.

    Examples:
        >>> model = torch.distributions.LowRankMultivariateNormal(torch.zeros(3), torch.ones(3, 1), torch.ones(3))
        >>> with lrd.patch_torch():
        ...     model.log_prob(torch.zeros(3))  # computed by the kernels
        tensor(-3.4500)
    """

    @classmethod
    def _replaced(cls) -> tuple[type, dict[str, Any]]:
        if not cls._originals:
            _refuse_unknown_class()
        return Target, {name: vars(LowRankMultivariateNormal)[name] for name in _REPLACED}

    @classmethod
    def _complete_instances(cls) -> None:
        _complete_instances()


def _refuse_unknown_class() -> None:
    differences = [
        f"{name}{inspect.signature(getattr(Target, name))}"
        for name, parameters in _PARAMETERS.items()
        if list(inspect.signature(getattr(Target, name)).parameters) != parameters
    ]
    if "__init__" not in " ".join(differences):
        held = set(vars(Target(torch.zeros(1), torch.zeros(1, 1), torch.ones(1))))
        differences += sorted(_ATTRIBUTES - held)
    if differences:
        raise RuntimeError(
            f"torch {torch.__version__}: LowRankMultivariateNormal differs from the class that patch_torch supports"
            f" ({', '.join(differences)}). Use lrd_kernels.LowRankMultivariateNormal instead."
        )


def _complete_instances() -> None:
    """Computes `_capacitance_tril` for instances that lack it, because torch's methods read it from the instance.

    Instances are found through the garbage collector and not recorded in the constructor: copying and unpickling do
    not call the constructor, and recording would break compiled graphs.
    """
    for candidate in gc.get_objects():
        if issubclass(type(candidate), Target) and not issubclass(type(candidate), LowRankMultivariateNormal):
            _ = candidate._capacitance_tril
