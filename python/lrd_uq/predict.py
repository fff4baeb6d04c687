"""Predictions for the files of a folder, as arrays and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import lrd_kernels as lrd
from lrd_uq import plots
from lrd_uq.bayes import predict_joint
from lrd_uq.data.batch import Batch
from lrd_uq.data.task import Task, collate
from lrd_uq.module import JointUncertainty


def predict_folder(
    module: JointUncertainty, data: Task, files: Path, output: Path, samples: int = 64, rank: int = 64
) -> list[Path]:
    """Writes `<name>.npz`, `<name>.safetensors` (for `lrd.LowRankMultivariateNormal.load`) and a panel `<name>.png` for
    every item of a folder. All files are read first: an unreadable one raises an error that names it.

    Returns:
        the files written.
    """
    items = [(path.stem, data.read(path)) for path in data.inputs_of(files)]
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, item in items:
        subject = predict_item(module, data, item, samples, rank)
        joint = subject.joint
        arrays = {
            "mean": joint.loc,
            "cov_factor": joint.cov_factor,
            "cov_diag": joint.cov_diag,
            "aleatoric_variance": joint.aleatoric.variance,
            "epistemic_variance": joint.epistemic.variance,
            "mask": subject.mask.flatten(),
        }
        paths = [output / f"{name}{ending}" for ending in (".npz", ".safetensors", ".png")]
        np.savez_compressed(paths[0], **{key: tensor.numpy() for key, tensor in arrays.items()})  # type: ignore[arg-type]
        joint.save(paths[1])
        plots.panel(paths[2], [subject])
        written += paths
    return written


def predict_item(module: JointUncertainty, data: Task, item: Batch, samples: int, rank: int) -> plots.Subject:
    """An item with its joint Gaussian, as input of `plots.panel`."""
    return plots.subject(item, joint_of(module, item, samples, rank), data.style)


def joint_of(module: JointUncertainty, item: Batch, samples: int, rank: int) -> lrd.JointNormal:
    """The joint Gaussian of one item."""
    batch = collate([item])
    mask = None if batch.mask is None else module.heads[0].flat(batch.mask)
    return plots.first_item(predict_joint(module.method, module.net, batch.input, samples, rank, mask=mask, chunk=8))
