"""Health, readiness, models, metrics and the figures of the page."""

import json
import re

import pytest
from conftest import REPO
from prometheus_client.parser import text_string_to_metric_families
from server_cases import CHAT, CLASSES, COMPLETION, FILES, NAME, about, client_of, error_of, posted, tiny_service, until

from jshadow.errors import NumericalError, ServingError
from jshadow.serving import Answer, Request
from jshadow.serving.http import metrics
from jshadow.serving.http.keys import ApiKeys, KeyLimits
from jshadow.serving.http.metrics import fetched_a_token

# The names that dashboards and gateways of vLLM read, by the type of each.
SECONDS = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time")
SECONDS = (*SECONDS, "request_prefill_time", "request_decode_time")
VLLM = {f"vllm:{name}_seconds": "histogram" for name in SECONDS}
for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
    VLLM[f"vllm:{name}"] = "gauge"
for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"):
    VLLM[f"vllm:{name}"] = "counter"
for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"):
    VLLM[f"vllm:{name}"] = "counter"
JSON = {"content-type": "application/json"}
TEXT = b"The sea is calm, and the lamp of the harbor burns. " * 2


def figures(client):
    """The samples by name and labels except the model's name, and the type of each family. All names are valid."""
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples_of(answer.text)


def samples_of(text):
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    samples = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = tuple(value for key, value in sorted(sample.labels.items()) if key != "model_name")
        assert (sample.name, labels) not in samples
        samples[sample.name, labels] = sample.value
    return samples, {family.name: family.type for family in families}


def test_many_who_ask_for_the_figures_cost_little(client, service, monkeypatch):
    made = []
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 60)
    monkeypatch.setattr(metrics, "generate_latest", lambda _: made.append(0) or str(len(made)).encode())
    service.metrics._made = -60.0
    assert [client.get("/metrics").text for _ in range(3)] == ["1"] * 3
    service.metrics._made = -60.0
    assert client.get("/metrics").text == "2"
    service.metrics._made = -60.0


def test_metrics_have_the_names_of_vllm_and_count_what_was_done(client, monkeypatch):
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0)
    before, types = figures(client)
    assert VLLM.items() <= types.items()
    made = client.post(FILES, files={"file": ("a.txt", TEXT)}).json()
    body = {"messages": about({"file_id": made["id"]}, "What?"), "max_tokens": 3}
    assert client.post(CHAT, json={"model": NAME, "ignored": 0} | body).status_code == 400
    usage = posted(client, CHAT, **body)["usage"]
    after, _ = figures(client)
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    hits = usage["prompt_tokens_details"]["cached_tokens"]
    assert hits > len(TEXT)
    for name, value in (
        ("prompt_tokens_total", usage["prompt_tokens"]),
        ("prefix_cache_queries_total", usage["prompt_tokens"]),
        ("generation_tokens_total", usage["completion_tokens"]),
        ("prefix_cache_hits_total", hits),
        ("time_to_first_token_seconds_count", 1),
    ):
        assert added[f"vllm:{name}", ()] == value, name
    assert sum(value for (name, _), value in added.items() if name == "vllm:request_success_total") == 1
    assert added["jshadow:requests_refused_total", ("400",)] == 1
    assert added["jshadow:tier_bytes", ("disk",)] > 0
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "jshadow:open_requests"):
        assert after[name, ()] == 0, name
    gauge = client.get("/v1/gauge").json()
    assert gauge["stored_tokens"] == made["tokens"]
    assert gauge["full_attention_bytes"] == made["tokens"] * 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, ...
    assert 0 < gauge["hit_share"] < 1
    assert gauge["first_token_seconds"] > 0


def test_the_model_and_the_bytes_that_a_step_fetches_at_most(client, service):
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"]) == (NAME, CLASSES[-1].capacity)
    assert client.get(f"/v1/models/{NAME}").json() == model
    assert client.get("/v1/models/other/name").status_code == 404
    policy = service.engine.plans[-1].policy
    assert fetched_a_token(service, policy, "resident") == 0
    one_layer = 2 * 16 * 4 * policy.budget  # heads, numbers and bytes of the values of the selected tokens
    assert fetched_a_token(service, policy, "device_put") == 2 * one_layer


def test_the_server_is_ready_when_its_programs_are_compiled_and_until_it_ends(client, service, monkeypatch):
    assert client.get("/ready").json() == {"status": "ready"}
    monkeypatch.setattr(service, "ready", False)
    assert error_of(client.get("/ready")) == (503, "not_ready")
    assert client.get("/v1/models").status_code == 200
    monkeypatch.setattr(service, "ready", True)
    monkeypatch.setattr(service, "draining", True)
    assert [client.get(path).status_code for path in ("/ready", "/v1/models")] == [503, 503]
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == 200


def test_a_failed_engine_is_told_by_health_and_in_the_log(caplog):
    with tiny_service() as service, client_of(service, raise_server_exceptions=False) as client:
        service.engine._loop.run_once = lambda: 1 / 0
        with pytest.raises(ServingError):
            service.engine.submit(Request([1], 1)).result(30)
        assert figures(client)[0]["jshadow:engine_failures_total", ()] == 1
        for path in ("/health", "/ready"):
            error = client.get(path).json()["error"]
            assert error["code"] == "engine_failed"
            assert "zero" not in error["message"]  # clients without a key read this
        assert "division by zero" in caplog.text
        answer = client.post(COMPLETION, json={"model": NAME, "prompt": "Hi", "max_tokens": 2})
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


def test_an_error_in_a_stream_is_told_logged_and_counted(client, service, monkeypatch, caplog):
    """The stream has begun with 200, so its error is its last event."""

    async def broken(_):
        yield {"piece": 1}
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0)
    monkeypatch.setattr("jshadow.serving.http.answers.Completion.events", broken)
    before, _ = figures(client)
    answer = client.post(COMPLETION, json={"model": NAME, "prompt": "Hi", "max_tokens": 2, "stream": True})
    first, last = (json.loads(line.removeprefix("data: ")) for line in answer.text.strip().split("\n\n"))
    assert (answer.status_code, first) == (200, {"piece": 1})
    assert last["error"]["type"] == "server_error"
    assert "fault" not in answer.text
    assert "a stream has failed" in caplog.text
    assert "a fault of ours" in caplog.text
    count = "jshadow:requests_refused_total", ("500",)
    assert figures(client)[0][count] == before.get(count, 0) + 1


def test_a_token_is_drawn_on_demand(client, service, monkeypatch):
    before = service.engine.report().counts.finished
    assert client.get("/health/deep").json() == {"status": "ok"}
    until(lambda: service.engine.report().counts.finished == before + 1)
    monkeypatch.setattr(service.engine, "submit_all", lambda _: [answer_that_failed()])
    assert error_of(client.get("/health/deep"))[0] == 500
    monkeypatch.setattr(service, "ready", False)
    assert error_of(client.get("/health/deep")) == (503, "not_ready")
    monkeypatch.setattr(service, "keys", ApiKeys({"first": KeyLimits()}, None))
    with client_of(service) as other:
        assert other.get("/health/deep").status_code == 401


def answer_that_failed():
    answer = Answer(Request([0], 1))
    answer.end(NumericalError("logits must be numbers, got NaN"))
    return answer


def test_what_the_server_holds_is_told(service, monkeypatch):
    """While the body of a question and an upload arrive, and afterwards."""
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0)
    names = [("jshadow:held_body_bytes", ()), ("jshadow:uploads", ()), ("jshadow:groups", ()), ("jshadow:rows", ())]
    with client_of(service) as client:
        body = json.dumps({"model": NAME, "prompt": "Hi", "max_tokens": 2})
        during = []
        submit = service.submit

        async def noted(*requests):
            during.append(samples_of(service.metrics.text().decode())[0])
            return await submit(*requests)

        monkeypatch.setattr(service, "submit", noted)
        assert client.post(COMPLETION, content=body, headers=JSON).status_code == 200
        assert client.post(FILES, files={"file": ("b.txt", TEXT + b"Another.")}).status_code == 200
        after = figures(client)[0]
    assert [found[names[0]] for found in during] == [len(body), during[1][names[0]]]
    assert during[1][names[0]] > len(TEXT)
    assert [found[names[1]] for found in during] == [0, 1]
    assert [after[name] for name in names[:2]] == [0, 0]
    report = service.engine.report()
    assert [after[name] for name in names[2:]] == [report.groups, report.rows] != [0, 0]


def test_the_dashboard_shows_figures_that_the_server_has(client):
    samples = {name for name, _ in figures(client)[0]}
    text = (REPO / "examples" / "monitoring" / "grafana.json").read_text()
    panels = json.loads(text)["panels"]
    used = [set(re.findall(r"(?:vllm|jshadow):\w+", target["expr"])) for panel in panels for target in panel["targets"]]
    assert len(panels) == 13
    assert all(used)
    # A counter by status, and the tiers of a library, have no sample before the first one.
    assert set().union(*used) - samples <= {"jshadow:requests_refused_total"}
