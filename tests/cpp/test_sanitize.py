"""The core's own test program under the address and undefined-behaviour sanitizers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_core_is_clean(tmp_path):
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if cmake is None or not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs cmake and the source tree")
    configure = [cmake, "-S", ROOT, "-B", tmp_path, "-DLRD_SANITIZE=ON", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run([cmake, "--build", tmp_path, "--parallel", "2"], check=True, capture_output=True)
    result = subprocess.run([tmp_path / "core_sanitize"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "0 numbers wrong" in result.stdout
