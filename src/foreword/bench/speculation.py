"""Speculation on real prompts: tokens per second of each method, taking turns on one executor."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from foreword.batch import InputBatch, SamplingParams
from foreword.bench.prompts import PROMPTS
from foreword.engine.build import build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.engine.observer import EngineObserver
from foreword.engine.outputs import RequestOutput
from foreword.engine.speculation import SpeculationConfig
from foreword.models.loader import load_model
from foreword.scheduler import SchedulerConfig, StepPlan


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Medians over the repeats.

    tok_s: output tokens per second from the last first token to the end. ratio: tok_s over that of the run without
    speculation in the same turn. tokens_per_step: tokens per request in steps that verified drafts.
    """

    kind: str
    at_once: int
    method: str
    tok_s: float
    ratio: float
    drafts_per_token: float
    acceptance: float
    tokens_per_step: float


@dataclass(slots=True)
class _Runs:
    tok_s: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    verified: int = 0
    tokens: int = 0


def run(
    model: str,
    *,
    num_tokens: int = 4,
    step_overhead: float = 18.0,
    adaptive: bool = True,
    draft_model: str | None = None,
    at_once: Sequence[int] = (1, 8),
    max_tokens: int = 128,
    repeats: int = 3,
    temperature: float = 0.0,
    async_scheduling: bool = False,
    options: dict[str, Any] | None = None,
) -> Iterator[SpeculationResult]:
    """One result per kind of prompt, number of concurrent requests and method.

    AssertionError if the tokens of a method differ from those without speculation.
    """
    loaded = load_model(model)
    ngram = SpeculationConfig(num_tokens=num_tokens, adaptive=adaptive, step_overhead=step_overhead)
    methods = {"ngram": ngram, "suffix": replace(ngram, method="suffix")}
    if draft_model is not None:
        methods["draft_model"] = replace(ngram, method="draft_model", model=draft_model)
    base = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=max(at_once)),
        max_model_len=1024,
        prefix_caching=False,
        async_scheduling=async_scheduling,
    )
    off = build_engine(loaded, base, **(options or {}))
    engines = {"off": off} | {
        name: build_engine(loaded, replace(base, speculation=speculation), runs_on=off.executor, **(options or {}))
        for name, speculation in methods.items()
    }
    for kind, messages in PROMPTS.items():
        prompts = [
            loaded.tokenizer.encode(
                loaded.tokenizer.apply_chat_template([{"role": "user", "content": message}]), add_special_tokens=False
            )
            for message in messages
        ]
        for count in at_once:
            # For a count of 1 each prompt is a batch of its own.
            batches = [[p] for p in prompts] if count == 1 else [list(islice(cycle(prompts), count))]
            runs = {name: _Runs() for name in engines}
            for repeat in range(repeats + 1):
                for batch in batches:
                    wanted: list[list[int]] | None = None
                    for name, engine in engines.items():
                        tokens, tok_s = _serve(engine, batch, max_tokens, temperature, runs[name])
                        wanted = tokens if wanted is None else wanted
                        assert tokens == wanted, f"{kind}: {name} changed the output"
                        if repeat:  # the first repeat is the warm-up
                            runs[name].tok_s.append(tok_s)
            for name, r in runs.items():
                yield SpeculationResult(
                    kind=kind,
                    at_once=count,
                    method=name,
                    tok_s=float(np.median(r.tok_s)),
                    ratio=float(np.median(np.array(r.tok_s) / np.array(runs["off"].tok_s))),
                    drafts_per_token=r.drafted / r.tokens,
                    acceptance=r.accepted / r.drafted if r.drafted else 0.0,
                    tokens_per_step=1 + r.accepted / r.verified if r.verified else 1.0,
                )
    for engine in engines.values():
        engine.close()


def _serve(
    engine: Engine, prompts: list[list[int]], max_tokens: int, temperature: float, runs: _Runs
) -> tuple[list[list[int]], float]:
    """The tokens of each prompt, and the rate in tokens per second after all first tokens."""
    stats = engine.speculation.stats if engine.speculation is not None else None
    before = (stats.num_drafted, stats.num_accepted, stats.num_steps) if stats is not None else (0, 0, 0)
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step()}
    end = time.perf_counter()
    begin = max(o.metrics.first_token_time or end for o in outputs.values())
    tokens = [outputs[str(i)].outputs[0].token_ids for i in range(len(prompts))]
    if stats is not None:
        runs.drafted += stats.num_drafted - before[0]
        runs.accepted += stats.num_accepted - before[1]
        runs.verified += stats.num_steps - before[2]
    runs.tokens += sum(map(len, tokens))
    return tokens, (sum(map(len, tokens)) - len(tokens)) / (end - begin)


def step_overhead(model: str, *, options: dict[str, Any] | None = None, repeats: int = 12) -> float:
    """The cost of a step of one request besides its tokens, in tokens: F / c of the line  seconds = F + c · tokens
    through the fastest steps with 1 … 9 tokens, measured in turns.
    """
    config = SpeculationConfig(num_tokens=8, adaptive=False)
    engine = build_engine(
        load_model(model),
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1), max_model_len=1024, speculation=config),
        **(options or {}),
    )
    assert engine.speculation is not None
    drafter = engine.speculation.drafter = _FixedDrafts(engine.states.max_num_draft_tokens)
    fastest: dict[int, float] = {}
    sizes = (1, 2, 3, 5, 9)
    engine.add_request(
        "0", [1000] * 128, SamplingParams(temperature=0.0, max_tokens=len(sizes) * repeats + 8, ignore_eos=True)
    )
    sizes_run = StepSizes()
    engine.observers.add(sizes_run)
    for turn in range(len(sizes) * repeats):
        drafter.count = sizes[turn % len(sizes)] - 1
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        fastest[sizes_run.last] = min(seconds, fastest.get(sizes_run.last, seconds))
    engine.abort("0")
    tokens = np.array([size for size in sizes if size in fastest])
    slope, start = np.polyfit(tokens, [fastest[size] for size in tokens.tolist()], 1)
    return float(start / slope)


class StepSizes(EngineObserver):
    """last: tokens of the last step."""

    last = 0

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self.last = batch.num_tokens


class _FixedDrafts:
    """Proposes ``count`` drafts."""

    relative_cost = 0.0

    def __init__(self, width: int) -> None:
        self.width, self.count = width, 0

    def propose(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        column = np.arange(self.width)
        return np.where(column < np.minimum(most, self.count)[:, None], 7 + column, -1).astype(np.int32)
