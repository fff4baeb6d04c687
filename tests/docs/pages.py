"""The Markdown pages of the project: their code blocks, links and anchors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
# HTML comments right before a block, which readers do not see.
_VARIES = "<!-- numbers vary -->"
_NOT_RUN = re.compile(r"<!-- not run: ([^>]+) -->\s*\Z")


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    code: str
    line: int  # of the first line of code
    not_run: str | None  # the reason, if the page gives one
    output: str | None  # the `text` block that follows a Python block without prose between them
    varies: bool  # whether the page says that the numbers of the output differ from machine to machine


class Link(NamedTuple):
    """A link or a picture of a page."""

    target: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in _FENCE.finditer(text):
        language, code = match[2], match[3]
        before = text[end : match.start()]
        if language == "text" and found and found[-1].language == "python" and before.strip() in ("", _VARIES):
            found[-1] = found[-1]._replace(output=code, varies=bool(before.strip()))
        reason = _NOT_RUN.search(before)
        found.append(Block(language, code, text.count("\n", 0, match.start(3)) + 1, reason and reason[1], None, False))
        end = match.end()
    return found


def prose(page: Path) -> str:
    """The text of a page, with its code blocks and inline code emptied. Lines keep their numbers."""
    text = _FENCE.sub(lambda match: "\n" * match.group().count("\n"), page.read_text(encoding="utf-8"))
    return re.sub(r"`[^`\n]+`", "``", text)


def inline_code(page: Path) -> list[str]:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def links(page: Path) -> list[Link]:
    text = prose(page)
    return [Link(match[2], text.count("\n", 0, match.start()) + 1) for match in _LINK.finditer(text)]


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as code hosts make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        unique, number = slug, 0
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found
