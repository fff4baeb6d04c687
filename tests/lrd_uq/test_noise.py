"""The noise of predictions: it depends on seed, draw and item, and on nothing else."""

import pytest
import torch
from torch import nn

from lrd_uq.bayes import Dropout, Laplace, Swag, Variational
from lrd_uq.bayes.noise import dropout_masks, generator
from lrd_uq.data.batch import Batch
from lrd_uq.heads import LowRankHead
from lrd_uq.nets import wrap


class TimeFirst(nn.Module):
    """A network whose dropout layer sees [time, items, channels]."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 6), nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.layer(x).transpose(0, 1)).transpose(0, 1)


def dropout():
    layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Dropout2d(0.4), nn.ReLU(), nn.Dropout(0.3)]
    return Dropout(), wrap(nn.Sequential(*layers), LowRankHead(6, 2))


def time_first():
    return Dropout(), wrap(TimeFirst(), LowRankHead(6, 2, features_last=True))


def variational():
    method = Variational(initial_std=0.1)
    return method, method.prepare(wrap(nn.Conv2d(1, 6, 3, padding=1), LowRankHead(6, 2)))


def swag():
    method = Swag(start=0.5, snapshots=2, columns=2)
    net = method.prepare(wrap(nn.Conv2d(1, 6, 3, padding=1), LowRankHead(6, 2)))
    for step in range(1, 5):
        with torch.no_grad():
            for p in net.net.parameters():
                p.add_(0.1 * torch.randn_like(p))
        method.after_step(net, step, 4)
    return method, net


def laplace():
    method = Laplace()
    net = method.prepare(wrap(nn.Conv2d(1, 6, 3, padding=1), LowRankHead(6, 2)))
    method.after_training(net, lambda: [Batch(torch.randn(4, 1, 5, 7), torch.randn(4, 1, 5, 7), None)])
    return method, net


@pytest.mark.parametrize("make", [dropout, time_first, variational, swag, laplace])
def test_prediction_depends_on_seed_and_item_alone(make):
    torch.manual_seed(0)
    method, net = make()
    x = torch.randn(5, 1, 5, 7) if make is not time_first else torch.randn(5, 4, 3)

    def means(x, T=4, **options):
        return torch.stack([p.mean for p in method.sample_predictions(net, x, T, **options)])

    state = torch.get_rng_state()
    wanted = means(x)
    assert torch.equal(torch.get_rng_state(), state)  # torch's random state is neither used nor changed
    close = {"rtol": 1e-5, "atol": 1e-6}
    for i in range(5):  # alone
        torch.testing.assert_close(means(x[i : i + 1])[:, 0], wanted[:, i], **close)
    torch.testing.assert_close(means(x.flip(0)).flip(1), wanted, **close)  # in another order
    torch.testing.assert_close(means(x, chunk=3), wanted, **close)
    torch.testing.assert_close(means(x, T=7)[:4], wanted, **close)  # fewer draws are the first of more
    spread = wanted.std(0).mean()
    assert spread > 1e-3
    assert (means(x, seed=1) - wanted).abs().mean() > 0.3 * spread
    assert (wanted[1:] - wanted[:-1]).abs().mean() > 0.3 * spread


def test_items_have_masks_of_their_own():
    layer = nn.Dropout2d(0.5).eval()
    with dropout_masks(layer, [generator(torch.device("cpu"), 0, i) for i in range(3)]):
        out = layer(torch.ones(3, 40, 2, 2))
    assert len(out.unique(dim=0)) == 3
    assert torch.equal(layer(torch.ones(3, 4, 2, 2)), torch.ones(3, 4, 2, 2))  # afterwards nothing is dropped


@pytest.mark.parametrize(
    "kind", [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
)
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_every_kind_of_dropout_has_the_values_of_torch(kind, p):
    torch.manual_seed(0)
    layer, x = kind(p), torch.randn(4, 500, *{nn.Dropout1d: (2,), nn.Dropout3d: (2, 1, 2)}.get(kind, (2, 2)))
    torch_s = torch.stack([layer.train()(x) for _ in range(80)])  # every value is dropped or kept: two results
    with dropout_masks(layer.eval(), [generator(torch.device("cpu"), 0, i) for i in range(4)]):
        found = layer(x)
    low, high = torch_s.amin(0), torch_s.amax(0)
    is_low, is_high = (found - low).abs() < 1e-5, (found - high).abs() < 1e-5
    assert (is_low | is_high).all()
    if p == 0.3 and "Alpha" not in kind.__name__:
        kept = torch.where(x > 0, is_high, is_low)
        assert abs(float(kept.float().mean()) - 0.7) < 0.05
        whole = kept.flatten(2)
        assert (whole.all(-1) == whole.any(-1)).all() == (kind is not nn.Dropout)
