"""Structured outputs through the engine: complete, the same in every arrangement, and fewer steps than tokens."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from random import Random
from threading import Event

import pytest
from bytes_tokenizer import COMPILER, END, BytesTokenizer, V, make_compiler
from engine_rig import run, token_ids
from oracle_model import OracleExecutor

from foreword.batch import KVGroup, SamplingParams
from foreword.engine import Engine, engine_config
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import RequestError

PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada Lovelace", "Grace Hopper"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}


def is_person(text: str) -> bool:
    value = json.loads(text)
    named = value["name"] in ("Ada Lovelace", "Grace Hopper") and 0 <= value["age"] <= 150
    return named and set(value["colours"]) <= {"red", "blue"} and text == json.dumps(value)


KINDS: dict[str, tuple[dict, Callable[[str], object]]] = {
    "json": ({"structured_outputs": {"json": PERSON}}, is_person),
    "compact": (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        lambda text: is_person(json.dumps(json.loads(text))) and " " not in text.replace("a L", "").replace("e H", ""),
    ),
    "regex": ({"structured_outputs": {"regex": "(abc|[0-9]){4,9}!"}}, re.compile("(abc|[0-9]){4,9}!").fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", "abc"]}}, ["yes", "no", "abc"].__contains__),
    "grammar": (
        {"structured_outputs": {"grammar": 'start: "(" item ("," item){0,3} ")"\nitem: /[a-c]/ | "red"'}},
        re.compile(r"\(([a-c]|red)(,([a-c]|red)){0,3}\)").fullmatch,
    ),
    "thinking": (
        {"structured_outputs": {"json": PERSON}, "thinking_end": "</think>", "thinking_budget": 5},
        lambda text: is_person(text.split("</think>", 1)[1]),
    ),
    "free": ({}, lambda text: True),
    "free too": ({}, lambda text: True),
}


def make_engine(*, blocks: int = 257, executor: type = OracleExecutor, **config) -> Engine:
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 4, "watermark": 0.0, "check": "full"}
    groups = [KVGroup(4)]
    return Engine(
        executor(V, groups, blocks),
        vocab_size=V,
        max_model_len=128,
        kv_groups=groups,
        num_blocks=blocks,
        config=engine_config(settings | config),
        tokenizer=BytesTokenizer(),
        eos_token_ids=[END],
        grammars=COMPILER,
    )


def params_of(kind: str, **others) -> SamplingParams:
    return SamplingParams(**({"temperature": 1.0, "seed": len(kind), "max_tokens": 90} | KINDS[kind][0] | others))


def serve(engine: Engine, **others) -> dict:
    for i, kind in enumerate(KINDS):
        engine.add_request(kind, [3 + i, 9, 9, 9], params_of(kind, **others))
    outputs = run(engine)
    engine.close()
    assert not engine.pipeline.grammars
    return outputs


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """The tokens of each request with no other, without forced tokens."""
    return token_ids(serve(make_engine(max_num_seqs=1, max_forced_tokens=0, prefix_caching=False)))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_forced_tokens": 0},
        {"max_forced_tokens": 30},
        {"max_num_batched_tokens": 5},
        {"async_scheduling": True},
        {"speculation": SpeculationConfig(min_match=1, num_tokens=3, adaptive=False)},
        {
            "speculation": SpeculationConfig(min_match=1, num_tokens=12),
            "max_forced_tokens": 2,
            "async_scheduling": True,
        },
        {"blocks": 34, "reserve_full_prompt": False},
        {"blocks": 34, "reserve_full_prompt": False, "async_scheduling": True},
    ],
)
def test_outputs_have_their_form_and_are_the_same_as_alone(alone, config):
    outputs = serve(make_engine(**config))
    for kind, (_, fits) in KINDS.items():
        completion = outputs[kind].outputs[0]
        assert fits(completion.text), (kind, completion.text)
        if not kind.startswith("free"):
            assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert token_ids(outputs) == alone
    if "blocks" in config:
        assert sum(output.metrics.num_preemptions for output in outputs.values()) > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_each_completion_has_a_place_of_its_own(prefix_caching: bool):
    outputs = serve(make_engine(prefix_caching=prefix_caching), n=3)
    for kind, (_, fits) in KINDS.items():
        completions = outputs[kind].outputs
        assert len(completions) == 3
        assert all(fits(completion.text) for completion in completions), kind
        if kind != "choice":
            assert len({completion.text for completion in completions}) > 1


def test_forced_tokens_take_no_step_of_their_own():
    def steps(**config) -> tuple[int, list[int]]:
        engine = make_engine(**config)
        engine.add_request("a", [3, 9], params_of("json"))
        output = run(engine)["a"].outputs[0]
        engine.close()
        return engine.executor.num_steps, output.token_ids

    (slow, plain), (fast, same) = steps(max_forced_tokens=0), steps()
    assert same == plain
    assert slow == len(plain)
    assert fast < slow / 2


@pytest.mark.parametrize("min_match", [1, 4])
def test_forced_tokens_are_not_counted_as_drafts(min_match):
    engine = make_engine(speculation=SpeculationConfig(min_match=min_match, adaptive=False))
    engine.add_request("a", [3, 9], params_of("json"))
    engine.add_request("b", [3, 9], params_of("json", stop=['"']))
    metrics = [output.metrics for output in run(engine).values()]
    stats = engine.speculation.stats
    assert (stats.num_drafted > 0) == (min_match == 1)
    assert sum(each.num_proposed_drafts for each in metrics) == stats.num_drafted
    assert 0 <= sum(each.num_accepted_drafts for each in metrics) <= stats.num_accepted


def test_an_output_ends_with_its_structure_whatever_else_would_end_it():
    engine = make_engine()
    engine.add_request("no end", [3, 9], params_of("choice", ignore_eos=True))
    engine.add_request("long", [3, 9], params_of("choice", min_tokens=40))
    engine.add_request("cut", [3, 9], params_of("json", max_tokens=3))
    outputs = {name: output.outputs[0] for name, output in run(engine).items()}
    assert {outputs[name].text for name in ("no end", "long")} <= {"yes", "no", "abc"}
    assert (outputs["cut"].finish_reason, len(outputs["cut"].token_ids)) == ("length", 3)


def test_a_grammar_that_fails_while_it_runs_ends_its_own_request():
    engine = make_engine()
    engine.add_request("a", [3, 9], SamplingParams(structured_outputs={"regex": "x?(a{1000}){1000}"}, max_tokens=20))
    engine.add_request("b", [3, 9], params_of("choice"))
    outputs = run(engine)
    engine.close()
    assert outputs["a"].outputs[0].finish_reason in ("error", "length")
    if outputs["a"].error is not None:
        assert isinstance(outputs["a"].error, RequestError)
        assert re.match(
            "request 'a': structured_outputs = .*: llguidance: .*Use a simpler one", str(outputs["a"].error)
        )
    assert outputs["b"].outputs[0].finish_reason == "stop"


def test_a_step_that_fails_leaves_every_grammar_at_the_committed_tokens(alone):
    class Failing(OracleExecutor):
        def compute(self, batch, logits_indices):
            if self.num_steps % 3 == 2:
                self.num_steps += 1
                raise MemoryError("no more memory")
            return super().compute(batch, logits_indices)

    engine = make_engine(executor=Failing)
    for i, kind in enumerate(KINDS):
        engine.add_request(kind, [3 + i, 9, 9, 9], params_of(kind))
    done = {}
    while engine.has_work:
        with suppress(MemoryError):
            done |= {o.request_id: o for o in engine.step()}
    engine.close()
    assert token_ids(done) == alone


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_interrupts_leave_every_grammar_at_the_committed_tokens(alone, async_scheduling: bool):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    random, num_interrupts = Random(1), 0
    gc.disable()  # an interrupt in a callback of the collector, such as hypothesis's, does not reach the engine
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while num_interrupts <= 10:  # how many steps are interrupted depends on the machine
            engine, done = make_engine(async_scheduling=async_scheduling, check="off"), {}
            for i, kind in enumerate(KINDS):
                engine.add_request(kind, [3 + i, 9, 9, 9], params_of(kind))
            while engine.has_work:
                try:
                    if num_interrupts <= 10:  # a slow machine may need longer than that for each step
                        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.02))
                    done |= {o.request_id: o for o in engine.step()}
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    num_interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            engine.close()
            assert token_ids({o.request_id: o for o in done.values()} | missing(engine, done)) == alone
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()


def missing(engine: Engine, done: dict) -> dict:
    """Outputs that an interrupt kept from the caller after `step` had returned them."""
    lost = {}
    for i, kind in enumerate(KINDS):
        if kind not in done:
            again = make_engine()
            again.add_request(kind, [3 + i, 9, 9, 9], params_of(kind))
            lost |= run(again)
            again.close()
    return lost


def test_a_grammar_is_compiled_outside_the_loop_and_the_engine():
    compiler, released, began = make_compiler(), Event(), Event()
    backend, *_ = compiler._made_backend()
    compile_one = backend.compile

    def slow(value):
        began.set()
        assert released.wait(60)
        return compile_one(value)

    backend.compile = slow
    engine = make_engine()
    engine._intake._grammars = compiler

    async def main() -> tuple[str, str]:
        async with AsyncEngine(engine) as serving:

            async def ask(kind: str) -> str:
                return [o async for o in serving.generate([3, 9], params_of(kind))][-1].outputs[0].text

            waits = asyncio.create_task(ask("choice"))
            await asyncio.to_thread(began.wait, 60)
            free = await ask("free")
            assert not waits.done()
            released.set()
            with pytest.raises(RequestError, match="request-2"):
                async for _ in serving.generate([3], SamplingParams(structured_outputs={"regex": "("})):
                    pass
            return free, await waits

    free, chosen = asyncio.run(main())
    assert free
    assert chosen in ("yes", "no", "abc")


def test_what_cannot_be_followed_is_refused_before_it_starts():
    engine = make_engine()
    for params, reason in (
        ({"structured_outputs": {"regex": "("}}, "cannot be compiled: llguidance: .* unclosed group"),
        ({"thinking_budget": 3}, "thinking_budget = 3: needs thinking_end"),
        ({"thinking_start": "<think>"}, "thinking_start = '<think>': needs thinking_end"),
        ({"thinking_start": V, "thinking_end": "x"}, f"thinking_start = {V}: expected a token id"),
        ({"thinking_end": V}, f"thinking_end = {V}: expected a token id"),
    ):
        with pytest.raises(RequestError, match=rf"request 'a': {reason}|request 'a': .*{reason}"):
            engine.add_request("a", [3], SamplingParams(**params))
    assert not engine.has_work
    for params, reason in (
        ({"structured_outputs": {"jsn": {}}}, r"structured_outputs = 'jsn': is unknown. Did you mean 'json'\?"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "expected exactly one of json"),
        ({"structured_outputs": "json"}, "expected a mapping"),
        ({"thinking_end": ""}, "thinking_end = ''"),
        ({"thinking_end": "x", "thinking_budget": -1}, "thinking_budget = -1: must be from 0"),
    ):
        with pytest.raises(RequestError, match=reason):
            SamplingParams(**params)
