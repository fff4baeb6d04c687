"""The scripts of docs/examples run and print what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tiles_on_two_processes_train_as_one():
    found = []
    for processes in ("1", "2"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
        done = subprocess.run(
            [*command, str(ROOT / "docs/examples/tiles.py")],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        before, after = map(float, re.search(r"loss per pixel: (\S+) before, (\S+) after", done.stdout).groups())
        assert after < before - 0.3
        found.append((before, after))
    assert found[0] == found[1]
