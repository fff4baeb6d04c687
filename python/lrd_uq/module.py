"""The LightningModule: training and validation steps, optimiser and schedule."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lrd_kernels as lrd
from lrd_uq import parallel
from lrd_uq.bayes.base import Method, eval_mode
from lrd_uq.checks import check_positive, check_weights
from lrd_uq.data.batch import Batch, collate
from lrd_uq.data.loading import named
from lrd_uq.data.order import one_pass
from lrd_uq.extra import lightning as L
from lrd_uq.extra import torchmetrics
from lrd_uq.heads import DiagonalHead, Gaussian, MeanHead, Output, full_precision
from lrd_uq.nets import GaussianNet, SplitNet, batch_for
from lrd_uq.objectives import Losses, Objective
from lrd_uq.resuming import finished_checkpoint


class Step(NamedTuple):
    """The detached outputs of a training step, for callbacks.

    Attributes:
        head: the head that made them.
        output: its output, with mean [B, S].
        target: [B, S]
        mask: bool [B, S], or None.
    """

    head: MeanHead
    output: Output
    target: Tensor
    mask: Tensor | None


class JointUncertainty(L.pytorch.LightningModule):
    """Trains a Gaussian network with a Bayesian method.

    Args:
        net: backbone and head.
        method: the distribution over the weights; None for a deterministic network.
        alpha: weight of the low-rank likelihood relative to the identity term; None for 0.125.
        factor_penalty: weight of the penalty on the factor; None for 0.01.
        learning_rate: peak of a one-cycle schedule over all steps.
        warmup: fraction of the steps before the peak; at least two steps.
        weight_decay: weight decay of AdamW.
        objective: replaces `Objective(alpha, factor_penalty)`, and has its own weights. The default detaches the mean
            in the likelihood when `net` is a `SplitNet`.

    Raises:
        ValueError: for alpha or factor_penalty beside an objective, which would ignore them, and for numbers out of
            range.

    Examples:
        >>> from lrd_uq.bayes import Dropout
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import DigitsUNet, GaussianNet
        >>> from lrd_uq.module import JointUncertainty
        >>> net = GaussianNet(DigitsUNet(dropout=0.2), LowRankHead(24, rank=8))
        >>> module = JointUncertainty(net, Dropout(), alpha=0.125)  # for lightning.pytorch.Trainer(...).fit
        >>> module.net(torch.zeros(1, 2, 28, 28)).mean.shape
        torch.Size([1, 784])
    """

    def __init__(
        self,
        net: GaussianNet,
        method: Method | None = None,
        alpha: float | None = None,
        factor_penalty: float | None = None,
        learning_rate: float = 5e-3,
        warmup: float = 0.1,
        weight_decay: float = 0.0,
        objective: Objective | None = None,
    ) -> None:
        super().__init__()
        weights = {"alpha": alpha, "factor_penalty": factor_penalty}
        given = {name: weight for name, weight in weights.items() if weight is not None}
        if objective is not None and given:
            raise ValueError(
                f"{type(objective).__name__} ignores {' and '.join(given)} of the model: set the weights of the"
                " objective instead"
            )
        check_positive(learning_rate=learning_rate)
        check_weights(weight_decay=weight_decay)
        self.method = Method() if method is None else method
        if not 0 <= warmup < (self.method.constant_from or 1):
            constant = "" if self.method.constant_from is None else ", at which SWAG's constant learning rate starts"
            raise ValueError(
                f"warmup must be a fraction of the steps, from 0 to below {self.method.constant_from or 1}{constant};"
                f" got {warmup}"
            )
        self.net = self.method.prepare(net)
        own = Objective(**given, separate_mean=isinstance(net, SplitNet))
        self.objective = own if objective is None else objective
        self.learning_rate, self.warmup, self.weight_decay = learning_rate, warmup, weight_decay
        self._no_mean: Exception | None = None  # why the mean of another run could not be read
        self.latest: list[Step] = []  # of the current step, one of each member
        self.val_log_prob = torchmetrics.MeanMetric(nan_strategy="disable")  # NaN stays NaN
        self.val_failed: list[int] = []  # items of this validation whose log-likelihood is not finite
        self._validated = 0  # items so far
        self.val_rmse = torchmetrics.MeanSquaredError(squared=False)

    def configure_model(self) -> None:
        """Shards the network, if the strategy does; lightning calls it."""
        if self.device_mesh is not None:
            parallel.shard(self.method, self.net, self.device_mesh["data_parallel"])

    @property
    def heads(self) -> list[MeanHead]:
        """The head of each member."""
        return [member.head for member in self.method.members(self.net)]

    def configure_phase(self, rank: int | None, alpha: float | None, eps: float | None, bayesian: bool | None) -> None:
        """Applies the settings of a training phase; None keeps the current value."""
        for head in self.heads:
            if rank is not None:
                head.rank_in_use = rank
            if eps is not None and isinstance(head, DiagonalHead):
                head.eps = eps
        if alpha is not None:
            self.objective.alpha = alpha
        if bayesian is not None:
            self.method.activate(self.net, bayesian)

    def setup(self, stage: str) -> None:
        """Lightning calls it before it distributes the network."""
        if stage == "fit":
            try:
                self._load_means()
            except (OSError, ValueError) as error:  # a checkpoint, which is read after this, has the mean, too
                self._no_mean = error
        parallel.prepare(self.trainer.strategy)
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, L.pytorch.plugins.precision.HalfPrecision):
            # It would round the targets, too. `batch_for` converts the inputs.
            plugin.convert_input = lambda data: data  # type: ignore[method-assign]

    def _load_means(self) -> None:
        for member in self.method.members(self.net):
            if isinstance(member, SplitNet) and member.mean_run is not None:
                member.load_mean(finished_checkpoint(Path(member.mean_run))["state_dict"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._no_mean = None

    def on_fit_start(self) -> None:
        if self._no_mean is not None:
            raise self._no_mean
        clip = self.trainer.gradient_clip_val
        if clip is not None and not clip >= 0:
            raise ValueError(f"gradient_clip_val must be 0 or above, where 0 and None do not clip; got {clip}")

    def training_step(self, given: Any, batch_idx: int) -> Tensor:
        batch = batch_for(self.net, given)
        self.latest = []
        self.objective.step = self.trainer.global_step
        losses = [self._member_losses(member, batch) for member in self.method.members(self.net)]
        # Summed, not averaged, so that each member gets the gradients that it would get on its own.
        total = torch.stack([loss.total for loss in losses]).sum()
        kl = self.method.kl(self.net, self.objective.alpha)
        if kl is not None:
            step = self.latest[0]
            outputs = step.target.numel() if step.mask is None else step.mask.sum()
            share = torch.as_tensor(outputs / len(step.target), dtype=torch.float64, device=self.device)
            per_item = self.trainer.strategy.reduce(share, reduce_op="mean")  # over the shares of all processes
            total = total + kl / (self._training_items() * per_item)
            self.log("kl", kl.detach())
        found = {"loss": total.detach() / len(losses)}
        for name in ("identity", "low_rank", "factor_loss"):
            found[name] = torch.stack([getattr(loss, name).detach() for loss in losses]).mean()
        self.log_dict(found, sync_dist=True)
        return total

    def _member_losses(self, member: GaussianNet, batch: Batch) -> Losses:
        output = member(batch.input)
        target = member.head.flat(batch.target)
        mask = None if batch.mask is None else member.head.flat(batch.mask)
        detached = Output(*(None if t is None else t.detach() for t in output))  # type: ignore[arg-type]
        self.latest.append(Step(member.head, detached, target, mask))
        with full_precision(target):
            return self.objective(member.head, output, target, mask)

    def refuse_misfit(self, item: Batch) -> None:
        """Raises ValueError if the network does not take an item, if it predicts other outputs than the target has, or
        if the method cannot draw its weights."""
        self.method.check(self.net)
        batch = batch_for(self.net, collate([item]))
        try:
            with torch.no_grad(), eval_mode(self.net), torch.random.fork_rng(devices=[]):
                for member in self.method.members(self.net):
                    self._member_losses(member, batch)
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"the network does not fit the data, whose items have an input of {list(item.input.shape)} and a target"
                f" of {list(item.target.shape)}: {error}"
            ) from error
        finally:
            self.latest = []

    def _training_items(self) -> int:
        dataset: Any = self._training_loader().dataset
        try:
            return len(dataset)
        except TypeError as error:
            raise TypeError(
                "the KL divergence of the weights is shared among the training items: give the data set,"
                f" {type(dataset).__name__}, a __len__"
            ) from error

    def _training_loader(self) -> DataLoader:
        loader = self.trainer.train_dataloader
        if not isinstance(loader, DataLoader):
            raise TypeError(f"this method needs a DataLoader of the training items; got {type(loader).__name__}")
        return loader

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.latest = []  # callbacks are done with it: release the S x R factors
        self.method.after_step(self.net, self.trainer.global_step, self.trainer.estimated_stepping_batches)

    def on_train_epoch_end(self) -> None:
        if self.trainer.global_step >= self.trainer.estimated_stepping_batches:  # before the last checkpoint is written
            self.method.after_training(self.net, self._training_batches)

    def _training_batches(self) -> Iterator[Batch]:
        """One pass over the training items, on the device of the module."""
        for batch in one_pass(self._training_loader(), self.trainer.num_training_batches):
            yield batch_for(self.net, batch)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val:  # None or 0: off
            return
        if gradient_clip_algorithm not in (None, "norm"):
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for member in self.method.members(self.net):  # each member by its own norm
            torch.nn.utils.clip_grad_norm_(member.parameters(), gradient_clip_val)

    def predict_gaussian(self, given: Any) -> tuple[Gaussian, Tensor, Tensor | None]:
        """A cheap prediction for monitoring: one of each member with its expected weights, several of them as one
        joint Gaussian. Also target [B, S] and mask [B, S]."""
        batch = batch_for(self.net, given)
        members = self.method.members(self.net)
        head = members[0].head
        mask = None if batch.mask is None else head.flat(batch.mask)
        gaussians = [member.gaussian(batch.input, mask) for member in members]
        with full_precision(batch.target):
            return together(gaussians), head.flat(batch.target), mask

    def on_validation_epoch_start(self) -> None:
        self.val_failed, self._validated = [], 0

    def validation_step(self, given: Any, batch_idx: int) -> None:
        gaussian, target, mask = self.predict_gaussian(given)
        distribution = gaussian.distribution()
        log_prob = lrd.log_prob(
            target, distribution.loc, distribution.cov_factor, distribution.cov_diag, mask=mask, on_failure="nan"
        )
        self.val_log_prob.update(log_prob)
        processes, process = self.trainer.world_size, self.trainer.global_rank  # each has every such item
        failed = (~log_prob.isfinite()).nonzero()[:, 0].tolist()
        self.val_failed += [(self._validated + i) * processes + process for i in failed]
        self._validated += len(log_prob)
        chosen = (gaussian.mean, target) if mask is None else (gaussian.mean[mask], target[mask])
        self.val_rmse.update(*chosen)
        self.log("val_log_prob", self.val_log_prob, on_epoch=True, prog_bar=True)
        self.log("val_rmse", self.val_rmse, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_failed", float(len(self.val_failed)), sync_dist=True, reduce_fx="sum")
        if self.val_failed:
            warnings.warn(
                f"the log-likelihood of {len(self.val_failed)} of {self._validated} validation items is not a number:"
                f" {named(self.val_failed)}. val_log_prob includes them, so it is not one either",
                stacklevel=1,
            )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        steps = max(int(self.trainer.estimated_stepping_batches), 3)
        if self.method.constant_from is not None:
            schedule = self._cosine_then_constant(optimizer, steps)
        else:
            warmup = max(self.warmup, 2 / steps)  # each half needs two steps: torch divides by one less
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, steps, pct_start=warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _cosine_then_constant(self, optimizer: torch.optim.Optimizer, steps: int) -> Any:
        """Linear warm-up to the peak, cosine decay, then constant from the fraction of steps that the method sets."""
        start, level = self.method.constant_from, self.method.constant_rate
        assert start is not None

        def rate(step: int) -> float:
            done = step / steps
            if done < self.warmup:
                return max(done / self.warmup, 0.04)
            fallen = min((done - self.warmup) / max(start - self.warmup, 1e-9), 1.0)
            return level + (1 - level) * 0.5 * (1 + math.cos(math.pi * fallen))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def together(gaussians: list[Gaussian]) -> Gaussian:
    """The joint Gaussian of several predictions for the same items; a single one as it is."""
    if len(gaussians) == 1:
        return gaussians[0]
    means, factors, diags = zip(*gaussians, strict=True)
    stacked = torch.stack([factor.mT for factor in factors]).mT  # stays rank-major
    joint = lrd.joint(torch.stack(means), stacked, torch.stack(diags), parts=False, validate_args=False)
    return Gaussian(joint.loc, joint.cov_factor, joint.cov_diag)
