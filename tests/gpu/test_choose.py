"""How the block sizes are chosen: the first that fits, or the fastest."""

import compiled
import pytest
from ptxemu.triton_driver import emulated_gpu

from benchmarks.gpu import choose
from lrd_kernels.ops.triton import configs, configs_table

RANKS = {("gram", c): list(choose.GRAM) for c in choose.COMPUTES} | {("gram", "tf32x3"): [32, 64]}


@pytest.fixture(autouse=True)
def _keep_table(monkeypatch):
    monkeypatch.setattr(configs_table, "TABLE", dict(configs_table.TABLE))


def entry(op, compute, rank, architecture=80):
    return configs_table.TABLE[op, compiled.name_of(architecture), compute, "row"][rank]


def test_the_first_that_fits(monkeypatch):
    def fits(architecture, op, compute, rank, pick=None):
        return entry(op, compute, rank)[0] < 64

    monkeypatch.setattr(choose, "fits", fits)
    chosen = choose.choose(80)
    assert {key: list(ranks) for key, ranks in chosen.items() if key[0] == "gram"} == RANKS
    assert chosen["gram", "float32"][16] == choose.GRAM[16][2]
    for rank, config in chosen["log_prob_bwd", "float32"].items():
        assert config[0] == chosen["log_prob_bwd", "float64"][rank][0] == min(32, choose.BACKWARD_ROWS[rank][0])


def test_a_rank_for_which_nothing_fits_is_left_to_tiles(monkeypatch):
    monkeypatch.setattr(choose, "fits", lambda architecture, op, compute, rank, pick=None: rank < 64)
    chosen = choose.choose(75)
    assert all(64 not in ranks and 128 not in ranks for ranks in chosen.values())
    assert ("gram", "tf32x3") not in chosen  # which it does not have


def test_the_fastest(monkeypatch, tmp_path):
    """With --time: for the GPU that is there, and the other entries stay."""
    monkeypatch.setattr(choose, "fits", lambda *_: True)
    monkeypatch.setattr(choose.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_90")
    output = tmp_path / "table.py"
    choose.main(["--time", "--output", str(output)], cost=lambda op, compute, rank: entry(op, compute, rank, 90)[0])
    written: dict = {}
    exec(output.read_text(), written)
    assert "sm_90" in written["TIMED"]
    for (op, name, compute), ranks in written["CHOICES"].items():
        if name != "sm_90":
            assert ranks == configs_table.CHOICES[op, name, compute]
        elif op in ("gram", "log_prob_bwd"):  # the least BLOCK_S costs least here
            assert {config[0] for config in ranks.values()} == {16}


def test_timing_runs_what_the_entry_serves(monkeypatch):
    monkeypatch.setattr(configs, "architecture", lambda device: "sm_80")
    with emulated_gpu(80) as gpu:
        seconds = choose.by_time("gram", "float32", 16, device="cpu", rows=64, repeats=1)
    assert seconds > 0
    assert {launch.name for launch in gpu.launches} == {"_gram_fwd_kernel", "_joint_gram_fwd_kernel"}


def test_timing_needs_a_gpu(capsys):
    if choose.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        choose.main(["--time"])
    assert "needs a GPU" in capsys.readouterr().err
