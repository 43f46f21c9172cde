"""A prefill on a GPU: its memory and how many prompts fit, its operations, pair by pair, and its predicted time."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY
from policy_inputs import llama
from real_shapes import LLAMA_31_8B

from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import prefill_peak
from jshadow.planner.gpu import Planner, capacity_plan
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GPUS
from jshadow.planner.prefill_operations import attention_operations, layer_operations
from jshadow.planner.prefill_pieces import rows_at_once
from jshadow.planner.prefill_time import LAUNCH_SECONDS, PREFILL_SHARE
from jshadow.policies import H2O, POLICIES, Full, ShadowKV

A100 = GPUS["a100-80gb"]

ROWS = [(1, 2048, 2048, 1), (24, 2048, 2048, 1), (24, 100, 2048, 12), (50, 100, 2048, 10), (7, 500, 2048, 1)]


@pytest.mark.parametrize(("batch", "size", "chunk", "rows"), [*ROWS, (8, 4, 2, 1)])
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


# Time


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize(("first", "tokens"), [(0, 1), (0, 16), (5, 9), (14, 30), (64, 64)])
def test_attention_counts_the_pairs_of_queries_and_keys(window, first, tokens):
    q, k = np.arange(first, first + tokens)[:, None], np.arange(first + tokens)[None]
    seen = (k <= q) & (True if window is None else k > q - window)
    pairs = seen.sum() * TINY.q_heads * TINY.head_dim
    assert attention_operations(TINY, window, first, tokens) == 4 * pairs  # a score and a weighted value


def test_a_layer_counts_its_weights_once_a_token():
    """A product of a token and a matrix takes two operations for each weight."""
    layer = abstract_weights(llama())["layer_0"]
    matrices = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(layer) if len(leaf.shape) >= 2)
    linear = layer_operations(llama(), None, 1000) - attention_operations(llama(), None, 0, 1000)
    assert linear == 2 * 1000 * matrices


def test_the_plan_of_a_prefill():
    plan = capacity_plan(llama(), ShadowKV(), GPUS["h200"], Serving(122_880, fetch="resident"))
    time, full = plan.chosen.prefill, plan.full.prefill
    assert time.flops == full.flops == 32 * layer_operations(llama(), None, 122_880)
    assert time.seconds == pytest.approx(time.flops / (PREFILL_SHARE * 989.5e12))
    assert 0.001 < time.compress_flops / time.flops < 0.003
    assert 32 * 1000 < time.compress_launches < 32 * 2000
    operations = time.compress_flops / time.flops * time.seconds
    assert time.compress_seconds == pytest.approx(operations + LAUNCH_SECONDS * time.compress_launches)
    assert (full.compress_flops, full.compress_launches, full.compress_seconds) == (0, 0, 0)
    assert full.restore_seconds > time.restore_seconds > 0
    device = plan.chosen.row_bytes[0]
    assert time.restore_seconds == pytest.approx(device / 63e9)
    assert time.first_token_seconds > time.restore_seconds
    assert plan.to_json()["chosen"]["prefill"]["seconds"] == time.seconds


def test_sliding_layers_take_less():
    config = dataclasses.replace(TINY, sliding_window=8, sliding_layers=(0,))
    plan = capacity_plan(config, Full(), GPUS["l4"], Serving(150, fetch="resident"))
    rest = (TINY.num_layers - 1) * layer_operations(TINY, None, 150)
    assert plan.chosen.prefill.flops == layer_operations(TINY, 8, 150) + rest
