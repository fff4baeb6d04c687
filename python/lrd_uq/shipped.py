"""What comes with the package: configs by name, and the help of `fit`, so that it is shown without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from pathlib import Path

CONFIGS = Path(__file__).with_name("configs")
BASE = CONFIGS / "base.yaml"  # every config starts from its settings
OPTIONS = ("--config", "-c")
FIT_HELP = Path(__file__).with_name("fit_help.txt")  # written by `python -m lrd_uq.settings`


def shipped_configs() -> list[str]:
    """Names of the configs that come with the package."""
    return list(described_configs())


def described_configs() -> dict[str, str]:
    """Name -> what it is, for the configs that come with the package: the first line of the file."""
    files = sorted(file for file in CONFIGS.glob("*.yaml") if file != BASE)
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for file in files}


def names_config(words: Sequence[str]) -> bool:
    """Whether the arguments choose a config."""
    return any(word.partition("=")[0] in OPTIONS for word in words)


def with_config_paths(words: Sequence[str]) -> list[str]:
    """Arguments with the paths of configs that are given by name: `--config NAME`, `--config=NAME`, `-c NAME`."""
    found, is_config = [], False
    for word in words:
        option, equals, value = word.partition("=")
        if is_config:
            word = _config_path(word)
        elif option in OPTIONS:
            word = f"--config={_config_path(value)}" if equals else "--config"
        is_config = word == "--config"
        found.append(word)
    return found


def config_files(words: Sequence[str]) -> list[str]:
    """The files that arguments name as configs."""
    words = with_config_paths(words)
    named = [word for before, word in pairwise(["", *words]) if "--config" in (before, word.partition("=")[0])]
    return [word.removeprefix("--config=") for word in named if word != "--config"]


def _config_path(name: str) -> str:
    """The path of a config that is given as a file or by the name of a shipped one."""
    if Path(name).is_file():
        return name
    path = CONFIGS / (name if name.endswith(".yaml") else f"{name}.yaml")
    if not path.exists():
        raise FileNotFoundError(f"there is no config {name}; the package has {', '.join(shipped_configs())}")
    return str(path)


def fit_help() -> str | None:
    """The help of `fit`. None if the versions that its options depend on are not those that it was written with."""
    written_with, _, text = FIT_HELP.read_text(encoding="utf-8").partition("\n")
    return text if written_with == versions() else None


def versions() -> str:
    """Of the packages that the options depend on."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in ("lightning", "jsonargparse"))
    except metadata.PackageNotFoundError:
        return ""
