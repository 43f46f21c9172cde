"""Spans of requests, as an OpenTelemetry exporter gets them."""

import dataclasses

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from server_cases import COMPLETION, NAME, client_of

from jshadow.errors import ConfigError
from jshadow.serving.http import traces
from jshadow.serving.http.traces import Traces

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"model": NAME, "prompt": "The secret is seven.", "max_tokens": 3}


@pytest.fixture
def spans(service, monkeypatch):
    """Closes the traces of a server, and returns their spans."""
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(service, "options", dataclasses.replace(service.options, traces=Traces(exporter)))

    def finished():
        service.options.traces.close()
        return exporter.get_finished_spans()

    return finished


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_a_span_with_its_phases_in_the_trace_of_its_client(service, spans, stream):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "a1"}
    with client_of(service) as client:
        answer = client.post(COMPLETION, json=BODY | {"stream": stream, "n": 2}, headers=headers)
        assert answer.status_code == 200
    *phases, request = spans()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"] * 2
    assert f"{request.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    about = {"http.request.method": "POST", "url.path": COMPLETION, "http.response.status_code": 200}
    assert dict(request.attributes) == about | {"jshadow.request.id": "a1"}
    for first in (0, 3):
        queue, prefill, decode = phases[first : first + 3]
        assert request.start_time - 10**8 < queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.end_time == decode.start_time <= decode.end_time <= request.end_time
    for span in phases:
        assert span.parent.span_id == request.context.span_id
        assert span.attributes["gen_ai.usage.input_tokens"] == len(BODY["prompt"])
        assert 1 <= span.attributes["gen_ai.usage.output_tokens"] <= 3
    assert not any("secret" in str(dict(span.attributes)) for span in (request, *phases))


def test_a_failure_of_the_server_is_an_error_without_text_of_the_request(service, spans, monkeypatch):
    def fails(name):
        raise RuntimeError(f"secret {name}")

    monkeypatch.setattr(service, "check_model", fails)
    with client_of(service, raise_server_exceptions=False) as client:
        assert client.post(COMPLETION, json=BODY).status_code == 500
        assert client.post(COMPLETION, json={"model": NAME}).status_code == 400
    failed, refused = spans()
    assert (failed.attributes["http.response.status_code"], failed.status.is_ok) == (500, False)
    assert (refused.attributes["http.response.status_code"], refused.status.is_ok) == (400, True)
    assert "secret" not in failed.to_json()


def test_a_wrong_address_and_a_missing_package_are_told(monkeypatch):
    assert Traces.to(None)._provider is None
    Traces.to("http://127.0.0.1:4318").close()
    with pytest.raises(ConfigError, match=r"--traces must begin with http:// or https://, got '127\.0\.0\.1:4318'"):
        Traces.to("127.0.0.1:4318")
    monkeypatch.setattr(traces.importlib, "import_module", lambda name: exec("import no_such_package"))
    with pytest.raises(ConfigError, match=r"no_such_package: pip install 'jshadow\[traces\]'"):
        Traces.to("http://127.0.0.1:4318")
