"""Count what the server and its engine have done, for Prometheus; read on request.

Names are vLLM's where the meaning is equal. A step of the engine costs a few additions, whatever its size.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from foreword.batch import InputBatch
from foreword.energy import EnergyMeter
from foreword.engine import EngineMetrics, EngineObserver, RequestOutput
from foreword.engine.engine import Engine
from foreword.sampling import Sampled
from foreword.scheduler import StepPlan
from foreword.server.admission import Admission

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends of the buckets of times."""


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, or several equal ones."""
        self._counts[bisect_left(SECONDS, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        counts, total, buckets = list(self._counts), 0, []
        for end, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
            total += count
            buckets.append((end, float(total)))
        family.add_metric(labels, buckets, self._sum)


class ServingTimes(EngineObserver):
    """Times of the requests and steps of an engine, and counts of what they gave.

    inter_token: between two steps, once for each completion that the later one continues. host_seconds: between the
    end of a model's run and the begin of the next one, while there is work.
    """

    def __init__(self) -> None:
        self.queue, self.first_token, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.inter_token = Histogram()
        self.finished: Counter[str] = Counter()
        self.num_generated, self.host_seconds = 0, 0.0
        self._num_unfinished = 0
        self._ran_at = self._committed_at = -1.0  # times of the last step, -1 if there was no work since

    def request_added(self, request_id: str, num_prompt_tokens: int) -> None:
        self._num_unfinished += 1

    def request_ended(self, output: RequestOutput) -> None:
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._ran_at = self._committed_at = -1.0
        metrics = output.metrics
        for histogram, seconds in (
            (self.queue, metrics.queue_time),
            (self.first_token, metrics.time_to_first_token),
            (self.end_to_end, metrics.e2e_latency),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        for completion in output.outputs:
            self.finished[completion.finish_reason or "abort"] += 1

    def step_planned(self, plan: StepPlan, batch: InputBatch) -> None:
        if self._ran_at >= 0:
            self.host_seconds += time.perf_counter() - self._ran_at

    def step_ran(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        self._ran_at = time.perf_counter()

    def step_committed(self, plan: StepPlan, batch: InputBatch, sampled: Sampled) -> None:
        now, num_decoding = time.perf_counter(), len(plan.rows) - len(plan.prefilling)
        if self._committed_at >= 0 and num_decoding:
            self.inter_token.observe(now - self._committed_at, num_decoding)
        self._committed_at = now
        self.num_generated += int((sampled.token_ids >= 0).sum())
        if len(plan.prefilling):  # without those that go on computing their prompt, whose token does not count
            states = batch.states
            left = states.num_tokens.take(plan.prefilling) - states.num_computed_tokens.take(plan.prefilling)
            self.num_generated -= int((left > 1).sum())


class Collector(Protocol):
    """A part that has metrics."""

    def collect(self) -> Iterator[Metric]: ...


def registry_of(collector: Collector) -> CollectorRegistry:
    """Return the metrics of a collector and of the process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    return registry


class ServerMetrics:
    """A collector of Prometheus. responses: answered HTTP requests by status."""

    def __init__(self, engine: Engine, model: str, admission: Admission | None) -> None:
        """Collect for one engine. ``admission`` is None in a server of several models, which counts itself what it
        refuses.
        """
        self._engine, self._admission, self._model = engine, admission, model
        self._counts, self._times = EngineMetrics(), ServingTimes()
        self._energy = EnergyMeter()
        self.responses: Counter[int] = Counter()
        self._registry = registry_of(self)
        engine.observers.add(self._counts)
        engine.observers.add(self._times)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Read in the thread of the caller, while the engine runs: each value is right, their moments may differ."""
        counts, times, scheduler, cache = self._counts, self._times, self._engine.scheduler, self._engine.cache
        waiting = list(scheduler.waiting)  # one operation, which no other thread interrupts
        ledger = scheduler.ledger
        refused = Counter[str]() if self._admission is None else self._admission.num_refused
        yield self._gauge("num_requests_running", "Completions that hold a row.", len(scheduler.running))
        num_loading = 0 if self._engine.tiers is None else self._engine.tiers.num_waiting
        yield self._gauge("num_requests_waiting", "Completions that wait.", len(waiting) + num_loading)
        yield self._gauge("kv_cache_usage_perc", "Used part of the KV blocks.", cache.pool.usage)
        if cache.has_state_pool:
            text = "Used part of the slots for states of recurrent layers."
            yield self._gauge("foreword:state_slots_usage", text, cache.state_pool.usage)
        reasons = Counter(ledger.reason_for(request.request_id, len(request)).code for request in waiting)
        reasons.update({"loading": num_loading} if num_loading else {})
        yield self._labelled(
            GaugeMetricFamily, "num_requests_waiting_by_reason", "Waiting completions by reason.", "reason", reasons
        )
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of ended requests.", counts.num_prompt_tokens),
            ("generation_tokens", "Tokens sampled.", times.num_generated),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", counts.num_prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", counts.num_cached_tokens),
            ("spec_decode_num_draft_tokens", "Drafts verified.", counts.num_proposed_drafts),
            ("spec_decode_num_accepted_tokens", "Drafts that were right.", counts.num_accepted_drafts),
            ("num_preemptions", "Preemptions.", counts.num_preemptions),
            ("foreword:num_steps", "Steps of the engine.", counts.num_steps),
            ("foreword:host_seconds", "Time between two runs of the model.", times.host_seconds),
        ):
            family = CounterMetricFamily(_full(name), text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        if (joules := self._energy.joules()) is not None:
            family = CounterMetricFamily("foreword:joules", "Energy of the processors.", labels=["model_name"])
            family.add_metric([self._model], joules)
            yield family
        for name, text, label, found in (
            ("foreword:loaded_tokens", "Prompt tokens read from outside the pool.", "tier", counts.loaded_tokens),
            ("request_success", "Ended completions.", "finished_reason", times.finished),
            ("admission_rejections", "Requests refused because the server was full.", "reason", refused),
            ("foreword:http_responses", "Answered HTTP requests.", "status", self.responses),
        ):
            yield self._labelled(CounterMetricFamily, name, text, label, found)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", times.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a completion.", times.inter_token),
            ("request_queue_time_seconds", "From arrival to the first step.", times.queue),
            ("e2e_request_latency_seconds", "From arrival to the end.", times.end_to_end),
        ):
            histograms = HistogramMetricFamily(_full(name), text, labels=["model_name"])
            histogram.add_to(histograms, [self._model])
            yield histograms

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(_full(name), text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _labelled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[Any, int],
    ) -> Metric:
        family = kind(_full(name), text, labels=["model_name", label])
        for value, count in list(values.items()):
            family.add_metric([self._model, str(value)], count)
        return family


def _full(name: str) -> str:
    return name if ":" in name else f"vllm:{name}"
