"""Gradients that are not finite, kept from spoiling a model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lrd_kernels import _validate

__all__ = ["filter_gradients"]

MODES = ("zero", "skip")


@torch.no_grad()
def filter_gradients(parameters: Tensor | Iterable[Tensor], mode: str = "zero") -> int:
    """Drops a step whose gradients are not all finite: call it between `backward()` and `optimizer.step()`.

    One bad number spoils the whole step, so all gradients of the step go, not the bad ones alone.

    Args:
        mode: "zero" sets them to zero: the optimizer's momentum and decay still move. "skip" sets them to None: torch's
            optimizers then leave the parameters and their own state alone.

    Returns:
        the number of parameters whose gradient was not finite; 0 for a good step, whose gradients are left as they are.
        So `dropped += lrd.filter_gradients(model.parameters()) > 0` counts the steps.
    """
    _validate.option("mode", mode, MODES)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    owners = [p for p in parameters if p.grad is not None]
    if not owners:
        return 0
    # Counted per device, so that a device is waited for once.
    finite: dict[torch.device, list[Tensor]] = {}
    for owner in owners:
        gradient: Tensor = owner.grad  # type: ignore[assignment]
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        finite.setdefault(gradient.device, []).append(values.isfinite().all())
    bad = sum(len(flags) - int(torch.stack(flags).sum()) for flags in finite.values())
    if bad:
        for owner in owners:
            if mode == "skip":
                owner.grad = None
            else:
                owner.grad.zero_()  # type: ignore[union-attr]
    return bad
