"""`lrd-uq fit | evaluate | predict | panel | diagnose | demo`: runs are folders, settings are YAML files.

    lrd-uq fit --config digits_dropout.yaml --run runs/dropout      # again after a kill: it goes on
    lrd-uq evaluate --run runs/dropout
    lrd-uq predict --run runs/dropout --images folder
    lrd-uq panel --run runs/dropout --items '[0,1,2]'
    lrd-uq diagnose --run runs/dropout
    lrd-uq demo

A config may be a file, or the name of one that comes with the package. Every setting of it can be given as an option,
as in `--model.alpha 0.25`; `lrd-uq fit --help` lists them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

    from lrd_uq.settings import Options


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "fit": fit,
        "evaluate": evaluate,
        "predict": predict,
        "panel": panel,
        "diagnose": diagnose,
        "demo": demo,
    }
    if not words or words[0] not in commands:
        wants_help = bool(words) and words[0] in ("-h", "--help")
        print(__doc__, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    try:
        commands[words[0]](words[1:])
    except (FileNotFoundError, ImportError, ValueError) as error:
        print(f"lrd-uq {words[0]}: {error}", file=sys.stderr)
        return 1
    return 0


def fit(words: list[str]) -> None:
    """Trains, or goes on with what a killed run left."""
    from lrd_uq import runs, settings

    cli = settings.configure(words, writes=True)
    folder = Path(cli.config["run"])
    refuse_other_settings(folder, cli.parser.dump(cli.config, skip_validation=True))
    cli.parser.save(cli.config, folder / "config.yaml", overwrite=True, skip_validation=True)
    cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=runs.checkpoint(folder), weights_only=False)


def refuse_other_settings(folder: Path, config: str) -> None:
    """What a run is of must not change when it goes on: its weights would be those of neither."""
    import yaml

    from lrd_uq import runs

    earlier = folder / "config.yaml"
    if runs.checkpoint(folder) is None or not earlier.exists():
        return
    before, now = (yaml.safe_load(text) for text in (earlier.read_text(encoding="utf-8"), config))
    changed = [name for name in ("seed_everything", "model", "data") if before.get(name) != now.get(name)]
    if changed:
        raise ValueError(
            f"{folder} holds a run with another {', '.join(changed)}: give the same settings to go on with it, or"
            " another --run"
        )


def evaluate(words: list[str]) -> None:
    """Scores a run on its test data: a table, and evaluation.json in the run's folder."""
    import torch

    from lrd_uq import evaluate as scores
    from lrd_uq import runs

    options = {"samples": (int, 64), "ranks": (list[int], [8, 16, 32, 64, 128]), "part": (str, "test")}
    cli = _trained(words, options)
    folder = Path(cli.config["run"])
    torch.manual_seed(cli.config["seed_everything"])
    module, batch = cli.model, cli.datamodule.part(cli.config["part"])
    found = scores.evaluate(module.method, module.net, batch, cli.config["samples"], cli.config["ranks"])
    print(
        f"{len(batch.target)} items of the {cli.config['part']} data, nats per item; RMSE {found.rmse:.4f},"
        f" error outside a prediction's columns {found.unexplained:.2f}"
    )
    print("\n".join(scores.table(list(found.rows.items()))))
    if "expected" in found.rows:
        difference = scores.paired(found.rows["joint"].log_probs, found.rows["expected"].log_probs)
        print(f"joint minus expected weights, paired: {difference}")
    elif found.no_expected:
        print(found.no_expected)
    document = {
        "facts": runs.facts(),
        "rmse": found.rmse,
        "mae": found.mae,
        "unexplained": found.unexplained,
        "rows": {key: scores.summary(row) for key, row in found.rows.items()},
    }
    (folder / "evaluation.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def predict(words: list[str]) -> None:
    """Arrays and pictures for a folder of files."""
    import torch

    from lrd_uq.predict import predict_folder

    options = {"images": (str, None), "output": (str, "predictions"), "samples": (int, 64), "rank": (int, 64)}
    cli = _trained(words, options)
    chosen = cli.config
    torch.manual_seed(chosen["seed_everything"])
    sizes = (chosen["samples"], chosen["rank"])
    for path in predict_folder(cli.model, cli.datamodule, Path(chosen["images"]), Path(chosen["output"]), *sizes):
        print(path)


def panel(words: list[str]) -> None:
    """A picture of test items: input, truth, prediction, variances and leading modes; or, where their outputs are no
    pictures, how certain sums of them are."""
    import torch

    from lrd_uq import plots
    from lrd_uq.predict import joint_of, predict_item

    options = {
        "items": (list[int], [0, 1, 2]),
        "output": (str, "panel.png"),
        "samples": (int, 64),
        "rank": (int, 64),
        "part": (str, "test"),
    }
    cli = _trained(words, options)
    chosen, data = cli.config, cli.datamodule
    torch.manual_seed(chosen["seed_everything"])
    dataset, sizes = data.dataset(chosen["part"]), (chosen["samples"], chosen["rank"])
    items = [dataset[i] for i in chosen["items"]]
    if data.style is None:
        head = cli.model.heads[0]
        sums = [(head.flat(item.target[None])[0], joint_of(cli.model, item, *sizes)) for item in items]
        plots.running_sums(Path(chosen["output"]), sums, head.outputs)
    else:
        plots.panel(Path(chosen["output"]), [predict_item(cli.model, data, item, *sizes) for item in items])
    print(f"Wrote {chosen['output']}")


def diagnose(words: list[str]) -> None:
    """How near the edge the predicted covariances are: in words, and over the steps as a picture."""
    import lrd_kernels as lrd
    from lrd_uq import plots, runs
    from lrd_uq.heads import DiagonalHead

    cli = _trained(words, {"part": (str, "val")})
    folder = Path(cli.config["run"])
    gaussian, _, mask = cli.model.predict_gaussian(cli.datamodule.part(cli.config["part"]))
    head = cli.model.heads[0]
    distribution = gaussian.distribution()
    factor, diag = distribution.cov_factor.detach(), distribution.cov_diag.detach()
    if mask is not None and bool((mask == mask[:1]).all()):  # the outputs that exist, where they are the same for all
        factor, diag = factor[:, mask[0]], diag[:, mask[0]]
    print(lrd.diagnose(factor, diag, eps=head.eps if isinstance(head, DiagonalHead) else None))
    series = runs.read_metrics(folder)
    if "condition_upper" in series:
        plots.condition_numbers(folder / "condition.png", {folder.name: series})
        plots.curves(folder / "curves.png", {folder.name: series})
        print(f"Wrote {folder / 'condition.png'} and {folder / 'curves.png'}")


def demo(words: list[str]) -> None:
    """Trains and compares diagonal and low-rank networks on MNIST inpainting; a report in reports/demo."""
    from lrd_uq.demo import main as run_demo

    run_demo(words)


def _trained(words: list[str], options: Options) -> LightningCLI:
    """Configured as the run was, with its weights."""
    from lrd_uq import runs, settings

    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--run=") else [word])]
    if "--run" in words[:-1] and "--config" not in words and "--help" not in words:
        saved = Path(words[words.index("--run") + 1]) / "config.yaml"
        if not saved.exists():
            raise FileNotFoundError(f"{saved.parent} is no run: it has no config.yaml")
        words = ["--config", str(saved), *words]
    cli = settings.configure(words, options)
    runs.load_weights(cli.model, Path(cli.config["run"]))
    return cli


if __name__ == "__main__":
    sys.exit(main())
