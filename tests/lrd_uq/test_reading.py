"""What files may contain: modes of pictures, sizes, links to other files, and data that would be misread."""

import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from pictures import CASES, RAMP, REFUSED
from PIL import Image
from realdata import colours, write_celeba, write_chairs, write_nyu
from scipy.io import savemat

from lrd_uq.data import read_idx
from lrd_uq.data import reading as limits
from lrd_uq.data.celeba import CelebA
from lrd_uq.data.depth import NyuDepth
from lrd_uq.data.files import pictures_of, read_colour, read_flo, read_grey, read_lines, write_flo
from lrd_uq.data.flow import FlyingChairs, MovingLayers
from lrd_uq.data.images import PICTURES, pixels
from lrd_uq.data.mat import read_mat
from lrd_uq.data.nyu import read_splits
from lrd_uq.data.reading import BrokenFile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def most(monkeypatch):
    """Sets the limit in megabytes."""

    def set_to(megabytes):
        monkeypatch.setenv(limits.LIMIT, str(megabytes))
        limits.most_bytes.cache_clear()

    yield set_to
    monkeypatch.undo()
    limits.most_bytes.cache_clear()


# --- pictures ---


def rows_of_the_table():
    text = (ROOT / "docs/tasks.md").read_text()
    table = text[text.index("Black is 0 and white is 1:") :].split("\n\n")[1]
    return [line.strip("| ").split(" | ")[0] for line in table.splitlines()[2:]]


def test_every_row_of_the_table_is_tested():
    assert rows_of_the_table() == list(CASES)
    assert all(f"`{suffix}`" in (ROOT / "docs/tasks.md").read_text() for suffix in PICTURES)


@pytest.mark.parametrize(
    ("suffix", "write", "error"),
    [pytest.param(*case, id=f"{row}, {case[0]} {i}") for row, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_picture_of_every_mode_is_read_by_its_own_scale_or_refused(suffix, write, error, tmp_path):
    path = tmp_path / f"a.{suffix}"
    write(path)
    assert pictures_of(tmp_path) == [path]
    if error is REFUSED:
        for mode in ("L", "RGB"):
            with pytest.raises(BrokenFile, match=rf"a\.{suffix} "):
                pixels(path, mode)
        return
    for mode, truth in (("L", RAMP), ("RGB", RAMP[..., None])):
        found = pixels(path, mode)
        assert found.shape == (3, 4, 3)[: len(mode) // 3 + 2]
        assert found.dtype == np.float32
        assert np.abs(found - truth).max() <= error


def test_channels_are_in_their_order(tmp_path):
    Image.fromarray(colours(1, 20, 30)).save(tmp_path / "a.png")
    assert torch.equal(read_colour(tmp_path / "a.png"), torch.from_numpy(colours(1, 20, 30)).movedim(-1, 0) / 255)


def test_pillows_own_limit_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)
    Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "a.png")
    assert read_grey(tmp_path / "a.png", 28).max() == 0
    assert Image.MAX_IMAGE_PIXELS == 7


# --- sizes ---


def bomb(path):
    """A PNG file of 13000 x 13000 black pixels, or one that says so."""
    rows = zlib.compress(bytes(1000))
    header = struct.pack(">IIBBBBB", 13000, 13000, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    data = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(data))


def gzipped(path):
    packer = zlib.compressobj(9, wbits=31)
    head = bytes([0, 0, 8, 3]) + struct.pack(">III", 4_000_000, 28, 28)
    path.write_bytes(packer.compress(head + bytes(1 << 20)) + packer.flush())


def flow_of(width, height):
    return lambda path: path.write_bytes(b"PIEH" + struct.pack("<ii", width, height) + bytes(100))


def splits_that_unpack(path):
    """A compressed array that says that it has 3 GB."""
    body = struct.pack("<II", 14, 3 << 30) + bytes(1 << 20)
    packed = zlib.compress(body)
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    path.write_bytes(header + struct.pack("<II", 15, len(packed)) + packed)


def hdf5_that_declares(path):
    """Arrays of 112 GiB that take no room in the file."""
    with h5py.File(path, "w") as file:
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.CONTIGUOUS)
        for name, kind in (("images", h5py.h5t.STD_U8LE), ("depths", h5py.h5t.IEEE_F32LE)):
            shape = (7, 3, 100_000, 53_687) if name == "images" else (7, 100_000, 53_687)
            h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(shape), plist)


@pytest.mark.parametrize(
    ("name", "write", "read", "said"),
    [
        ("a.png", bomb, lambda path: read_colour(path, (4, 4)), "would take 1,935 MB of memory, and at most 512"),
        ("a.gz", gzipped, read_idx, "would take 2,991 MB of memory, and at most 512 are read: set LRD_MAX_FILE_MB"),
        ("a.flo", flow_of(60_000, 60_000), read_flo, "60000 x 60000 pixels need 28800000012 bytes, it has 112"),
        ("a.mat", splits_that_unpack, lambda path: read_splits(path, 9), "would take 3,072 MB of memory"),
        ("b.mat", hdf5_that_declares, lambda path: NyuDepth(path, path).file.pair(0, False), "parts of it are missing"),
    ],
)
def test_small_file_costs_little(name, write, read, said, tmp_path):
    write(tmp_path / name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BrokenFile, match=rf"{re.escape(name)}.* {said}"):
        read(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # in KB


def test_limit_can_be_raised_and_lowered(tmp_path, most):
    Image.fromarray(np.zeros((600, 700, 3), np.uint8)).save(tmp_path / "a.png")
    most(4)
    with pytest.raises(BrokenFile, match=r"a\.png would take 5 MB of memory, and at most 4 are read"):
        read_colour(tmp_path / "a.png")
    most(5)
    assert read_colour(tmp_path / "a.png").shape == (3, 600, 700)
    most("1e3")
    with pytest.raises(ValueError, match="LRD_MAX_FILE_MB must be a whole number of megabytes, at least 1; got '1e3'"):
        read_colour(tmp_path / "a.png")


def test_chunk_that_unpacks_to_more_than_it_should_is_refused(tmp_path, most):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(3)) + packer.flush()
    with h5py.File(file, "a") as content:
        images = content["images"][()]
        del content["images"]
        made = content.create_dataset("images", data=images, chunks=(1, 3, 32, 24), compression="gzip", shuffle=True)
        made.id.write_direct_chunk((2, 0, 0, 0), packed)
    most(1)
    data = NyuDepth(str(file), str(tmp_path / "splits.mat"), raw=False)
    assert torch.allclose(data.file.pair(1, False)[0], torch.from_numpy(colours(1, 24, 32)).movedim(-1, 0) / 255)
    with pytest.raises(BrokenFile, match=r"labeled\.mat: a chunk of images is larger than its 2304 bytes"):
        data.file.pair(2, False)


# --- files that are none ---


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("a.png", read_colour),
        ("a.flo", read_flo),
        ("a.txt", read_lines),
        ("a.gz", read_idx),
        ("a.mat", lambda path: read_splits(path, 9)),
        ("b.mat", lambda path: len(NyuDepth(path, path).file)),
    ],
)
def test_fifo_and_folder_are_refused_and_not_waited_for(name, read, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(BrokenFile, match=rf"{name} is a FIFO, not a file"):
        read(tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(BrokenFile, match=rf"{name} is a folder, not a file"):
        read(tmp_path / name)


def test_fifo_among_pictures_is_skipped_where_that_is_wanted(tmp_path):
    folder = write_celeba(tmp_path / "faces")
    (folder / "CelebA-HQ-img" / "3.jpg").unlink()
    os.mkfifo(folder / "CelebA-HQ-img" / "3.jpg")
    with pytest.warns(UserWarning, match=r"skipped: .*3\.jpg is a FIFO"):
        assert len(CelebA(str(folder), size=(16, 16), on_broken="skip").part("train").target) == 5


@pytest.mark.parametrize("error", [zlib.error("x"), RuntimeError("x"), KeyError("x"), TypeError("x"), OSError("x")])
def test_whatever_a_decoder_raises_names_the_file(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image.Image, "convert", fail)
    with pytest.raises(BrokenFile, match=r"a\.png is not a picture that can be read: '?x"):
        read_colour(tmp_path / "a.png")


# --- HDF5 ---


def external(folder, file):
    (folder / "secret").write_bytes(b"secret" * 10_000)
    with h5py.File(file, "a") as content:
        del content["images"]
        content.create_dataset("images", (12, 3, 32, 24), "u1", external=[(str(folder / "secret"), 0, 12 * 2304)])


def elsewhere(folder, file):
    write_nyu(folder / "other")
    with h5py.File(file, "a") as content:
        del content["images"]
        content["images"] = h5py.ExternalLink(str(folder / "other" / file.name), "images")


def soft(folder, file):
    with h5py.File(file, "a") as content:
        content.move("images", "pictures")
        content["images"] = h5py.SoftLink("/pictures")


def virtual(folder, file):
    write_nyu(folder / "other")
    layout = h5py.VirtualLayout((12, 3, 32, 24), "u1")
    layout[:] = h5py.VirtualSource(str(folder / "other" / file.name), "images", (12, 3, 32, 24))
    with h5py.File(file, "a") as content:
        del content["images"]
        content.create_virtual_dataset("images", layout)


def group(folder, file):
    with h5py.File(file, "a") as content:
        del content["images"]
        content.create_group("images")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (external, "the numbers of images lie in other files, which are not read"),
        (virtual, "the numbers of images lie in other files, which are not read"),
        (elsewhere, "images is a link to another place, which is not followed"),
        (soft, "images is a link to another place, which is not followed"),
        (group, "images is no array of numbers"),
    ],
)
def test_hdf5_reads_no_other_files(change, said, tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    change(tmp_path, file)
    with pytest.raises(BrokenFile, match=rf"labeled\.mat: {said}"):
        NyuDepth(str(file), str(tmp_path / "splits.mat")).setup()


@pytest.mark.parametrize("where", ["size", "short", "address", "beyond"])
def test_chunks_outside_of_the_file_do_not_end_the_process(where, tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    with h5py.File(file, "a") as content:
        images = content["images"][()]
        del content["images"]
        made = content.create_dataset("images", data=images, chunks=(12, 3, 32, 24), fletcher32=True)
        chunk = made.id.get_chunk_info(0)
    data = file.read_bytes()
    key = struct.pack("<II", chunk.size, 0) + bytes(40)  # in the index: size, filters left out, position; then address
    assert data.count(key + struct.pack("<Q", chunk.byte_offset)) == 1
    changes = {"size": (0, chunk.byte_offset), "short": (3, chunk.byte_offset), "address": (chunk.size, 0)}
    size, address = changes.get(where, (chunk.size, len(data)))
    damaged = struct.pack("<II", size, 0) + bytes(40) + struct.pack("<Q", address)
    file.write_bytes(data.replace(key + struct.pack("<Q", chunk.byte_offset), damaged))
    read = "from lrd_uq.data.nyu import NyuFile; from pathlib import Path; NyuFile(Path({!r})).pair(0, False)"
    done = subprocess.run([sys.executable, "-c", read.format(str(file))], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"BrokenFile: .*labeled\.mat", done.stderr.splitlines()[-1])


def test_missing_chunks_are_not_black_pictures(tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    with h5py.File(file, "a") as content:
        del content["images"]
        content.create_dataset("images", (12, 3, 32, 24), "u1", chunks=(1, 3, 32, 24))[:11] = 7
    with pytest.raises(BrokenFile, match=r"images has the shape \(12, 3, 32, 24\), but parts of it are missing"):
        NyuDepth(str(file), str(tmp_path / "splits.mat")).setup()


@pytest.mark.parametrize(
    "options", [{"compression": "gzip", "shuffle": True, "fletcher32": True}, {"chunks": True}, {}]
)
def test_hdf5_as_it_may_be_stored(options, tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    with h5py.File(file, "a") as content:
        images = content["images"][()]
        del content["images"]
        content.create_dataset("images", data=images, **options)
    with_block = tmp_path / "block.mat"  # MATLAB puts 512 bytes of its own in front
    with h5py.File(file) as content, h5py.File(with_block, "w", userblock_size=512) as copy:
        for name in content:
            content.copy(name, copy)
    file = with_block
    data = NyuDepth(str(file), str(tmp_path / "splits.mat"), raw=False, size=(24, 32))
    whole = data.part("test").input
    assert torch.allclose(whole[1], torch.from_numpy(colours(2, 24, 32)).movedim(-1, 0) / 255)
    again = pickle.loads(pickle.dumps(data.file))  # as a worker process gets it
    assert torch.equal(again.pair(2, False)[0], whole[1])


# --- MATLAB ---


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_mat_files_are_read_as_written(kind, compressed, tmp_path):
    numbers = {"trainNdxs": np.arange(1, 8).astype(kind)[:, None], "testNdxs": np.array([[9]], kind)}
    others = {"words": "text", "cells": np.array([1, "a"], object), "empty": np.zeros((0, 0)), "z": np.array([[1j]])}
    savemat(tmp_path / "a.mat", {**others, **numbers}, do_compression=compressed)
    found = read_mat(tmp_path / "a.mat", numbers)
    assert found.keys() == numbers.keys()
    assert all(np.array_equal(found[name], numbers[name].ravel()) for name in numbers)
    assert read_splits(tmp_path / "a.mat", 9) == ([0, 1, 2, 3, 4, 5, 6], [8])


def test_mat_files_of_other_machines(tmp_path):
    """The same file with the bytes of every number in the other order."""

    def element(kind, data):
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    def array(name, values):
        head = element(6, struct.pack(">II", 6, 0)) + element(5, struct.pack(">ii", 1, len(values)))
        return element(14, head + element(1, name) + element(9, np.array(values, ">f8").tobytes()))

    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(">H", 0x0100) + b"MI"
    (tmp_path / "a.mat").write_bytes(header + array(b"trainNdxs", [1, 3]) + array(b"testNdxs", [2]))
    assert read_splits(tmp_path / "a.mat", 3) == ([0, 2], [1])


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([1.5, 2], "trainNdxs must be whole numbers; got float64"),
        ([np.nan, 2], "trainNdxs must be whole numbers"),
        ([np.inf, 2], "trainNdxs must be whole numbers"),
        ([1 + 2j, 2], "trainNdxs must be"),
        (["a", "b"], "trainNdxs must be an array of real numbers"),
        ([2, 2], "no number may be there twice"),
        ([3, 2], "no number may be there twice or in both parts"),
        ([0, 2], "numbers must be 1 to 12"),
        ([13, 2], "numbers must be 1 to 12"),
        ([], "does not fit 12 pairs"),
    ],
)
@pytest.mark.parametrize("hdf5", [False, True])
def test_split_that_would_be_bent_is_refused(train, said, hdf5, tmp_path):
    path = tmp_path / "splits.mat"
    if hdf5:
        if train and isinstance(train[0], str):
            pytest.skip("HDF5 has its own texts")
        with h5py.File(path, "w") as file:
            file["trainNdxs"], file["testNdxs"] = np.array(train, None if train else float), np.array([3.0])
    else:
        savemat(path, {"trainNdxs": train, "testNdxs": [3]})
    with pytest.raises(BrokenFile, match=rf"splits\.mat.*{said}"):
        read_splits(path, 12)


# --- data that would be misread ---


def test_frames_and_flow_of_other_sizes_are_refused_or_skipped(tmp_path):
    folder = write_chairs(tmp_path / "chairs")
    write_flo(folder / "00002_flow.flo", torch.zeros(2, 48, 64))
    Image.fromarray(colours(1, 12, 16)).save(folder / "00003_img2.ppm")
    data = FlyingChairs(str(folder), size=(12, 16))
    with pytest.raises(BrokenFile, match=r"00002_flow\.flo must have the size of its frames, 32 x 24; got 64 x 48"):
        data.pair("00002")
    with pytest.raises(
        BrokenFile, match=r"00003_img2\.ppm must have the size of 00003_img1\.ppm, 32 x 24; got 16 x 12"
    ):
        data.pair("00003")
    with pytest.raises(BrokenFile, match="must have the size of"):
        MovingLayers(size=(12, 16)).read(folder / "00003_img1.ppm")
    (tmp_path / "split.txt").write_text("1\n" * 6 + "2\n" * 2 + "3\n" * 2)
    skipping = FlyingChairs(str(folder), str(tmp_path / "split.txt"), size=(12, 16), on_broken="skip")
    with pytest.warns(UserWarning, match="skipped"):
        assert len(skipping.part("train").target) == 4
    (tmp_path / "split.txt").write_text("1 2\n" * 6 + "2\n" * 2 + "3\n" * 2)
    with pytest.raises(BrokenFile, match="must have a line with 1, 2 or 3 for each of 10 pairs"):
        FlyingChairs(str(folder), str(tmp_path / "split.txt")).setup()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("images", lambda a: a / np.float32(255), "images must be uint8"),
        ("images", lambda a: a.astype(np.int16) - 300, "images must be uint8"),
        ("images", lambda a: a[:, 0], "images must be uint8"),
        ("depths", lambda a: a * 1000, r"pair 1 are from 1000 to 1000: they must be in metres"),
        ("depths", lambda a: -a, r"pair 1 are from -1 to -1: they must be in metres"),
        ("depths", lambda a: (a * 1000).astype(np.uint16), "depths must be floats, in metres; got uint16"),
        ("depths", lambda a: a[:, :-1], "the shapes .* differ"),
    ],
)
def test_units_of_nyu_are_checked(name, change, said, tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    with h5py.File(file, "a") as content:
        values = change(content[name][()])
        del content[name]
        content[name] = values
    with pytest.raises(BrokenFile, match=rf"labeled\.mat.*{said}"):
        NyuDepth(str(file), str(tmp_path / "splits.mat"), raw=False).file.pair(0, False)


def test_pairs_of_other_units_are_skipped_one_by_one(tmp_path):
    file = write_nyu(tmp_path) / "nyu_depth_v2_labeled.mat"
    with h5py.File(file, "a") as content:
        content["depths"][2] *= 1000
        content["depths"][4, :5] = np.nan  # missing
    data = NyuDepth(str(file), str(tmp_path / "splits.mat"), raw=False, size=(24, 32), on_broken="skip")
    with pytest.warns(UserWarning, match="skipped: .*pair 3 .*in metres"):
        found = data.part("test")
    assert len(found.target) == 5
    assert found.mask.sum((1, 2, 3)).tolist() == [768, 768 - 120, 768, 768, 768]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("CelebA-HQ-to-CelebA-mapping.txt", lambda text: text.partition("\n")[2], "must begin with a heading.*got '0 "),
        ("CelebA-HQ-to-CelebA-mapping.txt", lambda text: "", "must begin with a heading.*got 'nothing'"),
        ("CelebA-HQ-to-CelebA-mapping.txt", lambda text: text + "3 1 000001.jpg", "has 3 or 000001.jpg twice"),
        ("CelebA-HQ-to-CelebA-mapping.txt", lambda text: text + "77 1 000901.jpg", "has 77 or 000901.jpg twice"),
        ("list_eval_partition.txt", lambda text: text + "000901.jpg 2", "has 000901.jpg in two parts, 0 and 2"),
    ],
)
def test_lists_of_celeba_that_contradict_themselves_are_refused(file, change, said, tmp_path):
    path = write_celeba(tmp_path / "faces") / file
    path.write_text(change(path.read_text()))
    with pytest.raises(BrokenFile, match=said):
        CelebA(str(tmp_path / "faces")).setup()
