"""Every relative link of every Markdown file leads to a file and a heading; every page is in the nav of the site."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples", "benchmarks", "native", "src", "tests", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
FENCE = re.compile(r"^( *)```.*?^\1```$", re.S | re.M)
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|href)=\"([^\"]+)\"")


@cache
def prose(page: Path) -> str:
    """Return a page without its blocks of code and its HTML comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.S)


@cache
def anchors(page: Path) -> set[str]:
    """Return the names of the headings of a page, as GitHub and the site make them, and its explicit ids."""
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ +(.*)$", prose(page), re.M)]
    names = {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}
    return names | set(re.findall(r'\bid="([^"]+)"', prose(page)))


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    found = []
    for match in LINK.finditer(re.sub(r"`[^`\n]+`", "", prose(page))):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_to_a_file_and_a_heading(page):
    assert broken(page) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title, with `code`\n[a](page.md#a-title-with-code) [b](none.md) [c](#none) `[d](none.md)`\n")
    assert broken(page) == ["none.md", "#none"]


def test_every_page_is_in_the_nav_once_and_the_nav_has_no_other_file():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", nav, re.M)) == sorted(pages | {"index.md"})
