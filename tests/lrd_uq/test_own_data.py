"""One's own network and data: any DataLoader with any method, own data sets as a task, targets without rounding."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from lrd_uq.bayes import Dropout, Ensemble, Laplace, Method, Swag, Variational, predict_joint
from lrd_uq.data import Batch, as_batch
from lrd_uq.data.loading import batches
from lrd_uq.data.order import one_pass
from lrd_uq.data.task import Items, Task
from lrd_uq.evaluate import evaluate
from lrd_uq.extra import lightning as L
from lrd_uq.heads import LowRankHead
from lrd_uq.module import JointUncertainty
from lrd_uq.nets import SplitNet, wrap

ITEMS, SHAPE = 20, (1, 4, 5)


class Own(Dataset):
    """Items in one of the forms."""

    def __init__(self, form):
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.rand(ITEMS, *SHAPE, generator=draw) for _ in range(2))
        self.mask, self.form = torch.rand(ITEMS, *SHAPE, generator=draw) > 0.2, form

    def __len__(self):
        return ITEMS

    def __getitem__(self, i):
        x, y, mask = self.x[i], self.y[i], self.mask[i]
        forms = {
            "pairs": (x, y),
            "with mask": (x, y, mask),
            "dicts": {"input": x, "target": y, "mask": mask, "name": str(i)},
            "monai": {"image": x, "label": y},
            "arrays": (x.double().numpy(), y.double().numpy()),
        }
        return forms[self.form]


class Stream(IterableDataset):
    """The same without an end and without a length."""

    def __iter__(self):
        own = Own("pairs")
        while True:
            yield from (own[i] for i in range(ITEMS))


FORMS = ("pairs", "with mask", "dicts", "monai", "arrays")
METHODS = {
    "none": Method,
    "dropout": Dropout,
    "variational": Variational,
    "ensemble": lambda: Ensemble(2),
    "swag": lambda: Swag(start=0.5, snapshots=2, columns=2),
    "laplace": Laplace,
}


def own_net():
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Dropout2d(0.2)), LowRankHead(6, 2))


def trained(make_trainer, method, *data, steps=6, net=None, **options):
    module = JointUncertainty(net or own_net(), method)
    make_trainer(steps, **options).fit(module, *data)
    return module


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("form", FORMS)
def test_any_loader_trains_with_any_method(form, name, make_trainer):
    loader = DataLoader(Own(form), batch_size=5, shuffle=True)
    module = trained(make_trainer, METHODS[name](), loader, DataLoader(Own(form), batch_size=7))
    found = evaluate(module.method, module.net, DataLoader(Own(form), batch_size=8), T=3)
    again = evaluate(module.method, module.net, as_batch(next(iter(DataLoader(Own(form), batch_size=ITEMS)))), T=3)
    assert len(found.rows["diagonal"].log_probs) == ITEMS
    for key, row in found.rows.items():
        assert row.log_probs.isfinite().all()
        torch.testing.assert_close(row.log_probs, again.rows[key].log_probs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dropout", "swag", "laplace"])
def test_stream_without_length_trains(name, make_trainer):
    loader = DataLoader(Stream(), batch_size=5)
    trained(make_trainer, METHODS[name](), loader, limit_train_batches=6)
    if name == "laplace":  # its posterior is of every item
        with pytest.raises(TypeError, match="may have no end: give the data set, Stream, a __len__"):
            trained(make_trainer, METHODS[name](), loader)


def test_variational_needs_the_number_of_items(make_trainer):
    with pytest.raises(TypeError, match="give the data set, Stream, a __len__"):
        trained(make_trainer, Variational(), DataLoader(Stream(), batch_size=5))


def test_laplace_sees_every_item_once():
    """Also those that a shuffled epoch with drop_last leaves out; but not those that the sampler never takes."""
    own = Own("pairs")
    for loader in (
        DataLoader(own, batch_size=6, shuffle=True, drop_last=True),
        DataLoader(own, batch_size=6),
        DataLoader(own, batch_size=None),
    ):
        seen = torch.cat([b.input.view(-1, *SHAPE) for b in map(as_batch, one_pass(loader))])
        assert torch.equal(seen, own.x)
    some = DataLoader(own, batch_size=3, sampler=SubsetRandomSampler([2, 5, 7, 11]))
    assert sum(len(x) for x, _ in one_pass(some)) == 4


@pytest.mark.parametrize("name", METHODS)
def test_task_of_own_datasets(name, make_trainer):
    parts = [Own(form) for form in ("dicts", "with mask", "with mask")]
    task = Task.of_datasets(*parts, batch_size=5, seed=3)
    module = trained(make_trainer, METHODS[name](), task)
    assert torch.equal(task.part("test").mask, parts[2].mask)
    assert torch.equal(task.part("test", [4, 2]).input, parts[2].x[[4, 2]])
    found = evaluate(module.method, module.net, task.dataset("test"), T=3)
    assert len(found.rows["diagonal"].log_probs) == ITEMS


def test_task_of_one_kind_of_data_sets_is_that_of_items(make_trainer):
    own = Own("with mask")
    parts = [Items(Batch(own.x, own.y, own.mask)), *[TensorDataset(own.x, own.y, own.mask)] * 2]
    tasks = Task.of_datasets(*parts, batch_size=5), Task.of_datasets(*reversed(parts), batch_size=5)
    nets = [trained(make_trainer, Dropout(), task).net for task in tasks]
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(one, other)


def test_data_set_without_length_is_refused():
    with pytest.raises(TypeError, match="must have __len__ and __getitem__; got Stream"):
        Task.of_datasets(Stream(), Own("pairs"), Own("pairs"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(2),), "got 1 elements"),
        ([torch.zeros(2)] * 4, "got 4 elements"),
        (torch.zeros(2), "got Tensor"),
        ({"image": torch.zeros(2), "name": "a"}, 'needs the keys "input" and "target".*got image, name'),
        ((torch.zeros(2), torch.zeros(2), torch.ones(2)), "must be bool.*got torch.float32"),
        ((torch.zeros(2), torch.zeros(2), torch.ones(1).bool()), r"shape of the target, \[2\]; got \[1\]"),
        ((torch.zeros(2), None), "got None"),
    ],
)
def test_other_batches_are_refused(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        as_batch(given)


def test_batches_of_any_data():
    own = Own("with mask")
    whole = Batch(own.x, own.y, own.mask)
    given = [whole, (own.x, own.y, own.mask), own, Items(whole), DataLoader(own, batch_size=8), iter([whole])]
    for data in given:
        found = list(batches(data, 7))
        assert max(len(batch.target) for batch in found) <= 7
        for part, wanted in zip(zip(*found, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(part), wanted)


def test_failed_validation_items_are_named(make_trainer):
    own = Own("pairs")
    own.y[[3, 17]] = torch.nan
    module = JointUncertainty(own_net())
    trainer = make_trainer(4)
    with pytest.warns(UserWarning, match="of 2 of 20 validation items is not a number: 3, 17"):
        trainer.fit(module, DataLoader(Own("pairs"), batch_size=5), DataLoader(own, batch_size=6))
    assert float(trainer.callback_metrics["val_failed"]) == 2
    assert trainer.callback_metrics["val_log_prob"].isnan()
    own.y[[3, 17]] = 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*validation items.*")
        trainer = make_trainer(4)
        trainer.fit(module, DataLoader(Own("pairs"), batch_size=5), DataLoader(own, batch_size=6))
    assert trainer.callback_metrics["val_log_prob"].isfinite()


class Scale(nn.Module):
    """Channels that are multiples of the input: a backbone without products of bfloat16 matrices."""

    def __init__(self, channels_in=1, channels=6):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, channels)[:, None, None, None].repeat(1, channels_in, 1, 1))
        self.dropout = nn.Dropout2d(0.2)

    def forward(self, x):
        return self.dropout((self.weight * x[:, None]).sum(2))


class Watch(L.pytorch.Callback):
    """Keeps the outputs and targets of the steps."""

    def on_train_batch_start(self, trainer, module, batch, *_):
        self.target, head = as_batch(batch).target, module.heads[0]
        own = module.objective.identity

        def identity(output, target, mask):
            self.seen, self.output = target, output
            return own(output, target, mask)

        module.objective.identity, self.head = identity, head


@pytest.mark.parametrize("name", ["dropout", "swag", "laplace"])
@pytest.mark.parametrize("split", [False, True])
def test_bf16_true_computes_the_density_in_float32(name, split, make_trainer):
    if split and name == "laplace":
        pytest.skip("Laplace does not support a SplitNet")
    head = LowRankHead(6, 2)
    net = SplitNet(Scale(), Scale(2), head) if split else wrap(Scale(), head)
    watch = Watch()
    module = JointUncertainty(net, METHODS[name]())
    loader = DataLoader(Own("with mask"), batch_size=5)
    make_trainer(4, watch, precision="bf16-true").fit(module, loader, loader)
    assert head.factor_weight.dtype == torch.bfloat16
    assert {t.dtype for t in watch.output} == {torch.float32}
    assert watch.seen.dtype == torch.float32
    assert torch.equal(watch.seen, watch.head.flat(watch.target))
    assert not torch.equal(watch.seen, watch.seen.bfloat16().float())  # the targets were not rounded
    for name, buffer in module.net.named_buffers():
        assert buffer.dtype in (torch.float32, torch.float64), name
    found = evaluate(module.method, module.net, loader, T=3)
    assert found.rows["joint"].log_probs.dtype == torch.float32
    assert found.rows["joint"].log_probs.isfinite().all()


def test_arrays_of_a_data_set_are_tensors():
    pairs = [(np.zeros((2, 3), np.float32), 1.0)] * 4
    assert Task.of_datasets(pairs, pairs, pairs).part("val").target.tolist() == [1.0] * 4


def test_joint_gaussians_over_any_loader():
    own, net, method = Own("with mask"), own_net(), Dropout()
    flat = net.head.flat
    whole = predict_joint(method, net, own.x, 4, 6, mask=flat(own.mask))
    for data in (DataLoader(own, batch_size=7), own, iter([(own.x, own.y, own.mask)])):
        joints = list(predict_joint(method, net, data, 4, 6))
        for name in ("loc", "cov_factor", "cov_diag"):
            found = torch.cat([getattr(joint, name) for joint in joints])
            if name == "cov_factor":  # unique but for signs
                found, wanted = (factor @ factor.mT for factor in (found, whole.cov_factor))
            else:
                wanted = getattr(whole, name)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        epistemic = torch.cat([joint.epistemic.variance for joint in joints])
        torch.testing.assert_close(epistemic, whole.epistemic.variance, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="leave mask out"):
        predict_joint(method, net, own, 4, 6, mask=flat(own.mask))
    with pytest.raises(ValueError, match="T must be at least 1; got 0"):
        predict_joint(method, net, own.x, 0, 6)
