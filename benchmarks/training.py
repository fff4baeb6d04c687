"""One training step beside the same step with torch's class as the loss.

A U-Net of MONAI with a low-rank head on pictures of 256 x 256 x 3, batch 8, R = 8: forward, loss, backward, AdamW.
Times are the least of rounds in which the contestants take turns; memory is the peak of a step beyond what was there
before it, in a process of each contestant's own. The loss alone, on the outputs of the same network, is timed as well:
the convolutions cost the same for all. Last, 64 predictions of one picture with dropout become a joint Gaussian,
streamed: time, and peak beside the bytes of the 64 factors.
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
from benchmarks.measure import interleave
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


def calls(contestant: str, side: int, batch: int, rank: int) -> dict[str, Callable[[], float]]:
    """A whole step, and the loss with its backward pass alone."""
    loss_of: Callable[..., Tensor] = {"lrd": our_loss, "torch": torch_loss}[contestant]
    net, x, target = setting(side, batch, rank)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(net.head, net(x), target)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    with torch.no_grad():
        emitted = [t.detach() for t in net(x)]

    def loss_alone() -> float:
        loss = loss_of(net.head, Output(*(t.requires_grad_() for t in emitted)), target)
        loss.backward()
        for t in emitted:
            t.grad = None
        return float(loss.detach())

    return {"step": step, "loss": loss_alone}


def peaks(contestant: str, side: int, batch: int, rank: int) -> dict:
    """Peak memory of each call, and the first loss."""
    found: dict = {}
    for name, call in calls(contestant, side, batch, rank).items():
        first = call()  # starts the threads, touches the code, makes the optimizer's state
        with memory.Peak() as peak:
            call()
        found |= {f"{name}_extra_bytes": peak.extra_bytes, f"first_{name}": first}
    return found


def times(side: int, batch: int, rank: int, repeats: int) -> dict:
    """Seconds of every call of every contestant, in turn."""
    both = {f"{who} {name}": c for who in CONTESTANTS for name, c in calls(who, side, batch, rank).items()}
    return {str(key): found for key, found in interleave(both, repeats, seconds=120).items()}


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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flags = {"side": 256, "batch": 8, "rank": 8, "repeats": 5}
    for name, default in flags.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(default: benchmarks/results/training.json)")
    parser.add_argument("--one", choices=(*CONTESTANTS, "times", "predict"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    sizes = {name: getattr(options, name) for name in flags}
    shape = (options.side, options.batch, options.rank)
    if options.one:
        if options.one == "times":
            found = times(*shape, options.repeats)
        else:
            found = predict(options.side, options.rank) if options.one == "predict" else peaks(options.one, *shape)
        print(json.dumps(found))
        return 0
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    document: dict = {"machine": machine.facts(), "sizes": sizes, "results": {}}
    print(machine.summary(document["machine"]))
    seconds = memory.fresh("benchmarks.training", *words, "--one", "times")
    print(f"{'':8}{'step s':>10}{'extra MB':>10}{'loss s':>10}{'extra MB':>10}{'first loss':>12}")
    for who in CONTESTANTS:
        found = memory.fresh("benchmarks.training", *words, "--one", who)
        found |= {f"{what}_seconds": seconds[f"{who} {what}"] for what in ("step", "loss")}
        document["results"][who] = found
        print(
            f"{who:8}{found['step_seconds']['min']:10.3f}{found['step_extra_bytes'] / 1e6:10.0f}"
            f"{found['loss_seconds']['min']:10.3f}{found['loss_extra_bytes'] / 1e6:10.0f}{found['first_step']:12.5f}",
            flush=True,
        )
    ours, theirs = (document["results"][who] for who in CONTESTANTS)
    for what in ("step", "loss"):
        faster = theirs[f"{what}_seconds"]["min"] / ours[f"{what}_seconds"]["min"]
        smaller = ours[f"{what}_extra_bytes"] / max(theirs[f"{what}_extra_bytes"], 1)
        print(f"{what}: {faster:.2f} times as fast, {smaller:.2f} of the memory")
    found = document["results"]["predict"] = memory.fresh("benchmarks.training", *words, "--one", "predict")
    print(
        f"{PREDICTIONS} predictions to a joint of rank {JOINT_RANK}: {found['seconds']:.1f} s,"
        f" {found['extra_bytes'] / 1e6:.0f} MB; all their factors have {found['bytes_of_all_factors'] / 1e6:.0f} MB"
    )
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
