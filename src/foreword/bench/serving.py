"""Run whole workloads on the engine: throughput, time to the first token and time per step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from foreword import LLM
from foreword.arrays import I64
from foreword.batch import InputBatch, SamplingParams
from foreword.bench.requests import Requests, make
from foreword.energy import EnergyMeter
from foreword.engine import Engine, EngineObserver, RequestOutput
from foreword.errors import ConfigError
from foreword.scheduler import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The outputs in the order of the prompts, and when the run began and ended, in seconds of `time.perf_counter`.

    drafts: int64 [3], the number of drafts, of accepted drafts, and of verifications of a request's drafts.
    """

    outputs: list[RequestOutput]
    begin: float
    end: float
    drafts: I64

    @property
    def tokens(self) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in self.outputs]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def decode_tok_s(self) -> float:
        """Return tokens per second: all tokens except the first of each request, divided by the time from the last
        first token to the end.
        """
        count = self.num_tokens - len(self.outputs)
        begin = max(o.metrics.first_token_time or self.end for o in self.outputs)
        return count / (self.end - begin) if count else 0.0


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters that generate ``max_tokens`` token ids of any kind."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def serve(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Served:
    """Add all requests, then step until none is left."""
    before = drafts_of(engine)
    begin = time.perf_counter()
    for i, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, p)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step()}
    end = time.perf_counter()
    return Served([outputs[str(i)] for i in range(len(prompts))], begin, end, drafts_of(engine) - before)


def drafts_of(engine: Engine) -> I64:
    """Return the numbers of drafts, of accepted drafts and of verifications since the engine was made, int64 [3]."""
    if engine.speculation is None:
        return np.zeros(3, np.int64)
    stats = engine.speculation.stats
    return np.array([stats.num_drafted, stats.num_accepted, stats.num_steps])


@dataclass(frozen=True, slots=True)
class ServingResult:
    """One run of a workload. Rates in tokens per second over the whole run, times in milliseconds.

    decode_tok_s: output tokens except the first of each request, divided by the time from the last first token to the
    end. step_ms: median time of a step that only decodes. joules_per_token: energy of the processors per output token;
    None if the system does not report it.
    """

    workload: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    output_tok_s: float
    prompt_tok_s: float
    decode_tok_s: float
    first_token_ms_p50: float
    first_token_ms_p99: float
    step_ms: float
    num_cached_tokens: int
    joules_per_token: float | None = None


class StepTimes(EngineObserver):
    """The start of each step, and whether it only decodes."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, bool]] = []

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        self.starts.append((time.perf_counter(), batch.max_query_len == 1))


def run(llm: LLM, requests: Requests) -> ServingResult:
    """Serve all requests, greedy, to their full length, ignoring end tokens. Raise ConfigError if they do not fit."""
    engine = llm.engine
    most = engine.config.scheduler.max_num_seqs
    if requests.max_num_seqs > most:
        raise ConfigError(f"max_num_seqs={most}: {requests.name} needs {requests.max_num_seqs}")
    times = StepTimes()
    engine.observers.add(times)
    meter = EnergyMeter()
    served = serve(engine, requests.prompts, list(map(greedy, requests.output_lens)))
    joules = meter.joules()
    engine.observers.remove(times)
    outputs, generated, seconds = served.outputs, served.num_tokens, served.end - served.begin
    if generated != requests.num_output_tokens:
        raise AssertionError(f"{requests.name}: {generated} tokens generated, {requests.num_output_tokens} wanted")
    first = np.array(
        [o.metrics.first_token_time - o.metrics.arrival_time for o in outputs if o.metrics.first_token_time]
    )
    stamps = [*times.starts, (served.end, False)]
    decode_steps = [after - before for (before, decodes), (after, _) in pairwise(stamps) if decodes]
    return ServingResult(
        workload=requests.name,
        num_requests=len(requests.prompts),
        num_prompt_tokens=requests.num_prompt_tokens,
        num_output_tokens=generated,
        seconds=seconds,
        output_tok_s=generated / seconds,
        prompt_tok_s=requests.num_prompt_tokens / float(first.max()),
        decode_tok_s=served.decode_tok_s,
        first_token_ms_p50=1e3 * float(np.percentile(first, 50)),
        first_token_ms_p99=1e3 * float(np.percentile(first, 99)),
        step_ms=1e3 * float(np.median(decode_steps)) if decode_steps else 0.0,
        num_cached_tokens=sum(o.metrics.num_cached_tokens for o in outputs),
        joules_per_token=None if joules is None else joules / generated,
    )


def best_of(llm: LLM, name: str, repeats: int) -> ServingResult:
    """Return the fastest of ``repeats`` runs with different ids, after a warm-up run."""
    vocab_size = llm.engine.states.vocab_size
    runs = [run(llm, make(name, repeat, vocab_size)) for repeat in range(repeats + 1)]
    return min(runs[1:], key=lambda r: r.seconds)
