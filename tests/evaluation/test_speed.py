"""`jshadow bench`: the counted bytes and operations of its rows, that it runs, and the errors that it raises."""

import copy
import functools
import json

import pytest
from cases import POLICY_CASES
from few import quick

from jshadow import Full, ShadowKV, cli
from jshadow.evaluation import speed
from jshadow.models.config import ModelConfig
from jshadow.weights.params import init_params, save

SHAPE = speed.Shape(context=200, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32")
POLICY = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
SETTING = "shadowkv:rank=8:chunk_size=4:budget=16:outlier_chunks=2:local_chunks=1"
REPEATS = 2
LAYER = ["bench", "layer", "--context", "200", "--batch", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
LAYER += ["--dtype", "float32", "--fetch", "resident", "--repeats", str(REPEATS)]
RATES = {"read": 3e9, "copy": 2e9, "matmul_float32": 5e9, "matmul_bfloat16": 4e9}
DEAR = quick(["full"], ["full", "specache", "infllm", "shadowkv_plus_transform"])  # policies with programs of their own
ceilings, measured = speed.ceilings, functools.cache(speed.bench_layer)


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Each layer is measured once, for all tests. The rates of the machine are made up."""
    monkeypatch.setattr(speed, "bench_layer", lambda *given: copy.deepcopy(measured(*given)))
    monkeypatch.setattr(speed, "ceilings", lambda repeats: RATES)


def test_a_row_of_full_attention():
    row = speed.bench_layer(SHAPE, Full(), "resident", REPEATS)
    cache = 2 * 2 * (200 + speed.LEFT) * 2 * 16 * 4
    assert (row["policy"], row["fetch"], row["context"], row["batch"]) == ("full", "resident", 200, 2)
    assert row["bytes_device"] == row["bytes_moved"] == cache
    assert row["bytes_host"] == 0
    assert 0 < row["least"] <= row["step_seconds"] <= row["most"]
    assert row["compile_seconds"] > 0


@pytest.mark.parametrize("name", DEAR)
def test_every_policy_can_be_measured(name):
    policy = Full() if name == "full" else POLICY_CASES[name].restricted
    assert speed.bench_layer(SHAPE, policy, "resident", REPEATS)["step_seconds"] > 0


def test_the_command_prints_rows_and_their_growth_over_contexts(capsys, monkeypatch):
    def at_200(shape, *others):
        slower = {"context": shape.context, "step_seconds": shape.context / 100}
        return measured(SHAPE, *others) | slower

    monkeypatch.setattr(speed, "bench_layer", at_200)
    options = [*LAYER, "--context", "200,400", "--policies", f"full,{SETTING}", "--fetch", "device_put"]
    assert cli.main(options) == 0
    out = capsys.readouterr().out
    assert "dense / this" in out
    assert f"times as long at 400 as at 200 tokens: full 2.00, {SETTING} 2.00" in out
    assert cli.main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in told["results"]] == [200, 200, 400, 400]
    assert told["results"][1]["bytes_fetched"] > 0
    for row in told["results"]:
        bytes_read = row["bytes_read"] + row["bytes_fetched"]
        assert row["bound_seconds"] == pytest.approx(
            bytes_read / RATES["read"] + row["flops"] / RATES["matmul_float32"]
        )
    assert told["machine"]["platform"] == "cpu"
    assert cli.main([*LAYER, "--policies", SETTING]) == 0
    assert f"{SETTING} / this" in capsys.readouterr().out  # where full attention is left out


def test_ceilings_are_printed(capsys, monkeypatch):
    monkeypatch.setattr(speed, "ON_CPU", (2**16, 32))
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
    policies = ["--policies", "full,shadowkv:rank=8:budget=16:outlier_chunks=1"]
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
        assert cli.main(["bench", part, checkpoint, "--tokens", "32", "--steps", "1", "--runs", "1"]) == 0
        out = capsys.readouterr().out
        assert unit in out
        assert "shadowkv has nothing to select" in out  # told, for 32 tokens are too few


def test_a_setting_that_cannot_be_measured_is_told(checkpoint, capsys, monkeypatch):
    def broken(request, policy, fetch):
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(speed, "answer_jshadow", broken)
    monkeypatch.setattr(speed, "in_own_process", lambda run: run())
    options = ["bench", "decode", checkpoint, "--tokens", "40", "--steps", "1", "--runs", "1", "--policies", "full"]
    assert cli.main(options) == 1
    assert "not measured: MemoryError: no room" in capsys.readouterr().out
    assert cli.main([*options, "--json"]) == 1
    [row] = json.loads(capsys.readouterr().out)["results"]
    assert row["error"] == "MemoryError: no room"


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
