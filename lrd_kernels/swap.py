"""Puts the kernels into torch's own class, for models whose code should not change."""

from __future__ import annotations

import gc
import inspect
import threading
from types import TracebackType
from typing import Any

import torch
from torch.distributions import LowRankMultivariateNormal as Target

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

_originals: dict[str, Any] = {}
_active: list[patch_torch] = []
_lock = threading.RLock()  # of the two above and of torch's class


class patch_torch:
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

    def __init__(self) -> None:
        with _lock:
            if not _active:
                _refuse_unknown_class()
                for name in _REPLACED:
                    if name in vars(Target):
                        _originals[name] = vars(Target)[name]
                    setattr(Target, name, vars(LowRankMultivariateNormal)[name])
            _active.append(self)

    def undo(self) -> None:
        """Undoes this patch. Undoing the last one restores torch's methods. A second call does nothing.

        Examples:
            >>> patch = lrd.patch_torch()
            >>> patch.undo()
        """
        with _lock:
            if self not in _active:
                return
            _active.remove(self)
            if _active:
                return
            _complete_instances()
            for name in _REPLACED:
                if name in _originals:
                    setattr(Target, name, _originals.pop(name))
                else:
                    delattr(Target, name)

    def __enter__(self) -> patch_torch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


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
