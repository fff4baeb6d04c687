"""Mixed precision: networks in 16 bits, densities in float32, loss scaling beside the gradient filter."""

import os
import subprocess
import sys

import pytest
import torch

from lrd_uq import checkpoints, settings
from lrd_uq.bayes import Variational
from lrd_uq.extra import lightning as L
from lrd_uq.metrics import MetricsLog, read_metrics
from lrd_uq.module import JointUncertainty
from lrd_uq.monitors import CovarianceMonitor, GradientFilter

MixedPrecision = L.pytorch.plugins.precision.MixedPrecision


def half(scale=2.0**16):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def train(make_trainer, data, net, steps, folder, *callbacks, **options):
    module = JointUncertainty(net, learning_rate=1e-3)
    watch = [GradientFilter(), CovarianceMonitor(), *callbacks]
    trainer = make_trainer(steps, *watch, logger=MetricsLog(folder), gradient_clip_val=0.5, **options)
    trainer.fit(module, datamodule=data)
    return module, trainer


@pytest.mark.parametrize("orthogonal", [False, True])
def test_float16_trains_as_float32_does(orthogonal, make_net, make_trainer, data, tmp_path):
    losses = {}
    for name, options in {"32": {}, "16": {"plugins": [half()]}}.items():
        (tmp_path / name).mkdir()
        train(make_trainer, data, make_net(orthogonal=orthogonal), 10, tmp_path / name, **options)
        losses[name] = read_metrics(tmp_path / name)
    assert losses["16"]["filtered_steps"][1][-1] == 0
    for name in ("loss", "val_log_prob", "capacitance_condition"):
        assert losses["16"][name][1] == pytest.approx(losses["32"][name][1], rel=0.02), name
    assert losses["16"]["loss"][1] != losses["32"]["loss"][1]  # the backbone was in float16


def test_noise_of_variational_layers_in_16_bits(make_net, make_trainer, data, tmp_path):
    """Variances of activations below the smallest number of float16; no step may be lost by an infinite derivative."""
    for name, options in {"mixed": {"plugins": [half()]}, "bfloat16": {"precision": "bf16-true"}}.items():
        module = JointUncertainty(make_net(), Variational(initial_std=1e-4), learning_rate=5e-3)
        watch, folder = GradientFilter(), tmp_path / name
        folder.mkdir()
        make_trainer(20, watch, logger=MetricsLog(folder), **options).fit(module, datamodule=data)
        logged = read_metrics(folder)
        assert logged["filtered_steps"][1][-1] == 0, name
        assert logged["loss"][1][-1] < logged["loss"][1][0] - 0.02, name


class Reference(L.pytorch.Callback):
    """Counts the optimiser's steps by its own state."""

    def on_train_end(self, trainer, module):
        self.taken = max(int(state["step"]) for state in trainer.optimizers[0].state.values())


def test_overflows_are_dropped_once_and_lower_the_scale(make_net, make_trainer, data, tmp_path):
    counted = Reference()
    module, trainer = train(make_trainer, data, make_net(), 16, tmp_path, counted, plugins=[half(2.0**24)])
    logged = read_metrics(tmp_path)
    dropped = int(logged["filtered_steps"][1][-1])
    assert 0 < dropped < 12
    assert counted.taken == 16 - dropped  # momentum does not see a dropped step
    assert trainer.precision_plugin.scaler.get_scale() == 2.0 ** (24 - dropped)
    assert logged["loss_scale"][1][-1] <= 2.0 ** (25 - dropped)
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_gradients_are_clipped_after_they_are_scaled_down(make_net, make_trainer, data, tmp_path):
    class Norms(L.pytorch.Callback):
        seen = ()

        def on_before_zero_grad(self, trainer, module, optimizer):
            norms = [p.grad.norm() for p in module.parameters() if p.grad is not None]
            self.seen = (*self.seen, float(torch.stack(norms).norm()) if norms else 0.0)

    norms = Norms()
    train(make_trainer, data, make_net(), 6, tmp_path, norms, plugins=[half(2.0**12)])
    assert 0 < max(norms.seen) <= 0.5 * 1.001


def test_option_takes_float16_on_a_cpu_too(tmp_path):
    """Lightning takes bfloat16 instead, with a warning."""
    words = ["--config=digits_lowrank", "--run", str(tmp_path), "--trainer.precision"]
    for precision, wanted in (("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)):
        plugin = settings.configure([*words, precision]).trainer.precision_plugin
        assert plugin.autocast_context_manager().fast_dtype == wanted
        assert (plugin.scaler is not None) == (wanted == torch.float16)


def test_scale_is_saved_and_restored(make_net, make_trainer, data, tmp_path):
    options = {"enable_checkpointing": True, "logger": False}

    def fit(steps, plugin, path=None):
        kept = L.pytorch.callbacks.ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
        plugins = [plugin, checkpoints.CheckpointFiles()]
        trainer = make_trainer(steps, GradientFilter(), kept, plugins=plugins, **options)
        trainer.fit(JointUncertainty(make_net()), datamodule=data, ckpt_path=path, weights_only=True)
        return plugin.scaler.get_scale()

    reached = fit(10, half(2.0**24))
    assert reached < 2.0**24
    assert fit(10, half(), tmp_path / "last.ckpt") == reached


@pytest.mark.slow
@pytest.mark.parametrize("config", ["digits_lowrank", "digits_orthogonal"])
def test_bfloat16_by_the_option(config, tmp_path):
    """In a process that keeps oneDNN from AMX, which some virtual machines announce and do not have."""
    small = ["--data.init_args.train", "64", "--data.init_args.val", "20", "--data.init_args.steps_per_epoch", "10"]
    words = ["fit", "-c", config, *small, "--trainer.max_steps", "20", "--trainer.log_every_n_steps", "1"]
    found = {}
    for precision in ("32-true", "bf16-mixed"):
        command = [sys.executable, "-m", "lrd_uq.cli", *words, "--run", str(tmp_path / precision)]
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
        subprocess.run([*command, "--trainer.precision", precision], check=True, env=environment, capture_output=True)
        found[precision] = read_metrics(tmp_path / precision)
    assert found["bf16-mixed"]["filtered_steps"][1][-1] == 0
    assert found["bf16-mixed"]["loss"][1] == pytest.approx(found["32-true"]["loss"][1], rel=0.03)
    assert found["bf16-mixed"]["loss"][1] != found["32-true"]["loss"][1]
