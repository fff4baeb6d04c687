"""Protection of a model against non-finite gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lrd_kernels import _validate

__all__ = ["filter_gradients"]

MODES = ("zero", "skip")


@torch.no_grad()
def filter_gradients(parameters: Tensor | Iterable[Tensor], mode: str = "zero") -> int:
    """Drops a step whose gradients are not all finite. Call it between `backward()` and `optimizer.step()`.

    One non-finite number invalidates the whole step, so all gradients of the step are dropped.

    Args:
        parameters: the parameters of a model, of any shapes, or one of them. Those without a gradient are ignored.
        mode: "zero" sets the gradients to zero; the optimizer still applies momentum and weight decay. "skip" sets the
            gradients to None; torch's optimizers then change neither the parameters nor their own state.

    Returns:
        The number of parameters whose gradient was not finite. If it is 0, the gradients are unchanged.
        `dropped += lrd.filter_gradients(model.parameters()) > 0` counts the dropped steps.

    Raises:
        ValueError: if the mode is unknown.

    Examples:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> weight.grad = torch.tensor([1.0, float("nan")])
        >>> lrd.filter_gradients([weight]), weight.grad
        (1, tensor([0., 0.]))
    """
    _validate.option("mode", mode, MODES)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    owners = [p for p in parameters if p.grad is not None]
    if not owners:
        return 0
    # Count per device, to synchronise once per device.
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
