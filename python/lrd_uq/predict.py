"""Predictions for a folder of images: arrays and pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lrd_uq import plots
from lrd_uq.bayes import predict_joint
from lrd_uq.data.inpainting import DigitInpainting
from lrd_uq.module import JointUncertainty

IMAGES = (".png", ".jpg", ".jpeg", ".bmp")


def read_image(path: Path, side: int) -> Tensor:
    """A picture in grey, [side, side] in [0, 1]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            grey = np.asarray(image.convert("L"), dtype=np.float32) / 255
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a picture that can be read: {error}") from error
    if grey.shape != (side, side):
        raise ValueError(f"{path} must have {side} x {side} pixels; got {grey.shape[1]} x {grey.shape[0]}")
    return torch.from_numpy(grey)


def predict_folder(
    module: JointUncertainty, data: DigitInpainting, images: Path, output: Path, samples: int = 64, rank: int = 64
) -> list[Path]:
    """For every image of a folder `<name>.npz`, `<name>.safetensors` (which `lrd.LowRankMultivariateNormal.load` reads)
    and a panel `<name>.png`. All images are read before anything is predicted: a bad one is named and refused.

    Returns:
        the files written.
    """
    files = sorted(file for file in images.iterdir() if file.suffix.lower() in IMAGES)
    if not files:
        raise ValueError(f"{images} has no image ({', '.join(IMAGES)})")
    batch = data.encode(torch.stack([read_image(file, data.side) for file in files]))
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
