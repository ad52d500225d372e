"""Spans of requests, as a collector of OpenTelemetry gets them."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from processes import MAIN, run
from test_process import ended, started

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector():
    """Yield the address of a collector, and the bodies that it gets."""
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


def spans_of(bodies: list[bytes]) -> list:
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    return [
        span
        for body in bodies
        for resource in proto.ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_a_finished_request_is_a_span_below_its_callers(talker, collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    endpoint, bodies = collector
    environment = {"NO_PROXY": "127.0.0.1", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    process, _, url = started(talker, "--port", 0, "--otlp-traces-endpoint", endpoint, env=environment)
    body = {"prompt": "abc", "max_tokens": 5, "temperature": 0.5, "ignore_eos": True}
    headers = {"traceparent": PARENT, "X-Request-Id": "it"}
    httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=60).raise_for_status()
    assert ended(process) == 0
    (span,) = spans_of(bodies)
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", *PARENT.split("-")[1:3])
    found = {item.key.removeprefix("gen_ai."): item.value for item in span.attributes}
    assert found["request.id"].string_value == "it"
    assert found["request.temperature"].double_value == 0.5
    assert (found["usage.prompt_tokens"].int_value, found["usage.completion_tokens"].int_value) == (3, 5)
    first, whole = (found[f"latency.{name}"].double_value for name in ("time_to_first_token", "e2e"))
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert 0 < first <= whole == pytest.approx(sum(found[f"latency.{name}"].double_value for name in parts))
    assert span.end_time_unix_nano - span.start_time_unix_nano == int(1e9 * whole)


def test_requests_that_are_aborted_refused_late_or_left_are_spans_with_an_error(talker, collector):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    endpoint, bodies = collector
    environment = {"NO_PROXY": "127.0.0.1", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    process, _, url = started(
        talker, "--port", 0, "--max-model-len", 100000, "--otlp-traces-endpoint", endpoint, env=environment
    )
    endless = {"prompt": "abc", "max_tokens": 90000, "temperature": 0, "ignore_eos": True}

    def post(name: str, **fields: object) -> httpx.Response:
        headers = {"X-Request-Id": name}
        return httpx.post(f"{url}/v1/completions", json=endless | fields, headers=headers, trust_env=False, timeout=60)

    def stream():
        return httpx.stream(
            "POST", f"{url}/v1/completions", json=endless | {"stream": True}, trust_env=False, timeout=60
        )

    assert post("refused", max_tokens=-2).status_code == 400
    assert post("late", timeout=0.2).status_code == 504
    with stream() as response:
        left = response.headers["x-request-id"]
        next(response.iter_text())
    with stream() as response:
        aborted = response.headers["x-request-id"]
        parts = response.iter_text()
        next(parts)
        httpx.post(f"{url}/abort", json={"request_id": aborted}, trust_env=False, timeout=60).raise_for_status()
        assert list(parts)
    assert ended(process) == 0
    found = {}
    for span in spans_of(bodies):
        values = {item.key: item.value.string_value for item in span.attributes}
        found[values["gen_ai.request.id"]] = (span.status.code, values.get("error.type"))
    error = 2  # STATUS_CODE_ERROR
    assert found == {
        "refused": (error, "RequestError"),
        "late": (error, "TimeoutError"),
        left: (error, "CancelledError"),
        aborted: (error, None),
    }


def test_without_the_packages_the_setting_names_them(talker, tmp_path):
    (tmp_path / "opentelemetry.py").write_text("raise ModuleNotFoundError('none', name='opentelemetry')")
    arguments = (talker, "--port", 0, "--otlp-traces-endpoint", "http://127.0.0.1:1")
    status, _, error = run("serve", *arguments, program=f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {MAIN}")
    assert status != 0
    assert "Install foreword[otel]" in error
