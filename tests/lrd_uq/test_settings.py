"""No setting is ignored: for every key of every shipped config, another value changes the weights, the scores or the
log, or is refused."""

import contextlib
import copy
import io
import json
import shutil
import warnings

import pytest
import torch
import yaml
from small import few, text_of

from lrd_uq import checkpoints, cli, settings, shipped
from lrd_uq.shipped import BASE

BY_DESIGN = {  # what they change is tested elsewhere
    "workers": "the number of processes that load items changes no item",
    "on_broken": "it matters only for files that cannot be read",
}
PHASES = {"start": 0.5, "rank": 3, "alpha": 0.5, "eps": 0.03, "bayesian": False, "ramp": 2}
OTHER = {  # key -> another value, where the rule by type would not do; a second key if the name stands for two
    **PHASES,
    "options": {"channels": [8, 16], "strides": [2], "num_res_units": 1},
    "factor_penalty": 0.5,
    "eps_std": 0.3,
    "kl_weight": 0.5,
    "warmup": 0.5,
    "weight_decay": 0.5,
    "gradient_clip_val": 0.001,
    "grace": 0,
    "snapshots": 2,
    "every": 3,
    "most_trace": 1e-9,
    "most_condition": 1e-9,
    "most_trace_ratio": 1e-9,
    "folder": "/nowhere",
    "file": "/nowhere",
    "splits": "/nowhere",
    "split": "/nowhere",
    "mean_run": "/nowhere",
    "test_on": "motorcycle",
    "name": "BasicUNet",
    "parametrisation": "scaled",
    "accelerator": "gpu",
    "max_epochs": 1,
    "visible": [10, 17],
    "hidden": [0.25, 0.25, 0.75, 0.5],
    "size": [32, 32],
    "train": 2,
    "val": 1,
    "test": 1,
    "batch_size": 1,
    "seed": 5,
    "split_seed": 5,
}
CLASSES = {
    "objective": ("lrd_uq.nppc.NppcObjective", "lrd_uq.objectives.Objective"),
    "method": ("lrd_uq.bayes.Variational", "lrd_uq.bayes.Method"),
    "question": ("lrd_uq.data.pictures.Colourisation", "lrd_uq.data.pictures.Inpainting"),
}
SCALES = {"prior_std": 3.0, "temperature": 3.0, "rate": 0.5, "initial_std": 0.1}
OTHER |= SCALES
QUICK = {  # were ignored once
    *("seed_everything", "model.alpha", "model.warmup", "model.net.init_args.head.init_args.rank"),
    *("data.init_args.split_seed", "data.init_args.visible", "trainer.gradient_clip_val"),
}


def leaves(tree, owner, path=()):
    """Owner, name and path of every setting; the owner is the class that it belongs to."""
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    for key, value in items:
        here = (*path, key)
        if isinstance(value, dict) and "class_path" in value:
            yield owner, key, here
            yield from leaves(value.get("init_args") or {}, value["class_path"], (*here, "init_args"))
        elif isinstance(value, dict) and key != "options":
            yield from leaves(value, f"{owner}.{key}", here)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield owner, key, here
            yield from leaves(value, owner, here)
        else:
            yield owner, key, here


def another(name, value):
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value[:-1]
    if name in OTHER:
        return OTHER[name]
    if name in CLASSES:
        now = (value or {}).get("class_path")
        return {"class_path": next(path for path in CLASSES[name] if path != now)}
    if isinstance(value, dict):  # another class of the kind
        return {"class_path": "lrd_uq.no_such_class"}
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 2 * value + 0.1
    raise AssertionError(f"no other value of {name}, which is {value!r}: add one")


def at(tree, path):
    for key in path:
        tree = tree[key]
    return tree


class Tried:
    """A config that is made small, and what comes of it."""

    def __init__(self, config, folder):
        self.folder, self.number = folder, 0
        words = ["--config", config, "--run", str(folder / "run"), *few(config, folder)]
        found = settings.configure(words)
        self.tree = yaml.safe_load(found.parser.dump(found.config, skip_validation=True, skip_unset=False))
        for callback in self.tree["trainer"]["callbacks"]:
            if callback["class_path"].endswith("CovarianceMonitor"):
                callback["init_args"]["every"] = 2  # or it would look at none of these steps
        named = yaml.safe_load(text_of(config))["trainer"].keys() | yaml.safe_load(BASE.read_text())["trainer"].keys()
        trainer = {key: value for key, value in self.tree["trainer"].items() if key in named}
        kept = {"seed_everything": 0, "model": self.tree["model"], "data": self.tree["data"], "trainer": trainer}
        self.keys = [leaf for leaf in leaves(kept, "") if leaf[1] != "steps_per_epoch"]
        self.base = self.outcome(self.tree)
        assert self.base["status"] == 0, self.base

    def changed(self, name, path):
        tree = copy.deepcopy(self.tree)
        at(tree, path[:-1])[path[-1]] = another(name, at(tree, path))
        return self.outcome(tree)

    def outcome(self, tree):
        """Weights and log of a training; the scores are computed when they are asked for."""
        self.number += 1
        folder = self.folder / f"run{self.number}"
        file = self.folder / f"{self.number}.yaml"
        file.write_text(yaml.safe_dump({**tree, "run": str(folder)}))
        status, said = run(["fit", "--config", str(file), "--run", str(folder)])
        if status:
            return {"status": status, "said": said}
        weights = checkpoints.load(folder / checkpoints.LAST)["state_dict"]
        log = (folder / "metrics.csv").read_text()
        said = said.replace(str(folder), "").replace(str(file), "")
        return {"status": 0, "weights": weights, "log": log, "said": said, "folder": folder}

    def scores(self, outcome):
        status, said = run(["evaluate", "--run", str(outcome["folder"]), "--samples", "3", "--ranks", "[2]"])
        assert status == 0, said
        (file,) = outcome["folder"].glob("evaluation*.json")
        document = json.loads(file.read_text())
        return {key: value for key, value in document.items() if key not in ("of", "facts")}

    def close(self, outcome):
        if outcome is not self.base and outcome["status"] == 0:
            shutil.rmtree(outcome["folder"])


def run(words):
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(said),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        status = cli.main(words)
    return status, said.getvalue() + "".join(str(one.message) for one in told if "lrd_uq" in one.filename)


def differ(a, b):
    if a.keys() != b.keys():
        return True
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            if value.shape != b[key].shape or not torch.equal(value, b[key]):
                return True
        elif value != b[key]:
            return True
    return False


def ignored(tried, keys):
    """The settings whose other value changes nothing and is not refused, and how many of each outcome there are."""
    found, counts = [], dict.fromkeys(("refused", "weights", "log", "scores"), 0)
    base_scores = None
    for owner, name, path in keys:
        outcome = tried.changed(name, path)
        if outcome["status"]:
            assert len(outcome["said"].strip().splitlines()) == 1, outcome["said"]
            counts["refused"] += 1
        elif differ(tried.base["weights"], outcome["weights"]):
            counts["weights"] += 1
        elif (tried.base["log"], tried.base["said"]) != (outcome["log"], outcome["said"]):
            counts["log"] += 1
        else:
            base_scores = base_scores or tried.scores(tried.base)
            if tried.scores(outcome) == base_scores:
                found.append(f"{owner} {'.'.join(map(str, path))}")
            else:
                counts["scores"] += 1
        tried.close(outcome)
    return found, counts


def test_settings_that_were_ignored_once(tmp_path):
    tried = Tried("digits_dropout", tmp_path)
    keys = [leaf for leaf in tried.keys if ".".join(map(str, leaf[2])) in QUICK]
    assert len(keys) == len(QUICK)
    assert ignored(tried, keys)[0] == []


def test_config_of_a_run_keeps_what_is_none(tmp_path):
    """The base has 1.0 for it: a second run from the first one's config has to be the same."""
    words = [*few("digits_dropout", tmp_path), "--trainer.gradient_clip_val=null"]
    assert cli.main(["fit", "--config", "digits_dropout", "--run", str(tmp_path / "a"), *words]) == 0
    config = str(tmp_path / "a" / "config.yaml")
    assert settings.configure(["--config", config, "--run", str(tmp_path / "b")]).trainer.gradient_clip_val is None


@pytest.fixture(scope="module")
def seen():
    """Class and name of the settings that were tried: each is tried in the first config that has it."""
    return set()


@pytest.mark.slow
@pytest.mark.parametrize("config", shipped.shipped_configs())
def test_no_setting_is_ignored(config, tmp_path, seen):
    tried = Tried(config, tmp_path)
    keys = [leaf for leaf in tried.keys if leaf[:2] not in seen and leaf[1] not in BY_DESIGN]
    seen |= {leaf[:2] for leaf in keys}
    found, counts = ignored(tried, keys)
    print(config, len(keys), counts)
    assert found == []
