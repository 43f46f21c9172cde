"""`jshadow bench`: the counted bytes and operations of its rows, that it runs, and the errors that it raises."""

import copy
import functools
import json
from types import SimpleNamespace

import fake_torch
import numpy as np
import pytest
from cases import POLICY_CASES, TINY
from cases import model as tiny_model
from few import quick

from jshadow import Full, PromptLookup, Quest, SelfDraft, ShadowKV, cli
from jshadow.errors import ConfigError
from jshadow.evaluation import speed as bench
from jshadow.evaluation.speed import layer, model, peers, timing
from jshadow.evaluation.speed.cycle import bench_cycle
from jshadow.evaluation.speed.request import Request
from jshadow.evaluation.speed.speculation import Text, acceptance, bench_speculation
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params, save

SHAPE = bench.Shape(context=200, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32")
POLICY = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
SETTING = "shadowkv:rank=8:chunk_size=4:budget=16:outlier_chunks=2:local_chunks=1"
REPEATS = 2
LAYER = ["bench", "layer", "--context", "200", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
LAYER += ["--dtype", "float32", "--fetch", "resident", "--repeats", str(REPEATS)]
RATES = {"read": 3e9, "copy": 2e9, "matmul_float32": 5e9, "matmul_bfloat16": 4e9}
FETCHES = pytest.mark.parametrize("fetch", ["resident", "device_put", "zero_copy"])
DEAR = quick(["full"], ["full", "specache", "infllm", "shadowkv_plus_transform"])  # policies with programs of their own
ceilings = bench.ceilings
measured = {name: functools.cache(getattr(bench, name)) for name in ("bench_layer", "bench_stages")}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Each layer is measured once, for all tests. The rates of the machine are made up."""
    for name, measure in measured.items():
        monkeypatch.setattr(bench, name, lambda *given, measure=measure: copy.deepcopy(measure(*given)))
    monkeypatch.setattr(bench, "ceilings", lambda repeats: RATES)


def test_a_row_of_full_attention():
    row = bench.bench_layer(SHAPE, Full(), "resident", REPEATS)
    cache = 2 * 2 * (200 + layer.LEFT) * 2 * 16 * 4
    assert (row["policy"], row["fetch"], row["context"], row["batch"]) == ("full", "resident", 200, 2)
    assert row["bytes_device"] == row["bytes_moved"] == cache
    assert row["bytes_host"] == 0
    assert 0 < row["least"] <= row["step_seconds"] <= row["most"]
    assert row["compile_seconds"] > 0


@FETCHES
def test_a_row_of_shadowkv_and_its_stages(fetch):
    step = bench.bench_layer(SHAPE, POLICY, fetch, REPEATS)
    values = 2 * 2 * ((200 + layer.LEFT) // 4 - 1) * 4 * 16 * 4
    assert step["bytes_host"] == (0 if fetch == "resident" else values)
    # values, landmarks and left factor of other chunks are not read
    assert step["bytes_moved"] < step["bytes_device"] + step["bytes_host"]
    rows = {row["stage"]: row for row in bench.bench_stages(SHAPE, POLICY, fetch, REPEATS)}
    apart = set() if fetch == "zero_copy" else {"keys", "values"}
    assert rows.keys() == {"append", "scores", "select", "fetch", "attend"} | apart
    outer = [row for row in rows.values() if row["part_of"] is None]
    for name in ("bytes_read", "bytes_fetched", "flops"):  # together they do what the step does
        assert sum(row[name] for row in outer) == step[name]
    chunks = (200 + layer.LEFT) // 4 - 1
    assert rows["scores"]["bytes_read"] == 2 * 2 * chunks * (16 * 4 + 1)  # landmarks and masks
    assert rows["fetch"]["bytes_fetched"] == (0 if fetch == "resident" else 2 * 2 * 4 * 4 * 16 * 4)
    assert all(row["step_seconds"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", DEAR)
def test_every_policy_can_be_measured_and_has_stages(name):
    policy = Full() if name == "full" else POLICY_CASES[name].restricted
    assert bench.bench_layer(SHAPE, policy, "resident", REPEATS)["step_seconds"] > 0
    stages = bench.bench_stages(SHAPE, policy, "resident", REPEATS)
    assert {"append", "attend"} <= {row["stage"] for row in stages}


def test_the_command_prints_rows_and_stages_beside_the_dense_baselines(capsys, monkeypatch):
    torch = fake_torch.install(monkeypatch)
    options = [*LAYER, "--stages", "--policies", SETTING, "--fetch", "device_put"]
    assert cli.main([*options, "--json"]) == 0
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
    monkeypatch.setattr(bench, "bench_baselines", lambda *given: told["results"][1:2])
    assert cli.main(options) == 0
    out = capsys.readouterr().out
    assert "dense / this" in out
    assert "keys (of fetch)" in out


def test_growth_over_contexts_is_printed(capsys, monkeypatch):
    def at_200(shape, *others):
        slower = {"context": shape.context, "step_seconds": shape.context / 100}
        return measured["bench_layer"](SHAPE, *others) | slower

    monkeypatch.setattr(bench, "bench_layer", at_200)
    monkeypatch.setattr(bench, "bench_baselines", lambda *given: [])
    options = [*LAYER, "--context", "200,400", "--policies", f"full,{SETTING}"]
    assert cli.main(options) == 0
    assert f"times as long at 400 as at 200 tokens: full 2.00, {SETTING} 2.00" in capsys.readouterr().out
    assert cli.main([*options, "--json"]) == 0
    assert [row["context"] for row in json.loads(capsys.readouterr().out)["results"]] == [200, 200, 400, 400]


def test_ceilings_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(timing, "ON_CPU", (2**16, 32))
    rates = ceilings(REPEATS)
    assert set(rates) == set(RATES)
    assert all(rate > 0 for rate in rates.values())
    assert cli.main(["bench", "ceilings", "--repeats", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ceilings"] == RATES
    assert cli.main(["bench", "ceilings", "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "matmul_bfloat16" in out
    assert "4.0 GFLOP" in out


# Whole requests


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny random Llama."""
    config = ModelConfig("llama", 64, 2, 32, 48, 4, 2, 8, 1e-6, 512, eos_ids=())
    path = tmp_path_factory.mktemp("bench") / "tiny"
    save(init_params(config), path)
    return str(path)


@pytest.mark.slow
@pytest.mark.process
def test_decode_and_prefill_of_a_checkpoint(checkpoint, capsys):
    options = ["--tokens", "96", "--steps", "3", "--runs", "1", "--batch", "2", "--fetch", "resident,device_put"]
    policies = ["--policies", "full,shadowkv:rank=8:budget=16:outlier_chunks=1", "--no-peers"]
    assert cli.main(["bench", "decode", checkpoint, *options, *policies, "--json"]) == 0
    out, err = capsys.readouterr()
    rows = {(row["setting"].partition(":")[0], row["fetch"]): row for row in json.loads(out)["results"]}
    assert set(rows) == {("full", "resident"), ("shadowkv", "resident"), ("shadowkv", "device_put")}
    assert "running shadowkv:rank=8:budget=16:outlier_chunks=1, device_put ..." in err
    cache = 2 * 2 * 2 * 99 * 16 * 4
    assert rows["full", "resident"]["bytes_device"] == cache
    assert rows["shadowkv", "resident"]["bytes_host"] == 0 < rows["shadowkv", "device_put"]["bytes_host"]
    weights = 4 * (2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 64 * 32 + 32)  # the head, no embedding
    assert rows["full", "resident"]["bytes_read"] == weights + cache
    for row in rows.values():
        assert row["step_seconds"] > 0 < row["prefill_seconds"]
        assert row["tokens_per_second"] == pytest.approx(2 / row["step_seconds"])
        assert row["error"] is None is row["fallback"]
        assert row["bound_seconds"] > 0 < row["prefill_bound_seconds"]
    for part, unit in (("decode", "step, ms"), ("prefill", "prefill, s")):
        assert cli.main(["bench", part, checkpoint, "--tokens", "32", "--steps", "1", "--runs", "1", "--no-peers"]) == 0
        out = capsys.readouterr().out
        assert unit in out
        assert "transformers" not in out
        assert "shadowkv has nothing to select" in out  # told, for 32 tokens are too few


def test_a_system_that_fails_keeps_the_others_figures(checkpoint, capsys, monkeypatch):
    """That transformers is timed where torch is, too. Its cache that offloads wants a GPU of torch's."""

    def broken(request, policy, fetch):
        raise MemoryError("no room\nat all")

    fake_torch.install(monkeypatch)
    monkeypatch.setattr(model, "answer_jshadow", broken)
    monkeypatch.setattr(model, "in_own_process", lambda run: run())
    options = ["--tokens", "40", "--steps", "1", "--runs", "1", "--policies", "full"]
    with monkeypatch.context() as patched:
        fake_torch.install_transformers(patched)
        assert cli.main(["bench", "decode", checkpoint, *options, "--json"]) == 1
    rows = {row["setting"]: row for row in json.loads(capsys.readouterr().out)["results"]}
    assert set(rows) == {"full", "transformers DynamicCache", "transformers OffloadedCache"}
    assert rows["full"]["error"] == "MemoryError: no room"
    assert rows["transformers DynamicCache"]["step_seconds"] > 0
    assert rows["transformers DynamicCache"]["bytes_device"] == 2 * 5 * 41
    assert "CUDA" in rows["transformers OffloadedCache"]["error"]
    assert cli.main(["bench", "decode", checkpoint, *options, "--no-peers"]) == 1
    assert "not measured: MemoryError: no room" in capsys.readouterr().out


def test_transformers_answers_twice_and_its_second_answer_counts(monkeypatch):
    """Each answer is the prompts in one call, and then its own tokens one by one."""
    fake_torch.install(monkeypatch)
    peer = fake_torch.install_transformers(monkeypatch)
    request = Request("folder", tokens=7, batch=2, steps=3)
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
    row = bench_cycle(bench.Shape(64, heads=4, kv_heads=2, head_dim=16, dtype="float32"), SMALL, 0.5, repeats=3)
    assert row["tokens_a_cycle"] == 1 + 0.5 + 0.25 + 0.125
    assert row["least"] <= row["ratio"] <= row["most"]
    words = [*LAYER, "--context", "64", "--no-compile-cache"]
    words += ["--speculate", "self:quest:budget=32:unit=8:recent=8:tokens=3", "--acceptance"]
    assert cli.main([*words, "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["tokens_a_cycle"] == 4
    assert cli.main([*words, "0.9"]) == 0
    assert "check, ms" in capsys.readouterr().out


# Refusals

DECODE = ["bench", "decode", "CHECKPOINT", "--tokens", "100"]
REFUSED = [
    ([*LAYER, "--context", "1,²"], "--context must be a comma list of token counts, got '1,²'"),
    ([*LAYER, "--context", "1,x"], "--context must be a comma list of token counts, got '1,x'"),
    ([*LAYER, "--heads", "3"], "heads must be a multiple of kv_heads=2, got 3"),
    ([*LAYER, "--context", "0"], "context must be at least 1, got 0"),
    ([*LAYER, "--head-dim", "15"], "head_dim must be even, got 15"),
    ([*LAYER, "--repeats", "0"], "--repeats must be at least 1, got 0"),
    ([*LAYER, "--dtype", "int8"], "--dtype must be float32 or bfloat16, got 'int8'"),
    ([*LAYER, "--policies", "none"], "policy must be one of"),
    ([*LAYER, "--fetch", "quickly"], "fetch must be 'auto' or one of"),
    ([*LAYER, "--speculate", "prompt_lookup", "--acceptance", "0.9"], "--speculate must be self or self:POLICY, with"),
    ([*LAYER, "--speculate", "self"], "--speculate must be self or self:POLICY, with --acceptance"),
    ([*DECODE, "--tokens", "600"], "tokens + steps must be at most the model's context=512, got 600 + 24"),
    ([*DECODE, "--tokens", "0"], "tokens must be at least 1, got 0"),
    ([*DECODE, "--runs", "0"], "runs must be at least 1, got 0"),
    ([*DECODE, "--dtype", "int8"], "--dtype must be float32 or bfloat16, got 'int8'"),
    ([*DECODE, "--fetch", "quickly"], "fetch must be 'auto' or one of"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_what_cannot_be_measured_is_refused(checkpoint, words, message, capsys):
    assert cli.main([checkpoint if word == "CHECKPOINT" else word for word in words]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_bad_numbers_of_a_cycle_are_refused():
    with pytest.raises(ConfigError, match=r"acceptance must lie in \[0, 1\], got 2"):
        bench_cycle(bench.Shape(64), SMALL, 2)
    with pytest.raises(ConfigError, match="repeats must be at least 1, got 0"):
        bench_speculation(tiny_model(), Full(), [], [], new=1, repeats=0)
