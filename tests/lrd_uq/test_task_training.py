"""Every task: a short training lowers the loss, and its joint Gaussian can be scored, sampled and drawn."""

import pytest
import torch
from realdata import write_celeba, write_chairs, write_nyu

from lrd_uq import plots
from lrd_uq.bayes import Dropout, predict_joint
from lrd_uq.data.celeba import CelebA
from lrd_uq.data.depth import NyuDepth, RenderedRooms
from lrd_uq.data.flow import FlyingChairs, MovingLayers
from lrd_uq.data.natural import NaturalPictures
from lrd_uq.data.pictures import Colourisation
from lrd_uq.data.series import RegionalDemand
from lrd_uq.data.table import CellMeasurements
from lrd_uq.evaluate import evaluate
from lrd_uq.heads import LowRankHead
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import MonaiUNet, NodeNet, wrap
from lrd_uq.predict import predict_item

SIZE = {"size": (24, 32), "batch_size": 4, "steps_per_epoch": 10}
FEW = {**SIZE, "train": 40, "val": 4, "test": 4}


def nyu(folder):
    write_nyu(folder)
    return NyuDepth(str(folder / "nyu_depth_v2_labeled.mat"), str(folder / "splits.mat"), **SIZE)


TASKS = {  # name -> data from a folder, channels of the input, outputs
    "celeba inpainting": (lambda f: CelebA(str(write_celeba(f / "faces")), **SIZE), 4, 3),
    "celeba colourisation": (lambda f: CelebA(str(write_celeba(f / "faces")), Colourisation(), **SIZE), 1, 3),
    "flying chairs": (lambda f: FlyingChairs(str(write_chairs(f / "chairs")), **SIZE), 6, 2),
    "nyu depth": (nyu, 3, 1),
    "natural inpainting": (lambda _: NaturalPictures(**FEW), 4, 3),
    "natural colourisation": (lambda _: NaturalPictures(Colourisation(), **FEW), 1, 3),
    "moving layers": (lambda _: MovingLayers(**FEW), 6, 2),
    "rendered rooms": (lambda _: RenderedRooms(**FEW), 3, 1),
    "regional demand": (lambda _: RegionalDemand(train=200, val=20, test=20, steps_per_epoch=10), 50, 12),
    "cell measurements": (lambda _: CellMeasurements(steps_per_epoch=10), 20, 10),
}
NODES = ("regional demand", "cell measurements")


def network(name, channels_in, outputs):
    torch.manual_seed(0)
    if name in NODES:
        return wrap(NodeNet(channels_in, 8, dropout=0.1), LowRankHead(8, 4, outputs, features_last=True))
    options = {"channels": (8, 16), "strides": (2,), "num_res_units": 1, "dropout": 0.1}
    return wrap(MonaiUNet("UNet", channels_in, 8, options=options), LowRankHead(8, 4, outputs))


@pytest.mark.parametrize("name", TASKS)
def test_short_training(name, tmp_path, train):
    make, channels_in, outputs = TASKS[name]
    data = make(tmp_path)
    module = JointUncertainty(network(name, channels_in, outputs), Dropout())
    losses = train(module, data)
    assert sum(losses[-8:]) < sum(losses[:8])

    batch = data.part("test")
    found = evaluate(module.method, module.net, batch, 4)
    assert found.rows["joint"].log_probs.isfinite().all()
    head = module.heads[0]
    mask = None if batch.mask is None else head.flat(batch.mask)
    joint = predict_joint(module.method, module.net, batch.input, 4, 6, mask=mask)
    assert joint.sample((3,)).shape == (3, *head.flat(batch.target).shape)
    if data.style is None:
        assert name in NODES
        return
    subject = predict_item(module, data, data.dataset("test")[0], 4, 6)
    plots.save(plots.panel([subject]), tmp_path / "panel.png")
    assert (tmp_path / "panel.png").stat().st_size > 10_000
