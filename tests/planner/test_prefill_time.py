"""The predicted time of a prefill: its operations, counted pair by pair, and the first token of a stored state."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY
from policy_inputs import llama

from jshadow.models.transformer import abstract_weights
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import GPUS
from jshadow.planner.prefill_operations import attention_operations, layer_operations
from jshadow.planner.prefill_time import LAUNCH_SECONDS, PREFILL_SHARE
from jshadow.policies import Full, ShadowKV


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
    assert 32 * 400 < time.compress_launches < 32 * 1200
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
