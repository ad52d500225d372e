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


def test_a_fault_has_the_line_and_what_to_write_instead():
    code = (
        '"""Say it."""\n\nERROR = "\\n".join(["it is no number"])\nis_no = [x for x in () if x is None]  # is no list\n'
    )
    assert list(prose.of_python(code, "m.py")) == [("m.py:3", "is no number", prose.RULES[0].instead)]
