"""One training step beside the same step with torch's class as the loss.

A U-Net of MONAI with a low-rank head on pictures of 256 x 256 x 3, batch 8, R = 8: forward, loss, backward, AdamW. Each
contestant has a process of its own: its time is the least of a few steps that follow one another, its memory the peak
of a step beyond what was there before it. The loss alone, on the outputs of the same network, is timed as well: the
convolutions cost the same for all. Last, 64 predictions of one picture with dropout become a joint Gaussian of rank 64,
streamed: time and peak beside the bytes of the 64 factors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import machine, memory
from lrd_uq.bayes import Dropout, predict_joint
from lrd_uq.heads import LowRankHead, Output
from lrd_uq.nets import GaussianNet, MonaiUNet, wrap
from lrd_uq.objectives import Objective

OUTPUT = machine.ROOT / "benchmarks" / "results" / "training.json"
CONTESTANTS = ("lrd", "torch")
CHANNELS, OUTPUTS = 16, 3
PREDICTIONS, JOINT_RANK = 64, 64


def torch_loss(head: LowRankHead, output: Output, target: Tensor) -> Tensor:
    """The objective with torch's class as its likelihood."""
    mean, factor, diag = head.gaussian(output)
    model = torch.distributions.LowRankMultivariateNormal(mean, factor, diag, validate_args=False)
    low_rank = -model.log_prob(target).mean() / target.shape[-1]
    identity = 0.5 * (target - mean).square().mean() + 0.5 * math.log(2 * math.pi)
    return identity + 0.125 * low_rank + 0.01 * head.low_rank_variance(output).mean()


def our_loss(head: LowRankHead, output: Output, target: Tensor) -> Tensor:
    return Objective()(head, output, target).total


def setting(side: int, batch: int, rank: int) -> tuple[GaussianNet, Tensor, Tensor]:
    torch.manual_seed(0)
    net = wrap(MonaiUNet("UNet", 3, CHANNELS), LowRankHead(CHANNELS, rank, OUTPUTS))
    return net, torch.rand(batch, 3, side, side), torch.rand(batch, OUTPUTS * side * side)


def measure(contestant: str, side: int, batch: int, rank: int, repeats: int) -> dict:
    loss_of: Callable[..., Tensor] = {"lrd": our_loss, "torch": torch_loss}[contestant]
    net, x, target = setting(side, batch, rank)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(net.head, net(x), target)
        loss.backward()
        optimizer.step()
        return float(loss)

    with torch.no_grad():
        emitted = [t.detach() for t in net(x)]

    def loss_alone() -> None:
        loss_of(net.head, Output(*(t.requires_grad_() for t in emitted)), target).backward()
        for t in emitted:
            t.grad = None

    first = step()  # starts the threads, touches the code, makes the optimizer's state
    with memory.Peak() as peak:
        step()
    with memory.Peak() as loss_peak:
        loss_alone()
    times, loss_times = ([_seconds(call) for _ in range(repeats)] for call in (step, loss_alone))
    return {
        "step_seconds": min(times),
        "step_samples": times,
        "step_extra_bytes": peak.extra_bytes,
        "loss_seconds": min(loss_times),
        "loss_samples": loss_times,
        "loss_extra_bytes": loss_peak.extra_bytes,
        "first_loss": first,
    }


def predict(side: int, rank: int) -> dict:
    """A joint Gaussian of one picture."""
    torch.manual_seed(0)
    net = wrap(MonaiUNet("UNet", 3, CHANNELS, options={"dropout": 0.2}), LowRankHead(CHANNELS, rank, OUTPUTS))
    x = torch.rand(1, 3, side, side)
    predict_joint(Dropout(), net, x, 2, JOINT_RANK)  # starts the threads and touches the code
    start = time.perf_counter()
    with memory.Peak() as peak:
        joint = predict_joint(Dropout(), net, x, PREDICTIONS, JOINT_RANK, parts=False)
    factors = PREDICTIONS * rank * joint.loc.numel() * joint.loc.element_size()
    return {"seconds": time.perf_counter() - start, "extra_bytes": peak.extra_bytes, "bytes_of_all_factors": factors}


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags = {"side": 256, "batch": 8, "rank": 8, "repeats": 5}
    for name, default in flags.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(default: benchmarks/results/training.json)")
    parser.add_argument("--one", choices=(*CONTESTANTS, "predict"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    sizes = {name: getattr(options, name) for name in flags}
    if options.one:
        one = options.one
        print(json.dumps(predict(options.side, options.rank) if one == "predict" else measure(one, **sizes)))
        return 0
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    document: dict = {"machine": machine.facts(), "sizes": sizes, "results": {}}
    print(machine.summary(document["machine"]))
    print(f"{'':8}{'step s':>10}{'extra MB':>10}{'loss s':>10}{'extra MB':>10}{'first loss':>12}")
    other = machine.OtherWork()
    for contestant in CONTESTANTS:
        found = memory.fresh("benchmarks.training", *words, "--one", contestant)
        document["results"][contestant] = found
        print(
            f"{contestant:8}{found['step_seconds']:10.3f}{found['step_extra_bytes'] / 1e6:10.0f}"
            f"{found['loss_seconds']:10.3f}{found['loss_extra_bytes'] / 1e6:10.0f}{found['first_loss']:12.5f}",
            flush=True,
        )
    ours, theirs = (document["results"][contestant] for contestant in CONTESTANTS)
    for what in ("step", "loss"):
        faster = theirs[f"{what}_seconds"] / ours[f"{what}_seconds"]
        smaller = ours[f"{what}_extra_bytes"] / max(theirs[f"{what}_extra_bytes"], 1)
        print(f"{what}: {faster:.2f} times as fast, {smaller:.2f} of the memory")
    found = document["results"]["predict"] = memory.fresh("benchmarks.training", *words, "--one", "predict")
    print(
        f"{PREDICTIONS} predictions to a joint of rank {JOINT_RANK}: {found['seconds']:.1f} s,"
        f" {found['extra_bytes'] / 1e6:.0f} MB; all their factors have {found['bytes_of_all_factors'] / 1e6:.0f} MB"
    )
    document["busy_cores"] = other.cores()  # this process waits for the contestants: theirs are among them
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
