"""`jshadow bench`: the counted bytes and operations of its rows, that it runs, and the errors that it raises."""

import json

import fake_torch
import numpy as np
import pytest
from cases import POLICY_CASES
from few import quick

from jshadow import cli
from jshadow.evaluation import speed as bench
from jshadow.evaluation.speed import layer, model, peers, timing
from jshadow.evaluation.speed.request import Request
from jshadow.models.config import ModelConfig
from jshadow.policies import Full, ShadowKV
from jshadow.weights.params import init_params, save

SHAPE = bench.Shape(context=200, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32")
TINY = ["--context", "200", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--repeats", "2"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setattr(timing, "ON_CPU", (2**16, 32))


def test_a_row_of_full_attention():
    row = bench.bench_layer(SHAPE, Full(), "resident", repeats=2)
    cache = 2 * 2 * (200 + layer.LEFT) * 2 * 16 * 4
    assert (row["policy"], row["fetch"], row["context"], row["batch"]) == ("full", "resident", 200, 2)
    assert row["bytes_device"] == row["bytes_moved"] == cache
    assert row["bytes_host"] == 0
    assert 0 < row["least"] <= row["step_seconds"] <= row["most"]
    assert row["compile_seconds"] > 0


@pytest.mark.parametrize("fetch", ["resident", "device_put", "zero_copy"])
def test_a_row_of_shadowkv(fetch):
    policy = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
    row = bench.bench_layer(SHAPE, policy, fetch, repeats=2)
    values = 2 * 2 * ((200 + layer.LEFT) // 4 - 1) * 4 * 16 * 4
    assert row["bytes_host"] == (0 if fetch == "resident" else values)
    # values, landmarks and left factor of other chunks are not read
    assert row["bytes_moved"] < row["bytes_device"] + row["bytes_host"]


@pytest.mark.parametrize("name", quick(["full"], ["full", "specache", "infllm", "shadowkv_plus_transform"]))
def test_every_policy_can_be_measured(name):
    row = bench.bench_layer(SHAPE, POLICY_CASES[name].restricted, "resident", repeats=1)
    assert row["step_seconds"] > 0


def test_the_command_prints_rows(capsys, monkeypatch):
    torch = fake_torch.install(monkeypatch)
    assert cli.main(["bench", "layer", *TINY, "--policies", "full,shadowkv:rank=8:budget=64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in told["results"]}
    assert {"full", "shadowkv", "jax.nn.dot_product_attention", "torch sdpa", "torch bmm"} == set(rows)
    for row in rows.values():
        assert row["bound_seconds"] == pytest.approx(
            row["bytes_moved"] / told["ceilings"]["read"] + row["flops"] / told["ceilings"]["matmul_bfloat16"]
        )
    assert told["machine"]["platform"] == "cpu"
    # Both of torch's rows are the same attention of the same arrays.
    [fused, *_] = [out for name, _, out in torch.calls if name == "sdpa"]
    [_, products, *_] = [out for name, _, out in torch.calls if name == "bmm"]
    np.testing.assert_allclose(products.reshape(fused.shape), fused, atol=1e-2)
    assert cli.main(["bench", "layer", *TINY]) == 0
    assert "dense / this" in capsys.readouterr().out


def test_ceilings_are_printed(capsys):
    assert cli.main(["bench", "ceilings", "--repeats", "2", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["ceilings"]) == {"read", "copy", "matmul_float32", "matmul_bfloat16"}
    assert cli.main(["bench", "ceilings", "--repeats", "2"]) == 0
    assert "matmul_bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "1,²"], "--context must be a comma list of token counts, got '1,²'"),
        (["--context", "1,x"], "--context must be a comma list of token counts, got '1,x'"),
        (["--heads", "3"], "heads must be a multiple of kv_heads=2, got 3"),
        (["--context", "0"], "context must be at least 1, got 0"),
        (["--head-dim", "15"], "head_dim must be even, got 15"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--dtype", "int8"], "--dtype must be float32 or bfloat16, got 'int8'"),
        (["--policies", "none"], "policy must be one of"),
        (["--fetch", "quickly"], "fetch must be 'auto' or one of"),
    ],
)
def test_what_cannot_be_measured(options, message, capsys):
    assert cli.main(["bench", "layer", *TINY, *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out


# Stages


@pytest.mark.parametrize("fetch", ["resident", "device_put", "zero_copy"])
def test_the_stages_of_shadowkv(fetch):
    policy = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
    rows = {row["stage"]: row for row in bench.bench_stages(SHAPE, policy, fetch, repeats=1)}
    apart = set() if fetch == "zero_copy" else {"keys", "values"}
    assert rows.keys() == {"append", "scores", "select", "fetch", "attend"} | apart
    step = bench.bench_layer(SHAPE, policy, fetch, repeats=1)
    outer = [row for row in rows.values() if row["part_of"] is None]
    for name in ("bytes_read", "bytes_fetched", "flops"):  # together they do what the step does
        assert sum(row[name] for row in outer) == step[name]
    chunks = (200 + layer.LEFT) // 4 - 1
    assert rows["scores"]["bytes_read"] == 2 * 2 * chunks * (16 * 4 + 1)  # landmarks and masks
    assert rows["fetch"]["bytes_fetched"] == (0 if fetch == "resident" else 2 * 2 * 4 * 4 * 16 * 4)
    assert all(row["step_seconds"] > 0 for row in rows.values())


@pytest.mark.parametrize("name", quick(["full"], ["full", "specache", "infllm", "shadowkv_plus_transform"]))
def test_every_policy_has_stages(name):
    rows = bench.bench_stages(SHAPE, POLICY_CASES[name].restricted, "resident", repeats=1)
    assert {"append", "attend"} <= {row["stage"] for row in rows}


def test_stages_and_growth_are_printed(capsys):
    options = ["--context", "200,400", "--stages", "--policies", "shadowkv:rank=8:budget=64"]
    assert cli.main(["bench", "layer", *TINY, *options]) == 0
    out = capsys.readouterr().out
    assert "shadowkv:rank=8:budget=64: keys (of fetch)" in out
    assert "times as long at 400 as at 200 tokens: shadowkv:rank=8:budget=64 " in out
    assert cli.main(["bench", "layer", *TINY, *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["context"] for row in told["stages"]} == {200, 400} == {row["context"] for row in told["results"]}


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "600"], "tokens + steps must be at most the model's context=512, got 600 + 24"),
        (["--tokens", "0"], "tokens must be at least 1, got 0"),
        (["--runs", "0"], "runs must be at least 1, got 0"),
        (["--dtype", "int8"], "--dtype must be float32 or bfloat16, got 'int8'"),
        (["--fetch", "quickly"], "fetch must be 'auto' or one of"),
    ],
)
def test_requests_that_cannot_be_measured(checkpoint, options, message, capsys):
    assert cli.main(["bench", "decode", checkpoint, "--tokens", "100", *options]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
