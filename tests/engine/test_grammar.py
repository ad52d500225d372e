"""Requests with a grammar: every output follows it, and is the most likely one step by step."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_rig import Guesser, V, answer, make_engine, run
from oracle_model import START, OracleExecutor, following, logits_after

from foreword.batch import Origin, SamplingParams, StructuredOutputs
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import RequestError
from foreword.executors import Capability
from foreword.sampling import NoTokenLeftError

END = 29
ALLOWED = {0: {1, 2, 3, 4}, 1: {5, 6, 7, 8}, 2: {9, 10, END}}  # state → tokens; the states follow in a circle
DRAFTS = SpeculationConfig(method="draft_model", model="guesser", num_tokens=3, adaptive=False)


class Circle:
    """A grammar that allows the tokens of ALLOWED[number of tokens so far mod 3], and ends with END."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def is_terminated(self) -> bool:
        return END in self.tokens

    def fill_mask(self, words) -> None:
        words[:] = sum(1 << token for token in ALLOWED[len(self.tokens) % 3])

    def accept(self, token_ids) -> int:
        for n, token in enumerate(token_ids):
            if self.is_terminated or token not in ALLOWED[len(self.tokens) % 3]:
                return n
            self.tokens.append(token)
        return len(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        del self.tokens[len(self.tokens) - num_tokens :]

    def reset(self) -> None:
        self.tokens.clear()

    def copy(self) -> Circle:
        return type(self)()

    def forced_tokens(self, limit: int) -> list[int]:
        return []


def expected(prompt: list[int], length: int) -> list[int]:
    """The greedy output under the grammar, with no engine at all."""
    prefix, output = START, []
    for token in prompt:
        prefix = following(prefix, token)
    while len(output) < length and END not in output:
        ids = sorted(ALLOWED[len(output) % 3])
        output.append(ids[int(np.argmax(logits_after(prefix, V)[ids]))])
        prefix = following(prefix, output[-1])
    return output


@pytest.mark.one_in(9)
@pytest.mark.parametrize("stops_at", ["eos", "grammar"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 3},
        {"speculation": DRAFTS, "drafter": Guesser},
        {"speculation": DRAFTS, "drafter": Guesser, "async_scheduling": True},
        {"blocks": 17, "reserve_full_prompt": False, "async_scheduling": True},
    ],
)
def test_outputs_follow_the_grammar_to_its_end(config, stops_at):
    engine = make_engine(eos=[END] if stops_at == "eos" else [], **config)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    prompts = {str(i): [1 + (i + j) % 9 for j in range(5 + 3 * i)] for i in range(8)}
    grammars = {name: Circle() for name in prompts}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params, grammar=grammars[name])
        engine.add_request(f"free {name}", prompt, params)
    outputs = run(engine)
    engine.close()
    lengths = []
    for name, prompt in prompts.items():
        output = outputs[name].outputs[0]
        assert output.token_ids == grammars[name].tokens == expected(prompt, 20)
        assert output.finish_reason == ("stop" if END in output.token_ids else "length")
        assert outputs[f"free {name}"].outputs[0].token_ids[:1] != [END]
        lengths.append(len(output.token_ids))
    assert min(lengths) < 20
    if "blocks" in config:
        assert sum(o.metrics.num_preemptions for o in outputs.values()) > 0
    assert not engine.pipeline.grammars


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_masks_are_computed_while_the_model_runs(async_scheduling: bool):
    filled = threading.Event()

    class Watched(Circle):
        def fill_mask(self, words) -> None:
            super().fill_mask(words)
            filled.set()

    class Waiting(OracleExecutor):
        def compute(self, batch, logits_indices):
            logits = super().compute(batch, logits_indices)
            assert filled.wait(60)
            filled.clear()
            return logits

    assert answer(
        [1, 2, 3],
        SamplingParams(temperature=0.0, max_tokens=20),
        grammar=Watched(),
        executor=Waiting,
        eos=[END],
        async_scheduling=async_scheduling,
    ).outputs[0].token_ids == expected([1, 2, 3], 20)


def test_further_completions_follow_copies_of_the_grammar():
    outputs = answer([1, 2, 3], SamplingParams(seed=3, n=8, max_tokens=20), grammar=Circle(), eos=[END]).outputs
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    for output in outputs:
        assert Circle().accept(output.token_ids) == len(output.token_ids)


def test_wrong_forced_tokens_cost_time_alone():
    class Wrong(Circle):
        def forced_tokens(self, limit: int) -> list[int]:
            if len(self.tokens) == 2:
                raise RuntimeError("no forced tokens")
            return [1, 6, 2, 9][:limit]

    for config in ({}, {"async_scheduling": True}, {"speculation": DRAFTS, "drafter": Guesser}):
        assert answer(
            [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20), grammar=Wrong(), eos=[END], **config
        ).outputs[0].token_ids == expected([1, 2, 3], 20)


def test_a_failed_step_leaves_the_grammar_at_the_committed_tokens():
    class Flaky(OracleExecutor):
        def compute(self, batch, logits_indices):
            if self.num_steps == 1:
                self.num_steps += 1
                raise MemoryError("no more memory")
            return super().compute(batch, logits_indices)

    engine = make_engine(executor=Flaky, eos=[END], speculation=DRAFTS, drafter=Guesser)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=20), grammar=Circle())
    assert engine.step() == []
    with pytest.raises(MemoryError):
        engine.step()
    assert run(engine)["a"].outputs[0].token_ids == expected([1, 2, 3], 20)


def test_a_grammar_that_leaves_no_token_ends_its_request_alone_with_an_error_that_names_it():
    class Nothing(Circle):
        def fill_mask(self, words) -> None:
            words[:] = 0

    engine = make_engine()
    engine.add_request("a", [1, 2, 3], grammar=Nothing())
    engine.add_request("b", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5), grammar=Circle())
    asked = StructuredOutputs.of_schema({}, Origin("response_format.schema", {}))
    engine.add_request("c", [1, 2, 3], SamplingParams(structured_outputs=asked), grammar=Nothing())
    outputs = run(engine)
    assert isinstance(outputs["a"].error, NoTokenLeftError)
    assert str(outputs["a"].error).startswith("request 'a': structured_outputs = 'token mask of step 1'")
    assert isinstance(outputs["c"].error, NoTokenLeftError)
    assert str(outputs["c"].error).startswith("request 'c': response_format.schema = 'token mask of step ")
    assert (outputs["a"].outputs[0].finish_reason, outputs["a"].outputs[0].token_ids) == ("error", [])
    assert outputs["b"].error is None
    assert outputs["b"].outputs[0].token_ids == expected([1, 2, 3], 5)
    assert engine.cache.pool.num_used == 0


def test_what_cannot_be_followed_is_refused():
    schema = SamplingParams(structured_outputs={"json": {"type": "object"}})
    with pytest.raises(RequestError, match=r"structured_outputs = .* does not compile grammars"):
        make_engine().add_request("a", [1], schema)
    make_engine().add_request("a", [1], schema, grammar=Circle())

    class Without(OracleExecutor):
        capabilities = frozenset({Capability.RECURRENT_STATE})

    for field, options in (("structured_outputs", {"params": schema}), ("grammar", {"grammar": Circle()})):
        with pytest.raises(RequestError, match=rf"request 'a': {field} = .*Without .*Capability\.GRAMMAR"):
            make_engine(executor=Without).add_request("a", [1], **options)
