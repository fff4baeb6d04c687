"""Replaces methods of another library's class, in place and in any thread, and puts the originals back."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, ClassVar, TypeVar

Self = TypeVar("Self", bound="Patch")


class Patch:
    """A patch that is active until `undo`, or to the end of the `with` block. A subclass says what is replaced.

    Patches of one kind can be nested: undoing the last one restores the originals.
    """

    _lock: ClassVar[threading.RLock] = threading.RLock()  # of what follows and of the patched classes
    _active: ClassVar[list[Patch]]
    _originals: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._active, cls._originals = [], {}

    def __init__(self) -> None:
        with self._lock:
            if not self._active:
                target, methods = self._replaced()
                for name, method in methods.items():
                    if name in vars(target):
                        self._originals[name] = vars(target)[name]
                    setattr(target, name, method)
            self._active.append(self)

    def undo(self) -> None:
        """Undoes this patch. Undoing the last one restores the original methods. A second call does nothing.

        Examples:
            >>> patch = lrd.patch_torch()
            >>> patch.undo()
        """
        with self._lock:
            if self not in self._active:
                return
            self._active.remove(self)
            if self._active:
                return
            self._complete_instances()
            target, methods = self._replaced()
            for name in methods:
                if name in self._originals:
                    setattr(target, name, self._originals.pop(name))
                else:
                    delattr(target, name)

    @classmethod
    def _replaced(cls) -> tuple[type, dict[str, Any]]:
        """The class, and its new methods by name."""
        raise NotImplementedError

    @classmethod
    def _complete_instances(cls) -> None:
        """Called before the originals are back."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()
