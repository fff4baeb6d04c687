"""Writes files so that a kill or a full disk never leaves half of one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

UNFINISHED = ".unfinished"


def write_whole(path: Path, *pieces: bytes | memoryview, keep: Path | None = None) -> None:
    """Replaces a file by one with these pieces, which are on the disk when it returns. If it fails, the file stays.

    Args:
        keep: becomes the file that was at `path` before.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")  # in the same folder: a rename is atomic
    with _naming(path):
        try:
            _write(temporary, os.O_CREAT | os.O_TRUNC, pieces, sync=True)
            if keep is not None and path.exists():
                os.replace(path, keep)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to; the file there takes the place of the one at `path` when the block ends without an error.

    What a link at `path` points to stays as it is.
    """
    temporary = path.with_name(f"{UNFINISHED}.{os.getpid()}.{path.name}")  # keeps the ending, which decides the format
    with _naming(path):
        try:
            yield temporary
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_json(path: Path, document: Any) -> None:
    """Replaces a file by a document in JSON, in which every number is finite."""
    write_whole(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())


def append(path: Path, piece: bytes) -> None:
    """Appends to a file. If it fails, the file keeps its length."""
    before = path.stat().st_size
    with _naming(path):
        try:
            _write(path, os.O_APPEND, [piece])
        except BaseException:
            with contextlib.suppress(OSError):
                os.truncate(path, before)
            raise


def remove_unfinished(folder: Path) -> None:
    """Removes what killed writes left in a folder, and leaves what other processes are writing."""
    for file in folder.glob(f"*{UNFINISHED}*"):
        number = re.search(r"\.(\d+)\.unfinished$|^\.unfinished\.(\d+)\.", file.name)
        if number is not None and not _lives(int(number[1] or number[2])):
            file.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return process != os.getpid()


def _write(path: Path, flags: int, pieces: Sequence[bytes | memoryview], sync: bool = False) -> None:
    descriptor = os.open(path, flags | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while len(rest):
                rest = rest[os.write(descriptor, rest) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Puts the names of a folder's files on the disk, on file systems that can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Names the file in an error of the system, which often does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path}: {error.strerror}") from error
