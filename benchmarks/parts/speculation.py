"""Speculation on real prompts and on W1 to W5: tokens per second of each method, taking turns by step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import numpy as np

from foreword.batch import InputBatch, SamplingParams
from foreword.bench.requests import make
from foreword.bench.serving import Served, greedy
from foreword.engine.build import build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.model import Model
from foreword.engine.observer import EngineObserver
from foreword.engine.speculation import SpeculationConfig
from foreword.scheduler import SchedulerConfig, StepPlan
from parts.prompts import PROMPTS
from parts.turns import apart, chat_prompts, in_turns_by_step, load_with

WORKLOADS = ("W1", "W2", "W3", "W4", "W5")
KINDS = (*PROMPTS, *WORKLOADS)
"""Names of prompts and workloads."""
METHODS = ("default", "ngram", "suffix")


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Medians over the repeats.

    tok_s: output tokens per second of a whole run, prompts included. ratio: tok_s over that of the run without
    speculation in the same turn; lowest, highest: of a turn. tokens_per_step: tokens per request in steps that verified
    drafts.
    """

    kind: str
    at_once: int
    method: str
    tok_s: float
    ratio: float
    lowest: float
    highest: float
    drafts_per_token: float
    acceptance: float
    tokens_per_step: float


def run(
    model: str,
    *,
    num_tokens: int = 8,
    step_overhead: float = 18.0,
    adaptive: bool = True,
    draft_model: str | None = None,
    at_once: Sequence[int] = (1, 8),
    max_tokens: int = 128,
    repeats: int = 3,
    async_scheduling: bool = False,
    options: dict[str, Any] | None = None,
    kinds: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
) -> Iterator[SpeculationResult]:
    """Return one result per kind of prompt, number of concurrent requests and method. kinds: of `KINDS`; None: all.

    Raise AssertionError if the tokens of a method differ from those without speculation.
    """
    loaded = load_with(model, options)
    ngram = SpeculationConfig(num_tokens=num_tokens, adaptive=adaptive, step_overhead=step_overhead)
    configs = {"default": EngineConfig().speculation, "ngram": ngram, "suffix": replace(ngram, method="suffix")}
    configs = {name: configs[name] for name in methods}
    if draft_model is not None:
        configs["draft_model"] = replace(ngram, method="draft_model", model=draft_model)
    base = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=max(*at_once, 64)),
        max_model_len=1024,
        prefix_caching=False,
        async_scheduling=async_scheduling,
        speculation=None,
    )
    off = build_engine(loaded, base)
    engines = {"off": off} | {
        name: build_engine(loaded, replace(base, speculation=speculation), executor=off.executor)
        for name, speculation in configs.items()
    }
    apart(list(engines.values()))
    for kind, count, batches in _batches(loaded, kinds or (*PROMPTS, *WORKLOADS), at_once, max_tokens):
        runs: dict[str, list[Served]] = {name: [] for name in engines}
        for prompts, params in batches:
            for name, served in in_turns_by_step(engines, prompts, params, repeats):
                runs[name].append(served)
        rates = {
            name: np.array([served.num_tokens / (served.end - served.begin) for served in of_method])
            for name, of_method in runs.items()
        }
        for name, of_method in runs.items():
            ratios = rates[name] / rates["off"]
            drafted, accepted, verified = np.sum([served.drafts for served in of_method], 0).tolist()
            yield SpeculationResult(
                kind=kind,
                at_once=count,
                method=name,
                tok_s=float(np.median(rates[name])),
                ratio=float(np.median(ratios)),
                lowest=float(ratios.min()),
                highest=float(ratios.max()),
                drafts_per_token=drafted / sum(served.num_tokens for served in of_method),
                acceptance=accepted / max(drafted, 1),
                tokens_per_step=1 + accepted / max(verified, 1),
            )
    for engine in engines.values():
        engine.close()


def _batches(
    model: Model[Any], kinds: Sequence[str], at_once: Sequence[int], max_tokens: int
) -> Iterator[tuple[str, int, list[tuple[list[list[int]], list[SamplingParams]]]]]:
    """Yield a kind of prompts, how many run at a time, and the prompts and parameters of each batch."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    for kind in [kind for kind in kinds if kind in PROMPTS]:
        prompts = chat_prompts(model, PROMPTS[kind])
        for count in at_once:
            # For a count of 1 each prompt is a batch of its own.
            batches = [[p] for p in prompts] if count == 1 else [list(islice(cycle(prompts), count))]
            yield kind, count, [(batch, [params] * len(batch)) for batch in batches]
    for name in [kind for kind in kinds if kind in WORKLOADS]:
        requests = make(name, vocab_size=model.vocab_size)
        outputs = [greedy(min(length, max_tokens)) for length in requests.output_lens]
        yield name, requests.max_num_seqs, [(requests.prompts, outputs)]


def step_overhead(model: str, *, options: dict[str, Any] | None = None, repeats: int = 12) -> float:
    """Return the cost of a step of one request besides its tokens, in tokens: F / c of the line  seconds = F + c ·
    tokens through the fastest steps with 1 … 9 tokens, measured in turns.
    """
    config = SpeculationConfig(method="custom", num_tokens=8, adaptive=False)
    drafter = _FixedDrafts(config.num_tokens)
    engine = build_engine(
        load_with(model, options),
        EngineConfig(scheduler=SchedulerConfig(max_num_seqs=1), max_model_len=1024, speculation=config),
        drafter=lambda _: drafter,
    )
    fastest: dict[int, float] = {}
    sizes = (1, 2, 3, 5, 9)
    engine.add_request("0", [100] * 128, greedy(len(sizes) * repeats + 8))
    sizes_run = StepSizes()
    engine.observers.add(sizes_run)
    for turn in range(len(sizes) * repeats):
        drafter.count = sizes[turn % len(sizes)] - 1
        start = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - start
        fastest[sizes_run.last] = min(seconds, fastest.get(sizes_run.last, seconds))
    engine.abort("0")
    engine.close()
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
