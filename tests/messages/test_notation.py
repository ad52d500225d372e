"""Values in JSON and in notations like it, against Python's own readers of both."""

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.messages.notation import JSON, PYTHON, Notation, Quotes, Status, ValueReader, decoded, overlap

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda v: st.lists(v) | st.dictionaries(st.text(), v), max_leaves=12)
CUTS = st.sets(st.integers(0, 80))
GEMMA = Notation(names_as_keys=True, quotes={'"': Quotes('"'), '<|"|>': Quotes('<|"|>', "none")})


def pieces(text, cuts):
    ends = sorted({*(cut for cut in cuts if cut < len(text)), len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def read(text, cuts, notation):
    """(status, what was written and what was not consumed) of a text in pieces, and a space at its end."""
    reader, rest = ValueReader(notation), []
    for piece in [*pieces(text, cuts), " "]:
        rest.append(piece[reader.read(piece, 0) :])
    return reader.status, "".join(reader.written), reader.take_held() + "".join(rest)


def valid_json(text):
    try:
        json.loads(text, strict=False, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@given(value=VALUES, cuts=CUTS, indent=st.sampled_from([None, 1]), ascii=st.booleans())
def test_json_is_written_as_it_was_read(value, cuts, indent, ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read(text, cuts, JSON) == (Status.DONE, text, " ")


@given(data=st.data(), value=VALUES, cuts=CUTS)
def test_a_value_is_complete_if_python_can_read_it(data, value, cuts):
    text = json.dumps(value)
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 3))
    text = text[:at] + data.draw(st.text('{}[]":,\\u01a.-eE tfn\n\t', max_size=3)) + text[at + length :]
    status, written, rest = read(text, cuts, JSON)
    assert (status is Status.DONE and not rest.strip()) == valid_json(text)
    if valid_json(text):
        assert json.loads(written) == json.loads(text, strict=False)
    assert read(text, (), JSON)[0] is status


@given(value=VALUES, cuts=CUTS)
def test_python_literals_become_json(value, cuts):
    status, written, _ = read(repr(value), cuts, PYTHON)
    assert status is Status.DONE
    assert json.loads(written) == ast.literal_eval(repr(value))


@pytest.mark.long
@given(arguments=st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), VALUES), cuts=CUTS)
def test_the_arguments_of_a_python_call_become_an_object(arguments, cuts):
    text = "(" + ", ".join(f"{name}={value!r}" for name, value in arguments.items()) + ")"
    status, written, rest = read(text, cuts, PYTHON)
    assert (status, rest) == (Status.DONE, " ")
    assert json.loads(written) == arguments


def gemma(value):
    """The value as the chat template of Gemma writes it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


GEMMA_TEXT = st.text().filter(lambda text: '<|"|' not in text + "<|" and not text.endswith(("<", "<|", '<|"')))
GEMMA_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | GEMMA_TEXT,
    lambda v: st.lists(v) | st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True), v),
)


@given(value=GEMMA_VALUES, cuts=CUTS)
def test_values_of_gemma_become_json(value, cuts):
    status, written, rest = read(gemma(value), cuts, GEMMA)
    assert (status, rest) == (Status.DONE, " ")
    assert json.loads(written) == value


@pytest.mark.parametrize(
    "text", ["1" * 401, "-", "01", "1.", "nul", "NaN", '{"a":1,}', "[1,]", '"\\x"', '"\\u12g"', "'a'"]
)
def test_what_json_does_not_allow_is_refused(text):
    assert read(text, (), JSON)[0] is Status.BAD


@pytest.mark.parametrize("text", ["rb'a'", "'\\xg'", "'\\u12'", "{1, 2}", "f()", "(a)"])
def test_what_is_no_python_literal_is_refused(text):
    assert read(text, (), PYTHON)[0] is Status.BAD


def test_depth_costs_no_recursion():
    text = "[" * 100_000 + "]" * 100_000
    reader = ValueReader()
    assert reader.read(text, 0) == len(text)
    assert (reader.status, reader.depth) == (Status.DONE, 100_000)


def test_a_lone_surrogate_is_replaced():
    assert decoded('"a\\ud800b\\ud83d\\ude42"') == "a\ufffdb🙂"
    assert read("'\\U0000d800\\U00ffffff\\d'", (), PYTHON)[1] == '"\ufffd\ufffd\\\\d"'


@given(text=st.text("ab<", max_size=12), marker=st.text("ab<", min_size=1, max_size=6))
def test_overlap_is_the_longest_beginning_at_the_end(text, marker):
    expected = max(k for k in range(min(len(text), len(marker) - 1) + 1) if text.endswith(marker[:k]) or not k)
    assert overlap(text, marker) == expected
