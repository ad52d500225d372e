"""Spans of requests, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from processes import MAIN, run
from test_process import ended, started

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector():
    """Its address, and the bodies that it gets."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()
        thread.join()


def test_a_finished_request_is_a_span_below_its_callers(talker, collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    endpoint, bodies = collector
    environment = {"NO_PROXY": "127.0.0.1", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    process, _, url = started(talker, "--port", 0, "--otlp-traces-endpoint", endpoint, env=environment)
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0.5, "ignore_eos": True}
    headers = {"traceparent": PARENT, "X-Request-Id": "it"}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60).raise_for_status()
    assert ended(process) == 0
    spans = [
        span
        for body in bodies
        for resource in proto.ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    (span,) = spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", *PARENT.split("-")[1:3])
    found = {item.key.removeprefix("gen_ai."): item.value for item in span.attributes}
    assert found["request.id"].string_value == "it"
    assert found["request.temperature"].double_value == 0.5
    assert (found["usage.prompt_tokens"].int_value, found["usage.completion_tokens"].int_value) == (3, 5)
    first, whole = (found[f"latency.{name}"].double_value for name in ("time_to_first_token", "e2e"))
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert 0 < first <= whole == pytest.approx(sum(found[f"latency.{name}"].double_value for name in parts))
    assert span.end_time_unix_nano - span.start_time_unix_nano == int(1e9 * whole)


def test_without_the_packages_the_setting_names_them(talker, tmp_path):
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError('none', name='opentelemetry')")
    arguments = (talker, "--port", 0, "--otlp-traces-endpoint", "http://127.0.0.1:1")
    status, _, error = run("serve", *arguments, program=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {MAIN}")
    assert status != 0
    assert "install foreword[otel]" in error
