"""A lock on a folder that one process holds, and that is gone when the process is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)

_held: set[int] = set()  # descriptors of the locks of this process


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, or raises if another process does."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise ValueError(
                f"{folder} is in use by another process{f' ({holder})' if holder else ''}: wait for it, or use another"
                " --run"
            ) from None
        except OSError as error:
            if error.errno not in NOT_SUPPORTED:
                raise
            warnings.warn(
                f"the file system of {folder} has no locks: make sure that no other process trains in it", stacklevel=1
            )
        with contextlib.suppress(OSError):  # for the message above alone: a full disk does not matter
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _let_go() -> None:
    """Closes a forked process's copies of the locks: a worker that outlives its parent must not keep them."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
