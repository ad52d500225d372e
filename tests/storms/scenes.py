"""Scenes of the storms: random engines on `HashExecutor`, random requests, and the outcome of each request alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from hash_model import HalfRight, HashExecutor
from oracle_model import LetterTokenizer

from foreword import LLM
from foreword.batch import KVGroup, SamplingParams
from foreword.engine import Engine, RequestOutput, engine_config
from foreword.engine.model import Model
from foreword.engine.speculation import SpeculationConfig

V, M = 30, 64
GROUPS = {
    "full": [KVGroup(4)],
    "window": [KVGroup(4, sliding_window=7)],
    "hybrid": [KVGroup(4), KVGroup(4, sliding_window=6)],
    "states": [KVGroup(4, recurrent=True)],
    "hybrid states": [KVGroup(4), KVGroup(4, sliding_window=6), KVGroup(2, recurrent=True)],
}
DRAFTS = {
    "no drafts": None,
    "ngram": SpeculationConfig(min_match=1, adaptive=False),
    "drafter": SpeculationConfig(method="draft_model", model="half right", num_tokens=3),
}

RECORDINGS = TemporaryDirectory(prefix="foreword-storm-")
"""The last steps of engines before steps that failed."""


@dataclass(frozen=True)
class Scene:
    """An engine's configuration. kind: a key of GROUPS; drafts: a key of DRAFTS; options: of `EngineConfig`.
    num_states: slots of recurrent states; 0: they are in blocks.
    """

    kind: str
    drafts: str
    num_blocks: int
    options: dict[str, Any]
    max_model_len: int = M
    num_states: int = 0

    @classmethod
    def choose(cls, random: Random, *, async_scheduling: bool) -> Scene:
        kind = random.choice([*GROUPS, "full", "full"])
        one = sum(1 if g.recurrent else M // g.block_size + 1 for g in GROUPS[kind])
        return cls(
            kind,
            random.choice(list(DRAFTS)),
            1 + one + random.choice([1, 6, 20, 80]),
            {
                "async_scheduling": async_scheduling,
                "max_num_seqs": random.choice([2, 4, 8]),
                "max_num_batched_tokens": random.choice([9, 32, 64]),
                "reserve_full_prompt": random.random() < 0.3,
                "prefix_caching": random.random() < 0.9,
                "policy": random.choice(["fcfs", "fcfs", "shortest-first", "priority"]),
                "long_prefill_threshold": random.choice([0, 0, 5]),
                "check": "full" if random.random() < 0.12 else "off",
            },
            num_states=random.choice([0, 1, 3, 12, 40]) if any(g.recurrent for g in GROUPS[kind]) else 0,
        )

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.kind}, {self.drafts}, num_blocks={self.num_blocks}, num_states={self.num_states}, {options}"

    def engine(self, **parts: Any) -> Engine:
        """parts: further arguments of `Engine`."""
        groups = GROUPS[self.kind]
        if self.drafts == "drafter":
            parts.setdefault("drafter", HalfRight)
        parts.setdefault("executor", HashExecutor(V, groups, self.num_blocks, self.num_states))
        parts.setdefault("tokenizer", LetterTokenizer())
        return Engine(
            vocab_size=V,
            max_model_len=self.max_model_len,
            kv_groups=groups,
            num_blocks=self.num_blocks,
            num_states=self.num_states,
            config=engine_config(
                {"watermark": 0.0, "speculation": DRAFTS[self.drafts], "flight_folder": RECORDINGS.name} | self.options
            ),
            **parts,
        )


PLAIN = Scene("full", "no drafts", 65, {"prefix_caching": False, "max_num_seqs": 8}, 2 * M)


class LetterModel(Model[Any]):
    """A model without weights, for engines that exist."""

    name, tokenizer, vocab_size = "storm", LetterTokenizer(), V

    def __init__(self) -> None:
        pass

    def pool(self, config):
        raise NotImplementedError

    def executor(self, size):
        raise NotImplementedError


def llm_on(engine: Engine) -> LLM:
    """The offline interface of an engine that is there already."""
    return LLM.of(LetterModel(), engine)


def some_params(random: Random) -> SamplingParams:
    params = SamplingParams(
        temperature=random.choice([0.0, 0.0, 0.8, 1.3]),
        top_k=random.choice([0, 0, 5]),
        top_p=random.choice([1.0, 0.8]),
        seed=random.randrange(1000),
        max_tokens=random.randint(1, 14),
        n=random.choice([1, 1, 1, 2]),
        logprobs=random.choice([None, None, 1]),
    )
    return replace(
        params,
        **random.choice(
            [
                {},
                {},
                {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2},
                {"bad_words": ["c", "ab"], "bad_words_token_ids": [[5], [7, 8]]},
                {"allowed_token_ids": random.sample(range(1, V), 6)},
                {"logit_bias": {4: 5.0, 9: -100.0}},
                {"stop": ("ab", "q")},
                {"stop_token_ids": random.sample(range(V), 3), "min_tokens": 1},
                {"prompt_logprobs": 1},
                {"best_of": 3},
                {"min_p": 0.1},
                {"typical_p": 0.7, "top_n_sigma": 1.5},
                {"xtc_probability": 0.5, "xtc_threshold": 0.05},
                {"dry_multiplier": 1.5, "dry_sequence_breakers": ["c"]},
            ]
        ),
    )


def outcome(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All of an output that other requests must not change."""
    completions = [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
    return [*completions, ("prompt", output.prompt_token_ids, output.prompt_logprobs)]


@dataclass
class Entry:
    """A request, and what it gives on an engine of its own."""

    prompt: list[int]
    params: SamplingParams

    @cached_property
    def wanted(self) -> list[tuple[Any, ...]]:
        engine = PLAIN.engine()
        engine.add_request("x", self.prompt, self.params)
        return outcome(run(engine)["x"])


@dataclass
class Catalogue:
    """The requests of a storm. Their prompts share prefixes, some of which end inside a block."""

    seed: int
    size: int = 60
    make_params: Callable[[Random], SamplingParams] = some_params
    entries: list[Entry] = field(init=False)

    def __post_init__(self) -> None:
        random = Random(f"catalogue {self.seed}")
        stems = [[random.randrange(V) for _ in range(40)] for _ in range(2)]
        self.entries = []
        for _ in range(self.size):
            stem = random.choice(stems)[: random.randint(0, 36)]
            prompt = stem + [random.randrange(V) for _ in range(random.randint(1, 6))]
            self.entries.append(Entry(prompt, self.make_params(random)))

    def choose(self, random: Random, most: int = 8) -> list[Entry]:
        return random.choices(self.entries, k=random.randint(1, most))


def run(engine: Engine, most_steps: int = 3000) -> dict[str, RequestOutput]:
    """Step until nothing is left: the final output of each request, which must come once."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(most_steps):
        if not engine.has_work:
            return outputs
        collect(engine.step(), outputs)
    raise Violation("never idle", f"{engine.num_unfinished} requests are left after {most_steps} steps")


def collect(new: list[RequestOutput], outputs: dict[str, RequestOutput]) -> None:
    for output in new:
        if output.finished:
            if output.request_id in outputs:
                raise Violation("ended twice", output.request_id)
            outputs[output.request_id] = output


class Violation(AssertionError):
    """The engine does not hold what it must. kind: of the damage, to count by."""

    def __init__(self, kind: str, detail: object = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


def check_outcome(output: RequestOutput, entry: Entry, name: str, *, may_fail: bool = False) -> None:
    """The request has the outcome that it has alone. may_fail: or an error ended it after some of these tokens."""
    got = outcome(output)
    if may_fail and any(c.finish_reason == "error" for c in output.outputs):
        if entry.params.best_of is not None:
            return
        pairs = zip(got[:-1], entry.wanted[:-1], strict=True)
        right = all(mine[0] == whole[0][: len(mine[0])] for mine, whole in pairs)
    else:
        right = got == entry.wanted
    if not right:
        raise Violation(
            "wrong output", f"request {name}: {got}, {getattr(output, 'error', None)!r}, alone {entry.wanted}"
        )


def check_idle(engine: Engine) -> None:
    """Nothing of any request is left in the engine."""
    pool, states, scheduler = engine.cache.pool, engine.states, engine.scheduler
    for what, left in (
        ("work", engine.has_work),
        ("requests", engine.num_unfinished),
        ("used blocks", pool.num_used),
        ("blocks with references", np.flatnonzero(pool.num_refs[1:]).tolist()),
        ("used states", engine.cache.state_pool.num_used),
        ("missing free blocks", pool.num_blocks - 1 - pool.num_free),
        ("state rows", len(states) or np.flatnonzero(states.live).tolist()),
        ("running rows", scheduler.running.rows.tolist()),
        ("waiting requests", len(scheduler.waiting)),
        ("grammars", list(engine.pipeline.grammars)),
    ):
        if left:
            raise Violation(f"leak of {what}", left)


def check_pool(engine: Engine) -> None:
    """The cache can be reset, and then every block can be allocated once."""
    pool = engine.cache.pool
    if not engine.reset_prefix_cache():
        raise Violation("reset refused", "the engine is idle")
    if pool.is_cached.any() or len(engine.cache.tree):
        raise Violation("content after a reset")
    for own in (pool, engine.cache.state_pool):
        blocks = own.allocate(own.num_free)
        if len(set(blocks.tolist())) != own.num_blocks - (own is pool):
            raise Violation("free blocks are not all blocks", sorted(blocks.tolist()))
        own.free(blocks)
