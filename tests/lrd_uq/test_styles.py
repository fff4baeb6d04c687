"""Drawing of tasks: hidden pixels, missing outputs, and colours."""

import numpy as np
import pytest
import torch

from lrd_uq import plots
from lrd_uq.data.batch import Batch
from lrd_uq.styles import ABSENT, UNSEEN, Colour, Colouring, Depth, Flow, Ink, Style

STYLES = {Ink: (2, 1), Colour: (4, 3), Colouring: (1, 3), Flow: (6, 2), Depth: (3, 1)}  # channels in and out


@pytest.mark.parametrize("style", STYLES)
def test_pictures_are_colours(style):
    channels_in, channels = STYLES[style]
    values = torch.randn(channels, 5, 7)
    values[:, 0, 0] = torch.nan
    for picture in (style().seen(torch.rand(channels_in, 5, 7)), style().picture(values), style().mode(values)):
        assert picture.shape == (5, 7, 3)
        assert picture.min() >= 0
        assert picture.max() <= 1
    assert tuple(style().picture(values)[0, 0]) == ABSENT
    assert tuple(style().mode(values)[0, 0]) == ABSENT


def test_what_was_hidden_is_orange():
    x = torch.rand(4, 2, 2)
    x[3] = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    seen = Colour().seen(x)
    assert tuple(seen[0, 1]) == UNSEEN
    assert np.allclose(seen[1, 0], x[:3, 1, 0])


@pytest.mark.parametrize(
    ("vector", "colour"),
    [((1, 0), (1, 0, 0)), ((-1, 0), (0, 1, 1)), ((0, 0), (1, 1, 1)), ((0, -1), (0.5, 1, 0)), ((0.5, 0), (1, 0.5, 0.5))],
)
def test_colour_wheel(vector, colour):
    """Red is right, up is between yellow and green (90 degrees), white is no motion, saturation is length."""
    field = torch.tensor(vector, dtype=torch.float32)[:, None, None]
    assert np.allclose(Flow(longest=1.0).picture(field)[0, 0], colour, atol=1e-6)


def test_signs_of_depth_diverge():
    drawn = Depth().mode(torch.tensor([[[1.0, 0.0, -1.0]]]))[0]
    assert drawn[0, 0] > drawn[0, 2]  # red above zero
    assert drawn[2, 2] > drawn[2, 0]  # blue below
    assert np.ptp(drawn[1]) < 0.05  # white at zero


@pytest.mark.parametrize("style", [Flow(), Depth()], ids=["flow", "depth"])
def test_a_prediction_has_the_scale_of_the_truth(style):
    truth = torch.linspace(1, 2, 8).view(2, 2, 2)[: 2 if isinstance(style, Flow) else 1]
    half = style.like(truth).picture(0.5 * truth)
    assert not np.allclose(half, style.picture(0.5 * truth))  # which has the scale of its own
    assert np.allclose(style.like(truth).picture(truth), style.picture(truth))
    assert style.like(torch.full_like(truth, torch.nan)).picture(truth).shape == (2, 2, 3)


def test_tables_have_no_picture():
    with pytest.raises(ValueError, match="only tasks whose outputs are pictures"):
        plots.subject(Batch(torch.zeros(3), torch.zeros(2), None), None, Style())
