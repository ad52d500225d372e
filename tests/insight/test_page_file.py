"""The page's file without a browser: its elements, and what it loads."""

import re

from foreword.insight.page import live_page, template
from foreword.server.page import policy


def test_the_script_finds_every_element_that_it_names():
    html = template()
    known = set(re.findall(r'\bid="([\w-]+)"', html))
    used = set(re.findall(r'\$\("([\w-]+)"\)', html)) - {"index"}  # which a live page does not have
    assert len(used) > 20
    assert used <= known
    assert set(re.findall(r"^#([\w-]+)", html, re.MULTILINE)) <= known


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_elements_of_texts():
    assert not re.findall(
        r"(?:https?:)?//[\w.]+\.\w+|\burl\(|@import|<link|<img|innerHTML|insertAdjacentHTML|\beval\(", template()
    )


def test_the_live_page_fits_a_policy_without_unsafe_sources():
    html = live_page()
    assert "unsafe" not in policy(html)
    assert not re.findall(r"<[^>]*\sstyle=|<[^>]*\son\w+=", html)
    assert "<!--" not in html
