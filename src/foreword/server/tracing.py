"""A span of OpenTelemetry for each finished request, with vLLM's names. Needs the packages of foreword[otel]."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from foreword.batch import SamplingParams
from foreword.engine import RequestOutput


class Traces:
    """Sends spans to an OTLP endpoint, such as http://localhost:4318/v1/traces, from a thread of its own."""

    def __init__(self, endpoint: str, model: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "foreword")})
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("foreword")
        self._parents = TraceContextTextMapPropagator()
        self._model = model

    def add(self, output: RequestOutput, params: SamplingParams, headers: Mapping[str, str]) -> None:
        """The span of a request, below the one that its ``traceparent`` header names."""
        metrics, usage, end = output.metrics, output.usage, time.time_ns()
        seconds = metrics.e2e_latency or 0.0
        attributes = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.id": output.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.latency.time_in_queue": metrics.queue_time,
            "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
            "gen_ai.latency.time_in_model_prefill": _between(metrics.first_scheduled_time, metrics.first_token_time),
            "gen_ai.latency.time_in_model_decode": _between(metrics.first_token_time, metrics.finished_time),
            "gen_ai.latency.time_in_model_inference": _between(metrics.first_scheduled_time, metrics.finished_time),
            "gen_ai.latency.e2e": seconds,
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.extract(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=end - int(1e9 * seconds),
        )
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
