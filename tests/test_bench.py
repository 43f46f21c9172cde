"""`jshadow bench`: what its rows say is counted, not timed; that it runs, and what it refuses."""

import json

import pytest
from cases import POLICY_CASES

from jshadow import bench, cli
from jshadow.policies import Full, ShadowKV

SHAPE = bench.Shape(context=200, batch=2, heads=4, kv_heads=2, head_dim=16, dtype="float32")
TINY = ["--context", "200", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--repeats", "2"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setattr(bench, "COPY_BYTES", 2**16)
    monkeypatch.setattr(bench, "SIDE", 32)


def test_a_row_of_full_attention():
    row = bench.bench_layer(SHAPE, Full(), "resident", repeats=2)
    cache = 2 * 2 * (200 + bench.LEFT) * 2 * 16 * 4
    assert (row["policy"], row["fetch"], row["context"], row["batch"]) == ("full", "resident", 200, 2)
    assert row["bytes_device"] == row["bytes_moved"] == cache
    assert row["bytes_host"] == 0
    assert 0 < row["least"] <= row["step_seconds"] <= row["most"]
    assert row["compile_seconds"] > 0


@pytest.mark.parametrize("fetch", ["resident", "device_put", "zero_copy"])
def test_a_row_of_shadowkv(fetch):
    policy = ShadowKV(rank=8, chunk_size=4, budget=16, outlier_chunks=2, local_chunks=1)
    row = bench.bench_layer(SHAPE, policy, fetch, repeats=2)
    values = 2 * 2 * ((200 + bench.LEFT) // 4 - 1) * 4 * 16 * 4
    assert row["bytes_host"] == (0 if fetch == "resident" else values)
    # values, landmarks and left factor of what is not selected stay where they are
    assert row["bytes_moved"] < row["bytes_device"] + row["bytes_host"]


@pytest.mark.parametrize("name", POLICY_CASES)
def test_every_policy_can_be_measured(name):
    row = bench.bench_layer(SHAPE, POLICY_CASES[name].restricted, "resident", repeats=1)
    assert row["step_seconds"] > 0


def test_the_command_prints_rows(capsys):
    assert cli.main(["bench", "layer", *TINY, "--policies", "full,shadowkv:rank=8:budget=64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = {row["policy"]: row for row in told["results"]}
    assert {"full", "shadowkv", "jax.nn.dot_product_attention", "torch sdpa", "torch bmm"} == set(rows)
    for row in rows.values():
        assert row["bound_seconds"] == pytest.approx(
            row["bytes_moved"] / told["ceilings"]["read"] + row["flops"] / told["ceilings"]["matmul_bfloat16"]
        )
    assert told["machine"]["platform"] == "cpu"
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
