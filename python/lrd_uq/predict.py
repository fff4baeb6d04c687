"""Predictions for the files of a folder, as arrays and pictures."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import lrd_kernels as lrd
from lrd_uq import plots
from lrd_uq.bayes.base import predict_joint
from lrd_uq.data.batch import Batch, collate
from lrd_uq.data.reading import BrokenFile
from lrd_uq.data.task import Task
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import batch_for
from lrd_uq.storage import replacing, write_whole
from lrd_uq.styles import Style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENDINGS = (".npz", ".safetensors", ".png")


def predict_folder(
    module: JointUncertainty,
    data: Task,
    files: Path,
    output: Path,
    samples: int = 64,
    rank: int = 64,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
) -> Iterator[Path]:
    """Writes `<name>.npz`, `<name>.safetensors` (for `lrd.LowRankMultivariateNormal.load`) and a panel `<name>.png` for
    every item of a folder, and yields their paths. Items are read as they are needed; an unreadable one raises an error
    that names it, unless the data skip it.

    The prediction of a file does not depend on the other ones. Its name is the file's without the ending, or with it if
    another file has the same name otherwise. Every result says what it is of: `about` and the name of the file.
    """
    inputs = data.inputs_of(files)
    targets = {path: [output / f"{name}{ending}" for ending in ENDINGS] for path, name in output_names(inputs).items()}
    refuse_overwriting(files, output, [path for paths in targets.values() for path in paths])
    for path, written in targets.items():
        try:
            item = data.read(path)
        except BrokenFile as error:
            if getattr(data, "on_broken", "refuse") == "refuse":
                raise
            warnings.warn(f"skipped: {error}", stacklevel=2)
            continue
        subject = predict_item(module, data, item, samples, rank, seed)
        output.mkdir(parents=True, exist_ok=True)
        _write(written, subject, {**(about or {}), "input": path.name})
        yield from written


def output_names(inputs: Sequence[Path]) -> dict[Path, str]:
    """The name of the results of each file: its stem, or its whole name if it shares the stem with another file."""
    stems = Counter(path.stem for path in inputs)
    names = [path.stem if stems[path.stem] == 1 else path.name for path in inputs]
    if len(set(names)) < len(names):  # such as a.png, a.jpg and a.png.bmp
        names = [path.name for path in inputs]
    if len(set(names)) < len(names):
        raise ValueError(f"two of the files have the same name: {Counter(names).most_common(1)[0][0]}")
    return dict(zip(inputs, names, strict=True))


def refuse_overwriting(files: Path, output: Path, written: Sequence[Path]) -> None:
    """Raises if the results would be written over a file of the folder that is read, or beside the inputs, where the
    next prediction would read them."""
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"output must be a folder; {output} is a file")
    if output.exists() and output.samefile(files):
        raise ValueError(f"output must be another folder than images; both are {output}")
    read = {file.resolve() for file in files.iterdir()}
    lost = next((path for path in written if path.parent.resolve() / path.name in read), None)
    if lost is not None:
        raise ValueError(f"{lost} would be written over a file that is read through {files}: choose another output")


def _write(paths: Sequence[Path], subject: plots.Subject, about: Mapping[str, Any]) -> None:
    from safetensors.torch import save

    joint = subject.joint
    gaussian = {"loc": joint.loc, "cov_factor": joint.cov_factor, "cov_diag": joint.cov_diag}
    arrays = {
        "mean": joint.loc,
        "cov_factor": joint.cov_factor,
        "cov_diag": joint.cov_diag,
        "aleatoric_variance": joint.aleatoric.variance,
        "epistemic_variance": joint.epistemic.variance,
        "mask": subject.mask.flatten(),
    }
    text = json.dumps(about)
    with replacing(paths[0]) as path:
        np.savez_compressed(path, **{key: tensor.numpy() for key, tensor in arrays.items()}, about=np.array(text))  # type: ignore[arg-type]
    contiguous = {name: tensor.contiguous() for name, tensor in gaussian.items()}
    write_whole(paths[1], save(contiguous, metadata={"about": text}))
    plots.save(plots.panel([subject]), paths[2], about)


def predict_item(
    module: JointUncertainty, data: Task, item: Batch, samples: int, rank: int, seed: int = 0
) -> plots.Subject:
    """An item with its joint Gaussian, as input of `plots.panel`."""
    return plots.subject(item, joint_of(module, item, samples, rank, seed), data.style)


def joint_of(module: JointUncertainty, item: Batch, samples: int, rank: int, seed: int = 0) -> lrd.JointNormal:
    """The joint Gaussian of one item, on the CPU."""
    x, _, mask = batch_for(module.net, collate([item]))
    mask = None if mask is None else module.heads[0].flat(mask)
    return plots.item_of(predict_joint(module.method, module.net, x, samples, rank, mask=mask, chunk=8, seed=seed))


def drawn(
    module: JointUncertainty, items: Sequence[Batch], joints: Sequence[lrd.JointNormal], style: Style | None
) -> Figure:
    """A panel of items with their joint Gaussians. Without a style, because the outputs are not pictures, running sums
    of them with 90 % intervals."""
    if style is not None:
        return plots.panel([plots.subject(item, joint, style) for item, joint in zip(items, joints, strict=True)])
    head = module.heads[0]
    targets = [head.flat(item.target[None])[0] for item in items]
    return plots.running_sums(list(zip(targets, joints, strict=True)), head.outputs)
