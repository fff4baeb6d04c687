"""Train, evaluate and inspect networks with low-rank Gaussian outputs.

    lrd-uq configs                                           # list the configs that come with the package
    lrd-uq fit --config digits_dropout --run runs/dropout    # train; after an interruption, the same command resumes
    lrd-uq evaluate --run runs/dropout                       # score the test data
    lrd-uq predict --run runs/dropout --images folder        # predict every picture of a folder
    lrd-uq panel --run runs/dropout --items '[0,1,2]'        # draw test items
    lrd-uq diagnose --run runs/dropout                       # check how well conditioned the covariances are
    lrd-uq demo                                              # train and compare four networks on MNIST inpainting

Status 0 of `fit` means that the run is trained and saved, 75 that `max_time` stopped it, 143 that SIGTERM did, 1 an
error. After each of them, the same command goes on from the last checkpoint.

A run is a folder. A config is a YAML file or the name of one that comes with the package. Every setting is also a
command-line option, for example `--model.alpha 0.25`; `lrd-uq fit --help` lists them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.cli import LightningCLI

    from lrd_uq.checkpoints import Found
    from lrd_uq.data.task import Task
    from lrd_uq.module import JointUncertainty
    from lrd_uq.settings import Options


TIME_IS_UP, TERMINATED = 75, 143  # EX_TEMPFAIL: the same command goes on; 128 + SIGTERM


class Stopped(Exception):
    """Training that ended before its last step was saved."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "configs": configs,
        "fit": fit,
        "evaluate": evaluate,
        "predict": predict,
        "panel": panel,
        "diagnose": diagnose,
        "demo": demo,
    }
    if not words or words[0] not in commands:
        wants_help = bool(words) and words[0] in ("-h", "--help")
        if words and not wants_help:
            print(f"lrd-uq: there is no command {words[0]!r}\n", file=sys.stderr)
        print(__doc__, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    try:
        commands[words[0]](words[1:])
        sys.stdout.flush()
    except Stopped as stop:
        print(f"lrd-uq {words[0]}: {stop}", file=sys.stderr)
        return stop.status
    except Exception as error:
        told = isinstance(error, (OSError, ImportError, ValueError))
        if not told and type(error).__name__ != "MisconfigurationException":  # lightning's; not imported for --help
            raise
        print(f"lrd-uq {words[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def configs(words: list[str]) -> None:
    """Lists the configs that come with the package."""
    from lrd_uq.shipped import described_configs

    if words:
        raise ValueError(f"configs takes no arguments; got {' '.join(words)}")
    known = described_configs()
    for name, what in known.items():
        print(f"{name:{max(map(len, known))}}  {what}")


def fit(words: list[str]) -> None:
    """Trains a network, or resumes an interrupted run. Leaves a finished one as it is. Raises unless the last step is
    trained and saved."""
    from lrd_uq.shipped import fit_help

    if words in (["--help"], ["-h"]) and (text := fit_help()) is not None:
        print(text, end="")
        return

    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from lrd_uq import checkpoints, resuming, settings, storage

    with contextlib.ExitStack() as held:
        cli = settings.configure(words, writes=held)
        folder, trainer = Path(cli.config["run"]), cli.trainer
        refuse_no_training(trainer)
        refuse_misfit(cli.model, cli.datamodule, cli.config["trainer"]["use_distributed_sampler"])
        config = cli.parser.dump(cli.config, skip_validation=True, skip_unset=False)  # with what is None, too
        resuming.refuse_other_settings(folder, config)
        found = checkpoints.newest(folder)
        if found is not None and resuming.is_finished(found.content, trainer.max_steps, trainer.max_epochs):
            if trainer.is_global_zero:
                print(f"{folder} is finished: its last step, {found.content['global_step']}, is trained and saved")
            return
        if trainer.is_global_zero:
            if found is not None:
                checkpoints.set_aside(found.damaged)
            storage.write_whole(folder / "config.yaml", config.encode())
        try:
            trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=found and found.path, weights_only=True)
        except SIGTERMException:
            raise Stopped(f"stopped by SIGTERM after step {_progress(trainer, folder)}", TERMINATED) from None
        except OSError as error:
            raise Stopped(f"{error}. Stopped after step {_progress(trainer, folder)}") from error
        if trainer.is_global_zero:
            refuse_unfinished(trainer, folder)


def refuse_no_training(trainer: Trainer) -> None:
    """Raises for settings with which no step would be trained or saved, with which training would never end, and for
    those that lightning divides by or ignores."""
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if getattr(trainer, name) == 0:
            raise ValueError(f"trainer.{name} must be above 0 for any training; got 0")
    if getattr(trainer, "fast_dev_run", False):
        raise ValueError("trainer.fast_dev_run saves no checkpoint: leave it out, and lower max_steps instead")
    if trainer.max_steps == -1 and trainer.max_epochs in (-1, None):
        raise ValueError("trainer.max_steps or trainer.max_epochs must be set: the learning rate depends on the end")
    for name in ("accumulate_grad_batches", "val_check_interval", "check_val_every_n_epoch"):
        value = getattr(trainer, name)
        if isinstance(value, (int, float)) and not value > 0:
            raise ValueError(f"trainer.{name} must be above 0; got {value}")
    if trainer.log_every_n_steps < 0:  # type: ignore[attr-defined]
        raise ValueError(f"trainer.log_every_n_steps must be 0 or above; got {trainer.log_every_n_steps}")  # type: ignore[attr-defined]
    for name, most in (("min_steps", trainer.max_steps), ("min_epochs", trainer.max_epochs)):
        if 0 < (most or 0) < (getattr(trainer, name) or 0):
            raise ValueError(
                f"trainer.{name} must be at most {name.replace('min', 'max')}, {most}, where training ends"
            )


def refuse_misfit(module: JointUncertainty, data: Any, distributes: bool) -> None:
    """Raises ValueError for a network, or a trainer, that does not fit the data."""
    from lrd_uq.data.batch import as_batch
    from lrd_uq.data.task import Task

    if not isinstance(data, Task):  # lightning has to prepare a data module of another kind
        return
    if distributes:
        raise ValueError("trainer.use_distributed_sampler must be false: the tasks distribute their batches themselves")
    items = data.dataset("train")
    read = getattr(items, "item_or_none", items.__getitem__)
    first = next((item for number in range(len(items)) if (item := read(number)) is not None), None)
    if first is not None:
        module.refuse_misfit(as_batch(first))


def refuse_unfinished(trainer: Trainer, folder: Path) -> None:
    """Raises unless training has ended and the last step is in the checkpoint on the disk."""
    from lightning.pytorch.callbacks import Timer

    timers = [callback for callback in getattr(trainer, "callbacks", []) if isinstance(callback, Timer)]
    remaining = [left for timer in timers if (left := timer.time_remaining()) is not None]
    if trainer.global_step < trainer.estimated_stepping_batches and any(left <= 0 for left in remaining):
        raise Stopped(f"stopped by max_time after step {_progress(trainer, folder)}", TIME_IS_UP)
    if trainer.received_sigterm and _saved_step(folder) != trainer.global_step:
        raise Stopped(f"stopped by SIGTERM after step {_progress(trainer, folder)}", TERMINATED)
    if trainer.global_step == 0 or _saved_step(folder) != trainer.global_step:
        raise Stopped(f"training ended early, after step {_progress(trainer, folder)}")


def _progress(trainer: Trainer, folder: Path) -> str:
    """How far a run got, and what is saved of it."""
    known = trainer.max_epochs == -1 or trainer.train_dataloader is not None  # or lightning would load the data for it
    total = f" of {trainer.estimated_stepping_batches}" if known else ""
    saved = _saved_step(folder)
    rest = f"the last checkpoint has step {saved}: the same command goes on from it" if saved else "no step is saved"
    return f"{trainer.global_step}{total}; {rest}"


def _saved_step(folder: Path) -> int:
    """The step of the newest sound checkpoint on the disk; 0 if there is none."""
    from lrd_uq import checkpoints

    found = checkpoints.newest(folder)
    return 0 if found is None else found.content["global_step"]


def evaluate(words: list[str]) -> None:
    """Scores a run on its test data: prints a table, and writes a file of its own into the run's folder."""
    from lrd_uq import evaluate as scores
    from lrd_uq import parallel, provenance, runs, storage
    from lrd_uq.evaluate.shares import Share

    options = {"samples": (int, 64), "ranks": (list[int], [8, 16, 32, 64, 128]), "part": (str, "test")}
    run = _trained("evaluate", words, options)
    part, T, ranks = run.chosen["part"], run.chosen["samples"], run.chosen["ranks"]

    def score(process: int, processes: int) -> scores.Evaluation:
        items = Share(run.data.dataset(part), process, processes)
        return scores.evaluate(run.module.method, run.module.net, items, T, ranks, seed=run.seed)

    found = parallel.launch(run.trainer, run.module, score)
    if not run.trainer.is_global_zero:
        return
    rows = list(found.rows.items())
    figures = scores.figures(found)
    print(
        f"{figures['items']} items of the {part} data, nats per item; RMSE {found.rmse:.4f},"
        f" share of the error outside the factor's columns {found.unexplained:.2f}"
    )
    print("\n".join([*scores.table(rows), *scores.failures(rows)]))
    if "expected" in found.rows:
        difference = scores.paired(found.rows["joint"].log_probs, found.rows["expected"].log_probs)
        print(f"joint minus expected weights, paired: {difference}")
    elif found.no_expected:
        print(found.no_expected)
    of = run.about(part=part, T=T, ranks=ranks)
    path = run.folder / f"evaluation-{part}-T{T}-seed{run.seed}-{provenance.short_hash(of)}.json"
    storage.write_json(path, {"of": of, "facts": runs.facts(), **figures})
    print(f"Wrote {path}")


def predict(words: list[str]) -> None:
    """Predicts every file of a folder, and writes arrays and pictures."""
    from lrd_uq.predict import predict_folder

    options = {"images": (str, None), "output": (str, "predictions"), "samples": (int, 64), "rank": (int, 64)}
    run = _trained("predict", words, options)
    images, output, (T, rank) = Path(run.chosen["images"]), Path(run.chosen["output"]), _sizes(run)
    about = run.about(T=T, rank=rank)
    for path in predict_folder(run.module, run.data, images, output, T, rank, run.seed, about):
        print(path, flush=True)


def panel(words: list[str]) -> None:
    """Draws test items: input, truth, prediction, variances and leading modes. If the outputs are not pictures, draws
    running sums of them with 90 % intervals."""
    from lrd_uq import plots
    from lrd_uq.predict import drawn, joint_of

    options = {
        "items": (list[int], [0, 1, 2]),
        "output": (str, "panel.png"),
        "samples": (int, 64),
        "rank": (int, 64),
        "part": (str, "test"),
    }
    run = _trained("panel", words, options)
    part, chosen, output, (T, rank) = run.chosen["part"], run.chosen["items"], Path(run.chosen["output"]), _sizes(run)
    dataset = run.data.dataset(part)
    missing = [i for i in chosen if not 0 <= i < len(dataset)]
    if missing:
        raise ValueError(
            f"there is no item {missing[0]}: the {part} data has {len(dataset)}, from 0 to {len(dataset) - 1}"
        )
    items, about = [dataset[i] for i in chosen], run.about(part=part, items=chosen, T=T, rank=rank)
    joints = [joint_of(run.module, item, T, rank, run.seed) for item in items]
    plots.save(drawn(run.module, items, joints, run.data.style), output, about)
    print(f"Wrote {output}")


def diagnose(words: list[str]) -> None:
    """Reports how well conditioned the predicted covariances are, and plots condition numbers over the steps."""
    from lrd_uq import plots
    from lrd_uq.diagnosis import diagnose as diagnosed
    from lrd_uq.metrics import read_metrics

    run = _trained("diagnose", words, {"part": (str, "val")})
    part, folder = run.chosen["part"], run.folder
    print("\n".join(diagnosed(run.module.method, run.module.net, run.data.dataset(part))))
    series = read_metrics(folder)
    if "condition_upper" in series:
        about = run.about()
        plots.condition_numbers(folder / "condition.png", {folder.name: [series]}, about)
        plots.curves(folder / "curves.png", {folder.name: [series]}, about)
        print(f"Wrote {folder / 'condition.png'} and {folder / 'curves.png'}")


def demo(words: list[str]) -> None:
    """Trains and compares diagonal and low-rank networks on MNIST inpainting; writes a report to reports/demo."""
    from lrd_uq.demo import main as run_demo

    run_demo(words)


class Trained:
    """A run that other commands than `fit` read."""

    def __init__(self, cli: LightningCLI, checkpoint: Found) -> None:
        self.module: JointUncertainty = cli.model
        self.data: Task = cli.datamodule
        self.trainer: Trainer = cli.trainer
        self.chosen = cli.config  # options of the command
        self.folder, self.seed = Path(cli.config["run"]), int(cli.config["seed_everything"])
        self._parser, self._checkpoint = cli.parser, checkpoint

    def about(self, **of: Any) -> dict[str, Any]:
        """What a result is of."""
        import yaml

        from lrd_uq.provenance import provenance

        settings = yaml.safe_load(self._parser.dump(self.chosen, skip_validation=True))
        return provenance(settings, self._checkpoint, **of, seed=self.seed)


def _sizes(run: Trained) -> tuple[int, int]:
    return run.chosen["samples"], run.chosen["rank"]


def _trained(command: str, words: list[str], options: Options) -> Trained:
    """Model and data of a run, with the trained weights, on the device of the trainer."""
    from lrd_uq import runs, settings, shipped
    from lrd_uq.data.task import Task

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--run=") else [word])]
    asks_help = "--help" in words or "-h" in words
    if "--run" not in words[:-1] and not asks_help:
        raise ValueError("--run is missing: the folder of a run, which `lrd-uq fit --run` makes")
    if not shipped.names_config(words) and not asks_help:
        saved = Path(words[words.index("--run") + 1]) / "config.yaml"
        if not saved.exists():
            raise FileNotFoundError(f"{saved.parent} is not a run: it has no config.yaml")
        words = ["--config", str(saved), *words]
    cli = settings.configure(words, options, command=command)
    if not isinstance(cli.datamodule, Task):
        raise ValueError(f"the config has no data of lrd_uq.data: {command} reads the items of a Task")
    for name in {"samples", "rank", "ranks"} & set(options):
        chosen = cli.config[name]
        if min(chosen if isinstance(chosen, list) else [chosen], default=1) < 1:
            raise ValueError(f"{name} must be at least 1; got {chosen}")
    checkpoint = runs.load_weights(cli.model, Path(cli.config["run"]))
    cli.model.to(cli.trainer.strategy.root_device)
    return Trained(cli, checkpoint)


if __name__ == "__main__":
    sys.exit(main())
