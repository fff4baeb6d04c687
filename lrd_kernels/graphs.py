"""Preparation for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def warm_up(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls a function once, forward and backward, so that later calls compile and probe nothing.

    The first call with a new rank, dtype, layout or combination of options compiles Triton kernels and loads CUDA
    kernels. Neither is possible while a CUDA graph is captured, so call this first, with the arguments of the call to
    capture::

        lrd.warm_up(lrd.log_prob, value, loc, cov_factor, cov_diag)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = lrd.log_prob(value, loc, cov_factor, cov_diag)

    Gradients are computed if an argument requires them; the `.grad` of the arguments is not changed. On a GPU, the call
    runs on a stream of its own, and this function waits until it is done.

    Examples:
        >>> lrd.warm_up(lrd.logdet, torch.ones(3, 1), torch.ones(3))
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(copies, structure)
    device = next((x.device for x in copies if isinstance(x, Tensor) and x.is_cuda), None)
    if device is None:
        _call(function, args, kwargs)
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            _call(function, args, kwargs)
        stream.synchronize()


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    results = [x for x in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
