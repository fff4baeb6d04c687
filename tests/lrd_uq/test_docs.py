"""The code in docs/training.md runs, and the page names every shipped config."""

import re
from pathlib import Path

import pytest

from lrd_uq.settings import shipped_configs

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_code_of_the_page_runs(block):
    exec(compile(block, PAGE.name, "exec"), {})


def test_page_names_every_config():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{config}`" in text for config in shipped_configs())
    assert len(BLOCKS) == 2
