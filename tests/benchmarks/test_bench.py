"""benchmarks/bench.py: the stages of a step, what is timed beside jshadow, and speculation."""

import copy
import functools
import json
from types import SimpleNamespace

import bench
import fake_torch
import numpy as np
import pytest
from cases import POLICY_CASES, TINY
from cases import model as tiny_model
from few import quick
from speed import peers, stages
from speed.speculation import Text, acceptance, bench_cycle, bench_speculation

from jshadow import Full, PromptLookup, Quest, SelfDraft, ShadowKV
from jshadow.errors import ConfigError
from jshadow.evaluation import speed
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params, save

SHAPE = speed.Shape(context=200, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32")
POLICY = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
SETTING = "shadowkv:rank=8:chunk_size=4:budget=16:outlier_chunks=2:local_chunks=1"
REPEATS = 2
LAYER = ["layer", "--context", "200", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
LAYER += ["--dtype", "float32", "--fetch", "resident", "--repeats", str(REPEATS)]
RATES = {"read": 3e9, "copy": 2e9, "matmul_float32": 5e9, "matmul_bfloat16": 4e9}
FETCHES = pytest.mark.parametrize("fetch", ["resident", "device_put", "zero_copy"])
DEAR = quick(["full"], ["full", "specache", "infllm", "shadowkv_plus_transform"])  # policies with programs of their own
measured_layer, measured_stages = functools.cache(speed.bench_layer), functools.cache(stages.bench_stages)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Each layer is measured once, for all tests. The rates of the machine are made up."""
    monkeypatch.setattr(speed, "bench_layer", lambda *given: copy.deepcopy(measured_layer(*given)))
    monkeypatch.setattr(stages, "bench_stages", lambda *given: copy.deepcopy(measured_stages(*given)))
    monkeypatch.setattr(speed, "ceilings", lambda repeats: RATES)


@FETCHES
def test_a_row_of_shadowkv_and_its_stages(fetch):
    step = speed.bench_layer(SHAPE, POLICY, fetch, REPEATS)
    values = 2 * 2 * ((200 + speed.LEFT) // 4 - 1) * 4 * 16 * 4
    assert step["bytes_host"] == (0 if fetch == "resident" else values)
    # values, landmarks and left factor of other chunks are not read
    assert step["bytes_moved"] < step["bytes_device"] + step["bytes_host"]
    rows = {row["stage"]: row for row in stages.bench_stages(SHAPE, POLICY, fetch, REPEATS)}
    apart = set() if fetch == "zero_copy" else {"keys", "values"}
    assert rows.keys() == {"append", "scores", "select", "fetch", "attend"} | apart
    outer = [row for row in rows.values() if row["part_of"] is None]
    for name in ("bytes_read", "bytes_fetched", "flops"):  # together they do what the step does
        assert sum(row[name] for row in outer) == step[name]
    chunks = (200 + speed.LEFT) // 4 - 1
    assert rows["scores"]["bytes_read"] == 2 * 2 * chunks * (16 * 4 + 1)  # landmarks and masks
    assert rows["fetch"]["bytes_fetched"] == (0 if fetch == "resident" else 2 * 2 * 4 * 4 * 16 * 4)
    assert all(row["step_seconds"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", DEAR)
def test_every_policy_has_stages(name):
    policy = Full() if name == "full" else POLICY_CASES[name].restricted
    rows = stages.bench_stages(SHAPE, policy, "resident", REPEATS)
    assert {"append", "attend"} <= {row["stage"] for row in rows}


def test_the_command_prints_rows_and_stages_beside_the_dense_baselines(capsys, monkeypatch):
    torch = fake_torch.install(monkeypatch)
    options = [*LAYER, "--stages", "--policies", SETTING, "--fetch", "device_put"]
    assert bench.main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in told["results"]}
    assert {"shadowkv", "jax.nn.dot_product_attention", "torch sdpa", "torch bmm"} == set(rows)
    assert rows["shadowkv"]["bytes_fetched"] > 0
    for row in [*told["results"], *told["stages"]]:
        bytes_read = row["bytes_read"] + row["bytes_fetched"]
        assert row["bound_seconds"] == pytest.approx(
            bytes_read / RATES["read"] + row["flops"] / RATES["matmul_float32"]
        )
    assert told["machine"]["platform"] == "cpu"
    assert {row["policy"] for row in told["stages"]} == {"shadowkv"}
    # Both of torch's rows are the same attention of the same arrays.
    [fused, *_] = [out for name, out in torch.calls if name == "sdpa"]
    [_, products, *_] = [out for name, out in torch.calls if name == "bmm"]
    np.testing.assert_allclose(products.reshape(fused.shape), fused, atol=1e-2)
    monkeypatch.setattr(peers, "bench_baselines", lambda *given: told["results"][1:2])
    assert bench.main(options) == 0
    out = capsys.readouterr().out
    assert "dense / this" in out
    assert "keys (of fetch)" in out


# Whole requests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random Llama."""
    config = ModelConfig("llama", 64, 2, 32, 48, 4, 2, 8, 1e-6, 512, eos_ids=())
    path = tmp_path_factory.mktemp("bench") / "tiny"
    save(init_params(config), path)
    return str(path)


def test_a_system_that_fails_keeps_the_others_figures(checkpoint, capsys, monkeypatch):
    """That transformers is timed where torch is, too. Its cache that offloads wants a GPU of torch's."""

    def broken(request, policy, fetch):
        raise MemoryError("no room\nat all")

    fake_torch.install(monkeypatch)
    monkeypatch.setattr(speed, "answer_jshadow", broken)
    monkeypatch.setattr(speed, "in_own_process", lambda run: run())
    options = ["--tokens", "40", "--steps", "1", "--runs", "1", "--policies", "full"]
    with monkeypatch.context() as patched:
        fake_torch.install_transformers(patched)
        assert bench.main(["decode", checkpoint, *options, "--json"]) == 1
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert set(rows) == {"full", "transformers DynamicCache", "transformers OffloadedCache"}
    assert rows["full"]["error"] == "MemoryError: no room"
    assert rows["transformers DynamicCache"]["step_seconds"] > 0
    assert rows["transformers DynamicCache"]["bytes_device"] == 2 * 5 * 41
    assert "CUDA" in rows["transformers OffloadedCache"]["error"]
    assert bench.main(["decode", checkpoint, *options, "--no-peers"]) == 1
    assert "not measured: MemoryError: no room" in capsys.readouterr().out


def test_transformers_answers_twice_and_its_second_answer_counts(monkeypatch):
    """Each answer is the prompts in one call, and then its own tokens one by one."""
    fake_torch.install(monkeypatch)
    peer = fake_torch.install_transformers(monkeypatch)
    request = speed.Request("folder", tokens=7, batch=2, steps=3)
    answer = peers.answer_transformers(request, "DynamicCache")
    assert (peer.last.folder, peer.last.dtype) == ("folder", np.float32)
    assert [fed.shape for fed in peer.last.fed] == 2 * [(2, 7), (2, 1), (2, 1), (2, 1)]
    prompts = request.prompts(50)
    for answered in (peer.last.fed[:4], peer.last.fed[4:]):
        np.testing.assert_array_equal(answered[0], prompts)
        for step, tokens in enumerate(answered[1:], start=1):
            np.testing.assert_array_equal(tokens, (prompts[:, -1:] + step) % 50)
    assert (answer.bytes_device, answer.bytes_host) == (2 * 5 * 2 * (7 + 3), 0)
    assert answer.prefill_seconds > 0 < answer.decode_seconds


# Speculation

SMALL = SelfDraft(tokens=3, policy=Quest(budget=32, unit=8, recent=8, dense_layers=0))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_an_acceptance_is_found_again(share):
    """From the counts of many cycles of eight tokens, of which each is accepted with this probability."""
    rng, cycles = np.random.default_rng(1), 4000
    accepted = (rng.random((cycles, 8)) < share).cumprod(axis=1).sum()
    report = SimpleNamespace(cycles=cycles, proposed_tokens=8 * cycles, accepted_tokens=int(accepted))
    assert acceptance(report) == pytest.approx(share, abs=0.02)


@pytest.mark.slow
def test_the_rows_of_a_text():
    ids = np.tile(np.random.default_rng(0).integers(0, TINY.vocab_size, 11), 6).tolist()
    texts = [Text("copy", ids)]
    rows = bench_speculation(tiny_model(), Full(), [PromptLookup(tokens=4), SMALL], texts, new=20, repeats=2)
    assert [row["system"].partition("(")[0] for row in rows] == ["plain", "PromptLookup", "SelfDraft"]
    for row in rows:
        assert row["same"]
        assert row["new_tokens"] == 20
        assert row["least"] <= row["ratio"] <= row["most"]
    plain, lookup, own = rows
    assert plain["ratio"] == 1
    assert plain["tokens_a_cycle"] is plain["acceptance"] is None
    for row in (lookup, own):
        assert 1 <= row["tokens_a_cycle"] <= 5
        assert 0 <= row["acceptance"] <= 1


@pytest.mark.slow
def test_a_cycle_of_one_layer(capsys):
    row = bench_cycle(speed.Shape(64, heads=4, kv_heads=2, head_dim=16, dtype="float32"), SMALL, 0.5, repeats=3)
    assert row["tokens_a_cycle"] == 1 + 0.5 + 0.25 + 0.125
    assert row["least"] <= row["ratio"] <= row["most"]
    words = [*LAYER, "--context", "64", "--no-compile-cache"]
    words += ["--speculate", "self:quest:budget=32:unit=8:recent=8:tokens=3", "--acceptance"]
    assert bench.main([*words, "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["tokens_a_cycle"] == 4
    assert bench.main([*words, "0.9"]) == 0
    assert "check, ms" in capsys.readouterr().out


# Refusals


@pytest.mark.parametrize("given", [["prompt_lookup", "--acceptance", "0.9"], ["self"]])
def test_a_cycle_needs_self_drafting_and_its_acceptance(given, capsys):
    assert bench.main([*LAYER, "--speculate", *given]) == 2
    assert "--speculate must be self or self:POLICY, with --acceptance" in capsys.readouterr().err


def test_bad_numbers_of_a_cycle_are_refused():
    with pytest.raises(ConfigError, match=r"acceptance must lie in \[0, 1\], got 2"):
        bench_cycle(speed.Shape(64), SMALL, 2)
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        bench_speculation(tiny_model(), Full(), [], [], new=1, repeats=0)
