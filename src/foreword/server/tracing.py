"""A span of OpenTelemetry for each request, with vLLM's names. Needs the packages of foreword[otel]."""

from __future__ import annotations

import os
import time
from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
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

    def ended(self, output: RequestOutput, params: SamplingParams, headers: Mapping[str, str]) -> None:
        """Send the span of a request, below the one that its ``traceparent`` header names.

        The span has the status of an error if a completion was aborted or failed.
        """
        metrics, usage = output.metrics, output.usage
        reasons = [completion.finish_reason for completion in output.outputs]
        attributes = {
            "gen_ai.response.finish_reasons": [reason or "abort" for reason in reasons],
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.latency.time_in_queue": metrics.queue_time,
            "gen_ai.latency.time_to_first_token": metrics.time_to_first_token,
            "gen_ai.latency.time_in_model_prefill": _between(metrics.first_scheduled_time, metrics.first_token_time),
            "gen_ai.latency.time_in_model_decode": _between(metrics.first_token_time, metrics.finished_time),
            "gen_ai.latency.time_in_model_inference": _between(metrics.first_scheduled_time, metrics.finished_time),
            "gen_ai.latency.e2e": metrics.e2e_latency,
        }
        failure = None if output.error is None else str(output.error)
        if failure is None and "abort" in reasons:
            failure = "aborted"
        self._add(output.request_id, params, headers, attributes, metrics.e2e_latency or 0.0, failure)

    def failed(
        self,
        request_id: str,
        error: BaseException,
        seconds: float,
        params: SamplingParams | None,
        headers: Mapping[str, str],
    ) -> None:
        """Send the span of a request that was refused or failed, or whose client closed the connection."""
        closed = isinstance(error, CancelledError)
        reason = (
            "the connection was closed, or the server is being stopped"
            if closed
            else str(error) or type(error).__name__
        )
        attributes = {"error.type": type(error).__name__}
        self._add(request_id, params, headers, attributes, seconds, reason)

    def _add(
        self,
        request_id: str,
        params: SamplingParams | None,
        headers: Mapping[str, str],
        attributes: Mapping[str, Any],
        seconds: float,
        failure: str | None,
    ) -> None:
        """Send a span that ends now. ``failure`` is the reason why its status is an error, if it is one."""
        attributes = {"gen_ai.response.model": self._model, "gen_ai.request.id": request_id, **attributes}
        if params is not None:
            attributes |= {
                "gen_ai.request.n": params.n,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
            }
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._parents.extract(headers),
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in attributes.items() if value is not None},
            start_time=end - int(1e9 * seconds),
        )
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(end)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin
