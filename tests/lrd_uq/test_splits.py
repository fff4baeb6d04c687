"""The split of a task depends on `split_seed` alone, and the order of its batches on `seed`."""

import numpy as np
import pytest
import torch
from realdata import write_chairs, write_nyu

from lrd_uq.data.depth import NyuDepth, RenderedRooms
from lrd_uq.data.flow import FlyingChairs, MovingLayers
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.data.natural import NaturalPictures
from lrd_uq.data.series import RegionalDemand
from lrd_uq.data.table import CellMeasurements
from lrd_uq.data.task import PARTS, Task
from lrd_uq.demo import specs

FEW = {"train": 12, "val": 3, "test": 3, "batch_size": 2}
SIZE = {"size": (16, 24)}


def chairs(folder, **options):
    files = folder / "chairs"
    if not files.exists():
        write_chairs(files)
    return FlyingChairs(str(files), size=(16, 24), batch_size=2, **options)


def nyu(folder, **options):
    write_nyu(folder)
    files = (str(folder / name) for name in ("nyu_depth_v2_labeled.mat", "splits.mat"))
    return NyuDepth(*files, size=(16, 24), batch_size=2, **options)


TASKS = {
    "digits": lambda folder, **options: DigitInpainting(**{**FEW, "train": 200}, **options),
    "chairs": chairs,
    "nyu": nyu,
    "layers": lambda folder, **options: MovingLayers(**FEW, **SIZE, **options),
    "rooms": lambda folder, **options: RenderedRooms(**FEW, **SIZE, **options),
    "natural": lambda folder, **options: NaturalPictures(**FEW, **SIZE, **options),
    "demand": lambda folder, **options: RegionalDemand(**FEW, **options),
    "table": lambda folder, **options: CellMeasurements(**options),
}


@pytest.fixture(params=TASKS)
def build(request, tmp_path):
    return lambda **options: TASKS[request.param](tmp_path, **options)


def test_seed_moves_the_order_and_not_the_items(build):
    one, other, split = build(seed=42), build(seed=43), build(seed=42, split_seed=7)
    for part in PARTS:
        assert torch.equal(one.part(part).target, other.part(part).target)
    assert not torch.equal(one.part("train").target, split.part("train").target)
    orders = [list(task.train_dataloader().batch_sampler) for task in (one, other, split)]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_training_digits_of_one_seed_are_not_test_digits_of_another():
    test = {bytes(image.numpy()) for image in DigitInpainting(seed=42).part("test").target}
    train = {bytes(image.numpy()) for image in DigitInpainting(seed=43).part("train").target}
    assert len(test) == 200
    assert not test & train


def test_split_seed_that_would_be_ignored_is_refused(tmp_path):
    task = chairs(tmp_path)
    count = len(task.names())
    (tmp_path / "split.txt").write_text("\n".join(str(1 + number % 3) for number in range(count)))
    assert chairs(tmp_path, split=str(tmp_path / "split.txt")).part("test").target.isfinite().all()
    with pytest.raises(ValueError, match="split_seed has no effect"):
        chairs(tmp_path, split=str(tmp_path / "split.txt"), split_seed=3).setup()
    pairs = [(np.zeros(3), np.zeros(1))] * 4
    with pytest.raises(ValueError, match="takes no split_seed"):
        Task.of_datasets(pairs, pairs, pairs, split_seed=1)


def test_demo_separates_the_seeds(tmp_path):
    spec = specs(tmp_path, 10, [3], 5, 2, 20)[0]
    data = spec.configure().datamodule
    assert (data.seed, data.split_seed) == (3, 5)
