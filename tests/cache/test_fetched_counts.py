"""Counts of fetched bytes that exceed 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot.compiler import place
from cases import STEPS, TINY, model, prefilled

from jshadow.cache import accounting
from jshadow.cache.offload import unit_bytes
from jshadow.cache.records import Kept, Selection
from jshadow.cache.spec import HostLayout
from jshadow.engine import decode
from jshadow.engine.step import step_writes
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_state
from jshadow.policies import ShadowKV

LLAMA = ModelConfig("llama", 256, 32, 4096, 256, 32, 8, 128, 1e-5, 2**20)


@pytest.mark.slow
def test_a_turn_that_moves_more_than_four_gibibytes_a_row():
    """Sixteen queries at 262,700 tokens fetch more bytes than 32 bits can count, and the step can be traced."""
    state = abstract_state(
        LLAMA, ShadowKV(), batch=1, capacity=262_700, prompt=262_000, dtype="bfloat16", fetch="device_put"
    )
    tokens, new = jax.ShapeDtypeStruct((1, 16), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    step = jax.jit(lambda weights, tokens, new, reads, writes: step_writes(weights, LLAMA, tokens, new, reads, writes))
    traced = step.trace(*map(place, (abstract_weights(LLAMA), tokens, new, *state.split()))).out_info
    assert traced[1].counters.fetched.dtype == jnp.uint32
    policy = state.policy
    assert 32 * 8 * 16 * policy.max_selected(262_700) * 8 * 128 * 2 >= 2**32


def test_a_turn_fetches_what_its_real_queries_select():
    """Padded queries and inactive rows fetch nothing, and within a turn no query reuses another query's rows."""
    _, state = prefilled("shadowkv", "restricted", "zero_copy")
    before = np.asarray(state.counters.fetched)
    new = np.array([7, 1, 0])
    _, state = decode.extend(model(), STEPS[:, :7], new, state, logits="all")
    chunks = np.array([4, 2, 0])  # a budget of 16 tokens; a row of 27 tokens has two chunks that can be selected
    one = TINY.num_layers * TINY.kv_heads * 4 * TINY.head_dim * 4  # bytes of a float32 chunk in all heads and layers
    counted = (np.asarray(state.counters.fetched) - before) * accounting.FETCH_QUANTUM
    assert counted.tolist() == (one * chunks * new).tolist()


def test_missed_chunks_are_counted_beyond_32_bits():
    state = abstract_state(LLAMA, ShadowKV(), batch=2, capacity=4096, prompt=4000, dtype="bfloat16", fetch="zero_copy")
    spec, units = state.specs[0], 300_000
    missed = np.broadcast_to(np.arange(units, dtype=np.int32), (2, 8, units)).copy()
    missed[1, :, 1:] = units
    rows = jax.ShapeDtypeStruct((2, 8, units, 1024), jnp.bfloat16)  # 10 GB, never allocated
    count = (missed < units).sum(axis=2)
    selection = Selection(missed, missed < units, kept=Kept(rows, rows, missed, missed, count))  # type: ignore[arg-type]
    layout = HostLayout(heads=8, units=units, unit=8)
    counted = accounting.missed_quanta(jnp.asarray(count.sum(axis=1), jnp.int32), unit_bytes(spec, layout))
    assert counted.tolist() == [8 * units * 2048 // 64, 8 * 2048 // 64]
    assert 8 * units * 2048 > 2**32
    assert accounting.fetched_bytes(spec, selection, layout) == 0
