"""One training step compared with the same step with torch's class as the loss.

A MONAI U-Net with a low-rank head on pictures of 256 x 256 x 3, batch 8, R = 8: forward, loss, backward, AdamW. Times
are the least over rounds in which the contestants take turns. Memory is the peak of a step beyond what was held before
it, measured in a fresh process for each contestant. The loss and its backward pass are also measured alone, because the
convolutions cost the same for both. Finally, 64 dropout predictions of one picture are streamed into a joint Gaussian:
time, and peak memory compared with the bytes of the 64 factors.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import commands, fresh, machine, memory
from benchmarks.measure import interleave
from lrd_uq.bayes import Dropout, predict_joint
from lrd_uq.heads import LowRankHead, Output
from lrd_uq.nets import GaussianNet, MonaiUNet, wrap
from lrd_uq.objectives import Objective

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


LOSSES: dict[str, Callable[..., Tensor]] = {"lrd": our_loss, "torch": torch_loss}
CONTESTANTS = tuple(LOSSES)


def setting(side: int, batch: int, rank: int) -> tuple[GaussianNet, Tensor, Tensor]:
    torch.manual_seed(0)
    net = wrap(MonaiUNet("UNet", 3, CHANNELS), LowRankHead(CHANNELS, rank, OUTPUTS))
    return net, torch.rand(batch, 3, side, side), torch.rand(batch, OUTPUTS * side * side)


def training_step(contestant: str, net: GaussianNet, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    """A function that makes one step of AdamW and returns the loss."""
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = LOSSES[contestant](net.head, net(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def calls(contestant: str, side: int, batch: int, rank: int) -> dict[str, Callable[[], Tensor]]:
    """A whole step, and the loss with its backward pass alone."""
    net, x, target = setting(side, batch, rank)
    step = training_step(contestant, net, x, target)
    with torch.no_grad():
        emitted = [t.detach() for t in net(x)]

    def loss_alone() -> Tensor:
        loss = LOSSES[contestant](net.head, Output(*(t.requires_grad_() for t in emitted)), target)
        loss.backward()
        for t in emitted:
            t.grad = None
        return loss.detach()

    return {"step": step, "loss": loss_alone}


def peaks(contestant: str, side: int, batch: int, rank: int) -> dict:
    """Peak memory of each call, and the first loss."""
    found: dict = {}
    for name, call in calls(contestant, side, batch, rank).items():
        first = float(call())  # starts the threads, touches the code, creates the optimizer's state
        with memory.Usage() as usage:
            call()
        found |= {f"{name}_extra_bytes": usage.peak, f"first_{name}": first}
    return found


def times(side: int, batch: int, rank: int, repeats: int) -> dict:
    """Seconds of every call of every contestant, measured in turn."""
    both = {f"{who} {name}": c for who in CONTESTANTS for name, c in calls(who, side, batch, rank).items()}
    return {str(key): found for key, found in interleave(both, repeats, seconds=120).items()}


def predict(side: int, rank: int) -> dict:
    """Time and memory of a joint Gaussian for one picture."""
    torch.manual_seed(0)
    net = wrap(MonaiUNet("UNet", 3, CHANNELS, options={"dropout": 0.2}), LowRankHead(CHANNELS, rank, OUTPUTS))
    x = torch.rand(1, 3, side, side)
    predict_joint(Dropout(), net, x, 2, JOINT_RANK)  # starts the threads and touches the code
    with memory.Usage() as usage:
        start = time.perf_counter()
        joint = predict_joint(Dropout(), net, x, PREDICTIONS, JOINT_RANK, parts=False)
        seconds = time.perf_counter() - start
    factors = PREDICTIONS * rank * joint.loc.numel() * joint.loc.element_size()
    return {"seconds": seconds, "extra_bytes": usage.peak, "bytes_of_all_factors": factors}


def main(argv: Sequence[str] | None = None) -> int:
    parser = commands.parser("benchmarks.training", __doc__, "training.json")
    parser.add_argument("--side", type=int, default=256, help="height and width of a picture")
    parser.add_argument("--batch", type=int, default=8, help="pictures in a batch")
    parser.add_argument("--rank", type=int, default=8, help="rank of the head")
    commands.add_repeats(parser, 5)
    options = parser.parse_args(argv)
    shape = (options.side, options.batch, options.rank)
    document = commands.begin(options)
    seconds = fresh.call(times, *shape, options.repeats)
    print(f"{'':8}{'step s':>10}{'extra MB':>10}{'loss s':>10}{'extra MB':>10}{'first loss':>12}")
    for who in CONTESTANTS:
        found = fresh.call(peaks, who, *shape)
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
    found = document["results"]["predict"] = fresh.call(predict, options.side, options.rank)
    print(
        f"{PREDICTIONS} predictions to a joint of rank {JOINT_RANK}: {found['seconds']:.1f} s,"
        f" {found['extra_bytes'] / 1e6:.0f} MB; all their factors have {found['bytes_of_all_factors'] / 1e6:.0f} MB"
    )
    machine.write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
