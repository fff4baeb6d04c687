"""Config files and command-line options, and the model, data and trainer that they describe."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrd_uq import runs
from lrd_uq.checkpoints import CheckpointFiles
from lrd_uq.extra import lightning as L
from lrd_uq.metrics import MetricsLog
from lrd_uq.module import JointUncertainty

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

CONFIGS = Path(__file__).with_name("configs")
BASE = CONFIGS / "base.yaml"  # every config starts from its settings
USAGE = "lrd-uq COMMAND [--config CONFIG] [--run RUN] [options]"
DESCRIPTION = """Options of the command come first. The others are settings of the run: those of --model and --data as
in the class that they name, those of --trainer as in lightning.pytorch.Trainer. Commands other than fit read them from
the run."""
HELP = {
    "images": "folder of the files to predict",
    "items": "numbers of the items to draw, as [0,1,2]",
    "output": "file or folder to write",
    "part": "data to use: train, val or test",
    "rank": "columns of the joint Gaussian",
    "ranks": "numbers of kept columns to score, as [8,64]",
    "samples": "predictions for each item, from which the joint Gaussian is made",
}
Options = Mapping[str, tuple[object, object]]  # name -> type and default; an option whose default is None is required


def shipped_configs() -> list[str]:
    """Names of the configs that come with the package."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml") if file != BASE)


def configure(
    arguments: Sequence[str],
    options: Options | None = None,
    *,
    writes: contextlib.ExitStack | None = None,
    callbacks: Sequence[L.pytorch.Callback] = (),
) -> LightningCLI:
    """Builds model, data and trainer.

    Args:
        arguments: command-line arguments. `--config` takes a file or the name of a shipped config, and every setting is
            an option.
        options: further options of a command.
        writes: if given, the trainer writes metrics and checkpoints into the run's folder, which no other process may
            write until this is closed.
        callbacks: further callbacks of a trainer that writes.
    """
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Configured(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_argument("--run", type=str, default="runs/latest", help="folder of the run")
            for name, (kind, default) in (options or {}).items():
                required = default is None
                parser.add_argument(f"--{name}", type=kind, default=default, required=required, help=HELP[name])

        def instantiate_trainer(self, **settings: Any) -> L.pytorch.Trainer:
            chosen, folder = self.config_init["trainer"], Path(self.config_init["run"])
            own: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
            if writes is not None:
                writes.enter_context(runs.opened(folder))
                kept = runs.callbacks(folder, self.config_init["seed_everything"])
                more = [one for one in _several(chosen["logger"]) if not isinstance(one, bool)]
                own = {"logger": [MetricsLog(folder), *more]}
                own["callbacks"] = [*_several(chosen["callbacks"]), *callbacks, *kept]
                own["plugins"] = [*_several(chosen["plugins"]), CheckpointFiles()]
            return super().instantiate_trainer(**own, **settings)

    description = f"{DESCRIPTION} Configs that come with the package: {', '.join(shipped_configs())}."
    warnings.filterwarnings("ignore", "LightningCLI's args parameter is intended")
    return Configured(
        JointUncertainty,
        datamodule_class=None,
        subclass_mode_data=True,
        args=[_config_path(word, before) for before, word in zip(["", *arguments], arguments, strict=False)],
        run=False,
        save_config_callback=None,
        seed_everything_default=0,
        parser_kwargs={"default_config_files": [str(BASE)], "usage": USAGE, "description": description},
    )


def _several(given: Any) -> list[Any]:
    """A setting that may be a list, a single value or None, as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


def _config_path(word: str, before: str) -> str:
    """The path of a config that is given as a file or by the name of a shipped one; other arguments as they are."""
    if before != "--config" or Path(word).exists():
        return word
    path = CONFIGS / (word if word.endswith(".yaml") else f"{word}.yaml")
    if not path.exists():
        raise FileNotFoundError(f"there is no config {word}; the package has {', '.join(shipped_configs())}")
    return str(path)
