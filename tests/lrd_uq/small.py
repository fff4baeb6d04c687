"""Options that make the shipped configs small enough for tests."""

from realdata import write_celeba, write_chairs, write_nyu

from lrd_uq import cli, shipped

CHANGES = {  # of the settings of digits_dropout in the fixture `trained_run`
    **{"data.init_args.train": 64, "data.init_args.val": 20, "data.init_args.test": 12},
    **{"data.init_args.steps_per_epoch": 7, "trainer.max_steps": 21, "trainer.enable_progress_bar": "false"},
    **{f"model.net.init_args.{part}.init_args.channels": 6 for part in ("head", "backbone")},
}
SMALL = ["--data.init_args.train", "64", "--data.init_args.val", "20", "--data.init_args.test", "12"]
SHORT = ["--data.init_args.steps_per_epoch", "3", "--trainer.max_steps", "6", "--trainer.log_every_n_steps", "1"]
SHORT += ["--trainer.enable_progress_bar", "false", "--trainer.num_sanity_val_steps", "0"]
HEAD, NET = "--model.net.init_args.head.init_args.", "--model.net.init_args."
FEW = [*SMALL, *SHORT, HEAD + "channels", "6", NET + "backbone.init_args.channels", "6"]
REAL = {"celeba_inpainting", "celeba_colourisation", "flying_chairs", "nyu_depth"}


def few(config, folder):
    """Options that make a config small; writes files of the paper's data sets into the folder."""
    if config.startswith("digits"):
        split = [NET + "mean.init_args.channels", "6"] if "SplitNet" in text_of(config) else []
        if "mean_run" in text_of(config):
            mean = folder / "mean"
            assert cli.main(["fit", "--config", "digits_mean", "--run", str(mean), *FEW]) == 0
            split += [NET + "mean_run", str(mean)]
        return [*FEW, *split]
    if config == "cell_measurements":
        return SHORT
    if config not in REAL:
        return [*SHORT, *SMALL, *(["--data.init_args.size", "[16,24]"] if config != "regional_demand" else [])]
    small = ["--data.init_args.size", "[24,32]", "--data.init_args.batch_size", "2", "--data.init_args.workers", "0"]
    if config.startswith("celeba"):
        where = ["--data.init_args.folder", str(write_celeba(folder / "data"))]
    elif config == "flying_chairs":
        where = ["--data.init_args.folder", str(write_chairs(folder / "data", count=30))]
    else:
        write_nyu(folder / "data")
        where = ["--data.init_args.file", str(folder / "data" / "nyu_depth_v2_labeled.mat")]
        where += ["--data.init_args.splits", str(folder / "data" / "splits.mat")]
    return [*SHORT, *small, *where, "--trainer.accelerator", "cpu"]


def text_of(config):
    return (shipped.CONFIGS / f"{config}.yaml").read_text()
