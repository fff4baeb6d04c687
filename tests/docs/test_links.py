"""Links between the pages, and to files of the project, lead somewhere; the site has every page and every name."""

import re

import pages
import pytest
import yaml

import lrd_kernels as lrd


def problems(page):
    for link in pages.links(page):
        where = f"{pages.name_of(page)}:{link.line}: {link.target}"
        if re.match(r"[a-z]+:", link.target):
            if not link.target.startswith("https://"):
                yield f"{where} is not https"
            continue
        target, _, anchor = link.target.partition("#")
        file = (page.parent / target).resolve() if target else page
        if not file.is_relative_to(pages.ROOT) or not file.exists():
            yield f"{where} does not exist"
        elif anchor and (file.suffix != ".md" or anchor not in pages.anchors(file)):
            yield f"{where}: {file.name} has no such heading"


@pytest.mark.parametrize("page", [*pages.PAGES, pages.ROOT / "CHANGELOG.md"], ids=pages.name_of)
def test_links_lead_somewhere(page):
    assert list(problems(page)) == []


def test_broken_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](page.md#a-title) [b](other.md) [c](#no) ![d](d.png) [e](http://x.org) `[f](g)`\n")
    assert [problem.split(": ", 1)[1].split()[0].rstrip(":") for problem in problems(page)] == [
        *("other.md", "#no", "d.png", "http://x.org")
    ]


def test_front_page_reaches_every_page():
    """From the README, by links alone, as on a code host."""
    reached, waiting = set(), [pages.ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = ((page.parent / link.target.partition("#")[0]).resolve() for link in pages.links(page))
            waiting += [target for target in targets if target.suffix == ".md" and target.is_file()]
    assert {pages.name_of(page) for page in pages.PAGES} <= {pages.name_of(page) for page in reached}


def test_site_lists_every_page():
    listed = set(re.findall(r"\w+\.md", str(yaml.safe_load((pages.ROOT / "mkdocs.yml").read_text())["nav"])))
    assert listed == {page.name for page in (pages.ROOT / "docs").glob("*.md")} | {
        *("index.md", "developing.md", "changelog.md", "stress.md")
    }


def test_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (pages.ROOT / "docs").glob("api*.md"))
    shown = set(re.findall(r"^::: lrd_kernels\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))
    assert {name for name in lrd.__all__ if not hasattr(getattr(lrd, name), "__path__")} - shown <= {"kl"}
