"""Backbones, and networks that combine a backbone with a head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrd_uq.checks import check_counts, check_dropout
from lrd_uq.data.batch import Batch, as_batch
from lrd_uq.heads import DiagonalHead, Gaussian, MeanHead, Output, density_dtype, full_precision

# Default options of MONAI's U-Nets, beyond dimensions and channels.
MONAI_UNETS: dict[str, dict[str, Any]] = {
    "UNet": {"channels": (16, 32, 64, 128), "strides": (2, 2, 2), "num_res_units": 1},
    "BasicUNet": {"features": (16, 16, 32, 64, 128, 16)},
    "AttentionUnet": {"channels": (16, 32, 64, 128), "strides": (2, 2, 2)},
    "SegResNet": {"init_filters": 16},
    "DynUNet": {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2)},
}
DROPOUTS = {1: nn.Dropout1d, 2: nn.Dropout2d, 3: nn.Dropout3d}  # of whole channels, by the number of dimensions


class GaussianNet(nn.Module):
    """A backbone and a head: input -> `Output`.

    Args:
        backbone: any module whose output is the head's feature map.
        head: `LowRankHead`, `DiagonalHead` or `MeanHead`.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import GaussianNet
        >>> net = GaussianNet(torch.nn.Conv2d(1, 4, 3, padding=1), LowRankHead(channels=4, rank=2))
        >>> net.gaussian(torch.zeros(5, 1, 8, 8)).factor.shape
        torch.Size([5, 64, 2])
    """

    def __init__(self, backbone: nn.Module, head: MeanHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Output:
        """The raw parameters for a batch of inputs [B, ...], in the layout that the backbone takes."""
        return self.head(self.backbone(x))

    def gaussian(self, x: Tensor, mask: Tensor | None = None) -> Gaussian:
        """The predicted Gaussian for inputs [B, ...].

        `mask` [B, S] is False for outputs that do not exist (see `MeanHead.gaussian`).
        """
        output = self(x)
        with full_precision(output.mean):
            return self.head.gaussian(output, mask)


def wrap(model: nn.Module, head: MeanHead) -> GaussianNet:
    """The same as `GaussianNet(model, head)`.

    Examples:
        >>> from lrd_uq.heads import DiagonalHead
        >>> from lrd_uq.nets import wrap
        >>> wrap(torch.nn.Conv2d(1, 4, 3), DiagonalHead(4))(torch.zeros(5, 1, 8, 8)).mean.shape
        torch.Size([5, 36])
    """
    return GaussianNet(model, head)


def batch_for(net: nn.Module, given: Any) -> Batch:
    """A batch, in any form that `as_batch` takes, on the device of a network.

    A floating input gets the dtype of the network; the target gets the one in which densities are computed.
    """
    x, target, mask = as_batch(given)
    weight = next(net.parameters())
    x = x.to(weight.device, weight.dtype if x.is_floating_point() else None)
    return Batch(
        x,
        target.to(weight.device, density_dtype(weight.dtype)),
        None if mask is None else mask.to(weight.device),
    )


class SplitNet(GaussianNet):
    """Two networks: one predicts the mean, the other predicts the covariance from the input and that mean.

    The likelihood trains only the covariance; the mean is trained by its squared error, or was trained in another run.

    Args:
        mean: backbone of the mean.
        backbone: backbone of the covariance. Its input channels are those of the input followed by those of the mean.
        head: head of the covariance. Both backbones must have the same number of feature channels.
        mean_run: folder of a finished run that trained the mean, with `mean` as its backbone, or as the backbone of the
            mean of a `SplitNet`. Training starts from its weights, keeps them, and sees the mean that the network
            predicts in evaluation mode. They become a part of this run, which does not need the folder any more.

    Examples:
        >>> from lrd_uq.heads import LowRankHead
        >>> from lrd_uq.nets import SplitNet
        >>> mean, covariance = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.Conv2d(2, 4, 3, padding=1)
        >>> SplitNet(mean, covariance, LowRankHead(4, rank=2))(torch.zeros(5, 1, 8, 8)).factor.shape
        torch.Size([5, 64, 2])
    """

    def __init__(self, mean: nn.Module, backbone: nn.Module, head: DiagonalHead, mean_run: str | None = None) -> None:
        super().__init__(backbone, head)
        self.mean_backbone = mean
        self.mean_head = MeanHead(head.channels, head.outputs, features_last=head.features_last)
        self.mean_run = mean_run
        for parameter in (head.mean_weight, head.mean_bias):
            parameter.requires_grad_(False)  # not used: mean_head predicts the mean
        if self.is_frozen:
            for parameter in (*self.mean_backbone.parameters(), *self.mean_head.parameters()):
                parameter.requires_grad_(False)

    @property
    def is_frozen(self) -> bool:
        """Whether the mean was trained before, and stays as it is."""
        return self.mean_run is not None

    def train(self, mode: bool = True) -> SplitNet:
        """Training mode for what is trained: a frozen mean stays in evaluation mode."""
        super().train(mode)
        if self.is_frozen:
            self.mean_backbone.eval()
        return self

    def load_mean(self, state: dict[str, Any]) -> None:
        """Takes the weights of the mean from the `state_dict` of the `JointUncertainty` that trained it.

        Raises ValueError if they do not fit.
        """
        split = any(name.startswith("net.mean_backbone.") for name in state)
        sources = ("net.mean_backbone.", "net.mean_head.") if split else ("net.backbone.", "net.head.")
        names = {"mean_weight", "mean_bias"}
        backbone, head = (
            {name.removeprefix(source): value for name, value in state.items() if name.startswith(source)}
            for source in sources
        )
        try:
            self.mean_backbone.load_state_dict(backbone)
            self.mean_head.load_state_dict({name: value for name, value in head.items() if name in names})
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"the mean of {self.mean_run} does not fit the network of the mean: {reason}") from error

    def forward(self, x: Tensor) -> Output:
        """The raw parameters for inputs [B, channels, ...], or in the layout of `features_last`."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            mean = self.mean_head(self.mean_backbone(x)).mean  # [B, S]
        if self.head.features_last:
            seen = mean.detach().to(x.dtype).view(len(x), self.head.outputs, -1).mT.reshape(*x.shape[:-1], -1)
            both = torch.cat([x, seen], -1)
        else:
            both = torch.cat([x, mean.detach().to(x.dtype).view(len(x), -1, *x.shape[2:])], 1)
        return self.head(self.backbone(both))._replace(mean=mean)


class NodeNet(nn.Module):
    """A multilayer perceptron on the last dimension of a table [B, C], or of nodes or series [B, N, C].

    Args:
        in_channels: channels of the input.
        channels: channels of the features.
        hidden: width of the two hidden layers.
        dropout: dropout rate after each hidden layer.

    Examples:
        >>> from lrd_uq.nets import NodeNet
        >>> NodeNet(in_channels=3, channels=16)(torch.zeros(5, 100, 3)).shape
        torch.Size([5, 100, 16])
    """

    def __init__(self, in_channels: int, channels: int, hidden: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, channels=channels, hidden=hidden)
        check_dropout(dropout)
        self.layers = nn.Sequential(
            *(nn.Linear(in_channels, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout)),
            *(nn.Linear(hidden, channels), nn.ReLU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The features [..., channels] of inputs [..., in_channels]."""
        return self.layers(x)


class MonaiUNet(nn.Module):
    """One of MONAI's U-Nets by name, as a backbone.

    Args:
        name: one of `MONAI_UNETS`.
        in_channels: channels of the input.
        channels: channels of the feature map.
        dims: 1 for series, 2 for images, 3 for volumes.
        options: further arguments of MONAI's class, such as `dropout`.
        drop_channels: replace dropout of single pixels by dropout of whole channels, so that predictions with Monte
            Carlo dropout differ by patterns that are correlated over pixels.

    Raises:
        ValueError: if the name is unknown, or for options that the class does not take.
        ImportError: without MONAI, which the extra `train` installs.

    Examples:
        >>> from lrd_uq.nets import MonaiUNet
        >>> MonaiUNet("UNet", in_channels=1, channels=4)(torch.zeros(1, 1, 32, 32)).shape
        torch.Size([1, 4, 32, 32])
    """

    def __init__(
        self,
        name: str,
        in_channels: int,
        channels: int,
        dims: int = 2,
        options: dict[str, Any] | None = None,
        drop_channels: bool = False,
    ) -> None:
        super().__init__()
        if name not in MONAI_UNETS:
            raise ValueError(f"name must be one of {', '.join(MONAI_UNETS)}; got {name!r}")
        if dims not in DROPOUTS:
            raise ValueError(f"dims must be 1, 2 or 3; got {dims}")
        check_counts(in_channels=in_channels, channels=channels)
        try:
            from monai.networks import nets
        except ImportError as error:
            raise ImportError("MONAI's networks need the training extra: pip install 'lrd-kernels[train]'") from error
        settings = {**MONAI_UNETS[name], **(options or {})}
        kind = getattr(nets, name)
        try:
            self.net = kind(spatial_dims=dims, in_channels=in_channels, out_channels=channels, **settings)
        except TypeError as error:
            raise ValueError(f"options do not fit MONAI's {name}: {error}") from error
        if drop_channels:
            for module in list(self.net.modules()):
                for child, layer in module.named_children():
                    if type(layer) is nn.Dropout:
                        setattr(module, child, DROPOUTS[dims](layer.p))

    def forward(self, x: Tensor) -> Tensor:
        """The features [B, channels, ...] of inputs [B, in_channels, ...]."""
        return self.net(x)


class DigitsUNet(nn.Module):
    """A small U-Net for 28 x 28 pictures: [B, in_channels, 28, 28] -> [B, channels, 28, 28].

    Args:
        in_channels: channels of the input.
        channels: channels of the feature map; the inner layers have twice as many.
        dropout: rate of the channel-wise dropout after three of the inner layers.

    Examples:
        >>> from lrd_uq.nets import DigitsUNet
        >>> DigitsUNet(in_channels=2, channels=24)(torch.zeros(1, 2, 28, 28)).shape
        torch.Size([1, 24, 28, 28])
    """

    def __init__(self, in_channels: int = 2, channels: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        check_counts(in_channels=in_channels, channels=channels)
        check_dropout(dropout)
        inner = 2 * channels
        self.down = nn.Conv2d(in_channels, channels, 4, stride=2, padding=1)  # 28 -> 14
        self.first = nn.Conv2d(channels, inner, 3, padding=1)  # at 7
        self.second = nn.Conv2d(inner, inner, 3, padding=1)
        self.residual = nn.Conv2d(inner, inner, 3, padding=1)
        self.merge = nn.Conv2d(inner + channels, inner, 3, padding=1)  # at 14
        self.up = nn.ConvTranspose2d(inner, channels, 2, stride=2)  # 14 -> 28
        self.drop_inner, self.drop_residual, self.drop_merged = (nn.Dropout2d(dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The features [B, channels, 28, 28] of pictures [B, in_channels, 28, 28]."""
        skip = F.relu(self.down(x))
        inner = F.relu(self.first(F.max_pool2d(skip, 2)))
        inner = self.drop_inner(F.relu(self.second(inner)))
        inner = self.drop_residual(inner + F.relu(self.residual(inner)))
        merged = torch.cat([F.interpolate(inner, scale_factor=2.0, mode="nearest"), skip], 1)
        merged = self.drop_merged(F.relu(self.merge(merged)))
        return F.relu(self.up(merged))
