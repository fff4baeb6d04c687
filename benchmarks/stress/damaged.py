"""Damaged files: every reader of the training layer must read what is left, or raise an error that names the file.

The process must live, and a file of a few kilobytes must not cost more than `MOST_MB` of memory.
"""

from __future__ import annotations

import atexit
import gzip
import io
import os
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.stress.inputs import Draw
from benchmarks.stress.items import Error

LIMIT_MB = 64  # of LRD_MAX_FILE_MB, for these readers
MOST_MB = 400  # of growth of the process in one case: decoders hold a picture two or three times


class Kind(NamedTuple):
    """Sound files of one kind, by name, and what reads them."""

    files: Callable[[], dict[str, bytes]]
    read: Callable[[Path], Any]


@cache
def folder() -> Path:
    """A folder of this process, which is removed at its end."""
    made = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


# How bytes are changed. The docstrings become cells of the report.


def bits(data: bytearray, g: Draw) -> bytes:
    """one to eight bits of a file flipped"""
    for _ in range(1 + g.index(8)):
        data[g.index(len(data))] ^= 1 << g.index(8)
    return bytes(data)


def head(data: bytearray, g: Draw) -> bytes:
    """bytes of the first hundred of a file replaced"""
    for _ in range(1 + g.index(6)):
        data[g.index(min(100, len(data)))] = g.pick((0, 1, 0x7F, 0x80, 0xFF, g.index(256)))
    return bytes(data)


def number(data: bytearray, g: Draw) -> bytes:
    """four aligned bytes of a file replaced by an extreme number"""
    at = 4 * g.index(max(len(data) // 4, 1))
    data[at : at + 4] = g.pick((0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1)).to_bytes(4, g.pick(("little", "big")))
    return bytes(data)


def cut(data: bytearray, g: Draw) -> bytes:
    """a file cut short"""
    return bytes(data[: g.index(len(data))])


def missing(data: bytearray, g: Draw) -> bytes:
    """a part of a file missing"""
    at = g.index(len(data))
    return bytes(data[:at] + data[at + 1 + g.index(64) :])


def twice(data: bytearray, g: Draw) -> bytes:
    """a part of a file twice"""
    at = g.index(len(data))
    return bytes(data[: at + 1 + g.index(64)] + data[at:])


def zeros(data: bytearray, g: Draw) -> bytes:
    """a part of a file zero"""
    at, length = g.index(len(data)), 1 + g.index(512)
    data[at : at + length] = bytes(len(data[at : at + length]))
    return bytes(data)


DAMAGES = (bits, head, number, cut, missing, twice, zeros)


# Sound files


def picture_files() -> dict[str, bytes]:
    from PIL import Image

    ramp = np.linspace(0, 255, 28 * 28).astype(np.uint8).reshape(28, 28)
    words, floats = ramp.astype(np.uint16) * 257, (ramp / 255).astype(np.float32)
    grey = Image.fromarray(ramp)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = {
        "a.png": (grey, {}),
        "b.png": (Image.fromarray(words), {}),
        "c.png": (grey.convert("RGBA"), {}),
        "d.png": (grey.convert("P"), {"transparency": 255}),
        "a.jpg": (grey.convert("RGB"), {"exif": exif}),
        "a.bmp": (grey, {}),
        "a.pgm": (Image.fromarray(words), {}),
        "a.ppm": (grey.convert("RGB"), {}),
        "a.tif": (grey, {"exif": exif}),
        "b.tif": (Image.fromarray(floats), {}),
        "c.tif": (grey.convert("RGB"), {"compression": "tiff_lzw"}),
        "d.tif": (Image.fromarray(words), {"compression": "tiff_deflate"}),
    }
    return {
        name: _saved(lambda path, i=image, o=options: i.save(path, **o), name)
        for name, (image, options) in made.items()
    }


def flow_files() -> dict[str, bytes]:
    from lrd_uq.data.files import write_flo

    return {"a.flo": _saved(lambda path: write_flo(path, torch.randn(2, 12, 16)), "a.flo")}


def idx_files() -> dict[str, bytes]:
    data = bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(range(196)) * 36
    return {"a": data, "a.gz": gzip.compress(data)}


def split_files() -> dict[str, bytes]:
    import h5py
    from scipy.io import savemat

    numbers = {"trainNdxs": np.arange(2, 13, 2)[:, None], "testNdxs": np.arange(1, 13, 2)[:, None], "other": [["text"]]}
    made = {}
    for name, compressed in (("a.mat", False), ("b.mat", True)):
        memory = io.BytesIO()
        savemat(memory, numbers, do_compression=compressed)
        made[name] = memory.getvalue()

    def hdf5(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file["trainNdxs"], file["testNdxs"] = numbers["trainNdxs"].astype(float), numbers["testNdxs"].astype(float)

    return {**made, "c.mat": _saved(hdf5, "c.mat")}


def nyu_files() -> dict[str, bytes]:
    import h5py

    def write(path: Path, **options: Any) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=np.arange(4 * 3 * 8 * 6, dtype=np.uint8).reshape(4, 3, 8, 6), **options)
            file.create_dataset("depths", data=np.ones((4, 8, 6), np.float32), **options)

    packed = {"compression": "gzip", "shuffle": True, "fletcher32": True}
    return {"a.mat": _saved(write, "a.mat"), "b.mat": _saved(lambda path: write(path, **packed), "b.mat")}


def list_files() -> dict[str, bytes]:
    lines = [f"{i:<9} {100 - i:<9} {101 - i:06d}.jpg" for i in range(20)]
    return {"CelebA-HQ-to-CelebA-mapping.txt": "\n".join(["idx orig_idx orig_file", *lines, ""]).encode()}


def checkpoint_files() -> dict[str, bytes]:
    from lrd_uq import checkpoints

    return {"last.ckpt": _saved(lambda path: checkpoints.save(_state(), path), "last.ckpt")}


def metric_files() -> dict[str, bytes]:
    return {"metrics.csv": b"loss,step\n" + b"".join(b"%.3f,%d\n" % (1 / (i + 1), i) for i in range(40))}


def _saved(write: Callable[[Path], None], name: str) -> bytes:
    path = folder() / f"sound-{name}"
    write(path)
    return path.read_bytes()


def _state() -> dict[str, Any]:
    return {"state_dict": {"w": torch.arange(300.0)}, "global_step": 7, "epoch": 1}


# Readers. What they return must be sound numbers.


def read_picture(path: Path) -> None:
    from lrd_uq.data.files import read_colour

    picture = read_colour(path)
    assert picture.shape[0] == 3, f"shape {picture.shape}"
    assert bool((picture >= 0).all() & (picture <= 1).all()), "pixels beyond 0 to 1"


def read_flow(path: Path) -> None:
    from lrd_uq.data.files import known_flow, read_flo

    flow = read_flo(path)
    assert flow.shape[0] == 2, f"shape {flow.shape}"
    assert bool(flow[known_flow(flow)].isfinite().all()), "unknown flow counted as known"


def read_idx(path: Path) -> None:
    from lrd_uq.data.idx import read_idx

    assert read_idx(path).dtype == torch.uint8, "another dtype"


def read_splits(path: Path) -> None:
    from lrd_uq.data.nyu import read_splits

    train, test = read_splits(path, 12)
    numbers = {*train, *test}
    assert len(numbers) == len(train) + len(test), "a pair twice"
    assert numbers <= set(range(12)), f"pairs {numbers}"


def read_nyu(path: Path) -> None:
    from lrd_uq.data.nyu import NyuFile

    file = NyuFile(path)
    for at in range(min(len(file), 4)):
        picture, metres = file.pair(at, False)
        assert picture.shape[1:] == metres.shape[1:], "sizes differ"
        known = metres[metres.isfinite()]
        assert bool((picture >= 0).all() & (picture <= 1).all() & (known >= 0).all()), "numbers of no picture"


def read_lists(path: Path) -> None:
    from lrd_uq.data.celeba import PARTITION, CelebA

    (path.parent / PARTITION).write_text("".join(f"{101 - i:06d}.jpg {i % 3}\n" for i in range(20)))
    parts = CelebA(str(path.parent)).split()
    found = [file for part in parts for file in part]
    assert len(set(found)) == len(found), "a picture twice"


def read_checkpoint(path: Path) -> None:
    from lrd_uq import checkpoints

    found, wanted = checkpoints.load(path), _state()
    assert found.keys() == wanted.keys(), "other content"
    assert torch.equal(found["state_dict"]["w"], wanted["state_dict"]["w"]), "other weights"


def read_metrics(path: Path) -> None:
    from lrd_uq.metrics import read_metrics

    read_metrics(path.parent)


KINDS = {
    "damaged_pictures": Kind(cache(picture_files), read_picture),
    "damaged_flow": Kind(cache(flow_files), read_flow),
    "damaged_idx": Kind(cache(idx_files), read_idx),
    "damaged_splits": Kind(cache(split_files), read_splits),
    "damaged_nyu": Kind(cache(nyu_files), read_nyu),
    "damaged_lists": Kind(cache(list_files), read_lists),
    "damaged_checkpoints": Kind(cache(checkpoint_files), read_checkpoint),
    "damaged_metrics": Kind(cache(metric_files), read_metrics),
}


def check(kind: Kind, g: Draw) -> Iterator[Error]:
    from lrd_uq.data import reading

    os.environ[reading.LIMIT] = str(LIMIT_MB)
    reading.most_bytes.cache_clear()
    files = kind.files()
    name, damage = g.pick(tuple(files)), g.pick(DAMAGES)
    g.family = f"{name}, {damage.__name__}"
    path = folder() / name
    path.write_bytes(damage(bytearray(files[name]), g))
    before = _peak()
    said = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind.read(path)
    except ValueError as error:  # BrokenFile, DamagedCheckpoint, ...
        if str(path) not in str(error):
            said = f"{type(error).__name__} without the name of the file: {error}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        del os.environ[reading.LIMIT]
        reading.most_bytes.cache_clear()
    if _peak() - before > MOST_MB:
        said = f"{_peak() - before:.0f} MB of memory"
    yield Error("", torch.uint8, float("inf") if said else 0.0, said)


def _peak() -> float:
    """The most memory of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _checks() -> Iterator[Callable[[Draw], Iterator[Error]]]:
    for name, kind in KINDS.items():

        def one(g: Draw, kind: Kind = kind) -> Iterator[Error]:
            return check(kind, g)

        one.__name__ = name
        yield one


CHECKS = tuple(_checks())
