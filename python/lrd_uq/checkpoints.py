"""Checkpoints of a run: written whole, with a checksum, two of them kept, and read without running code.

A checkpoint is a file of `torch.save`, a zip archive, with the SHA-256 of all bytes before it as the archive's comment.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from lrd_uq.extra import lightning as L
from lrd_uq.storage import write_whole

LAST, PREVIOUS = "last.ckpt", "previous.ckpt"
DAMAGED = ".damaged"  # added to the name of a damaged checkpoint when a run goes on from the one before
TAG = b"lrd-uq sha256 "
SEAL = len(TAG) + 64  # bytes of the comment
END = b"PK\5\6"  # an archive ends with 22 bytes that begin so, the last two the length of the comment that follows


class DamagedCheckpoint(ValueError):
    """A checkpoint that is not what was written."""


class UnsafeCheckpoint(ValueError):
    """A checkpoint that asks for more than tensors and plain values, so that loading it could run code."""


class Found(NamedTuple):
    path: Path
    content: dict[str, Any]
    damaged: list[Path]  # newer ones that are damaged
    sha256: str  # of the file


class CheckpointFiles(L.pytorch.plugins.CheckpointIO):
    """Writes and reads the checkpoints of lightning's trainer. The one before last.ckpt is kept as previous.ckpt."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if "://" in str(path):
            raise ValueError(f"checkpoints are written to local folders only; got {path}")
        save(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:  # weights_only: lightning's default; only tensors and plain values are ever loaded
        return load(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint, which must be of tensors and plain values."""
    memory = io.BytesIO()
    torch.save(checkpoint, memory)
    memory.seek(0)
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(memory)
    if foreign:
        raise TypeError(
            f"a checkpoint holds tensors, numbers, strings, lists and dicts, so that loading it runs no code; the state"
            f" of this run has {', '.join(sorted(foreign))}"
        )
    data = memory.getbuffer()
    assert (bytes(data[-22:-18]), bytes(data[-2:])) == (END, b"\0\0"), "torch.save wrote no plain archive"
    body, length = data[:-2], SEAL.to_bytes(2, "little")
    digest = hashlib.sha256(body)
    digest.update(length)
    path.parent.mkdir(parents=True, exist_ok=True)
    keep = path.with_name(PREVIOUS) if path.name == LAST else None
    write_whole(path, body, length, TAG + digest.hexdigest().encode(), keep=keep)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint to the CPU after its checksum was verified. Runs no code from it."""
    return _load(path)[0]


def _load(path: Path) -> tuple[dict[str, Any], str]:
    """The content of a checkpoint, and the SHA-256 of its file."""
    with path.open("rb") as file:
        _verify(file, path)
        digest = _digest(file, file.seek(0, os.SEEK_END)).decode()
        file.seek(0)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise _unsafe(path, str(error)) from error
        except Exception as error:  # a crafted file can raise anything
            raise DamagedCheckpoint(f"{path} is damaged: {_first_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise DamagedCheckpoint(f"{path} is not a checkpoint of a run: it has no state_dict")
    if not isinstance(content.get("global_step"), int):
        raise DamagedCheckpoint(f"{path} is not a checkpoint of a run: it has no global_step")
    return content, digest


def newest(folder: Path) -> Found | None:
    """The newest sound checkpoint of a run; warns of a damaged one. None if the run has none, an error if none is
    sound."""
    reasons, damaged = [], []
    for name in (LAST, PREVIOUS):
        path = folder / name
        try:
            content, digest = _load(path)
        except FileNotFoundError:
            reasons.append(f"{path} is missing")
            continue
        except DamagedCheckpoint as error:
            reasons.append(str(error))
            damaged.append(path)
            continue
        if reasons:
            warnings.warn(f"{reasons[0]}; {name} of step {content['global_step']} is used instead", stacklevel=2)
        return Found(path, content, damaged, digest)
    if damaged:
        raise DamagedCheckpoint(f"no checkpoint can be used: {'; '.join(reasons)}. Use another --run to start again")
    return None


def set_aside(damaged: list[Path]) -> None:
    """Renames damaged checkpoints, so that the next one saved does not push out the sound one."""
    for path in damaged:
        os.replace(path, path.with_name(path.name + DAMAGED))


def _verify(file: IO[bytes], path: Path) -> None:
    size = file.seek(0, os.SEEK_END)
    start = max(size - SEAL, 0)
    file.seek(start)
    seal = file.read()
    if seal.startswith(TAG):
        if _digest(file, start) != seal[len(TAG) :]:
            raise DamagedCheckpoint(f"{path} is damaged: its content does not match its checksum")
        return
    file.seek(0)
    if file.read(1) == b"\x80":
        raise _unsafe(path, "a bare pickle")
    if seal[-22:-18] != END or seal[-2:] != b"\0\0":
        raise DamagedCheckpoint(f"{path} is damaged: it is cut short, or its end is overwritten")
    file.seek(0)
    try:
        broken = zipfile.ZipFile(file).testzip()
    except Exception as error:  # zipfile raises several
        raise DamagedCheckpoint(f"{path} is damaged: {_first_line(error)}") from error
    if broken is not None:
        raise DamagedCheckpoint(f"{path} is damaged: {broken} in it does not match its CRC-32")
    warnings.warn(f"{path} has no SHA-256 checksum: it was not written by this version of lrd-uq", stacklevel=4)


def _digest(file: IO[bytes], size: int) -> bytes:
    """SHA-256 of the first `size` bytes, in hexadecimal."""
    file.seek(0)
    digest = hashlib.sha256()
    while size:
        piece = file.read(min(size, 1 << 20))
        if not piece:
            break
        digest.update(piece)
        size -= len(piece)
    return digest.hexdigest().encode()


def _unsafe(path: Path, reason: str) -> UnsafeCheckpoint:
    name = re.search(r"GLOBAL (\S+)", reason)
    asked = f" ({name[1]})" if name else ""
    return UnsafeCheckpoint(f"{path} holds more than tensors and plain values{asked}: loading it could run code")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
