"""Every path that CONTRIBUTING.md and docs/architecture.md name exists, and every target of make."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("CONTRIBUTING.md", "docs/architecture.md")}
PATHS = {
    (name, path) for name, page in PAGES.items() for path in re.findall(r"`((?:src|native|tests|docs)/[\w./-]*)`", page)
}
LINKS = {(name, path) for name, page in PAGES.items() for path in re.findall(r"\]\(([\w./-]+)\)", page)}


@pytest.mark.parametrize(("page", "path"), sorted(PATHS))
def test_a_path_of_the_page_exists(page, path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("page", "path"), sorted(LINKS))
def test_a_link_of_the_page_leads_to_a_file(page, path):
    assert ((ROOT / page).parent / path).exists()


def test_every_target_of_make_that_is_named_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for page in PAGES.values() for target in re.findall(r"`make ([a-z]+)`", page)}
    assert named <= targets
    assert len(named) >= 8
