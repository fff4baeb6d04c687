"""Deep ensembles: several networks with different initial weights; each of them is a draw, or draws its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lrd_uq.bayes.base import Method, NoExpectedWeights, Predict
from lrd_uq.data.batch import Batch
from lrd_uq.heads import Gaussian, Output
from lrd_uq.nets import GaussianNet


class EnsembleNet(nn.Module):
    """The members of an ensemble, each as its method prepared it."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> list[Output]:
        return [member(x) for member in self.members]


class Ensemble(Method):
    """Independent networks, trained on the same batches at the same time, or each in a run of its own (`of_runs`).

    Predictions come from the members in turns. A deterministic member predicts once; if any member draws its weights,
    such as with dropout, T predictions are spread over all members.

    Args:
        size: number of networks.
        method: the distribution over the weights of every member; None for deterministic members.

    Raises:
        ValueError: if size is below 2.

    Examples:
        >>> from lrd_uq.bayes import Dropout, Ensemble
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> def predictions(method, T):
        ...     net = method.prepare(GaussianNet(DigitsUNet(dropout=0.2), LowRankHead(24, rank=8)))
        ...     return len(list(method.sample_predictions(net, torch.zeros(1, 2, 28, 28), T=T)))
        >>> predictions(Ensemble(size=3), T=16), predictions(Ensemble(size=3, method=Dropout()), T=16)
        (3, 16)
    """

    def __init__(self, size: int = 5, method: Method | None = None) -> None:
        if size < 2:
            raise ValueError(f"size must be at least 2; got {size}")
        self.size = size
        self.methods: list[Method] = [Method() if method is None else method] * size  # of each member
        self.constant_from, self.constant_rate = self.methods[0].constant_from, self.methods[0].constant_rate

    @classmethod
    def of_runs(cls, folders: Sequence[str | Path]) -> tuple[Ensemble, EnsembleNet]:
        """The ensemble of the networks of finished runs: method and network, for `predict_joint` and `evaluate`.

        Args:
            folders: two or more folders of `lrd-uq fit`. Their methods may differ.

        Raises:
            FileNotFoundError: if a folder is not a run.
            ValueError: if a run is not finished, is named twice, or has other outputs than the first one.
        """
        from lrd_uq import resuming, settings

        paths = [Path(folder) for folder in folders]
        if len({path.resolve() for path in paths}) < len(paths):
            raise ValueError(f"every run can be a member once; got {', '.join(map(str, paths))}")
        ensemble = cls(len(paths))
        parts, shapes = [], []
        for path in paths:
            state = resuming.finished_checkpoint(path)["state_dict"]
            with torch.random.fork_rng(devices=[]):  # building a model seeds torch
                module = settings.configure(["--config", str(path / resuming.CONFIG)]).model
            module.load_state_dict(state)
            head = module.heads[0]
            shapes.append((head.outputs, head.features_last))
            if shapes[-1] != shapes[0]:
                raise ValueError(
                    f"{path} has another kind of output than {paths[0]}: outputs and features_last are {shapes[-1]} and"
                    f" {shapes[0]}"
                )
            parts.append((module.method, module.net.eval()))
        ensemble.methods = [method for method, _ in parts]
        return ensemble, EnsembleNet([net for _, net in parts])

    def prepare(self, net: GaussianNet) -> nn.Module:
        networks = [net, *(reinitialised(net) for _ in range(self.size - 1))]
        return EnsembleNet([method.prepare(one) for method, one in zip(self.methods, networks, strict=True)])

    def parts(self, net: nn.Module) -> list[tuple[Method, nn.Module]]:
        """The method and the prepared network of every member."""
        assert isinstance(net, EnsembleNet)
        return list(zip(self.methods, net.members, strict=True))

    def members(self, net: nn.Module) -> Sequence[GaussianNet]:
        return [member for method, part in self.parts(net) for member in method.members(part)]

    @property
    def noisy_training(self) -> bool:
        return any(method.noisy_training for method in self.methods)

    @property
    def needs_all_weights(self) -> bool:
        return any(method.needs_all_weights for method in self.methods)

    def check(self, net: nn.Module) -> None:
        for method, part in self.parts(net):
            method.check(part)

    def activate(self, net: nn.Module, on: bool) -> None:
        for method, part in self.parts(net):
            method.activate(part, on)

    def kl(self, net: nn.Module, alpha: float) -> Tensor | None:
        found = [kl for method, part in self.parts(net) if (kl := method.kl(part, alpha)) is not None]
        return torch.stack(found).sum() if found else None

    def after_step(self, net: nn.Module, step: int, steps: float) -> None:
        for method, part in self.parts(net):
            method.after_step(part, step, steps)

    def after_training(self, net: nn.Module, batches: Callable[[], Iterable[Batch]]) -> None:
        for method, part in self.parts(net):
            method.after_training(part, batches)

    def is_ready(self, net: nn.Module) -> bool:
        return all(method.is_ready(part) for method, part in self.parts(net))

    def sample_predictions(
        self, net: nn.Module, x: Tensor, T: int, *, mask: Tensor | None = None, chunk: int = 1, seed: int = 0
    ) -> Iterator[Gaussian]:
        """T predictions, from the members in turns; at most one of each if all members are deterministic."""
        parts = self.parts(net)
        if all(method.is_deterministic for method, _ in parts):
            T = min(T, len(parts))
        options: dict[str, Any] = {"mask": mask, "chunk": chunk}
        draws = []
        for i, (method, part) in enumerate(parts):
            count = len(range(i, T, len(parts)))
            own = method.sample_predictions(part, x, count, seed=seed + 1_000_003 * i, **options)
            draws.append(_repeated(own) if method.is_deterministic else own)
        for t in range(T):
            yield next(draws[t % len(parts)])

    def expected(self, net: nn.Module) -> Predict:
        raise NoExpectedWeights(
            "an ensemble has no expected weights: its members lie in different minima, and the mean of their weights"
            " does not describe a trained network"
        )


def _repeated(predictions: Iterator[Gaussian]) -> Iterator[Gaussian]:
    """The only prediction of a deterministic member, which counts as often as one that is drawn."""
    (only,) = predictions
    while True:
        yield only


def reinitialised(net: GaussianNet) -> GaussianNet:
    """A copy with new initial weights."""
    other = copy.deepcopy(net)
    with torch.no_grad():
        for module in reversed(list(other.modules())):  # children first: a parent may rescale their weights
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    for (name, ours), theirs in zip(other.named_parameters(), net.parameters(), strict=True):
        constant = ours.numel() == 0 or bool((ours == ours.flatten()[0]).all())  # such as a bias of zeros
        if not constant and torch.equal(ours, theirs):
            raise ValueError(f"{name} has no reset_parameters: all members would start from the same value")
    return other
