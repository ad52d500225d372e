"""Grammars that are refused, within which time, and those that are kept."""

from __future__ import annotations

import gc
import json
import re
import sys
import time
from pathlib import Path
from threading import Event, Thread, active_count
from types import SimpleNamespace

import numpy as np
import pytest
from bytes_tokenizer import END, BytesTokenizer, V, allowed, grammar, make_compiler

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.errors import RequestError
from foreword.schemas import FORMATS
from foreword.structured import GrammarCompiler, compiler
from foreword.structured.trial import TooLargeError, Trial
from foreword.structured.vocabulary import Vocabulary


def refused(structured_outputs, reason: str, **params) -> None:
    with pytest.raises(RequestError, match=reason) as failure:
        grammar(structured_outputs, **params)
    assert failure.value.request_id == "a"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: \\["not"\\]'),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[" * 10000}, "nests too deeply"),
        ({"json": "3"}, "a schema is an object"),
        ({"json": {"type": "strin"}}, "strin"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": {"$ref": "#"}}, "cannot be compiled"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "((("}, "unclosed group"),
        ({"grammar": "start: other"}, "other"),
        ({"grammar": "start: start"}, "cannot be compiled"),
        ({"grammar": 'root ::= "a'}, "cannot be compiled"),
        ({"structural_tag": {"triggers": ["<f="]}}, "structures"),
        ({"structural_tag": {"triggers": ["<f="], "structures": [{"begin": "<g", "schema": {}}]}}, "none of the trigg"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(given, reason):
    refused(given, rf"request 'a': structured_outputs = .*{reason}")


ANNOTATIONS = ("path", "password", "binary", "byte", "uri-reference", "regex", "json-pointer", "idn-email", "uuid4", "")


def follows(schema: dict, value: object) -> bool:
    """Return whether the value is an output of the schema."""
    made = grammar({"json": schema})
    for token in BytesTokenizer().encode(json.dumps(value)):
        if token not in allowed(made):
            return False
        made.accept([token])
    return END in allowed(made)


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_an_unknown_format_is_an_annotation(name: str):
    """At any depth; the name of a property, and a value of a constant, are no keywords."""
    text = {"type": "string", "format": name}
    for schema in (text, {"anyOf": [text]}, {"$ref": "#/$defs/t", "$defs": {"t": text}}, {"allOf": [text]}):
        assert follows(schema, "x")
        assert not follows(schema, 1)
    assert follows({"$ref": "#/components/a~1b/t", "components": {"a/b": {"t": text}}}, "x")
    assert follows({"type": "array", "items": text, "prefixItems": [text]}, ["x", "y"])
    keyed = {"properties": {"format": {"const": name}}, "required": ["format"], "type": "object"}
    assert follows(keyed, {"format": name})
    assert not follows(keyed, {"format": "x"})


@pytest.mark.parametrize(
    ("name", "valid", "other"),
    [("date", "2026-11-26", "today"), ("uuid", "0" * 8 + "-0000-0000-0000-" + "0" * 12, "0"), ("ipv4", "1.2.3.4", "1")],
)
def test_a_known_format_is_followed(name: str, valid: str, other: str):
    assert follows({"type": "string", "format": name}, valid)
    assert not follows({"type": "string", "format": name}, other)


def test_the_page_lists_the_formats_that_are_followed():
    page = (Path(__file__).parents[2] / "docs" / "structured-outputs.md").read_text()
    (line,) = re.findall(r"`format` of strings: (.*?)\.", page, re.DOTALL)
    assert re.findall(r"`([\w-]+)`", line) == sorted(FORMATS)
    for name in FORMATS:
        grammar({"json": {"type": "string", "format": name}})


def test_what_asks_for_nothing_is_accepted():
    asks = {"type": "array", "uniqueItems": False, "x-order": 1, "nullable": True, "deprecated": True, "minContains": 1}
    assert follows(asks, [1, 1])
    record = {"type": "object", "propertyNames": {"type": "string"}, "dependentRequired": {}, "then": False}
    assert follows({**record, "additionalProperties": {"type": "integer"}}, {"a": 1})
    refused({"json": {"type": "object", "propertyNames": {"maxLength": 1}}}, "propertyNames")


def test_an_error_names_where_a_schema_comes_from():
    bad, good = {"not": {}}, {"type": "string"}
    made = StructuredOutputs.of_schema(bad, Origin("response_format.json_schema.schema", bad))
    with pytest.raises(
        RequestError, match=r"response_format\.json_schema\.schema = \{'not': \{\}\}: .*Unimplemented"
    ) as one:
        grammar(made)
    assert one.value.field == "response_format.json_schema.schema"
    parts = tuple(
        StructuredOutputs.of_schema(s, Origin(f"tools[{i}].parameters", s)) for i, s in enumerate((good, bad))
    )
    text = 'start: a | b\na: %json {"type": "string"}\nb: %json {"not": {}}'
    whole = StructuredOutputs(kind="grammar", text=text, origin=Origin("tool_choice", "required"), parts=parts)
    with pytest.raises(RequestError, match=r"tools\[1\]\.parameters") as odd:
        grammar(whole)
    assert "%json" not in str(odd.value)
    with pytest.raises(RequestError, match=r"tool_choice = 'required': cannot be compiled"):
        grammar(StructuredOutputs(kind="grammar", text="start: other", origin=Origin("tool_choice", "required")))


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def definitions(count: int) -> dict:
    """A chain of references, each in the definition before it."""
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}}


HOSTILE = {
    "deep": {"json": deep(400)},
    "references": {"json": definitions(2400)},
    "recursion": {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
    "properties": {"json": {"properties": {f"p{i}": {} for i in range(1500)}}},
    "all of any of": {"json": {"allOf": [{"anyOf": [{"minLength": i + j} for j in range(3)]} for i in range(14)]}},
    "values": {"json": {"enum": [f"value {i}" for i in range(5000)]}},
    "choices": {"choice": [f"value {i}" for i in range(5000)]},
    "exponential": {"regex": "(.*a.{20}){3}|(a|aa)+b"},
    "repeated": {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    "exact": {"regex": "(a{1000}){1000}"},
    "nested": {"regex": "(" * 3000 + "a" + ")" * 3000},
    "intersection": {"grammar": "start: /" + "&".join(f"(.*a{i}.*)" for i in range(200)) + "/"},
    "ambiguous": {"grammar": 'start: s\ns: s s | "a" | ""'},
    "rules": {"grammar": "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(7000)) + '\nr7000: "y"'},
    "terminals": {"grammar": "start: R0\n" + "\n".join(f'R{i}: "x" R{i + 1}' for i in range(7000)) + '\nR7000: "y"'},
    "alternatives": {"grammar": "start: " + " | ".join(f'"a{i}" start' for i in range(3000)) + ' | "b"'},
}


@pytest.fixture(scope="module")
def of_hostile():
    """One compiler for all of them: what one does to its process must not harm the next."""
    return make_compiler()


@pytest.mark.one_in(19)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_followed_or_ends_its_request_soon(of_hostile, name: str):
    """In a thread with the stack of an engine's."""
    events: list[float] = []
    reasons: list[str] = []

    def follow() -> None:
        start = time.monotonic()
        try:
            ours = grammar(HOSTILE[name], compiler=of_hostile)
            random = np.random.default_rng(0)
            for _ in range(40):
                if ours.is_terminated:
                    break
                token = int(random.choice(sorted(allowed(ours))))
                ours.forced_tokens(8)
                assert ours.accept([token]) == 1
                copy = ours.copy()
                copy.roll_back(0)
        except (RequestError, ValueError) as error:
            reasons.append(str(error))
        events.append(time.monotonic() - start)

    thread = Thread(target=follow)
    thread.start()
    thread.join(60)
    assert events
    assert all(reasons)


@pytest.mark.long
def test_text_and_time_have_limits(monkeypatch: pytest.MonkeyPatch):
    refused({"regex": "a" * (1 << 17) + "b"}, "has 131073 characters, more than 131072")
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 1.0)
    slow, released = make_compiler(), Event()
    monkeypatch.setattr(slow._made_backend()[0], "compile", lambda value: released.wait(60))
    with pytest.raises(RequestError, match=r"takes more than 1 s to compile"):
        grammar({"regex": "a"}, compiler=slow)
    released.set()


@pytest.mark.long
def test_an_endless_search_is_stopped_and_the_next_grammar_compiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 3.0)
    ours, threads = make_compiler(), active_count()
    with pytest.raises(RequestError, match="takes more than 3 s to compile"):
        grammar({"json": {"type": "integer", "multipleOf": 999_983}}, compiler=ours)
    assert active_count() <= threads
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 30.0)
    assert grammar({"regex": "ab"}, compiler=ours) is not None


@pytest.mark.long
def test_a_grammar_that_takes_too_much_memory_is_stopped_and_the_next_one_compiles():
    trial = Trial(Vocabulary(BytesTokenizer(), vocab_size=V, eos_token_ids=[END]), memory_bytes=1 << 20)
    with pytest.raises(TooLargeError):
        trial.compile(StructuredOutputs.of(HOSTILE["exact"], "a"), 30.0)
    trial.compile(StructuredOutputs.of({"regex": "ab"}, "a"), 30.0)


LARGE = [{"json": {"type": "integer", "multipleOf": 20011 + 6 * i}} for i in range(3)]
"""Grammars of some ten megabytes each: none of the numbers has a factor in common with 10, which makes them smaller."""


@pytest.mark.long
def test_a_trial_tells_the_memory_of_a_grammar():
    trial = Trial(Vocabulary(BytesTokenizer(), vocab_size=V, eos_token_ids=[END]))
    small, large = {"regex": "ab"}, LARGE[0]
    found = [trial.compile(StructuredOutputs.of(one, "a"), 30.0) for one in (small, large, small, large, small)]
    assert max(found[0::2]) < 4 << 20 < min(found[1::2])


@pytest.mark.long
def test_grammars_are_kept_while_they_fit_into_the_memory_for_them():
    compiled, ours = [], make_compiler(cache_bytes=20 << 20)
    backend, *_ = ours._made_backend()
    compile_one = backend.compile
    backend.compile = lambda value: compiled.append(value.text) or compile_one(value)
    for given in (LARGE[0], LARGE[0], *LARGE[1:], LARGE[0], {"regex": "a"}, {"regex": "b"}, {"regex": "a"}):
        grammar(given, compiler=ours)
    assert len(compiled) == 6  # the first large one was forgotten, the small ones were not
    assert ours._num_bytes <= 20 << 20


def test_why_a_grammar_cannot_be_compiled_is_remembered():
    ours = make_compiler()
    backend, *_ = ours._made_backend()
    tried = []
    compile_one = backend.compile
    backend.compile = lambda value: tried.append(value.text) or compile_one(value)
    for _ in range(3):
        with pytest.raises(RequestError, match="cannot be compiled"):
            grammar({"grammar": "start: other"}, compiler=ours)
    assert len(tried) == 1


def test_a_grammar_that_took_too_long_is_tried_again_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 0.3)
    now = [0.0]
    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ours, released, tried = make_compiler(), Event(), []
    backend, *_ = ours._made_backend()
    compile_one = backend.compile

    def slow(value):
        tried.append(value)
        released.wait(30)
        return compile_one(value)

    backend.compile = slow
    for _ in range(2):
        with pytest.raises(RequestError, match=r"takes more than 0\.3 s"):
            grammar({"regex": "a"}, compiler=ours)
    assert len(tried) == 1
    released.set()
    monkeypatch.setattr(compiler, "COMPILE_SECONDS", 30.0)
    now[0] = compiler.TIMEOUT_HOLDS
    assert grammar({"regex": "a"}, compiler=ours) is not None


def test_what_takes_long_is_told_from_what_does_not(monkeypatch: pytest.MonkeyPatch):
    ours = make_compiler()
    assert ours.settle(SamplingParams(structured_outputs={"regex": "ab"}), 60.0)
    assert not ours.settle(SamplingParams(structured_outputs={"json": {"type": "integer", "multipleOf": 999_983}}), 0.5)
    assert ours.settle(SamplingParams(structured_outputs={"regex": "abc"}), 60.0)
    assert ours.settle(SamplingParams(structured_outputs={"grammar": "start: other"}), 60.0)
    assert ours.settle(SamplingParams(), 60.0)


def test_the_process_of_a_compiler_ends_with_it():
    ours = make_compiler()
    grammar({"regex": "a"}, compiler=ours)
    process = ours._made_backend()[2]._process
    assert process is not None
    assert process.poll() is None
    del ours
    gc.collect()
    assert process.poll() is not None


def test_equal_grammars_are_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    compiled, ours = [], make_compiler()
    backend, *_ = ours._made_backend()
    compile_one = backend.compile
    monkeypatch.setattr(backend, "compile", lambda value: compiled.append(value.text) or compile_one(value))
    monkeypatch.setattr(compiler, "MAX_CACHED", 2)
    for given in ({"json": {"type": "null"}}, {"json": '{"type": "null"}'}, {"regex": "a"}, {"json": {"type": "null"}}):
        grammar(given, compiler=ours)
    assert compiled == ['{"type": "null"}', "a"]
    grammar({"regex": "b"}, compiler=ours)
    grammar({"json": {"type": "null"}}, compiler=ours)
    grammar({"regex": "a"}, compiler=ours)
    assert compiled == ['{"type": "null"}', "a", "b", "a"]
    grammar({"json": {"type": "null"}, "disable_any_whitespace": True}, compiler=ours)
    assert len(compiled) == 5


def test_two_outputs_of_one_grammar_do_not_share_their_place():
    one, other = grammar({"regex": "abc+"}), grammar({"regex": "abc+"})
    assert one.accept(BytesTokenizer().encode("abc")) == 1
    assert END in allowed(one)
    assert END not in allowed(other)


def test_a_request_without_the_extra_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch):
    for name in ("foreword.structured.backend", "foreword.structured.matcher", "foreword.structured.source"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"Install foreword\[grammar\]"):
        grammar({"regex": "a"}, compiler=make_compiler())
    assert grammar(None, compiler=make_compiler(), thinking_end="</think>") is not None


def test_a_model_without_an_end_token_has_no_structured_outputs():
    endless = GrammarCompiler(BytesTokenizer(), vocab_size=V, eos_token_ids=[])
    with pytest.raises(RequestError, match="no end token"):
        grammar({"regex": "a"}, compiler=endless)


def test_a_vocabulary_that_writes_a_space_before_every_text_is_read_without_it():
    class Spaced(BytesTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
            return super().encode(" " + text)

    ours = GrammarCompiler(Spaced(), vocab_size=V, eos_token_ids=[END])
    made = ours.grammar("a", SamplingParams(structured_outputs={"choice": ["abc name"]}))
    assert made is not None
    assert list(made.forced_tokens(9))[:2] == BytesTokenizer().encode("abc name")[:2]


def test_a_schema_cannot_bring_back_endless_whitespace():
    for given in (
        {"json": {"type": "array", "x-guidance": {"whitespace_pattern": " *", "whitespace_flexible": True}}},
        {"json": {"type": "array"}},
        {"json": {"type": "array"}, "max_whitespace": 3},
        {"json_object": True},
    ):
        ours, text = grammar(given), "{" if "json_object" in given else "["
        assert ours.accept(BytesTokenizer().encode(text)) == 1
        spaces = BytesTokenizer().encode(" " * 9)
        assert ours.accept(spaces) == given.get("max_whitespace", 0), json.dumps(given)
