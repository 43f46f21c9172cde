"""Traces by OpenTelemetry: a span for each HTTP request, and in it one for each phase of each answer.

The names of attributes are OpenTelemetry's (semantic conventions of HTTP and of generative AI). Texts of requests are
not in them.
"""

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.serving import AnswerReport

_NANO = 1_000_000_000
_PATH = "/v1/traces"  # where a collector takes traces by OTLP over HTTP


class Traces:
    """The traces of a server, or nothing without an exporter. Any thread may call `answer`."""

    def __init__(self, exporter: Any = None) -> None:
        """Take an OpenTelemetry span exporter. None: there are no traces.

        Raises:
            ConfigError: the package opentelemetry-sdk is not installed.
        """
        self._provider: Any = None
        if exporter is None:
            return
        resources, sdk = _installed("opentelemetry.sdk.resources"), _installed("opentelemetry.sdk.trace")
        # The variables OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win.
        resource = resources.Resource({"service.name": "jshadow"}).merge(resources.OTELResourceDetector().detect())
        self._provider = sdk.TracerProvider(resource=resource)
        self._provider.add_span_processor(_installed("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("jshadow")

    @classmethod
    def to(cls, collector: str | None) -> "Traces":
        """Return traces that go to the address of a collector, or none for None.

        Raises:
            ConfigError: the address is not one of HTTP, or a package is not installed.
        """
        if collector is None:
            return cls()
        if not collector.startswith(("http://", "https://")):
            raise ConfigError(f"--traces must begin with http:// or https://, got {collector!r:.80}")
        otlp = _installed("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return cls(otlp.OTLPSpanExporter(collector.rstrip("/") + _PATH))

    @contextlib.contextmanager
    def request(self, scope: MutableMapping[str, Any], name: str) -> Iterator[Callable[[int], None]]:
        """A context manager for an HTTP request, of which `name` is the id. Yields what takes its status at the end.

        A header `traceparent` makes the span a part of the client's trace (W3C Trace Context).
        """
        if self._provider is None:
            yield lambda status: None
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        about = {"http.request.method": scope["method"], "url.path": scope["path"], "jshadow.request.id": name}
        parent = TraceContextTextMapPropagator().extract(headers)
        # The message of an exception could have text of the request.
        silent = {"record_exception": False, "set_status_on_exception": False}
        kinds: dict[str, Any] = {"context": parent, "kind": SpanKind.SERVER, **silent}
        with self._tracer.start_as_current_span(scope["method"], attributes=about, **kinds) as span:

            def end(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))

            yield end

    def answer(self, report: AnswerReport) -> None:
        """Add the phases of an answer that ends now to the span of the request that this thread or task works for."""
        if self._provider is None:
            return
        phases = {"queue": report.queue_seconds, "prefill": report.prefill_seconds, "decode": report.decode_seconds}
        begin = time.time_ns() - int(_NANO * sum(phases.values()))
        about = {
            "gen_ai.usage.input_tokens": report.prompt_tokens,
            "gen_ai.usage.output_tokens": report.generated_tokens,
            "gen_ai.response.finish_reasons": [report.finish],
            "jshadow.stored_tokens": report.stored_tokens,
            "jshadow.accepted_tokens": report.accepted_tokens,
            "jshadow.policy": report.policy.name,
        }
        for phase, seconds in phases.items():
            span = self._tracer.start_span(phase, start_time=begin, attributes=about)
            begin += int(_NANO * seconds)
            span.end(begin)

    def close(self, seconds: float = 1.0) -> None:
        """Send what was not sent yet. If the collector does not answer within `seconds`, it is lost."""
        if self._provider is not None:
            sending = threading.Thread(target=self._provider.shutdown, daemon=True)
            sending.start()
            sending.join(seconds)


def _installed(name: str) -> Any:
    """Return a module of the extra `traces`. Raises ConfigError if its package is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"--traces needs the package {error.name}: pip install 'jshadow[traces]'") from error
