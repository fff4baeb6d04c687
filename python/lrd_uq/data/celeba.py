"""CelebA-HQ with the splits of CelebA: 24,183 pictures for training, 2,993 for validation and 2,824 for testing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lrd_uq.checks import check_counts
from lrd_uq.data.files import read_colour, read_lines
from lrd_uq.data.pictures import Inpainting, PictureTask, Question
from lrd_uq.data.reading import BrokenFile
from lrd_uq.data.task import at_most

MAPPING, PARTITION, IMAGES = "CelebA-HQ-to-CelebA-mapping.txt", "list_eval_partition.txt", "CelebA-HQ-img"
# 119 x 250 of 256 x 256 pixels over the eyes: the paper has 29,750 hidden pixels, and does not say where.
EYES = (60 / 256, 3 / 256, 179 / 256, 253 / 256)


class CelebA(PictureTask):
    """Faces, from a folder with the files of CelebAMask-HQ and CelebA as they are distributed:

        CelebA-HQ-img/0.jpg ...               the pictures, .jpg or .png
        CelebA-HQ-to-CelebA-mapping.txt       a header, then: number, number in CelebA, file name in CelebA
        list_eval_partition.txt               file name in CelebA, and 0 (training), 1 (validation) or 2 (test)

    Args:
        folder: folder of the files.
        question: `Inpainting` (None: of the eyes) or `Colourisation`.
        size: height and width to which pictures are resized.
        train, val, test: maximum number of items of each part; None for all.
        on_broken: "refuse" (raise an error) or "skip" pictures that cannot be read.
        batch_size, steps_per_epoch, seed, workers: see `Task`.
    """

    def __init__(
        self,
        folder: str,
        question: Question | None = None,
        size: tuple[int, int] = (256, 256),
        train: int | None = None,
        val: int | None = None,
        test: int | None = None,
        on_broken: str = "refuse",
        batch_size: int = 32,
        steps_per_epoch: int | None = None,
        seed: int = 42,
        workers: int = 0,
    ) -> None:
        question = Inpainting(EYES) if question is None else question
        super().__init__(question, size, on_broken, batch_size, steps_per_epoch, seed, workers)
        check_counts(train=train, val=val, test=test)
        self.folder, self.most = Path(folder), (train, val, test)

    def sources(self) -> Sequence[Sequence[Path]]:
        return at_most(self.split(), self.most)

    def picture(self, source: Path) -> Tensor:
        return read_colour(source, self.size)

    def split(self) -> tuple[list[Path], list[Path], list[Path]]:
        """The files of the three parts, in the order of the mapping file."""
        partition, parts = self.folder / PARTITION, self._partition()
        mapping = self.folder / MAPPING
        lines = read_lines(mapping)
        if not lines or len(lines[0]) != 3 or lines[0][0].isdecimal():
            raise BrokenFile(
                f"{mapping} must begin with a heading, as 'idx orig_idx orig_file'; got"
                f" {' '.join(lines[0]) if lines else 'nothing'!r}"
            )
        found: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
        seen: set[str] = set()
        for words in lines[1:]:
            if len(words) != 3 or not (words[0].isdecimal() and words[1].isdecimal()):
                raise BrokenFile(
                    f"{mapping} must have two numbers and a file name in every line; got {' '.join(words)!r}"
                )
            if words[0] in seen or words[2] in seen:
                raise BrokenFile(f"{mapping} has {words[0]} or {words[2]} twice")
            seen |= {words[0], words[2]}
            if words[2] not in parts:
                raise BrokenFile(f"{mapping} names {words[2]}, which is missing in {partition.name}")
            found[parts[words[2]]].append(self._picture(words[0]))
        if not all(found):
            raise BrokenFile(f"{mapping} and {partition.name} leave a part empty: {[len(files) for files in found]}")
        return found

    def _partition(self) -> dict[str, int]:
        """File name in CelebA -> part."""
        partition = self.folder / PARTITION
        parts: dict[str, int] = {}
        for words in read_lines(partition):
            if len(words) != 2 or words[1] not in ("0", "1", "2"):
                raise BrokenFile(
                    f"{partition} must have a file name and 0, 1 or 2 in every line; got {' '.join(words)!r}"
                )
            if parts.setdefault(words[0], int(words[1])) != int(words[1]):
                raise BrokenFile(f"{partition} has {words[0]} in two parts, {parts[words[0]]} and {words[1]}")
        return parts

    def _picture(self, number: str) -> Path:
        for suffix in (".jpg", ".png"):
            if (path := self.folder / IMAGES / f"{number}{suffix}").exists():
                return path
        return self.folder / IMAGES / f"{number}.jpg"  # missing: reading it raises an error with this name
