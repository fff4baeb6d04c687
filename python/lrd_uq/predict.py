"""Predictions for a folder of images: arrays and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from lrd_uq import plots
from lrd_uq.bayes import predict_joint
from lrd_uq.data.batch import ImageTask
from lrd_uq.module import JointUncertainty

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")


def predict_folder(
    module: JointUncertainty, data: ImageTask, images: Path, output: Path, samples: int = 64, rank: int = 64
) -> list[Path]:
    """For every image of a folder `<name>.npz`, `<name>.safetensors` (which `lrd.LowRankMultivariateNormal.load` reads)
    and a panel `<name>.png`. All images are read before anything is predicted: a bad one is named and refused.

    Returns:
        the files written.
    """
    files = sorted(file for file in images.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{images} has no image ({', '.join(IMAGES)})")
    batch = data.encode(torch.stack([data.read(file) for file in files]))
    assert batch.mask is not None
    output.mkdir(parents=True, exist_ok=True)
    head = module.heads[0]
    written = []
    for i, file in enumerate(files):
        x, target, mask = batch.input[i : i + 1], batch.target[i, 0], batch.mask[i : i + 1]
        flat = head.flat(mask)
        joint = predict_joint(module.method, module.net, x, samples, rank, mask=flat)
        one = plots.first_item(joint)
        arrays = {
            "mean": one.loc,
            "cov_factor": one.cov_factor,
            "cov_diag": one.cov_diag,
            "aleatoric_variance": one.aleatoric.variance,
            "epistemic_variance": one.epistemic.variance,
            "mask": flat[0],
        }
        paths = [output / f"{file.stem}{ending}" for ending in (".npz", ".safetensors", ".png")]
        np.savez_compressed(paths[0], **{name: tensor.numpy() for name, tensor in arrays.items()})  # type: ignore[arg-type]
        one.save(paths[1])
        plots.panel(paths[2], [plots.Subject(data.visible_part(target, mask[0, 0]), target, mask[0, 0], one)])
        written += paths
    return written
