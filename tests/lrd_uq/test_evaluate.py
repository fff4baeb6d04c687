"""Scores: every row against plain torch on dense matrices, and calibration on data from a known Gaussian."""

import json
import math
import warnings
import weakref

import pytest
import torch

import lrd_kernels as lrd
from lrd_uq.bayes import Dropout, Ensemble, Method
from lrd_uq.data.batch import Batch
from lrd_uq.data.reading import BrokenFile
from lrd_uq.data.task import LazyItems
from lrd_uq.evaluate import (
    Row,
    calibration,
    collect,
    evaluate,
    failures,
    kept_columns,
    key_of,
    over_seeds,
    paired,
    standardised_sum,
    summary,
    table,
)
from lrd_uq.heads import DiagonalHead, LowRankHead
from lrd_uq.nets import wrap


@pytest.fixture
def small():
    """A network with dropout for 5 x 4 pictures of one channel, and a batch with a different mask per item."""
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.Dropout2d(0.4))
    head = LowRankHead(6, 2)
    torch.nn.init.normal_(head.factor_weight)
    batch = Batch(torch.randn(4, 1, 5, 4), torch.randn(4, 1, 5, 4), torch.rand(4, 1, 5, 4) > 0.3)
    return wrap(backbone, head), batch


def dense_log_prob(mean, covariance, target, mask):
    keep = mask.nonzero()[:, 0]
    chosen = torch.distributions.MultivariateNormal(mean[keep].double(), covariance[keep][:, keep].double())
    return chosen.log_prob(target[keep].double())


@pytest.mark.parametrize("images_at_once", [4, 3])
def test_rows_are_those_of_dense_matrices(small, images_at_once):
    net, batch = small
    method, T = Dropout(), 6
    found = evaluate(method, net, batch, T, (3, 50), images_at_once, seed=3)
    target, mask = batch.target.flatten(1), batch.mask.flatten(1)
    for begin in range(0, 4, images_at_once):
        some = slice(begin, begin + images_at_once)
        means, factors, diags = collect(method, net, batch.input[some], T, mask[some], seed=3)
        for i in range(means.shape[1]):
            n = begin + i
            mu, P, D = means[:, i].double(), factors[:, i].double(), diags[:, i].double()
            epistemic = mu.T.cov()
            aleatoric = (P @ P.mT).mean(0) + D.mean(0).diag()
            total = aleatoric + epistemic
            check = {
                "joint": total,
                "diagonal": total.diag().diag(),
            }
            expected = method.expected(net)(batch.input[n : n + 1], mask[n : n + 1])
            own = expected.factor[0].double()
            check["expected"] = own @ own.mT + expected.diag[0].double().diag() + epistemic
            for key, covariance in check.items():
                wanted = dense_log_prob(mu.mean(0), covariance, target[n], mask[n])
                assert float(found.rows[key].log_probs[n]) == pytest.approx(float(wanted), rel=1e-4, abs=1e-3)
            single = [dense_log_prob(mu[t], P[t] @ P[t].mT + D[t].diag(), target[n], mask[n]) for t in range(T)]
            wanted = torch.stack(single).logsumexp(0) - math.log(T)
            assert float(found.rows["mixture"].log_probs[n]) == pytest.approx(float(wanted), rel=1e-4, abs=1e-3)
    assert set(found.rows) == {"joint", "diagonal", "joint 3", "joint 3 unfolded", "mixture", "expected"}
    assert len(found.rows["joint"].log_probs) == 4


def test_deterministic_network_has_one_row_and_its_variances(small):
    net, batch = small
    found = evaluate(Method(), net, batch)
    assert set(found.rows) == {"single", "diagonal"}
    mean = net.eval()(batch.input).mean
    error = (batch.target.flatten(1) - mean)[batch.mask.flatten(1)]
    assert found.rmse == pytest.approx(float(error.square().mean().sqrt()), rel=1e-5)
    assert found.mae == pytest.approx(float(error.abs().mean()), rel=1e-5)


def test_diagonal_network_is_scored(small):
    _, batch = small
    backbone = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.Dropout2d(0.4))
    found = evaluate(Dropout(), wrap(backbone, DiagonalHead(6)), batch, 5)
    assert {"joint", "diagonal", "mixture", "expected"} <= set(found.rows)


def test_ensemble_gives_the_reason_instead_of_a_row(small):
    net, batch = small
    method = Ensemble(2)
    found = evaluate(method, method.prepare(net), batch)
    assert "expected" not in found.rows
    assert "no expected weights" in found.no_expected


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_kept_columns_are_those_of_a_truncation(rank):
    torch.manual_seed(0)
    joint = lrd.LowRankMultivariateNormal(torch.randn(2, 30), torch.randn(2, 30, 8), torch.rand(2, 30) + 0.1)
    found = dict(kept_columns(joint, (1, 3, 7, 8)))
    assert set(found) == {key_of(k, fold) for k in (1, 3, 7) for fold in (True, False)}
    for fold in (True, False):
        wanted = joint.truncate(rank, fold=fold)
        got = found[key_of(rank, fold)]
        torch.testing.assert_close(got.covariance_matrix, wanted.covariance_matrix, rtol=1e-4, atol=1e-4)


def test_right_covariance_is_calibrated_and_variances_alone_are_not():
    torch.manual_seed(0)
    N, S = 4000, 30
    factor, diag = torch.ones(S, 1) * 0.5, torch.full((S,), 0.2)
    mask = (torch.arange(S) < 20).expand(N, S)
    right = lrd.LowRankMultivariateNormal(torch.zeros(N, S), factor.expand(N, S, 1), diag.expand(N, S))
    target = right.sample()
    found = calibration(standardised_sum(right, target, mask))
    assert found.rms == pytest.approx(1, abs=0.04)
    assert found.coverage == pytest.approx(0.9, abs=0.02)
    alone = lrd.LowRankMultivariateNormal(torch.zeros(N, S), torch.zeros(N, S, 0), right.variance)
    assert calibration(standardised_sum(alone, target, mask)).rms > 3


def test_paired_difference():
    worse = torch.tensor([0.0, 10.0, 20.0, 30.0])
    found = paired(worse + torch.tensor([1.0, 2.0, 3.0, -1.0]), worse)
    assert found.mean == pytest.approx(1.25)
    assert found.error == pytest.approx(torch.tensor([1.0, 2.0, 3.0, -1.0]).std().item() / 2)
    assert found.share_gaining == 0.75


def test_intervals_over_seeds_and_over_items_are_apart():
    """Seeds that differ by 2, items that differ by 20: each interval has the width of its own spread."""
    torch.manual_seed(0)
    items, seeds = 20 * torch.randn(400), torch.tensor([-2.0, 0.0, 2.0])
    found = over_seeds([items + seed + 5 for seed in seeds], [torch.zeros(400)] * 3)
    centre = float(items.mean()) + 5
    assert found.mean == pytest.approx(centre, abs=1e-5)
    assert found.per_seed == pytest.approx([centre - 2, centre, centre + 2], abs=1e-4)
    assert found.over_seeds == pytest.approx([centre - 4.9683, centre + 4.9683], abs=1e-3)  # 4.3027 * 2 / sqrt(3)
    error = float(items.std()) / 20
    assert found.over_items == pytest.approx([centre - 1.96 * error, centre + 1.96 * error], abs=0.15)
    assert (found.in_favour, found.share_gaining) == (3, float((items + 5 > 0).double().mean()))
    one = over_seeds([items], [torch.zeros(400)])
    assert one.over_seeds is None
    assert one.over_items is not None
    failed = over_seeds([items, items * torch.nan], [torch.zeros(400)] * 2)
    assert (failed.over_seeds, failed.over_items) == (None, None)
    assert math.isnan(failed.mean)


def test_table_is_markdown_with_numbers():
    rows = [
        ("first", Row("joint", torch.tensor([1.0, 3.0]), torch.tensor([1.0, -2.0]))),
        ("second", Row("m", torch.tensor([5.0, 5.0]), None)),
    ]
    lines = table(rows)
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == ["first", "2.0", "1.4", "1.58", "0.50"]
    assert [cell.strip() for cell in lines[3].split("|")[1:-1]] == ["second", "5.0", "0.0", "", ""]


@pytest.mark.parametrize("method", [Dropout(), Method()])
def test_failed_items_are_counted_and_named(small, method):
    """An item without a log-likelihood is not averaged away, and the other items are scored as without it."""
    net, batch = small
    broken = batch._replace(input=batch.input.clone(), target=batch.target.clone(), mask=torch.ones_like(batch.mask))
    wanted = evaluate(method, net, broken, 4, (3,)).rows
    broken.input[1] = torch.nan
    broken.target[3, 0, 2, 2] = torch.inf
    found = evaluate(method, net, broken, 4, (3,))
    for key, row in found.rows.items():
        assert row.failed == [1, 3]
        assert math.isnan(row.mean)
        torch.testing.assert_close(row.log_probs[[0, 2]], wanted[key].log_probs[[0, 2]])
        figures = summary(row)
        assert figures["mean"] is None
        assert figures["failed"] == [1, 3]
        assert "2 of 4 items is not a finite number: 1, 3" in figures["reasons"]["mean"]
        assert figures["others"]["mean"] == pytest.approx(float(wanted[key].log_probs[[0, 2]].mean()))
        json.dumps(figures, allow_nan=False)
    (line,) = [line for line in failures(list(found.rows.items())) if line.startswith("diagonal:")]
    assert "2 of 4 items is not a finite number: 1, 3; mean of the others" in line


def test_one_item_has_no_spread(small):
    net, batch = small
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evaluate(Dropout(), net, Batch(*(part[:1] for part in batch)), 4)
        figures = summary(found.rows["joint"])
        assert table(list(found.rows.items()))
    assert (figures["sd"], figures["reasons"]) == (None, {"sd": "one item has no spread"})
    assert math.isfinite(figures["mean"])
    json.dumps(figures, allow_nan=False)


def test_nothing_to_score_is_refused(small):
    with pytest.raises(ValueError, match="no items"):
        evaluate(Dropout(), small[0], [])
    with pytest.raises(ValueError, match="T must be at least 1; got 0"):
        evaluate(Dropout(), small[0], small[1], T=0)


def test_items_are_read_as_they_are_needed(small):
    """No more than one batch of items is alive at a time; a skipped item keeps its number."""
    net, batch = small
    alive, most = [], []

    def make(number):
        if number == 5:
            raise BrokenFile("item 5")
        item = Batch(*(part[number % 4].clone() for part in batch))
        item = item._replace(target=torch.full_like(item.target, torch.nan)) if number == 8 else item
        alive.append(weakref.ref(item.input))
        most.append(sum(one() is not None for one in alive))
        return item

    items = LazyItems(range(40), make, on_broken="skip")
    with pytest.warns(UserWarning, match="skipped: item 5"):
        found = evaluate(Dropout(), net, items, 2, images_at_once=3)
    assert len(found.rows["joint"].log_probs) == 39
    assert found.rows["joint"].failed == [8]
    assert max(most) <= 2 * 3
    assert found.scores.items.tolist() == [n for n in range(40) if n != 5]


def test_evaluation_leaves_the_network_and_torch_alone(small):
    net, batch = small
    net.train()
    state, modes = torch.get_rng_state(), [module.training for module in net.modules()]
    first = evaluate(Dropout(), net, batch, 3)
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    again = evaluate(Dropout(), net, batch, 3)
    for key, row in first.rows.items():
        assert torch.equal(row.log_probs, again.rows[key].log_probs)
        assert not row.log_probs.requires_grad
    other = evaluate(Dropout(), net, batch, 3, seed=1)
    assert not torch.equal(other.rows["joint"].log_probs, first.rows["joint"].log_probs)
