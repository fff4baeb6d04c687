"""Distributions that Pyro accepts as its own. Pyro is imported only where the program has imported it already."""

from __future__ import annotations

import functools
import sys
from typing import Any, TypeVar

Made = TypeVar("Made", bound="PyroAware")


class PyroAware:
    """A distribution whose instances are also Pyro's, so that `pyro.sample` and plates take them, in a program that
    imports `pyro.distributions` before it makes them."""

    def __new__(cls: type[Made], *args: Any, **kwargs: Any) -> Made:
        made = _for_pyro(cls) if "pyro.distributions" in sys.modules else cls  # type: ignore[arg-type]
        return object.__new__(made)


@functools.cache
def _for_pyro(cls: Any) -> Any:
    """A subclass with the same name that is also a distribution of Pyro."""
    from pyro.distributions.torch_distribution import TorchDistributionMixin

    if issubclass(cls, TorchDistributionMixin):
        return cls

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _made, (cls,), self.__getstate__()

    own = {name: getattr(cls, name) for name in ("batch_shape", "event_shape", "has_rsample")}  # not those of the mixin
    made: Any = type(TorchDistributionMixin)
    return made(
        cls.__name__, (cls, TorchDistributionMixin), {**own, "__module__": cls.__module__, "__reduce_ex__": reduce}
    )


def _made(cls: type[Made]) -> Made:
    """An instance without a state, for pickle."""
    return cls.__new__(cls)
