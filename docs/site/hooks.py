"""Hooks of mkdocs: pages that lie outside docs/, links to them, and formulas.

README.md is the front page of the site, CONTRIBUTING.md and CHANGELOG.md are pages, and what a page links to in
benchmarks/results comes along. The files are written for a code host, with links that are relative to each file; here
they become links within the site. Blocks marked ```math become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "developing.md", "CHANGELOG.md": "changelog.md"}
RESULTS = "benchmarks/results"
COPIED = ("LICENSE", "CITATION.cff")

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MATH = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: Any) -> Files:
    """Adds what lies outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    results = (path for path in sorted((ROOT / RESULTS).iterdir()) if path.is_file())
    for path in (*results, *(ROOT / name for name in COPIED)):
        files.append(File.generated(config, to_site(path.relative_to(ROOT).as_posix()), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrites links, and turns formulas into MathML."""
    sources = {site: source for source, site in PAGES.items()}
    origin = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [rewrite_links(markdown[end : fence.start()], origin), formula(fence.group())]
        end = fence.end()
    return "".join([*pieces, rewrite_links(markdown[end:], origin)])


def rewrite_links(text: str, origin: str) -> str:
    """Links of a file at `origin`, a path in the repository, as links of its page at the top of the site."""

    def replace(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match.group()
        return before + to_site(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))) + after

    return LINK.sub(replace, text)


def to_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    if path.startswith(f"{RESULTS}/"):
        return "results/" + path.removeprefix(f"{RESULTS}/")
    return PAGES.get(path, path.removeprefix("docs/"))


def formula(block: str) -> str:
    """A block of code as it is, or MathML."""
    match = MATH.fullmatch(block)
    if match is None:
        return block
    mathml = convert(match[1].strip(), display="block")
    if unknown := re.search(r"\\\w+", mathml):
        raise PluginError(f"a formula has the unknown command {unknown.group()}: {match[1].strip()}")
    return f'<div class="formula">{mathml}</div>'
