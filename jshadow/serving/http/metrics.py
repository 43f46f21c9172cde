"""Metrics in Prometheus' text form: vLLM's names, so that its dashboards and gateways read them, and our own."""

import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import Planner
from jshadow.planner.gpu_specs import Gpu
from jshadow.policies import Policy
from jshadow.serving import AnswerReport

if TYPE_CHECKING:
    from jshadow.serving.http.service import Service

_ANY_GPU = Gpu("any", 1, 1.0, 1.0, 1.0, 1.0)  # the bytes of its plan do not depend on the rates
FRESH_SECONDS = 0.5  # for which the text serves all who ask, because /metrics needs no key
_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0)


class Metrics:
    """The figures of a server."""

    def __init__(self, service: "Service") -> None:
        """Begin with zeros. `service` is read when the figures are asked for."""
        self._fetched_a_token = functools.cache(functools.partial(fetched_a_token, service))
        self.registry, name = CollectorRegistry(), service.options.name
        self.tokens = self.stored = self.answers = 0
        self.first_seconds = 0.0
        self._text, self._made = b"", -FRESH_SECONDS

        def histogram(metric: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            family = Histogram(f"vllm:{metric}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return family.labels(name)

        def counter(metric: str, text: str) -> Counter:
            return Counter(metric, text, ["model_name"], registry=self.registry).labels(name)

        self.prompt = counter("vllm:prompt_tokens", "Tokens of prompts")
        self.generated = counter("vllm:generation_tokens", "New tokens")
        self.queries = counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked for in the library")
        self.hits = counter("vllm:prefix_cache_hits", "Tokens of prompts that the library held")
        self.first = histogram("time_to_first_token_seconds", "Time from the request to the first token")
        self.between = histogram(
            "inter_token_latency_seconds", "Mean time between the tokens of a request", _STEP_SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "Time from the request to the end of its answer")
        self.queue = histogram("request_queue_time_seconds", "Time in the queue")
        self.prefill = histogram("request_prefill_time_seconds", "Time from the queue to the first token")
        self.decode = histogram("request_decode_time_seconds", "Time from the first token to the end")
        self.ended = Counter(
            "vllm:request_success", "Answers by their end", ["model_name", "finished_reason"], registry=self.registry
        )
        self.refused = Counter(
            "jshadow:requests_refused",
            "Responses and streams that end with an error",
            ["status"],
            registry=self.registry,
        )
        self.fetched = Counter(
            "jshadow:fetched_bytes", "Bytes that the steps moved from the host, at most", registry=self.registry
        )
        self.name = name
        self.registry.register(_Live(service))

    def count_error(self, status: int) -> None:
        """Count a response or a stream that ends with an error."""
        self.refused.labels(str(status)).inc()

    def count(self, report: AnswerReport) -> None:
        """Count a complete answer."""
        self.prompt.inc(report.prompt_tokens)
        self.generated.inc(report.generated_tokens)
        self.queries.inc(report.prompt_tokens)
        self.hits.inc(report.stored_tokens)
        to_first = report.queue_seconds + report.prefill_seconds
        self.tokens += report.prompt_tokens
        self.stored += report.stored_tokens
        self.answers += 1
        self.first_seconds += to_first
        self.first.observe(to_first)
        if report.generated_tokens > 1:
            self.between.observe(report.decode_seconds / (report.generated_tokens - 1))
        self.whole.observe(to_first + report.decode_seconds)
        self.queue.observe(report.queue_seconds)
        self.prefill.observe(report.prefill_seconds)
        self.decode.observe(report.decode_seconds)
        self.ended.labels(self.name, report.finish).inc()
        fetch = report.spilled or report.fetch
        if fetch != "resident":
            refused = (report.proposed_tokens or 0) - report.accepted_tokens  # the model read these too
            self.fetched.inc(self._fetched_a_token(report.policy, fetch) * (report.generated_tokens + refused))

    @property
    def hit_share(self) -> float:
        """The share of the prompts' tokens that the library held."""
        return self.stored / self.tokens if self.tokens else 0.0

    @property
    def first_token_seconds(self) -> float | None:
        """The mean time to the first token in seconds, or None before the first answer."""
        return self.first_seconds / self.answers if self.answers else None

    def text(self) -> bytes:
        """Return all figures in Prometheus' text form, at most `FRESH_SECONDS` old."""
        now = time.monotonic()
        if now - self._made >= FRESH_SECONDS:
            self._text, self._made = bytes(generate_latest(self.registry)), now
        return self._text


def fetched_a_token(service: "Service", policy: Policy, fetch: str) -> int:
    """Return the bytes that a step of one row moves from the host, at most."""
    params = service.params
    workload = Workload(service.most_tokens - 1, 1, dtype=str(params.dtype), fetch=fetch, repeat_share=0.0)
    planner = Planner(params.config, params.config, _ANY_GPU, workload)
    return int(planner.step(policy, 1, passes=False).pcie_bytes)


class _Live(Collector):
    """The figures that are read from the engine and the library when they are asked for."""

    def __init__(self, service: "Service") -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        report, name = self.service.engine.report(), self.service.options.name

        def gauge(metric: str, text: str, value: float) -> GaugeMetricFamily:
            family = GaugeMetricFamily(metric, text, labels=["model_name"])
            family.add_metric([name], value)
            return family

        service = self.service
        for metric, text, value in (
            ("jshadow:open_requests", "HTTP requests that are being answered", service.open),
            ("jshadow:held_body_bytes", "Bytes of the bodies of open requests", service.held.total()),
            ("jshadow:uploads", "Requests whose document is being read, or waits for it", service.uploads),
            ("jshadow:groups", "Groups of rows", report.groups),
            ("jshadow:rows", "Rows of all groups", report.rows),
            ("jshadow:rows_spilled", "Rows of requests that have moved to host memory", report.rows_spilled),
        ):
            yield GaugeMetricFamily(metric, text, value=value)
        yield gauge("vllm:num_requests_running", "Requests that have a row", report.rows_in_use)
        yield gauge("vllm:num_requests_waiting", "Requests that wait for a row", report.waiting)
        share = report.rows_in_use / report.rows if report.rows else 0.0
        yield gauge("vllm:kv_cache_usage_perc", "Share of the rows that a request has, 1 is all", share)
        used = GaugeMetricFamily("jshadow:tier_bytes", "Bytes of stored states by tier", labels=["tier"])
        limits = GaugeMetricFamily("jshadow:tier_limit_bytes", "Limit of bytes by tier", labels=["tier"])
        for tier, size, limit in self.service.tiers():
            used.add_metric([tier], size)
            if limit is not None:
                limits.add_metric([tier], limit)
        rows = GaugeMetricFamily("jshadow:row_bytes", "Planned bytes of the rows by memory", labels=["memory"])
        rows.add_metric(["device"], report.device_bytes)
        rows.add_metric(["host"], report.host_bytes)
        yield from (used, limits, rows)
        counts = report.counts
        for metric, text, value in (
            ("jshadow:steps", "Steps of groups of rows", counts.steps),
            ("jshadow:prompt_units", "Units of prompts that were read", counts.units),
            ("vllm:spec_decode_num_draft_tokens", "Tokens that speculation proposed", counts.proposed),
            ("vllm:spec_decode_num_accepted_tokens", "Of these, the accepted ones", counts.accepted),
            ("jshadow:requests_failed", "Requests that failed", counts.failed),
            ("jshadow:requests_cancelled", "Requests that were cancelled", counts.cancelled),
            ("jshadow:programs_compiled", "Programs that were compiled", report.programs),
            ("jshadow:engine_failures", "Failures of the engine", int(self.service.engine.failure is not None)),
        ):
            yield CounterMetricFamily(metric, text, value=value)
