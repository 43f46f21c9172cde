"""ShadowKV with packed keys, landmarks and values: bytes, scores, host rows, refused settings, and fetch modes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import LENGTHS, PLUS, PROMPT, SMALL, STEPS, TINY, model, run_steps
from few import one_of

from jshadow.cache import accounting, offload
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.ops import packing
from jshadow.planner.bytes import abstract_state, footprint
from jshadow.policies import ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import ExactKeys, Landmarks, Quirks, TransformCode, Values, landmarks, selection
from jshadow.policies.shadowkv.costs import landmark_bytes
from jshadow.policies.shadowkv.key_codecs import (
    LowRankCodec,
    Sizes,
)
from jshadow.policies.sizing import device_share

LLAMA = ModelConfig("llama", 256, 2, 4096, 256, 32, 8, 128, 1e-5, 2**20)
STORED = ((2, "int4"), (8, "int8"), (4, "model"), (1, "int8"))  # tokens of a landmark, and its dtype
PACKED = dict(landmarks=Landmarks(tokens=2, dtype="int4"), values=Values(dtype="int4"))


@pytest.mark.parametrize(
    "policy",
    [
        ShadowKV(),
        ShadowKV(keys=TransformCode(), **PACKED),
        ShadowKV(landmarks=Landmarks(dtype="int8")),
        ShadowKV(keys=ExactKeys(), landmarks=Landmarks(tokens=4), values=Values("int8")),
    ],
    ids=lambda policy: f"{policy.keys.name}-{policy.landmarks.dtype}-{policy.values.dtype}",
)
def test_planned_bytes_are_the_state_s(policy):
    """The counts of the codec and of the costs equal the bytes of a state's arrays."""
    planned = footprint(LLAMA, policy, capacity=32768, prompt=32768, fetch="device_put")
    resolved = policy.resolve(LLAMA, 32768)
    parts, sizes = planned["parts"], Sizes(LLAMA.kv_heads, LLAMA.head_dim, "bfloat16")
    code = parts["left"][0] + parts.get("right", (0, 0))[0]
    chunks = resolved.max_chunks(32768)
    assert code == LLAMA.num_layers * resolved.codec.nbytes(chunks, resolved.chunk_size, sizes)
    assert parts["landmarks"][0] == LLAMA.num_layers * landmark_bytes(resolved, chunks, sizes)
    assert device_share(resolved, 32768, LLAMA) == planned["device_bytes"] / planned["full_bytes"]
    # A chunk's codes and scales fill 1,040 or 528 bytes, which are filled up to sectors of 32 bytes.
    row = {"model": 8 * 128 * 2, "int8": 1056, "int4": 544}[policy.values.dtype]
    assert planned["host_bytes"] == LLAMA.num_layers * 8 * resolved.max_chunks(32768) * row


def test_the_usual_profile_has_the_bits_of_the_usual_rank():
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(LLAMA, 4096)
    assert (policy.rank, policy.keys.profile) == (None, (80, 320, 320))
    sizes = Sizes(8, 128, "bfloat16")
    assert policy.codec.read_bytes(sizes) == LowRankCodec(160).read_bytes(sizes) == 320
    small = dataclasses.replace(LLAMA, kv_heads=3, q_heads=9, head_dim=64)
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(small, 4096)
    assert policy.keys.profile == (16, 64, 64)
    parts = footprint(small, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
    tokens = 2 * 8 * policy.max_chunks(4096)
    # A token has its code, half a landmark of 4 bits, and half a scale for each head.
    assert (parts["left"][0], parts["landmarks"][0]) == (64 * tokens, (48 + 3) * tokens)
    for heads, dim in ((1, 8), (1, 6), (2, 16), (5, 64), (8, 256)):
        one = dataclasses.replace(LLAMA, kv_heads=heads, q_heads=heads, head_dim=dim)
        profile = ShadowKV(keys=TransformCode()).resolve(one, 4096).keys.profile
        assert 1 <= sum(profile) <= heads * dim
        assert profile[1] % 2 == profile[2] % 4 == 0


# Landmarks and values


@functools.partial(jax.jit, static_argnames=("kind", "dtype", "parts"))
def marks_and_scores(keys, q, candidates, *, kind, dtype, parts):
    """The landmarks of four chunks of eight, the worst cosine of a chunk, and the scores by the stored landmarks."""
    means, worst = landmarks.prompt_landmarks(keys, 4, 8, block=16, parts=parts)
    stored, there = landmarks.store_landmarks(means, kind, dtype), jnp.repeat(candidates, parts, axis=2)[:, :, None]
    logits = landmarks.landmark_logits(q, stored, there, 0.3)
    return means, worst, selection.chunk_scores(logits, jnp.ones((1, 2), bool), selection.Scoring(0.3), parts)


@pytest.mark.parametrize(
    ("tokens", "kind", "dtype"),
    one_of(4, [(*k, d) for k in STORED for d in ("bfloat16", "float32")]),
)
def test_landmarks_and_scores_are_the_oracle_s(tokens, kind, dtype):
    """33 tokens are four chunks of eight. The fourth is not a candidate in the second KV head."""
    rng, parts = np.random.default_rng(tokens), 8 // tokens
    keys = rng.standard_normal((1, 33, 2, 12)).astype(dtype)
    q = (2 * rng.standard_normal((1, 2, 6, 12))).astype(dtype)
    candidates = np.ones((1, 2, 4), bool)
    candidates[0, 1, 3] = False
    made = marks_and_scores(keys, q, candidates, kind=kind, dtype=dtype, parts=parts)
    means, worst, scores = map(np.asarray, made)
    for head in range(2):
        rows = np.asarray(keys, np.float64)[0, :32, head].reshape(4, parts, tokens, 12)
        want = rows.mean(axis=2)
        np.testing.assert_allclose(np.asarray(means, np.float64)[0, head], want.reshape(-1, 12), rtol=0.01, atol=1e-2)
        cosine = (rows * want[:, :, None]).sum(-1)
        cosine /= np.linalg.norm(rows, axis=-1) * np.linalg.norm(want, axis=-1)[:, :, None]
        np.testing.assert_allclose(worst[0, head], cosine.min(axis=(1, 2)), atol=1e-5)
        kept = np.asarray(means, np.float64)[0, head].reshape(4, parts, 12)
        if kind != "model":
            kept = oracle_codec.rounded_rows(kept, packing.ROW_BITS[kind], dtype)
        for t in range(2):
            group = np.asarray(q, np.float64)[0, t, 3 * head : 3 * head + 3]
            want = oracle_codec.chunk_scores(group, kept, candidates[0, head], 0.3)
            np.testing.assert_allclose(scores[0, head, t], want, atol=1e-5)


packed_rows = jax.jit(packing.quantize_chunks, static_argnums=(1, 2))
unpacked_rows = jax.jit(packing.dequantize_chunks, static_argnums=(1, 2, 3, 4))
quantized = jax.jit(packing.quantize_rows, static_argnums=(1, 2))
dequantized = jax.jit(packing.dequantize_rows, static_argnums=(1, 2))


@pytest.mark.parametrize(
    ("bits", "dtype"), one_of(2, [(bits, dtype) for bits in (8, 4) for dtype in ("float32", "bfloat16", "float16")])
)
def test_host_rows_are_the_oracle_s(bits, dtype):
    values = np.random.default_rng(bits).standard_normal((1, 1, 5, 4, 6)).astype(dtype)
    values[0, 0, 1, 2] = 0
    rows = np.asarray(packed_rows(values, bits, dtype))
    assert rows.shape == (1, 1, 5, packing.row_words(4, 6, bits, dtype))
    assert rows.shape[3] == (32 if (bits, dtype) == (8, "float32") else 16)  # of 20, 16, 16 and 12 words
    want = oracle_codec.host_row_values(rows[0, 0], 4, 6, bits, dtype)
    wide = np.asarray(values, np.float64)[0, 0]
    np.testing.assert_allclose(want, oracle_codec.rounded_rows(wide, bits, dtype), atol=1e-6)
    back = np.asarray(unpacked_rows(rows, 4, 6, bits, dtype))
    np.testing.assert_array_equal(back[0, 0], want.astype(back.dtype))
    assert not want[1, 2].any()
    scale = np.abs(wide).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(want - wide) <= scale * 0.51).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_past_their_scale_are_clipped(bits):
    """Numbers of a bfloat16 model may exceed the range of their float16 scales."""
    most = 2 ** (bits - 1) - 1
    values = np.array([[3e9, -1e9, 70000.0 * most, 1.0], [60000.0 * most, -9e4, 1.0, 0.0]]).astype(jnp.bfloat16)
    rows = quantized(values, bits, "bfloat16")
    scale = np.asarray(rows.scale)
    assert (scale.dtype, float(scale[0, 0])) == (np.float16, 65504.0)
    back = np.asarray(dequantized(rows, bits, "float32"))
    np.testing.assert_array_equal(back[0], 65504.0 * most * np.array([1, -1, 1, 0]))
    assert (np.abs(back[1] - np.asarray(values, np.float32)[1]) <= 32_000).all()
    np.testing.assert_allclose(back, oracle_codec.rounded_rows(np.asarray(values, np.float64), bits, "bfloat16"))


# A policy's settings

BAD = {
    "codec": (dict(keys="zip"), r"keys must be LowRank or TransformCode or ExactKeys or .* or ChannelCode, got 'zip'"),
    "other_codec": (dict(keys=Values()), r"shadowkv\.keys must be LowRank or .*, got Values"),
    "other_record": (dict(landmarks=2), r"shadowkv\.landmarks must be Landmarks, got 2"),
    "rank": (dict(keys=TransformCode(), rank=8), "rank must be None with keys='transform'.*got 8"),
    "odd": (dict(keys=TransformCode(profile=(4, 3, 4))), r"multiple of 2 and the third of 4, got \(4, 3, 4\)"),
    "third": (dict(keys=TransformCode(profile=(4, 4, 2))), r"the third of 4, got \(4, 4, 2\)"),
    "wide": (dict(keys=TransformCode(profile=(9, 16, 8))), r"together 1 to 32, .*got \(9, 16, 8\)"),
    "none": (dict(keys=TransformCode(profile=(0, 0, 0))), r"got \(0, 0, 0\)"),
    "two": (dict(keys=TransformCode(profile=(8, 8))), r"must be three numbers of columns.*got \(8, 8\)"),
    "bool": (dict(keys=TransformCode(profile=(True, 8, 8))), "must be three numbers"),
    "negative": (dict(keys=TransformCode(profile=(-1, 8, 8))), "must be three numbers"),
    "landmark": (dict(landmarks=Landmarks(tokens=3)), r"shadowkv\.landmarks\.tokens must divide chunk_size=8, got 3"),
    "long_landmark": (
        dict(landmarks=Landmarks(tokens=16)),
        r"shadowkv\.landmarks\.tokens must be an integer in \[1, 8\], got 16",
    ),
    "landmark_dtype": (
        dict(landmarks=Landmarks(dtype="int2")),
        r"shadowkv\.landmarks\.dtype must be one of \('model', 'int8', 'int4'\)",
    ),
    "value_dtype": (dict(values=Values(dtype=4)), r"shadowkv\.values\.dtype must be one of .*'int4'\), got 4"),
    "landmark_fp8": (
        dict(landmarks=Landmarks(dtype="fp8")),
        r"shadowkv\.landmarks\.dtype must be one of .*'int4'\), got 'fp8'",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_told(case):
    given, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        ShadowKV(**given).resolve(TINY, 96)


@pytest.mark.parametrize("given", [{"landmarks": Landmarks(dtype="int4")}, {"values": Values("int4")}])
def test_four_bits_need_an_even_head(given):
    odd = dataclasses.replace(TINY, head_dim=15, rope=RopeConfig(rotary_share=0.8))
    with pytest.raises(ConfigError, match="='int4' must have an even head_dim, got 15"):
        ShadowKV(**given).resolve(odd, 96)


def test_settings_as_text():
    policy = parse_policy("shadowkv", ["keys=transform", "keys.profile=16,64,64", "landmarks.tokens=2"])
    assert policy == ShadowKV(keys=TransformCode(profile=(16, 64, 64)), landmarks=Landmarks(tokens=2))
    assert hash(policy) != hash(ShadowKV())
    plus = parse_policy("shadowkv_plus", ["keys.profile=16+64+64", "keys=transform"])
    assert plus == ShadowKVPlus(keys=TransformCode(profile=(16, 64, 64)))


@pytest.mark.parametrize("policy", [ShadowKV, ShadowKVPlus])
def test_zero_copy_is_refused_where_no_kernel_rebuilds_the_keys(policy, monkeypatch):
    """It is refused on a GPU, before anything runs. Other modes and packed numbers are not refused."""
    sizes = dict(batch=1, capacity=96, prompt=90, dtype="float32")
    projected = {"later_keys": "projected"} if policy is ShadowKVPlus else {}
    exact = policy(**SMALL, keys=ExactKeys(), values=Values(dtype="int4"))
    abstract_state(TINY, exact, **sizes, fetch="zero_copy")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    message = f"fetch must be 'device_put' or 'resident' for {policy.name} with keys='exact' on a GPU"
    with pytest.raises(ConfigError, match=message):
        abstract_state(TINY, exact, **sizes, fetch="zero_copy")
    abstract_state(TINY, exact, **sizes, fetch="device_put")
    for codec, kind in (("lowrank", "int4"), ("transform", "model"), ("transform", "int4")):
        packed = with_settings(
            policy(**SMALL, **projected, values=Values(dtype=kind), landmarks=Landmarks(tokens=2, dtype="int4")),
            {"keys": codec},
        )
        assert abstract_state(TINY, packed, **sizes, fetch="zero_copy").fetch == "zero_copy"


MODES = {
    "transform": ShadowKV(keys=TransformCode(), budget=24, **SMALL, **PACKED),
    "int8": ShadowKV(rank=12, budget=24, **SMALL, landmarks=Landmarks(dtype="int8"), values=Values("int8")),
    "plus": ShadowKVPlus(keys=TransformCode(), budget=24, **PLUS, **PACKED),
    "lowrank": ShadowKV(rank=12, budget=24, **SMALL, values=Values(dtype="int4")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_packed_rows_come_alike_in_every_fetch_mode(name):
    """All modes give the same logits. With `zero_copy`, only the bytes of missing chunks are moved and counted."""
    modes = ["resident", "device_put", "zero_copy"]
    prefilled = decode.prefill_many(model(), PROMPT, LENGTHS, [MODES[name]] * 3, capacity=96, fetch=modes)
    fetched = [np.asarray(state.counters.fetched, np.int64) for _, state in prefilled]
    runs = [run_steps(model(), state, STEPS[:, :4]) for _, state in prefilled]
    for logits, _ in runs[1:]:
        np.testing.assert_allclose(logits, runs[0][0], atol=1e-5)
    states = [state for _, state in runs]
    assert states[2].layers[0].live.values.dtype == jnp.float32
    counters, spec = states[2].counters, states[2].specs[0]
    needed = (np.asarray(counters.selected, np.int64) - np.asarray(counters.hits)) * offload.unit_bytes(
        spec, spec.policy.host_layout(spec)
    )
    moved = [
        (np.asarray(state.counters.fetched, np.int64) - before) * accounting.FETCH_QUANTUM
        for state, before in zip(states, fetched, strict=True)
    ]
    assert not moved[0].any()
    # Each layer rounds down.
    assert ((needed - 4 * 3 * accounting.FETCH_QUANTUM < moved[2]) & (moved[2] <= needed)).all()
    assert (moved[2] < moved[1]).all()


SHORT = {
    "small": ShadowKV.packed(small=True),
    "multiple": ShadowKV(
        landmarks=Landmarks(dtype="int8"),
        values=Values(dtype="int8"),
        quirks=Quirks(chunk_multiple=16, exact_preload=True),
    ),
    "plus": ShadowKVPlus.packed(),
}


@pytest.mark.parametrize("name", one_of(3, SHORT))
def test_a_capacity_without_a_whole_chunk(name):
    """There is no chunk to select or to pack, because all tokens are in the window."""
    wanted, dense = decode.prefill(model(), PROMPT[:, :12], [12, 3, 1], capacity=39)
    logits, state = decode.prefill(model(), PROMPT[:, :12], [12, 3, 1], SHORT[name], capacity=39, fetch="device_put")
    assert state.specs[0].policy.max_chunks(39) == 0
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    steps = [run_steps(model(), one, STEPS[:, :4])[0] for one in (state, dense)]
    np.testing.assert_allclose(*steps, atol=1e-4)


# A code with left rows for each head, and tokens after the prompt; the law tests do not have this case.
LATER = {
    "plus_exact": ShadowKVPlus(
        keys=ExactKeys(), budget=16, **PLUS, landmarks=Landmarks(tokens=1), values=Values("int8")
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_later_tokens_in_other_codes(name):
    """A turn gives the logits of single steps, and an offloaded state those of a resident one."""
    prefilled = decode.prefill_many(
        model(), PROMPT, LENGTHS, [LATER[name]] * 2, capacity=96, fetch=["resident", "device_put"]
    )
    (_, resident), (_, offloaded) = prefilled
    turn, extended = decode.extend(model(), STEPS[:, :7], [7, 7, 7], resident.fork(), logits="all")
    steps, stepped = run_steps(model(), offloaded, STEPS[:, :7])
    np.testing.assert_allclose(turn, steps, atol=1e-4)
    for one, other in zip(extended.layers, stepped.layers, strict=True):
        if one.live.left.size:  # exact keys are stored as the bytes of float32 numbers
            left, other_left = (np.asarray(layer.live.left).view(np.float32) for layer in (one, other))
            with np.errstate(invalid="ignore", over="ignore"):  # rows that hold no token can have any bits
                near = np.abs(left - other_left) <= 1e-5
            assert (near | (left.view(np.uint32) == other_left.view(np.uint32))).all()
            assert left.view(np.uint32).any()
    assert offload.host_bytes(offloaded.specs) > 0
