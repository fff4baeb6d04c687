"""The suite's own limits: a test that takes too long fails the run."""

import pytest
from budget import FOLDER_SECONDS, TEST_SECONDS, Spent, over_limit

pytest_plugins = ["pytester"]


def test_limits():
    quick = Spent("tests/kernels/a.py::b", TEST_SECONDS - 1, slow=False)
    assert over_limit([quick, Spent("tests/kernels/a.py::c", 10 * FOLDER_SECONDS, slow=True)]) == []
    assert "a.py::b took 20.1 s" in over_limit([quick._replace(seconds=20.1)])[0]
    many = [quick] * int(FOLDER_SECONDS // quick.seconds + 1)
    assert [line.split(":")[0] for line in over_limit(many)] == ["tests/kernels"]


@pytest.mark.parametrize(("marks", "code"), [("", 1), ("@pytest.mark.slow", 0)])
def test_a_long_test_fails_the_run_unless_it_is_marked(pytester, monkeypatch, marks, code):
    monkeypatch.setattr("budget.TEST_SECONDS", 0.2)
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makeconftest(
        "from budget import Budget\ndef pytest_configure(config):\n    config.pluginmanager.register(Budget())"
    )
    pytester.makepyfile(
        f"""
        import pytest, subprocess, sys

        {marks}
        def test_in_a_process():
            busy = "import time\\nwhile time.process_time() < 0.4: pass"
            subprocess.run([sys.executable, "-c", busy], check=True)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert result.ret == code
    result.stdout.fnmatch_lines(["*1 passed*"])
    result.stdout.fnmatch_lines(["*CPU time*", "*s  test_a_long_test*::test_in_a_process*"])
