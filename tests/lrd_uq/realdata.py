"""Writes small files in the formats of the paper's data sets."""

import h5py
import numpy as np
import torch
from PIL import Image
from scipy.io import savemat

from lrd_uq.data.files import write_flo


def colours(seed, height, width):
    """A smooth uint8 picture [H, W, 3] that depends on the seed."""
    ys, xs = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(3 * (seed + 1) * xs + c + 2 * ys * (c + 1)) for c in range(3)]
    return (127 + 100 * np.stack(waves, -1)).astype(np.uint8)


def write_celeba(folder, parts=(0, 0, 0, 0, 0, 0, 1, 1, 2, 2), size=40):
    """The files of CelebAMask-HQ and CelebA, whose numberings differ."""
    (folder / "CelebA-HQ-img").mkdir(parents=True)
    mapping, partition = ["idx orig_idx orig_file"], []
    for i, part in enumerate(parts):
        Image.fromarray(colours(i, size, size)).save(folder / "CelebA-HQ-img" / f"{i}.jpg", quality=95, subsampling=0)
        original = 100 * (len(parts) - i)
        mapping.append(f"{i:<9} {original:<9} {original + 1:06d}.jpg")
        partition.append(f"{original + 1:06d}.jpg {part}")
    partition.append("999999.jpg 0")  # CelebA has more pictures
    (folder / "CelebA-HQ-to-CelebA-mapping.txt").write_text("\n".join(mapping) + "\n")
    (folder / "list_eval_partition.txt").write_text("\n".join(reversed(partition)) + "\n")
    return folder


def write_chairs(folder, count=10, height=24, width=32):
    """Frames and flow; every pixel of pair i moves by (i, -2 i) pixels."""
    folder.mkdir(parents=True)
    for i in range(count):
        for frame in (1, 2):
            Image.fromarray(colours(10 * i + frame, height, width)).save(folder / f"{i + 1:05d}_img{frame}.ppm")
        flow = torch.tensor([float(i), -2.0 * i])[:, None, None].expand(2, height, width).clone()
        write_flo(folder / f"{i + 1:05d}_flow.flo", flow)
    return folder


def write_nyu(folder, count=12, height=24, width=32, hdf5_splits=False):
    """MATLAB's arrays are transposed: images [N, 3, W, H], depths [N, W, H]. Pair i is i + 1 metres away; in the raw
    distances the left half is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    metres = np.ones((count, width, height), np.float32) * (1 + np.arange(count, dtype=np.float32))[:, None, None]
    raw = metres.copy()
    raw[:, : width // 2] = 0
    with h5py.File(folder / "nyu_depth_v2_labeled.mat", "w") as file:
        file["images"] = np.stack([colours(i, height, width).transpose(2, 1, 0) for i in range(count)])
        file["depths"], file["rawDepths"] = metres, raw
    splits = {"trainNdxs": np.arange(1, count, 2)[:, None] + 1, "testNdxs": np.arange(0, count, 2)[:, None] + 1}
    if hdf5_splits:
        with h5py.File(folder / "splits.mat", "w") as file:
            for name, numbers in splits.items():
                file[name] = numbers.T.astype(np.float64)
    else:
        savemat(folder / "splits.mat", splits)
    return folder
