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
        ("m.py:2", "Whether it runs."),
        ("m.py:3", "as ever"),
    ]


def test_docstrings_of_functions_begin_with_a_verb_or_are_sentences():
    begun = ["[T] positions.", "x * y", "depth: the steps.", "Every other layer slides.", "ValueError, with a reason."]
    code = "".join(f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(begun))
    code += 'def sentence():\n    """Even layers have a window."""\nclass Of:\n    """Of a request."""\n'
    code += '    @property\n    def size(self):\n        """The number of rows."""\n'
    places = {fault.place for fault in prose.of_python(code, "m.py")}
    assert places == {"m.py:2", "m.py:4", "m.py:6", "m.py:8", "m.py:10", "m.py:14"}


def test_names_of_tests_are_the_sentences_that_their_docstrings_add_to():
    code = 'def test_rows():\n    """[T] positions."""\ndef test_more():\n    """Also on a device."""\n'
    assert [fault.place for fault in prose.of_python(code, "tests/m.py")] == ["tests/m.py:4"]


def test_lines_of_cpp_are_not_longer_than_the_width():
    code = f"// {'é' * 117}\n// {'é' * 118}\nint a = {'1' * 120};\n"
    assert [fault.place for fault in prose.of_cpp(code, "m.h")] == ["m.h:2", "m.h:3"]


def test_comments_of_cpp_are_read_as_wholes_and_do_not_begin_with_a_genitive():
    code = 'int a = 0;  // of a value\n// The sum\n// of all is in sum 1.\nf("// of a text");  // https://a.b\n'
    faults = [(fault.place, fault.phrase) for fault in prose.of_cpp(code, "m.h")]
    assert faults == [("m.h:1", "of a value"), ("m.h:3", "in sum")]
