"""Prefill in pieces: the same state whatever the piece, within a bound of device memory that a function tells."""

import dataclasses
import gc
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ALL, CAPACITY, LENGTHS, POLICY_CASES, PROMPT, TINY, case_of, model, policies_of
from layer_reading import memory_of_a_piece
from real_shapes import LLAMA_SHAPE, WIDE

import jshadow
from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import PromptKV
from jshadow.engine import decode
from jshadow.engine.prefill.layer import compress_layer
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.errors import ConfigError
from jshadow.evaluation.laws import turns
from jshadow.ops.attention import Piece, attend, causal_attention
from jshadow.planner.bytes import abstract_state, cache_specs, prefill_peak
from jshadow.planner.prefill_pieces import pieces_of
from jshadow.policies import Full, ShadowKV, ShadowKVPlus
from jshadow.weights.params import init_params

PIECES = [1, 7, 16, 60, 2048]  # 61 tokens: single ones, an uneven cut, two nearly whole halves, and one piece


@pytest.mark.parametrize(
    ("name", "prefill_chunk"),
    [
        (name, size)
        for name in POLICY_CASES
        for size in (PIECES[:-1] if ALL else PIECES[1:3] if name in policies_of() else PIECES[:1])
    ],
)
def test_every_piece_size_gives_the_same_state(name, prefill_chunk):
    turns.prefill_pieces_are_one_prefill(case_of(name, piece=prefill_chunk))


@pytest.mark.parametrize("logits", ["all", "last"])
def test_logits_of_a_prompt_in_pieces(logits):
    whole = decode.prefill(model(), PROMPT, LENGTHS, Full(), capacity=CAPACITY, logits=logits)[0]
    cut = decode.prefill(model(), PROMPT, LENGTHS, Full(), capacity=CAPACITY, logits=logits, prefill_chunk=9)[0]
    assert cut.shape == whole.shape
    np.testing.assert_allclose(cut, whole, atol=1e-4)


def test_a_piece_must_have_tokens():
    for value in (0, -1, 2.5, True, None):
        with pytest.raises(ConfigError, match="prefill_chunk must be an integer of at least 1"):
            decode.prefill(model(), PROMPT, LENGTHS, capacity=CAPACITY, prefill_chunk=value)


def test_a_ragged_batch_is_in_the_bound():
    """The shortest prompt decides the windows of all rows."""
    prompt = np.zeros((2, 90), np.int32)
    _, state = decode.prefill(model(), prompt, [90, 5], ShadowKV(rank=8), capacity=CAPACITY)
    settings = dict(batch=2, tokens=90, capacity=CAPACITY, dtype="float32", fetch="resident")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    assert prefill_peak(TINY, ShadowKV(rank=8), shortest=5, **settings)["state"] == held
    assert prefill_peak(TINY, ShadowKV(rank=8), **settings)["state"] < held
    for name in ("tokens", "prefill_chunk"):
        with pytest.raises(ConfigError, match=name):
            prefill_peak(TINY, ShadowKV(), **settings | {name: 0})


@pytest.mark.parametrize(("tokens", "chunk", "pieces"), [(61, 2048, (1, 61)), (2112, 2048, (2, 1056)), (7, 2, (4, 2))])
def test_pieces_are_even_and_cover_the_prompt(tokens, chunk, pieces):
    assert pieces_of(tokens, chunk) == pieces


@pytest.mark.parametrize(
    ("tokens", "chunk", "multiple", "pieces"),
    [(61, 2048, 16, (1, 64)), (2112, 2048, 512, (2, 1536)), (7, 2, 4, (2, 4)), (4096, 2048, 512, (2, 2048))],
)
def test_pieces_may_have_to_be_multiples(tokens, chunk, multiple, pieces):
    assert pieces_of(tokens, chunk, multiple) == pieces


@pytest.mark.parametrize(("tokens", "size", "group", "dim"), [(700, 100, 2, 16), (482, 241, 4, 80), (113, 113, 1, 64)])
def test_attention_of_a_piece(tokens, size, group, dim):
    """Whatever lies after the piece is not looked at."""
    keys = jax.random.split(jax.random.key(tokens), 3)
    q, k, v = (
        jax.random.normal(key, (2, tokens, heads, dim)) for key, heads in zip(keys, (2 * group, 2, 2), strict=True)
    )
    want, want_lse = causal_attention(q, k, v, 0.2)
    for first in range(0, tokens, size):
        piece = q[:, first : first + size]
        out, lse = causal_attention(piece, k.at[:, first + size :].set(1e4), v, 0.2, first)
        np.testing.assert_allclose(out, want[:, first : first + size], atol=1e-5)
        np.testing.assert_allclose(lse, want_lse[:, :, first : first + size], atol=1e-5)


def test_a_long_turn_is_attended_in_blocks():
    """600 queries at once, some rows for all of them and some for each: the scores never exist all at once."""
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (1, 600, 4, 16))
    shared, own = (
        jax.random.normal(key, shape)
        for key, shape in zip(keys[1:], ((1, 2, 40, 16), (1, 2, 600, 3, 16)), strict=False)
    )
    causal = jnp.arange(40) <= jnp.arange(600)[:, None]
    pieces = [Piece(shared, shared, causal[None, None]), Piece(own, -own, jnp.ones((1, 1, 1, 3), bool))]
    whole = jax.jit(lambda q: attend(q, pieces, 0.25))
    parts = [
        attend(q[:, at : at + 1], [piece.of_queries(at, at + 1) for piece in pieces], 0.25) for at in (0, 255, 256, 599)
    ]
    out = whole(q)
    for at, part in zip((0, 255, 256, 599), parts, strict=True):
        np.testing.assert_allclose(out[:, at : at + 1], part, atol=1e-5)
    text = whole.lower(q).as_text()
    assert "tensor<1x2x512x40xf32>" in text  # 256 queries of a group of two
    assert "tensor<1x2x1200x40xf32>" not in text


# The bound


def layer_memory(config, tokens, chunk):
    """memory_analysis of the compiled program of a piece."""
    count, size = pieces_of(tokens, chunk)
    plan = LayerPlan(config, config.attention_kind(0), needs_all=False, q_tail=0, size=size)
    return memory_of_a_piece(config, count * size, plan)


def compress_memory(config, tokens, capacity, policy, chunk):
    """memory_analysis of the compiled compression."""
    policy = policy.resolve(config, capacity)
    [spec, *_] = cache_specs(config, policy, 1, capacity, tokens, "float32", "device_put")
    count, size = pieces_of(tokens, chunk)
    rows = jax.ShapeDtypeStruct((1, count * size, config.kv_heads, config.head_dim), jnp.float32)
    prompt = PromptKV(
        rows, rows, rows, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1, count * size), jnp.int32)
    )
    spec = dataclasses.replace(spec, layer=None)
    return compress_layer.lower(prompt, None, spec=spec).compile().memory_analysis()


@pytest.mark.parametrize("config", [WIDE, LLAMA_SHAPE], ids=["narrow", "llama"])
@pytest.mark.parametrize(("tokens", "chunk"), [(8192, 2048), (8192, 512), (16384, 512)])
@pytest.mark.parametrize("policy", [ShadowKV(), ShadowKVPlus()], ids=lambda policy: policy.name)
def test_the_compiled_layer_keeps_to_the_bound(config, tokens, chunk, policy):
    """What XLA reserves: temporaries of a piece that do not grow with the prompt, hidden states in place."""
    peak = prefill_peak(
        config,
        policy,
        batch=1,
        tokens=tokens,
        capacity=tokens + 64,
        prefill_chunk=chunk,
        dtype="float32",
        fetch="device_put",
    )
    layer, compress = layer_memory(config, tokens, chunk), compress_memory(config, tokens, tokens + 64, policy, chunk)
    held = peak["hidden"] + peak["keys_values"] + 4 * tokens + 4  # and positions and lengths
    assert layer.alias_size_in_bytes == held
    assert layer.output_size_in_bytes <= held + 4096
    assert layer.temp_size_in_bytes <= peak["piece"]
    assert compress.temp_size_in_bytes <= peak["compress"]
    state = peak["state"] // config.num_layers
    assert compress.output_size_in_bytes <= peak["in_flight"] + state + 4096


def device_bytes():
    """Bytes of all live arrays in device memory."""
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.sharding.memory_kind == "device")


def measure_growth(config, tokens, policy, prefill_chunk):
    """Live device bytes after each layer of a prefill, weights not counted, and the state of the prompt."""
    params = init_params(config)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens), dtype=np.int32)
    before, after = device_bytes(), []
    [(_, state)] = decode.prefill_many(
        params,
        prompt,
        [tokens],
        [policy],
        capacity=tokens + 64,
        fetch="device_put",
        prefill_chunk=prefill_chunk,
        progress=lambda progress: progress.units or after.append(device_bytes() - before),
    )
    return after, state


def check_growth(config, tokens, policy, prefill_chunk):
    """Between layers nothing stays but the hidden states and one more layer's compressed state."""
    after, state = measure_growth(config, tokens, policy, prefill_chunk)
    abstract = abstract_state(
        config, policy, batch=1, capacity=tokens + 64, prompt=tokens, dtype="float32", fetch="device_put"
    )
    layer = [
        sum(device for device, _ in layer_nbytes(one).values())
        for spec, one in zip(abstract.specs, abstract.layers, strict=True)
    ]
    assert np.diff(after).tolist() == layer[1:]
    peak = prefill_peak(
        config,
        policy,
        batch=1,
        tokens=tokens,
        capacity=tokens + 64,
        prefill_chunk=prefill_chunk,
        dtype="float32",
        fetch="device_put",
    )
    assert after[0] <= peak["hidden"] + layer[0] + 64  # lengths
    assert after[-1] <= peak["hidden"] + peak["state"] + 64
    full = 2 * (tokens + 64) * config.key_columns * 4
    assert layer[0] < full / 2
    return after, state


@pytest.mark.parametrize("policy", [ShadowKV(), ShadowKVPlus()], ids=lambda policy: policy.name)
def test_live_bytes_grow_by_the_compressed_state_alone(policy):
    check_growth(WIDE, 4096, policy, 1024)


@pytest.mark.real
def test_a_long_prompt_through_the_attention_of_llama(record_property):
    """32 query and 8 KV heads of 128, a narrow model: on a CPU, in float32."""
    config = dataclasses.replace(LLAMA_SHAPE, num_layers=2)
    after, state = check_growth(config, 32768 if ALL else 16384, ShadowKV(), 2048)
    record_property("live_bytes", after)
    logits, _ = jshadow.decode_step(init_params(config), [1], state)
    assert np.isfinite(np.asarray(logits)).all()


THREADS = """
import sys, threading
import jshadow, threadpoolctl
from cases import CAPACITY, LENGTHS, PROMPT, model
PREFILL = sys.modules["jshadow.engine.prefill.partial"]
seen, compress = [], PREFILL.compress_layer
def pools():
    return {pool["filepath"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas"}
def spy(*args, **options):
    out = compress(*args, **options)  # after this, all that LAPACK needs is loaded
    seen.append(pools())
    return out
PREFILL.compress_layer = spy
def once():
    jshadow.prefill(model(), PROMPT, LENGTHS, capacity=CAPACITY)
once()
assert any("scipy" in path for path in seen[0]), seen[0]
assert all(set(one.values()) == {1} for one in seen), seen
assert len(seen) == model().config.num_layers
assert set(pools().values()) == {2}, pools()
threads = [threading.Thread(target=once) for _ in range(3)]
for thread in threads: thread.start()
once()
for thread in threads: thread.join()
assert set(pools().values()) == {2}, pools()
"""


def test_lapack_has_one_thread_while_a_prompt_is_compressed():
    """From a process's first prefill on; afterwards all is as before, after several at once too."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "2"}
    env.pop("XLA_FLAGS", None)  # see conftest.py: threads
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
