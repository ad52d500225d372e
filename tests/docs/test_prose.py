"""tools/prose.py finds phrases that break a rule, in pages and in the texts of modules, and not in code."""

import pytest

import prose


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("`x` is no file.", ["is no file"]),
        ("There is no file, and it is no longer there.", []),
        ("```\nit is no file\n```\nA total of `a is no b`.", []),
        ("Its signs\nof life stop.", ["signs of life"]),
        ("Keys belong into a file; they are\nnot told.", ["belong into", "not told"]),
    ],
)
def test_phrases_of_a_page(text, phrases):
    assert [fault.phrase for fault in prose.of_markdown(text, "page.md")] == phrases


def test_lines_of_a_page_that_are_too_long_are_found_apart_from_code_tables_links_and_written_pages():
    long = "word " * 25
    page = f"{long}\n| {long} |\n[{long}](a.md)\n```\n{long}\n```\n<!-- keys -->\n{long}\n<!-- /keys -->\n{long}\n"
    assert [fault.place for fault in prose.of_markdown(page, "page.md")] == ["page.md:1", "page.md:10"]
    assert list(prose.of_markdown(f"`make pages` writes this page.\n{page}", "page.md")) == []


def test_a_fault_has_the_line_and_what_to_write_instead():
    code = '"""Say it."""\n\nERROR = "\\n".join(["it is no number"])\nis_no = [x for x in () if x is None]  # a list\n'
    assert list(prose.of_python(code, "m.py")) == [("m.py:3", "is no number", prose.RULES[0].instead)]


def test_comments_and_docstrings_of_functions_that_begin_with_a_fragment_are_found():
    code = 'def f():\n    """Whether it runs."""\n    return 1  # as ever\n'
    code += 'def g():\n    """Return whether it runs."""\n'
    assert [(fault.place, fault.phrase) for fault in prose.of_python(code, "m.py")] == [
        ("m.py:2", "Whether"),
        ("m.py:3", "as ever"),
    ]
