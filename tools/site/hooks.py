"""Hooks of mkdocs.yml: files outside of docs/ that pages link to are part of the site.

README.md is the home page; any other file PATH of the repository becomes `repository/PATH`. Links keep the form that
they have in the repository, so that the same files can be read without the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
HOME = "README.md"
LINK = re.compile(r"(\]\()([\w./-]+)(#[\w.-]*)?(\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.S | re.M)


def _in_site(path: str) -> str:
    """Return the name in the site of a file of the repository."""
    if path == HOME:
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"


def _targets(path: str) -> list[str]:
    """Return the files of the repository that a page links to."""
    text = CODE.sub("", (ROOT / path).read_text(encoding="utf-8"))
    folder = posixpath.dirname(path)
    return [posixpath.normpath(posixpath.join(folder, match[2])) for match in LINK.finditer(text)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page and every file outside of docs/ that a page of the site links to."""
    waiting = [HOME, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        if not page.startswith("docs/"):
            inclusion = InclusionLevel.INCLUDED if page == HOME else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _in_site(page), abs_src_path=str(ROOT / page), inclusion=inclusion))
        if page.endswith(".md"):
            new = [path for path in _targets(page) if path not in seen and not path.startswith("docs/")]
            seen.update(new)
            waiting += dict.fromkeys(new)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make links between files of the repository links between files of the site."""
    uri = page.file.src_uri
    path = HOME if uri == "index.md" else uri.removeprefix("repository/") if "repository/" in uri else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        if not (ROOT / target).is_file():
            raise PluginError(f"{path}: {match[2]} is linked and is not a file")
        return f"{match[1]}{posixpath.relpath(_in_site(target), posixpath.dirname(uri))}{match[3] or ''}{match[4]}"

    pieces, end = [], 0
    for code in CODE.finditer(markdown):
        pieces += [LINK.sub(link, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, LINK.sub(link, markdown[end:])])


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page whose scripts, styles, fonts or pictures would be loaded from elsewhere."""
    if remote := re.search(
        r"<(?:script|img|iframe)[^>]*\ssrc=\"?https?:[^ >]+|<link[^>]*stylesheet[^>]*https?:[^ >]+", output
    ):
        raise PluginError(f"{page.file.src_uri}: {remote[0]} is loaded from elsewhere")
    return output
