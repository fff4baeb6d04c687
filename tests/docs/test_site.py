"""`make docs` fails for what a reader would stumble over."""

import os
import shutil
import subprocess
import sys

import pages
import pytest

pytestmark = pytest.mark.slow

HOLDS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "CITATION.cff", "Makefile", "mkdocs.yml")
FOLDERS = ("docs", "benchmarks/results", "lrd_kernels", "python")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    for name in HOLDS:
        shutil.copy(pages.ROOT / name, folder / name)
    for name in FOLDERS:
        shutil.copytree(pages.ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("[a](no_such_page.md)", "no_such_page.md"),
        ("[a](safety.md#no-such-heading)", "no-such-heading"),
        ("::: lrd_kernels.no_such_function", "no_such_function"),
        ("```math\n\\nosuchcommand x\n```", "nosuchcommand"),
    ],
)
def test_site_is_built_without_a_warning_or_not_at_all(tree, text, said):
    page = tree / "docs/concepts.md"
    page.write_text((pages.ROOT / "docs/concepts.md").read_text() + f"\n{text}\n")
    command = ["make", "docs", "-o", f"{sys.prefix}/.installed", f"VENV={sys.prefix}"]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, env={**os.environ})
    assert (result.returncode == 0) == (said is None), result.stderr
    assert said is None or said in result.stderr
    if said is None:
        front = (tree / "build/site/index.html").read_text()
        assert "pictures/front.png" in front
        assert "WARNING" not in result.stderr
