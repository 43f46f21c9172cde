"""Prefill in pieces: the same state whatever the piece, paused anywhere, within a bound of memory that is told."""

import dataclasses
import functools
import gc
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, case_of, mode_of, model, prefilled, setting
from family_cases import family_config
from few import each_once, slow
from jax.sharding import AbstractMesh
from layer_reading import memory_of_a_piece, read_layer
from real_shapes import LLAMA_SHAPE, WIDE

import jshadow
from jshadow import VerticalSlash, begin_prefill
from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import PromptKV
from jshadow.cache.spec import Shards
from jshadow.engine import decode
from jshadow.engine.prefill import job as prefill_job
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.engine.prefill import whole as partial_prefill
from jshadow.engine.prefill.job import PrefillJob, PrefillOptions, Unit, check_job, units_of
from jshadow.engine.prefill.layer import Given, LayerPlan, compress_layer
from jshadow.engine.prefill.whole import LIMITING
from jshadow.engine.sparse_prefill import AShape
from jshadow.errors import CapacityError, ConfigError, StateMismatch
from jshadow.evaluation.laws import laws
from jshadow.ops.attention import Piece, attend, causal_attention, cudnn_attends
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import abstract_state, prefill_peak
from jshadow.planner.pieces import pieces_of, rows_at_once
from jshadow.policies import H2O, Full, InfLLM, ShadowKV, ShadowKVPlus
from jshadow.weights.params import init_params

SHADOW = setting("shadowkv", "restricted")
PIECE = 16  # 61 tokens: an uneven cut
SETTINGS = {"capacity": CAPACITY, "prefill_chunk": PIECE}


def test_pieces_of_any_size_give_the_same_state():
    """The law has two sizes."""
    laws.prefill_pieces_are_one_prefill(case_of("shadowkv", piece=7))


@pytest.mark.parametrize("logits", ["all", slow("last")])
def test_logits_of_a_prompt_in_pieces(logits):
    options = {"capacity": CAPACITY, "logits": logits}
    whole = decode.prefill(model(), PROMPT, LENGTHS, Full(), **options)[0]
    cut = decode.prefill(model(), PROMPT, LENGTHS, Full(), prefill_chunk=PIECE, **options)[0]
    assert cut.shape == whole.shape
    np.testing.assert_allclose(cut, whole, atol=1e-4)


def test_a_ragged_batch_is_in_the_bound():
    """The shortest prompt decides the windows of all rows."""
    state = prefilled("shadowkv", "restricted")[1]
    settings = {"batch": 3, "tokens": max(LENGTHS), "capacity": CAPACITY, "dtype": "float32", "fetch": "resident"}
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.layers))
    assert prefill_peak(TINY, SHADOW, shortest=min(LENGTHS), **settings)["state"] == held
    assert prefill_peak(TINY, SHADOW, **settings)["state"] < held


PIECES_OF = {(61, 2048, 1): (1, 61), (61, 2048, 16): (1, 64), (2112, 2048, 1): (2, 1056), (2112, 2048, 512): (2, 1536)}
PIECES_OF |= {(7, 2, 1): (4, 2), (7, 2, 4): (2, 4), (4096, 2048, 512): (2, 2048)}


def test_pieces_are_even_cover_the_prompt_and_may_have_to_be_multiples():
    assert {case: pieces_of(*case) for case in PIECES_OF} == PIECES_OF
    assert pieces_of(61, 2048) == (1, 61)


def attended(q, k, v, scale, seen):
    """Attention and log-sum-exp in float64. q: [B, T, h_q, d], keys [B, S, h_kv, d], seen [T, S]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.where(seen, np.einsum("bthd,bshd->bhts", q, k) * scale, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", weights / total, v), (np.log(total) + top)[..., 0]


@pytest.mark.parametrize(("tokens", "size", "group", "dim"), [(482, 241, 4, 80), slow((113, 113, 1, 64))])
def test_attention_of_a_piece(tokens, size, group, dim):
    """Whatever lies after the piece is not looked at."""
    rng, run = np.random.default_rng(tokens), jax.jit(causal_attention, static_argnums=3)
    q, k, v = (rng.standard_normal((2, tokens, heads, dim), np.float32) for heads in (2 * group, 2, 2))
    for first in range(0, tokens, size):
        piece, place = q[:, first : first + size], np.arange(tokens)
        behind = k.copy()
        behind[:, first + size :] = 1e4
        out, lse = run(piece, behind, v, 0.2, np.int32(first))
        want, want_lse = attended(piece, k, v, 0.2, place <= place[first : first + size, None])
        np.testing.assert_allclose(out, want, atol=1e-5)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_a_long_turn_is_attended_in_blocks():
    """600 queries at once, some rows for all of them and some for each: the scores never exist all at once."""
    rng, shapes = np.random.default_rng(1), ((1, 600, 4, 16), (1, 2, 40, 16), (1, 2, 600, 3, 16))
    q, shared, own = (rng.standard_normal(shape, np.float32) for shape in shapes)
    causal = np.arange(40) <= np.arange(600)[:, None]

    def whole(q, shared, own):
        rows = jnp.ones((1, 1, 1, 3), bool)
        return attend(q, [Piece(shared, shared, causal[None, None]), Piece(own, -own, rows)], 0.25)

    lowered = jax.jit(whole).lower(q, shared, own)
    out = np.asarray(lowered.compile()(q, shared, own))
    for at in (0, 255, 256, 599):
        near = own[:, :, at].swapaxes(1, 2)
        keys, values = (np.concatenate([shared.swapaxes(1, 2), part], axis=1) for part in (near, -near))
        want = attended(q[:, at : at + 1], keys, values, 0.25, np.append(causal[at], [True] * 3)[None])[0]
        np.testing.assert_allclose(out[:, at : at + 1], want, atol=1e-5)
    text = lowered.as_text()
    assert "tensor<1x2x512x40xf32>" in text  # 256 queries of a group of two
    assert "tensor<1x2x1200x40xf32>" not in text


# Paused anywhere


def begun():
    return begin_prefill(model(), PROMPT, LENGTHS, SHADOW, **SETTINGS)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), got, want)


def pause_everywhere(params, tokens, lengths, policy, **options):
    """The result of a prefill that is paused after each unit, with another prefill beside it, and its progress."""
    partial, seen = begin_prefill(params, tokens, lengths, policy, **options), []
    while not partial.done:
        seen.append(partial.progress)
        # Other prompts on the device in between.
        jshadow.advance_prefill(params, begin_prefill(params, tokens[::-1], lengths[::-1], policy, **options))
        partial = jshadow.advance_prefill(params, partial, policy)
    seen.append(partial.progress)
    return jshadow.finish_prefill(params, partial), seen


@pytest.mark.parametrize("name", ["shadowkv", *map(slow, ("infllm", "shadowkv_plus_transform"))])
def test_paused_at_every_unit_the_state_is_equal_to_the_bit(name):
    policy = setting(name, "restricted")
    settings = SETTINGS | {"fetch": mode_of(name)}
    want = jshadow.prefill(model(), PROMPT, LENGTHS, policy, **settings)
    got, seen = pause_everywhere(model(), PROMPT, LENGTHS, policy, **settings)
    assert_same(got, want)
    shares = [progress.share for progress in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1], seen[0].layers, seen[-1].layers) == (0.0, 1.0, 0, TINY.num_layers)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [None, VerticalSlash(vertical=4, slash=6, last_queries=4), "whole"])
def test_every_kind_of_attention_can_be_paused(attention, monkeypatch):
    config = family_config("gemma3")
    params = init_params(config, seed=7)
    if attention == "whole":
        plan_of, changes = PrefillJob.layer_plan, {"whole": "xla", "rows": 1}
        monkeypatch.setattr(
            PrefillJob, "layer_plan", lambda job, *place: dataclasses.replace(plan_of(job, *place), **changes)
        )
        attention = None
    tokens = np.random.default_rng(3).integers(3, 97, (2, 55), dtype=np.int32)
    settings = {"capacity": 80, "prefill_chunk": PIECE, "attention": attention, "fetch": "device_put", "room": 8}
    want = jshadow.prefill(params, tokens, [55, 21], SHADOW, **settings)
    assert_same(pause_everywhere(params, tokens, [55, 21], SHADOW, **settings)[0], want)


def test_the_units_of_a_layer():
    """Pieces without real tokens are not computed."""
    plan = begun().schedule.plans[0]
    assert units_of(plan, 3, 2) == (Unit("piece", 0), Unit("piece", 1), Unit("compress"))
    each = [Unit("project", 0, 2), Unit("project", 1, 2), Unit("attend", 0, 2), Unit("finish", 0, 2)]
    each.append(Unit("finish", 1, 2))
    whole = dataclasses.replace(plan, whole="xla", rows=2)
    assert units_of(whole, 4, 2) == (*(unit._replace(row=0) for unit in each), *each, Unit("compress"))
    ahead = dataclasses.replace(plan, attention=VerticalSlash())
    assert units_of(ahead, 3, 1) == (Unit("project"), Unit("begin"), Unit("piece"), Unit("compress"))
    for longest, pieces in ((33, 3), (32, 2)):
        partial = begin_prefill(model(), PROMPT, [longest, 3, 1], Full(), **SETTINGS)
        assert partial.progress.num_units == pieces + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infllm", "shadowkv"])
def test_one_program_serves_all_lengths_of_a_width(name):
    """A prompt of one token, of one piece, of one piece and a token, and of all tokens: no further program."""
    policy, tokens = setting(name, "restricted"), np.random.default_rng(5).integers(3, 97, (1, 64), dtype=np.int32)
    settings = {"capacity": 80, "prefill_chunk": 16, "shortest": 1}

    def programs():
        jitted = (value for value in vars(prefill_layer).values() if hasattr(value, "_cache_size"))
        return sum(one._cache_size() for one in jitted)

    counts = []
    for length in (64, 1, 16, 17, 63):
        out, state = jshadow.prefill_many(model(), tokens, [length], [policy], **settings)[0]
        counts.append(programs())
        short = jshadow.prefill_many(model(), tokens[:, :length], [length], [policy], **settings)[0]
        np.testing.assert_allclose(out, short[0], atol=1e-4)
        same = jshadow.prefill_many(model(), tokens, [length], [policy], **settings)[0]
        assert_same((out, state), same)
        counts.append(programs())
    assert counts[2::2] == counts[1:-1:2]


def test_ctrl_c_leaves_nothing_behind():
    def live():
        gc.collect()
        return sum(leaf.nbytes for leaf in jax.live_arrays())

    settings = SETTINGS | {"fetch": "device_put"}
    want = jshadow.prefill(model(), PROMPT, LENGTHS, SHADOW, **settings)
    before = live()

    def interrupt(progress):
        if (progress.layers, progress.units) == (1, 1):
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            jshadow.prefill_many(model(), PROMPT, LENGTHS, [SHADOW], progress=interrupt, **settings)
        assert live() == before
        assert not LIMITING.locked()
    assert_same(jshadow.prefill(model(), PROMPT, LENGTHS, SHADOW, **settings), want)


def test_progress_has_a_rate_after_the_first_layer():
    seen = []
    jshadow.prefill_many(model(), PROMPT, LENGTHS, [SHADOW], progress=seen.append, fetch="device_put", **SETTINGS)
    units = -(-PROMPT.shape[1] // PIECE) + 1
    assert len(seen) == units * TINY.num_layers
    first = [(0, n) for n in range(1, units)]
    assert [(one.layers, one.units) for one in seen[: units + 1]] == [*first, (1, 0), (1, 1)]
    assert (seen[-1].share, seen[-1].seconds_left) == (1.0, 0.0)
    assert all(one.tokens == sum(LENGTHS) and one.tokens_per_second > 0 for one in seen)


# Bad input


@pytest.mark.parametrize("use", [jshadow.advance_prefill, jshadow.finish_prefill])
def test_another_model_or_policy_is_refused(use):
    old = begun()
    partial = jshadow.advance_prefill(model(), old)
    another = r"params must be those with which the prefill was begun \(\d+ layers"
    for arguments, told in (
        ((init_params(TINY, seed=99), partial), another),
        ((init_params(family_config("gemma3"), seed=7), partial), another),
        ((model(), partial, Full()), "policy must be the prefill's own ShadowKV"),
        ((model(), None), "partial must be a PartialPrefill"),
    ):
        with pytest.raises(StateMismatch, match=told):
            use(*arguments)
    assert jshadow.finish_prefill(model(), partial, SHADOW)[0].shape == (len(LENGTHS), TINY.vocab_size)
    for used in (old, partial):  # a value can be used once
        with pytest.raises(StateMismatch, match="was advanced before; use the value that advance_prefill returned"):
            use(model(), used)


def test_bad_sizes_are_refused():
    for value in (0, -1, 2.5, True, None):
        with pytest.raises(ConfigError, match="prefill_chunk must be an integer of at least 1"):
            decode.prefill(model(), PROMPT, LENGTHS, capacity=CAPACITY, prefill_chunk=value)
    with pytest.raises(CapacityError):
        begin_prefill(model(), PROMPT, LENGTHS, SHADOW, capacity=max(LENGTHS) - 1)
    sizes = {"batch": 3, "tokens": 61, "capacity": CAPACITY, "dtype": "float32", "fetch": "resident"}
    for name in ("tokens", "prefill_chunk"):
        with pytest.raises(ConfigError, match=name):
            prefill_peak(TINY, ShadowKV(), **sizes | {name: 0})


def test_a_layer_is_dispatched_before_the_rows_of_the_last_one_are_awaited(monkeypatch):
    """The rows of a layer are awaited after the next layer was dispatched, and before its own rows are copied."""
    order = []

    def note(owner, function, name):
        real = getattr(owner, function)
        monkeypatch.setattr(owner, function, lambda *args, **named: order.append(name) or real(*args, **named))

    note(partial_prefill, "run_unit", "layer")
    note(partial_prefill, "compress_all", "compress")
    note(partial_prefill.host_memory, "settle", "await")
    decode.prefill(model(), PROMPT, LENGTHS, SHADOW, capacity=CAPACITY, fetch="device_put")
    assert order == ["layer", "await", "compress"] * TINY.num_layers + ["await"]


# The bound


def peak_of(config, policy, tokens, chunk, attention=None):
    sizes = {"batch": 1, "tokens": tokens, "capacity": tokens + 64, "dtype": "float32", "fetch": "device_put"}
    return prefill_peak(config, policy, prefill_chunk=chunk, attention=attention, **sizes)


def memory_of_compression(config, policy, tokens, rows):
    """memory_analysis of the compiled compression of a prompt that is padded to some rows."""
    policy = policy.resolve(config, tokens + 64)
    [spec, *_] = cache_specs(config, policy, 1, tokens + 64, tokens, "float32", "device_put")
    keys = jax.ShapeDtypeStruct((1, rows, config.kv_heads, config.head_dim), jnp.float32)
    prompt = PromptKV(keys, keys, keys, *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1,), (1, rows))))
    return compress_layer.lower(prompt, None, spec=dataclasses.replace(spec, layer=None)).compile().memory_analysis()


EXACT = each_once((ShadowKV(), ShadowKVPlus()), (WIDE, LLAMA_SHAPE), ((8192, 512), (8192, 2048), (16384, 512)), [None])
LINES = VerticalSlash(vertical=500, slash=700)
SPARSE = [(AShape(initial=64, local=512), WIDE), (VerticalSlash(), LLAMA_SHAPE)]
BOUNDS = [EXACT[0], (Full(), WIDE, (8192, 512), LINES), *map(slow, EXACT[1:])]
BOUNDS += [slow((Full(), config, (8192, 512), attention)) for attention, config in SPARSE]


@pytest.mark.parametrize(("policy", "config", "sizes", "attention"), BOUNDS)
def test_the_compiled_layer_keeps_to_the_bound(policy, config, sizes, attention):
    """What XLA reserves: temporaries of a piece that do not grow with the prompt, hidden states in place."""
    (tokens, chunk), peak = sizes, peak_of(config, policy, *sizes, attention)
    count, size = pieces_of(tokens, chunk, attention.multiple if attention else 1)
    plan = LayerPlan(config, config.attention_kind(0), needs_all=False, q_tail=0, size=size, attention=attention)
    layer = memory_of_a_piece(config, count * size, plan)
    if attention:
        left = layer.output_size_in_bytes - peak["hidden"] - peak["keys_values"]  # positions, and what was chosen
        assert layer.temp_size_in_bytes + left <= peak["piece"]
        assert peak["piece"] < tokens * tokens * config.q_heads  # let alone four bytes of each score
        return
    held = peak["hidden"] + peak["keys_values"] + 4 * tokens + 4  # and positions and lengths
    assert layer.alias_size_in_bytes == held
    assert layer.output_size_in_bytes <= held + 4096
    assert layer.temp_size_in_bytes <= peak["piece"]
    compress = memory_of_compression(config, policy, tokens, count * size)
    assert compress.temp_size_in_bytes <= peak["compress"]
    state = peak["state"] // config.num_layers
    assert compress.output_size_in_bytes <= peak["in_flight"] + state + 4096


def device_bytes():
    gc.collect()
    return sum(leaf.nbytes for leaf in jax.live_arrays() if leaf.sharding.memory_kind == "device")


@pytest.mark.slow
def test_live_bytes_grow_by_the_compressed_state_alone():
    """Between layers nothing stays but the hidden states and one more layer's compressed state."""
    policy = ShadowKVPlus()
    config, tokens, params = WIDE, 2048, init_params(WIDE)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, (1, tokens), dtype=np.int32)
    sizes, before, after = {"capacity": tokens + 64, "fetch": "device_put"}, device_bytes(), []
    note = {"progress": lambda progress: progress.units or after.append(device_bytes() - before)}
    jshadow.prefill_many(params, prompt, [tokens], [policy], prefill_chunk=512, **sizes, **note)
    abstract = abstract_state(config, policy, batch=1, prompt=tokens, dtype="float32", **sizes)
    layer = [sum(device for device, _ in layer_nbytes(one).values()) for one in abstract.layers]
    assert np.diff(after).tolist() == layer[1:]
    peak = peak_of(config, policy, tokens, 512)
    assert after[0] <= peak["hidden"] + layer[0] + 64  # lengths
    assert after[-1] <= peak["hidden"] + peak["state"] + 64
    assert layer[0] < (tokens + 64) * config.key_columns * 4  # half of full attention's


THREADS = """
import sys, threading
import jshadow, threadpoolctl
from cases import CAPACITY, LENGTHS, PROMPT, model
PREFILL = sys.modules["jshadow.engine.prefill.whole"]
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


@pytest.mark.slow
@pytest.mark.process
def test_lapack_has_one_thread_while_a_prompt_is_compressed():
    """From a process's first prefill on; afterwards all is as before, after several at once too."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "2"}
    env.pop("XLA_FLAGS", None)  # see conftest.py: threads
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


# Attention that takes the whole prompt at once, as cuDNN does on a GPU. Here it is JAX's own, written without ours

SIZE = 20
UNEVEN = (55, SIZE + 1, SIZE, 1)  # the longest has three pieces, and is longer than every window but one
HOPPER, AMPERE = (9, 0), (8, 0)
params_of = functools.cache(functools.partial(init_params, seed=7))


def check_equal(config, plan, tokens, lengths, layer=0, dtype="float32"):
    """A layer read with a plan is the layer read piece by piece, up to rounding: in bfloat16, of attention's output.

    Returns the PromptKV of the plan.
    """
    shape = (len(lengths), tokens, config.model_dim)
    x = np.random.default_rng(layer).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))
    weights = params_of(config, dtype=dtype).weights[f"layer_{layer}"]
    given = Given(weights, inverse_frequencies(plan.kind.rope, config.head_dim, 512))
    usual = dataclasses.replace(plan, whole=None, rows=None)
    (want, want_kv), (x, kv) = (read_layer(one, given, x, lengths) for one in (usual, plan))
    assert x.dtype == kv.k_post.dtype == jnp.dtype(dtype)
    real = np.arange(tokens) < np.asarray(lengths)[:, None]
    x, want = (np.asarray(one, np.float32)[real] for one in (x, want))
    if dtype == "float32":
        np.testing.assert_allclose(x, want, atol=2e-5, rtol=2e-5)
    assert np.linalg.norm(x - want) < 0.02 * np.linalg.norm(want)
    tolerance = {"atol": 1e-5} if dtype == "float32" else {"rtol": 0.01}
    for name in ("k_pre", "k_post", "v", *["q_tail"] * bool(plan.q_tail)):
        mine, theirs = (np.asarray(getattr(one, name), np.float32) for one in (kv, want_kv))
        np.testing.assert_allclose(mine, theirs, err_msg=name, **tolerance)
    assert not np.asarray(kv.v)[~real].any()
    np.testing.assert_array_equal(kv.positions, want_kv.positions)
    np.testing.assert_array_equal(kv.lengths, lengths)
    assert kv.extra is kv.q_post is kv.lse is None
    return kv


@pytest.mark.slow
@pytest.mark.parametrize("name", ["phi3_partial_longrope", "gemma3", "smollm3"])
def test_every_kind_of_layer(name):
    config = family_config(name)
    kinds = {config.attention_kind(layer): layer for layer in range(config.num_layers)}
    for kind, layer in kinds.items():
        check_equal(config, LayerPlan(config, kind, False, 9, SIZE, whole="xla", rows=2), 3 * SIZE, UNEVEN, layer)


SHORT = [((1,), 1), ((SIZE,), None), ((3, SIZE + 1, 2), 1), ((3, SIZE + 1, 2), None)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "rows", "dtype"), [*((*case, "float32") for case in SHORT), (UNEVEN, 1, "bfloat16")]
)
def test_prompts_around_a_piece(lengths, rows, dtype):
    config, count = family_config("gemma3"), -(-max(lengths) // SIZE)
    size = -(-max(lengths) // count)
    plan = LayerPlan(config, config.attention_kind(0), False, 5, size, whole="xla", rows=rows)
    check_equal(config, plan, count * size, lengths, dtype=dtype)


@pytest.mark.slow
def test_prompts_of_a_model_with_attention_sinks():
    config = family_config("gpt_oss")
    plan = LayerPlan(config, config.attention_kind(1), False, 5, SIZE, whole="xla", rows=1)
    check_equal(config, plan, 3 * SIZE, UNEVEN)


def test_a_window_of_one_token_and_no_tail():
    kind = dataclasses.replace(TINY.attention_kind(0), window=1)
    assert check_equal(TINY, LayerPlan(TINY, kind, False, 0, 8, whole="xla"), 16, (16, 3)).q_tail is None


@pytest.mark.slow
def test_a_prefill_of_all_layers(monkeypatch):
    policy = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2)
    config, plan_of, rows = family_config("gemma3"), PrefillJob.layer_plan, []
    tokens = np.random.default_rng(3).integers(3, 97, (4, 55), dtype=np.int32)
    settings = {"capacity": 80, "prefill_chunk": SIZE, "logits": "all"}
    want, usual = decode.prefill(params_of(config), tokens, np.array(UNEVEN), policy, **settings)

    def whole(job, index, count, size):
        rows.append(rows_at_once(len(job.lengths), size, SIZE))
        return dataclasses.replace(plan_of(job, index, count, size), whole="xla", rows=rows[-1])

    monkeypatch.setattr(PrefillJob, "layer_plan", whole)
    logits, state = decode.prefill(params_of(config), tokens, np.array(UNEVEN), policy, **settings)
    assert rows == [1] * config.num_layers
    for row, length in enumerate(UNEVEN):
        np.testing.assert_allclose(logits[row, :length], want[row, :length], atol=1e-4)
    steps = [decode.decode_step(params_of(config), tokens[:, 0], one.fork())[0] for one in (state, usual)]
    np.testing.assert_allclose(*steps, atol=1e-4)


# The choice


def plans(monkeypatch, config, policy=None, dtype="bfloat16", capability=HOPPER, attention=None, **changes):
    """The plan of each layer on a GPU of a compute capability, or without a GPU."""
    monkeypatch.setattr(prefill_job, "capability_here", lambda: capability)
    options = PrefillOptions(80, None, "last", SIZE, None, None, attention, None)
    tokens = np.full((4, 55), 5, np.int32)
    job = check_job(params_of(config, dtype=dtype), tokens, UNEVEN, [policy or Full()], "resident", options)
    job = dataclasses.replace(job, **changes)
    return [job.layer_plan(layer, 3, SIZE) for layer in range(config.num_layers)]


def test_where_cudnn_reads_a_prompt(monkeypatch):
    gemma = family_config("gemma3")  # whose heads have a width of 20
    config = dataclasses.replace(gemma, head_dim=24)
    assert [(plan.whole, plan.rows) for plan in plans(monkeypatch, config)] == [("cudnn", 1)] * 3
    mesh = Shards(AbstractMesh((1, 2), ("data", "tp")))
    for kinds, which, options in (
        ({None}, config, {"capability": None}),
        ({None}, config, {"dtype": "float32"}),
        ({None, "cudnn"}, config, {"policy": H2O()}),  # sliding layers are not H2O's
        ({None}, TINY, {"policy": InfLLM()}),
        ({None}, config, {"shards": mesh}),
        ({None}, gemma, {}),
    ):
        assert {plan.whole for plan in plans(monkeypatch, which, **options)} == kinds, options
    pattern = plans(monkeypatch, config, attention=VerticalSlash())
    assert [plan.whole for plan in pattern] == [None if plan.attention else "cudnn" for plan in pattern]
    assert {plan.whole for plan in pattern} == {None, "cudnn"}
    sinks = family_config("gpt_oss")  # a layer without a window between two with one
    assert [plan.whole for plan in plans(monkeypatch, sinks)] == [None, "cudnn", None]
    assert {plan.whole for plan in plans(monkeypatch, dataclasses.replace(sinks, head_dim=256))} == {None}


ATTENDS = {(128, "bfloat16", AMPERE): True, (128, "float16", AMPERE): True, (128, "float32", HOPPER): False}
ATTENDS |= {(256, "bfloat16", AMPERE): False, (256, "bfloat16", HOPPER): True, (264, "bfloat16", HOPPER): False}
ATTENDS |= {(20, "bfloat16", HOPPER): False, (64, "float16", (7, 5)): False}


def test_what_cudnn_attends_to():
    assert {case: cudnn_attends(*case) for case in ATTENDS} == ATTENDS
