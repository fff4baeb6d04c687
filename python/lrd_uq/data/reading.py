"""What all readers of files share: an error that names the file, and a limit to the memory that a file can cost."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import BinaryIO

LIMIT = "LRD_MAX_FILE_MB"
DEFAULT_LIMIT = 512
MB = 2**20
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class BrokenFile(ValueError):
    """A file that is corrupt, truncated or of another kind; the message names it."""


@cache
def most_bytes() -> int:
    """The largest number of bytes that the content of one file, or of one item in it, may take in memory."""
    text = os.environ.get(LIMIT, str(DEFAULT_LIMIT))
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{LIMIT} must be a whole number of megabytes, at least 1; got {text!r}")
    return int(text) * MB


def check_size(path: Path, size: int) -> None:
    """Raises for content that would take more than the limit, before anything is allocated for it."""
    if size > most_bytes():
        raise BrokenFile(
            f"{path} would take {-(-size // MB):,} MB of memory, and at most {most_bytes() // MB:,} are read: set"
            f" {LIMIT} to read it nevertheless"
        )


@contextlib.contextmanager
def naming(path: Path, kind: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a `BrokenFile` that names the file: decoders raise all kinds of errors."""
    try:
        yield
    except (BrokenFile, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BrokenFile(f"{path} is not {kind} that can be read: {reason}") from error


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[BinaryIO]:
    """A file that is open for reading, with the errors of `naming`. A FIFO is refused, not waited for."""
    with naming(path, kind):
        refuse_special(path, os.stat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # it may have become a FIFO
        with os.fdopen(descriptor, "rb") as file:
            refuse_special(path, os.fstat(descriptor))
            yield file


def refuse_special(path: Path, status: os.stat_result) -> None:
    """Raises for a FIFO, a device and anything else that is no regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise BrokenFile(f"{path} is {KINDS.get(stat.S_IFMT(status.st_mode), 'no regular file')}, not a file")
