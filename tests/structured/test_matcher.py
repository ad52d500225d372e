"""Grammars on llguidance: what is allowed after which tokens, against lists of all texts that are allowed."""

import itertools
import json
from random import Random

import pytest
from bytes_tokenizer import END, LONGER, OTHER, TOKENS, BytesTokenizer, V, allowed, grammar

from foreword.sampling import GrammarStoppedError

COLOURS = {"enum": ["red", "blue"]}
CASES = {
    "choice": ({"choice": ["yes", "no", "yes, no", "ab", "abc"]}, ["yes", "no", "yes, no", "ab", "abc"]),
    "regex": (
        {"regex": "(ab|c){1,3}"},
        ["".join(p) for n in (1, 2, 3) for p in itertools.product(("ab", "c"), repeat=n)],
    ),
    "grammar": ({"grammar": 'start: "a" b? "."\nb: "b" | "cd"'}, ["a.", "ab.", "acd."]),
    "gbnf": ({"grammar": 'root ::= "a" ("b" | "cd")? "."'}, ["a.", "ab.", "acd."]),
    "json": ({"json": COLOURS}, ['"red"', '"blue"']),
    "json text": ({"json": json.dumps(COLOURS)}, ['"red"', '"blue"']),
    "object": (
        {"json": {"type": "object", "properties": {"age": COLOURS, "ok": {"type": "boolean"}}, "required": ["age"]},
         "disable_additional_properties": True},
        [f'{{"age": "{c}"{ok}}}' for c in ("red", "blue") for ok in ("", ', "ok": true', ', "ok": false')],
    ),
    "compact": (
        {"json": {"type": "object", "properties": {"age": COLOURS, "ok": {"const": 1}}, "required": ["age", "ok"],
                  "additionalProperties": False}, "disable_any_whitespace": True},
        ['{"age":"red","ok":1}', '{"age":"blue","ok":1}'],
    ),
    "whitespace": (
        {"json": {"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 1}, "max_whitespace": 1},
        [f"[{before}1{after}]" for before in ("", *" \n\r\t") for after in ("", *" \n\r\t")],
    ),
}  # fmt: skip


def after(texts: list[str], written: bytes) -> set[int]:
    """The tokens that may follow ``written``, which is the beginning of some of the texts."""
    left = [text.encode()[len(written) :] for text in texts if text.encode().startswith(written)]
    ends = {END} if b"" in left else set()
    return ends | {t for t in range(2, len(TOKENS)) if any(rest.startswith(TOKENS[t]) for rest in left)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", CASES)
def test_a_mask_allows_what_some_text_continues_with(name: str):
    given, texts = CASES[name]
    random = Random(name)
    for _ in range(30):
        ours, written = grammar(given), b""
        while not ours.is_terminated:
            expected, found, forced = after(texts, written), allowed(ours), ours.forced_tokens(3)
            if forced:  # the one of the fitting tokens that the tokenizer makes of the text
                assert found == {forced[0]} <= expected
            else:
                assert found == expected
            token = random.choice(sorted(found))
            for wrong in {2, OTHER, END, len(TOKENS), *range(200, V)} - expected:
                assert ours.accept([wrong]) == 0
            assert ours.accept([token]) == 1
            written += TOKENS[token] if token != END else b""
        assert written.decode() in texts
        assert ours.accept([END]) == 0


@pytest.mark.parametrize("name", CASES)
def test_forced_tokens_are_the_only_ones_that_the_masks_allow(name: str):
    random, ours = Random(name), grammar(CASES[name][0])
    num_forced = 0
    while not ours.is_terminated:
        forced = ours.forced_tokens(100)
        for token in forced:
            assert allowed(ours) == {token}
            assert ours.accept([token]) == 1
        num_forced += len(forced)
        if not ours.is_terminated:
            assert ours.accept([random.choice(sorted(allowed(ours)))]) == 1
    assert num_forced or name in ("choice", "regex", "whitespace")


@pytest.mark.parametrize("name", CASES)
def test_taken_back_tokens_and_copies_leave_no_trace(name: str):
    random, ours, path = Random(name), grammar(CASES[name][0]), []
    for step in range(200):
        count = random.randint(0, len(path))
        if ours.is_terminated or random.random() < 0.3:
            ours.roll_back(count)
            del path[len(path) - count :]
        if random.random() < 0.1:
            ours.reset()
            assert ours.accept(path) == len(path)
        if not ours.is_terminated:
            path.append(random.choice(sorted(allowed(ours))))
            assert ours.accept(path[-1:]) == 1
        fresh = ours.copy()
        assert fresh.accept(path) == len(path), step
        assert fresh.is_terminated == ours.is_terminated
        if not ours.is_terminated:
            assert allowed(fresh) == allowed(ours)


def test_accepting_stops_at_the_first_token_that_is_not_allowed():
    ours, tokens = grammar({"choice": ["abc!"]}), BytesTokenizer().encode("abc?")
    assert ours.accept(tokens) == len(tokens) - 1
    assert ours.accept(BytesTokenizer().encode("!")) == 1
    assert ours.is_terminated


def test_an_output_may_end_where_its_text_is_complete_and_ends_where_nothing_can_follow():
    ours = grammar({"regex": "(ab){1,2}"})
    ab = BytesTokenizer().encode("ab")
    assert END not in allowed(ours)
    assert ours.accept(ab) == 1
    assert END in allowed(ours)
    assert not ours.is_terminated
    ending = ours.copy()
    assert ending.accept([*ab, END]) == 2
    assert ending.is_terminated
    assert ours.accept(ab) == 1
    assert ours.is_terminated


def test_special_tokens_and_those_without_bytes_are_in_no_text():
    everything = allowed(grammar({"regex": r"(.|\n)*"}))
    assert not everything & {OTHER, *range(len(TOKENS), len(TOKENS) + 11)}
    assert everything >= {END, *(TOKENS.index(text.encode()) for text in LONGER)}


def test_text_between_tags_is_free_and_a_tag_follows_its_schema():
    tags = {"structures": [{"begin": "<f=a>", "schema": COLOURS, "end": "</f>"}], "triggers": ["<f="]}
    tokenizer = BytesTokenizer()
    for text, is_complete in (
        ("no tag at all", True),
        ('x<f=a>"red"</f>y<f=a>"blue"</f>', True),
        ('x<f=a>"red"</f', False),
        ('x<f=a>"re', False),
    ):
        ours, tokens = grammar({"structural_tag": tags}), tokenizer.encode(text)
        assert ours.accept(tokens) == len(tokens), text
        assert (END in allowed(ours)) == is_complete, text
    for text in ("x<f=b", 'x<f=a>"green', 'x<f=a> "red"'):
        ours, tokens = grammar({"structural_tag": tags}), tokenizer.encode(text)
        assert ours.accept(tokens) < len(tokens), text


def test_a_special_token_begins_a_tag_or_is_named_by_a_grammar():
    tags = {"structures": [{"begin": "<other>", "schema": COLOURS, "end": "!"}], "triggers": ["<other>"]}
    text = [*BytesTokenizer().encode("x"), OTHER, *BytesTokenizer().encode('"red"!')]
    ours = grammar({"structural_tag": tags})
    assert ours.accept(text) == len(text)
    assert END in allowed(ours)
    assert grammar({"structural_tag": tags}).accept([OTHER, *BytesTokenizer().encode("x")]) == 1
    named, tokens = grammar({"grammar": 'start: "a" <other> "b"'}), [OTHER, *BytesTokenizer().encode("b")]
    assert named.accept(BytesTokenizer().encode("a")) == 1
    assert allowed(named) == {OTHER}
    assert named.accept(tokens) == 2
    assert named.is_terminated


def test_an_output_whose_grammar_takes_too_long_per_token_is_ended_and_others_are_not(monkeypatch):
    ours, other = grammar({"regex": "a*"}), grammar({"regex": "a*"})
    letter, clock = 2 + ord("a"), itertools.count(step=0.02)
    monkeypatch.setattr("foreword.structured.matcher.thread_time", lambda: next(clock))
    assert ours.accept([letter] * 20) == 20  # each takes 20 ms, of which 0.3 are given back
    with pytest.raises(GrammarStoppedError, match=r"more than 0\.5 s and 0\.3 ms per token"):
        ours.accept([letter] * 20)
    with pytest.raises(GrammarStoppedError):  # another output of the same request
        ours.copy().accept([letter])
    monkeypatch.undo()
    assert other.accept([letter] * 1000) == 1000
