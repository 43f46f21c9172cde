"""How much device memory a prefill takes on a GPU, where attention takes whole prompts, and how many prompts fit."""

import dataclasses

import pytest
from real_shapes import LLAMA_31_8B

from jshadow.planner.bytes import prefill_peak
from jshadow.planner.gpu import Planner
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GPUS
from jshadow.planner.prefill_pieces import rows_at_once
from jshadow.policies import H2O, POLICIES, ShadowKV

A100 = GPUS["a100-80gb"]


@pytest.mark.parametrize(
    ("batch", "size", "chunk", "rows"),
    [
        (1, 2048, 2048, 1),
        (24, 2048, 2048, 1),
        (24, 100, 2048, 12),
        (50, 100, 2048, 10),
        (7, 500, 2048, 1),
        (8, 4, 2, 1),
    ],
)
def test_rows_at_once(batch, size, chunk, rows):
    assert rows_at_once(batch, size, chunk) == rows


def test_the_bound_on_a_gpu():
    """Beside one row's queries and outputs, only what the results need grows with the rows."""

    def peak(config=LLAMA_31_8B, batch=1, **changes):
        settings = dict(batch=batch, tokens=122_880, capacity=123_904, fetch="device_put", backend="gpu")
        return prefill_peak(config, changes.pop("policy", ShadowKV()), **settings | changes)

    one, four = peak(), peak(batch=4)
    row = 122_880 * 32 * 128 * 2
    assert one["attention"] == 2 * row
    assert four["attention"] == 2 * row + 2 * row // 4  # and its keys and values
    assert four["piece"] == one["piece"]
    assert four["hidden"] == 4 * one["hidden"]
    usual = peak(backend="cpu")
    assert usual["attention"] == 0 < one["piece"] < usual["piece"]
    assert peak(dtype="float32") == peak(dtype="float32", backend="cpu")
    assert peak(policy=H2O()) == peak(policy=H2O(), backend="cpu")
    wide = dataclasses.replace(LLAMA_31_8B, q_heads=16, kv_heads=4, head_dim=256)
    assert peak(wide)["attention"] == 2 * row
    assert peak(wide)["piece"] == peak(wide, backend="cpu")["piece"]  # an A100 reads it in pieces


@pytest.mark.parametrize("fetch", ["device_put", "resident"])
@pytest.mark.parametrize(
    ("context", "name", "share", "fits"),
    [
        (120 * 1024, "shadowkv", 1, range(5, 15)),
        (120 * 1024, "h2o", 1, range(6, 40)),
        (1000, "shadowkv", 1, range(100, 1000)),
        (100, "full", 0.1995, range(1, 20)),  # up to 20 prompts go through a layer at once
        (131000, "full", 0.4, range(1)),
    ],
)
def test_one_more_prompt_would_not_fit(context, name, share, fits, fetch):
    gpu = dataclasses.replace(A100, memory_bytes=int(A100.memory_bytes * share))
    policy = POLICIES[name]().resolve(LLAMA_31_8B, context + 64)
    planner = Planner(LLAMA_31_8B, LLAMA_31_8B, gpu, Serving(context, 64, fetch=fetch))
    rows, room = planner.prefill_batch(policy), gpu.memory_bytes - CONTEXT_RESERVE

    def peak(batch):
        sizes = dict(batch=batch, tokens=context, capacity=context + 64, fetch=fetch, backend="gpu")
        return sum(prefill_peak(LLAMA_31_8B, policy, **sizes).values())

    assert rows in fits
    assert rows == 0 or peak(rows) <= room
    assert room < peak(rows + 1)
