"""Whether a run may go on: with the settings that it was started with, and only if it is not finished."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lrd_uq import checkpoints, runs

CONFIG = "config.yaml"
# What may differ when a run goes on: limits of time, what is printed and logged, when it is validated.
FREE = {
    *("trainer.max_time", "trainer.default_root_dir", "trainer.detect_anomaly", "trainer.profiler", "trainer.logger"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.log_every_n_steps"),
    *("trainer.val_check_interval", "trainer.check_val_every_n_epoch", "trainer.num_sanity_val_steps"),
    *("trainer.limit_val_batches", "trainer.limit_test_batches", "trainer.limit_predict_batches"),
    "data.init_args.workers",
}
WATCHERS = {  # callbacks that change no weights
    *("CovarianceMonitor", "ScoreMonitor", "ModePictures", "LearningRateMonitor", "DeviceStatsMonitor", "Timer"),
    *("Progress", "ProgressBar", "TQDMProgressBar", "RichProgressBar", "ModelSummary", "RichModelSummary"),
}
SHOWN = 3  # changes that a message names


def refuse_other_settings(folder: Path, config: str) -> None:
    """Raises ValueError if a run is resumed with settings that change its weights."""
    earlier = folder / CONFIG
    if not runs.has_checkpoint(folder) or not earlier.exists():
        return
    before, now = (_comparable(yaml.safe_load(text)) for text in (earlier.read_text(encoding="utf-8"), config))
    changed = [f"{key} was {old!r} and is now {new!r}" for key, old, new in differences(before, now)]
    if not changed:
        return
    more = f" (and {len(changed) - SHOWN} more)" if len(changed) > SHOWN else ""
    hint = ""
    if any(line.startswith(("trainer.max_steps", "trainer.max_epochs")) for line in changed):
        hint = ". The learning rate follows a schedule to the last step, so a run cannot be made longer or shorter"
    raise ValueError(
        f"{folder} holds a run with other settings: {'; '.join(changed[:SHOWN])}{more}{hint}. Use the same settings to"
        " resume it, or another --run for a new one"
    )


def finished_checkpoint(folder: Path) -> dict[str, Any]:
    """The last checkpoint of a finished run. Raises an error that names a run that is missing or not finished."""
    found, config = checkpoints.newest(folder), folder / CONFIG
    if found is None or not config.exists():
        raise FileNotFoundError(f"{folder} is not a trained run: train it first with `lrd-uq fit --run {folder}`")
    trainer = yaml.safe_load(config.read_text(encoding="utf-8"))["trainer"]
    if not is_finished(found.content, trainer["max_steps"], trainer["max_epochs"]):
        raise ValueError(
            f"{folder} is not finished: {found.path.name} has step {found.content['global_step']} of"
            f" {trainer['max_steps']}"
        )
    return found.content


def is_finished(checkpoint: dict[str, Any], max_steps: int, max_epochs: int | None) -> bool:
    """Whether a checkpoint is the last one of its run."""
    if 0 < max_steps <= checkpoint["global_step"]:
        return True
    states = checkpoint.get("callbacks", {})
    if any(name.startswith("EarlyStopping") and state.get("stopped_epoch") for name, state in states.items()):
        return True
    epochs = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current", {})
    return 0 < (max_epochs or 0) <= epochs.get("processed", 0)


def differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Keys, with dots, at which two configs differ, and both values."""
    if key in FREE or (before == now and type(before) is type(now)):
        return
    if isinstance(before, dict) and isinstance(now, dict) and before.get("class_path") == now.get("class_path"):
        for name in (*before, *(name for name in now if name not in before)):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{key}[{number}]")
    elif before != now:
        yield key, _name(before), _name(now)


def _comparable(config: dict[str, Any]) -> dict[str, Any]:
    """The settings without the folder and what only watches."""
    kept = {name: value for name, value in config.items() if name not in ("run", "config", "log")}
    trainer = dict(kept.get("trainer") or {})
    callbacks = trainer.get("callbacks") or []
    several = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer["callbacks"] = [one for one in several if one["class_path"].rpartition(".")[2] not in WATCHERS]
    return {**kept, "trainer": trainer}


def _name(value: Any) -> Any:
    """The class of a setting that is an object, and other values as they are."""
    return value["class_path"] if isinstance(value, dict) and "class_path" in value else value
