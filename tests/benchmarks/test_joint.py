"""The benchmarks of joint covariances, in small: each runs to its file, and its numbers are those of a right answer."""

import json

import pytest

import lrd_kernels as lrd
from benchmarks import accumulator, joint, truncation

pytestmark = pytest.mark.skipif(not lrd.backends()["cpu"].available, reason="the compiled library did not load")


def test_end_to_end(tmp_path, capsys, no_processes):
    output = tmp_path / "joint.json"
    sizes = ["--outputs", "300", "--predictions", "5", "--factor-rank", "2", "--rank", "4", "--repeats", "1"]
    assert joint.main([*sizes, "--output", str(output)]) == 0
    results = json.loads(output.read_text())["results"]
    assert set(results) == {f"{who} {how}" for who in ("lrd", "lrd+parts", "torch") for how in ("row", "rank")}
    for layout in ("row", "rank"):
        ours, plain = results[f"lrd {layout}"], results[f"torch {layout}"]
        for number in ("log_prob", "entropy", "variance"):
            assert ours[number] == pytest.approx(plain[number], rel=1e-5)
    assert "times as fast" in capsys.readouterr().out
    assert no_processes == ["measure"] * 6  # one process for each contestant and layout


def test_truncation(tmp_path, no_processes):
    output = tmp_path / "truncation.json"
    sizes = ["--outputs", "300", "--columns", "12", "--rank", "4", "--repeats", "1"]
    assert truncation.main([*sizes, "--output", str(output)]) == 0
    for found in json.loads(output.read_text())["results"].values():
        assert found["variance_error"] < 1e-6
        assert found["low_rank_error"] < 1e-5
        assert found["seconds"] > 0
    assert no_processes == ["measure"] * 4


@pytest.mark.parametrize("kind", accumulator.KINDS)
def test_streamed_joint_is_near_the_exact_one(kind):
    assert accumulator.streamed(kind, 500, 40, 4, 16)["variance_error"] < 1e-6
    found = accumulator.held_out(kind, 500, 40, 4, 16)
    assert found["off"] < 0.01
    assert found["log_prob"] != found["exact_log_prob"]


def test_accumulator_report(tmp_path, no_processes):
    output = tmp_path / "accumulator.json"
    sizes = ["--outputs", "300", "--exact-outputs", "100", "--predictions", "9", "--factor-rank", "2", "--rank", "5"]
    assert accumulator.main([*sizes, "--output", str(output)]) == 0
    assert set(json.loads(output.read_text())["results"]) == {"structured 9", "flat 9"}
    assert no_processes == ["streamed", "held_out"] * 2
