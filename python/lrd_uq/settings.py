"""Config files and command-line options, and the model, data and trainer that they describe."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from lrd_uq import boards, imports, runs
from lrd_uq.checkpoints import CheckpointFiles
from lrd_uq.extra import lightning as L
from lrd_uq.messages import one_line
from lrd_uq.metrics import MetricsLog
from lrd_uq.module import JointUncertainty
from lrd_uq.progress import Progress
from lrd_uq.shipped import BASE, FIT_HELP, config_files, names_config, shipped_configs, versions, with_config_paths

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

USAGE = "lrd-uq {} [--config CONFIG] [--run RUN] [options]"
DESCRIPTION = """Options of the command come first. The others are settings of the run: those of --model and --data as
in the class that they name, those of --trainer as in lightning.pytorch.Trainer. Commands other than fit read them from
the run. A config can name classes of lightning, lrd_kernels, lrd_uq, monai, torch.nn and torch.optim; --allow-imports
PACKAGE, or the environment variable LRD_ALLOW_IMPORTS, allows others."""
HELP_WIDTH = "100"
HIDDEN_WARNINGS = (
    "LightningCLI's args parameter is intended",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from .* therefore",
    "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "The number of training batches .* is smaller than the logging interval",
    "The '(train|val|test)_dataloader' does not have many workers",
    "FSDP2-wrapped module .* returned a view tensor",  # nothing is changed in place
)
HELP = {
    "images": "folder of the files to predict",
    "items": "numbers of the items to draw, as [0,1,2]",
    "log": "also show metrics, and pictures of the modes, in tensorboard, in wandb, or in both: [tensorboard,wandb]",
    "output": "file or folder to write",
    "part": "data to use: train, val or test",
    "rank": "columns of the joint Gaussian",
    "ranks": "numbers of kept columns to score, as [8,64]",
    "samples": "predictions for each item, from which the joint Gaussian is made",
}
Options = Mapping[str, tuple[object, object]]  # name -> type and default; an option whose default is None is required


def configure(
    arguments: Sequence[str],
    options: Options | None = None,
    *,
    writes: contextlib.ExitStack | None = None,
    callbacks: Sequence[L.pytorch.Callback] = (),
    command: str = "fit",
) -> LightningCLI:
    """Builds model, data and trainer.

    Args:
        arguments: command-line arguments. `--config` takes a file or the name of a shipped config, and every setting is
            an option.
        options: further options of a command.
        writes: if given, the trainer writes metrics and checkpoints into the run's folder, which no other process may
            write until this is closed.
        callbacks: further callbacks of a trainer that writes.
        command: name of the command in the help.

    Raises:
        ValueError: if an argument is wrong.
    """
    from jsonargparse import ArgumentError
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

    class Configured(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.add_argument("--run", type=str, default="runs/latest", help="folder of the run")
            parser.add_argument("--log", type=boards.Boards, default=None, help=HELP["log"])
            for name, (kind, default) in (options or {}).items():
                required = default is None
                parser.add_argument(f"--{name}", type=kind, default=default, required=required, help=HELP[name])

        def before_instantiate_classes(self) -> None:
            if self.config["seed_everything"] is False:
                raise ValueError("seed_everything must be a number: without it, no run could be repeated; got false")

        def instantiate_trainer(self, **settings: Any) -> L.pytorch.Trainer:
            chosen, folder = self.config_init["trainer"], Path(self.config_init["run"])
            own: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
            if writes is not None:
                writes.enter_context(runs.opened(folder))
                kept = runs.callbacks(folder, self.config_init["seed_everything"])
                more = [one for one in _several(chosen["logger"]) if not isinstance(one, bool)]
                shown = [*_several(chosen["callbacks"]), *callbacks, *kept]
                if boards.named(self.config["log"]):
                    more += boards.loggers(self.config["log"], folder, yaml.safe_load(self.parser.dump(self.config)))
                    has_pictures = any(isinstance(one, boards.ModePictures) for one in shown)
                    shown += [] if has_pictures else [boards.ModePictures()]
                own = {"logger": [MetricsLog(folder), *more]}
                own["callbacks"] = [*shown, *_progress(shown, chosen["enable_progress_bar"])]
                own["plugins"] = [*_several(chosen["plugins"]), CheckpointFiles()]
            if is_half_on_cpu(chosen):  # lightning would take bfloat16 instead
                half = L.pytorch.plugins.precision.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
                own |= {"precision": None, "plugins": [*own.get("plugins", _several(chosen["plugins"])), half]}
            try:
                return super().instantiate_trainer(**own, **settings)
            except TypeError as error:  # some checks of lightning raise it for wrong numbers
                raise ValueError(f"trainer: {error}") from error

    description = f"{DESCRIPTION} Configs that come with the package: {', '.join(shipped_configs())}."
    quiet_lightning()
    arguments, packages = imports.taken_out(arguments)
    allowed = [*packages, *imports.named_by_caller(arguments)]
    parser = {"default_config_files": [str(BASE)], "usage": USAGE.format(command), "description": description}
    try:
        with imports.only(allowed):
            return Configured(
                JointUncertainty,
                datamodule_class=None,
                subclass_mode_data=True,
                args=with_config_paths(arguments),
                run=False,
                save_config_callback=None,
                seed_everything_default=0,
                parser_kwargs={**parser, "exit_on_error": False, "allow_abbrev": False},
            )
    except (ArgumentError, ValueError) as error:
        message = imports.explained(one_line(str(error)))
        if isinstance(error, UnicodeError) or "parsing config" in message or "Unexpected config" in message:
            message = f"{' or '.join(config_files(arguments))} cannot be read: {message}"
        if "arguments are required" in message and not names_config(arguments):
            message += ". A config sets them: --config NAME, where NAME is a file or one of those of `lrd-uq configs`"
        raise ValueError(message) from error


def fit_help() -> str:
    """The help of `fit`, as the parser prints it, without what differs: folders, and lists of the classes imported."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        configure(["--help"])
    text = re.sub(r"default config file locations:.*?\n\n", "", said.getvalue(), flags=re.DOTALL)
    return re.sub(r",\s+known\s+subclasses:[^)]*\)", ")", text)


def quiet_lightning() -> None:
    """Hides lightning's advertising, and advice that does not apply: batches are in memory, a run has one folder."""
    for name in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{name}").setLevel(logging.WARNING)
    for text in HIDDEN_WARNINGS:
        warnings.filterwarnings("ignore", text)


def _progress(callbacks: Sequence[L.pytorch.Callback], wanted: bool | None) -> list[L.pytorch.Callback]:
    """The progress bar, unless there is another one or none is wanted."""
    has_one = any(isinstance(one, L.pytorch.callbacks.ProgressBar) for one in callbacks)
    return [] if has_one or wanted is False else [Progress()]


def is_half_on_cpu(trainer: Any) -> bool:
    """Whether the settings of a trainer ask for mixed precision with float16 on a CPU."""
    on_cpu = trainer["accelerator"] == "cpu" or (trainer["accelerator"] == "auto" and not torch.cuda.is_available())
    return on_cpu and str(trainer["precision"]) in ("16", "16-mixed")


def _several(given: Any) -> list[Any]:
    """A setting that may be a list, a single value or None, as a list."""
    return given if isinstance(given, list) else [] if given is None else [given]


if __name__ == "__main__":
    os.environ["COLUMNS"] = HELP_WIDTH
    FIT_HELP.write_text(f"{versions()}\n{fit_help()}", encoding="utf-8")
