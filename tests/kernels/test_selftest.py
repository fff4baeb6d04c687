"""The self-test for other people's machines, on this one's CPU."""

import json
import os
import subprocess
import sys

import pytest

import lrd_kernels as lrd
from lrd_kernels import info


def test_passes_and_writes_its_file(tmp_path, capsys):
    output = tmp_path / "selftest.json"
    assert info.main(["--self-test", "--device", "cpu", "--repeats", "0", "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert len(document["accuracy"]) == 32
    assert document["deterministic"]
    assert "WRONG" not in capsys.readouterr().out


@pytest.mark.slow
def test_passes_in_the_interpreter_of_triton(tmp_path):
    pytest.importorskip("triton")
    output = tmp_path / "selftest.json"
    command = [sys.executable, "-m", "lrd_kernels.info", "--self-test", "--device", "cpu", "--backend", "triton"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([*command, "--repeats", "0", "--output", output], check=True, env=environment)
    document = json.loads(output.read_text())
    assert document["backend"] == "triton"
    assert all(row["ok"] for row in document["accuracy"])


def test_notices_a_wrong_backend(tmp_path, monkeypatch, capsys):
    real = lrd.log_prob

    def off(*args, backend=None, **options):
        result = real(*args, backend=backend, **options)
        return result if backend == "reference" else result * 1.001

    monkeypatch.setattr(lrd, "log_prob", off)
    assert info.main(["--self-test", "--device", "cpu", "--repeats", "0", "--output", str(tmp_path / "x.json")]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_says_that_there_is_no_gpu(capsys):
    if info.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        info.main(["--self-test", "--device", "cuda"])
    assert "no GPU" in capsys.readouterr().err


def test_options_of_the_longer_test_are_not_ignored(capsys):
    with pytest.raises(SystemExit):
        info.main(["--device", "cpu"])
    assert "--device requires --self-test" in capsys.readouterr().err
