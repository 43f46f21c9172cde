"""Profiles of the transform code: the default for any width and bits, a model's own by brute force and by the code
itself; packed settings, and policies that keep their code at a share of full attention's bytes.
"""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import oracle_codec
import pytest
from cases import TINY, model, random_tokens

from jshadow.cache.prompt_walk import prompts_of
from jshadow.errors import ConfigError, Infeasible, PromptError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import Policy, Quest, ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Choice, Landmarks, LowRank, TransformCode, Values
from jshadow.policies.shadowkv.costs import largest_shadow
from jshadow.policies.shadowkv.key_codecs import TransformCodec, usual_profile, usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import packed_width
from jshadow.policies.shadowkv.key_codecs.profiles import best_profile, column_errors, profile_error, profile_of
from jshadow.policies.shadowkv.key_codecs.query_weights import query_weights
from jshadow.policies.shadowkv.profile_calibration import key_errors

SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)
LLAMA = ModelConfig("llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 131072)


def test_the_measured_profiles_come_out():
    assert profile_of(192, 512) == (16, 64, 64) == usual_profile(192)
    assert profile_of(192, 256) == (4, 40, 32)
    assert profile_of(192, 384) == (28, 40, 0)
    assert profile_of(1024, 2560) == (80, 320, 320) == usual_profile(1024)
    assert profile_of(1024, 1024 * 4 / 3) == (22, 214, 168)  # a third and more of 512 bits each, in whole bytes
    assert [profile_of(192, bits) for bits in (768, 1024, 1280)] == [(33, 102, 48), (75, 96, 20), (130, 58, 4)]
    assert profile_of(192, 8 * 192) == (192, 0, 0)


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 12, 22, 44, 192, 320, 1024])
def test_every_profile_fills_its_bytes(columns):
    sizes = range(1, columns + 1)
    for size in sizes:
        profile = eight, four, two = profile_of(columns, 8 * size)
        assert packed_width(profile) == size
        assert min(profile) >= 0 == four % 2 == two % 4
        assert 1 <= eight + four + two <= columns
    assert profile_of(columns, 8 * columns + 3) == (columns, 0, 0)
    for bits in (0, 3, -8, 8 * columns + 5):
        with pytest.raises(ConfigError, match=rf"must be in \[8, {8 * columns}\], got {bits}"):
            profile_of(columns, bits)


# A model's own


def errors_like(columns: int, seed: int) -> np.ndarray:
    """Columns of falling variance that lose less with more bits, each by a ratio of its own."""
    rng = np.random.default_rng(seed)
    variance = np.sort(rng.exponential(size=columns))[::-1] ** rng.uniform(0.5, 4)
    kinds = np.cumprod(rng.uniform(0.02, 0.6, (3, columns)), axis=0)[::-1]
    return np.concatenate([kinds * variance, variance[None]])


@pytest.mark.parametrize("columns", [5, 12, 13])
@pytest.mark.parametrize("bits", [8, 24, 40, 72, 200])
def test_the_best_profile_by_brute_force(columns, bits):
    for seed in range(3):
        errors = errors_like(columns, seed)
        lost = {
            profile: profile_error(errors, profile)
            for profile in itertools.product(range(columns + 1), range(0, columns + 1, 2), range(0, columns + 1, 4))
            if sum(profile) <= columns and 8 * profile[0] + 4 * profile[1] + 2 * profile[2] <= bits
        }
        found = best_profile(errors, bits)
        assert lost[found] == pytest.approx(min(lost.values()), rel=1e-9)
    with pytest.raises(ConfigError, match="must be at least 8, got 2"):
        best_profile(errors, 2)


def test_errors_of_columns_are_the_oracle_s():
    rng = np.random.default_rng(0)
    rows = rng.standard_t(5, (300, 8)) * 10.0 ** -np.arange(8)
    rows[:, 7] = 0
    errors = np.asarray(column_errors(jnp.asarray(rows, jnp.float32)), np.float64)
    np.testing.assert_allclose(errors[3], (rows**2).mean(axis=0), rtol=1e-5)
    for kind, bits in enumerate((8, 4, 2)):
        sigma = np.sqrt((rows**2).mean(axis=0))
        steps = np.where(sigma > 1e-5 * sigma[0], oracle_codec.column_steps(rows, np.full(8, bits)), 0)
        coder = oracle_codec.Coder(np.zeros(8), np.eye(8), np.full(8, bits), steps)
        want = ((coder.values(coder.codes(rows)) - rows) ** 2).mean(axis=0)
        np.testing.assert_allclose(errors[kind], want, rtol=2e-3, atol=1e-12)


@pytest.mark.parametrize("weighed", [False, True])
def test_what_is_foretold_is_what_the_code_loses(weighed):
    """The transform code itself, on the keys of every layer of a tiny model: 32 columns."""
    text = random_tokens(2, 90, seed=3)
    errors = key_errors(model(), text, weighed=weighed)
    assert errors.shape == (3, 4, 32)
    np.testing.assert_allclose(errors[:, 3].sum(axis=1), 1, rtol=1e-5)
    own = best_profile(errors.mean(axis=0), 64)
    assert profile_error(errors.mean(axis=0), own) <= profile_error(errors.mean(axis=0), profile_of(32, 64))
    for layer, prompt in enumerate(prompts_of(model(), text)):
        weights = query_weights(prompt.q_post[:, -64:], prompt.lengths, 2, 16) if weighed else None
        sizes = np.ones((2, 1, 2, 16)) if weights is None else np.asarray(weights, np.float64)[:, None]
        keys = np.asarray(prompt.k_pre, np.float64) * sizes
        for profile in (own, (3, 10, 8)):
            codec = TransformCodec(profile)
            code = codec.encode(prompt.k_pre, prompt.lengths, 90, 1, weights)
            ids = jnp.broadcast_to(jnp.arange(90, dtype=jnp.int32), (2, 2, 90))
            back = np.asarray(codec.decode(code, ids, 1), np.float64).swapaxes(1, 2) * sizes
            spread = ((keys - keys.mean(axis=1, keepdims=True)) ** 2).sum(axis=(1, 2, 3))
            lost = (((back - keys) ** 2).sum(axis=(1, 2, 3)) / spread).mean()
            assert profile_error(errors[layer], profile) == pytest.approx(lost, rel=0.02)


def test_too_short_a_text_tells_no_profile():
    with pytest.raises(PromptError, match="more than the 32 key columns, got 32"):
        key_errors(model(), random_tokens(1, 32))
    with pytest.raises(PromptError, match="tokens must not all be the same in any row"):
        key_errors(model(), np.concatenate([random_tokens(1, 40), np.full((1, 40), 7, np.int32)]))


# Settings


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_packed_settings(kind):
    """Bytes of a prompt token and layer: what BENCHMARKS tells of SmolLM2, scales counted."""
    for small, profile, own in ((False, (28, 40, 0), 48 + 63 + 3.75), (True, (4, 40, 32), 32 + 12.75 + 0.75)):
        policy = kind.packed(small=small)
        assert type(policy) is kind
        resolved = policy.resolve(SMOLLM2, 4096)
        assert resolved == resolved.resolve(SMOLLM2, 4096)
        assert (resolved.keys.profile, resolved.keys.bits, resolved.rank) == (profile, None, None)
        parts = footprint(SMOLLM2, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
        tokens = 30 * 8 * resolved.max_chunks(4096) + (30 * 8 * -(-resolved.window_slots(4096, 4096) // 8)) * (
            kind is ShadowKVPlus
        )
        assert sum(parts[part][0] for part in ("left", "landmarks", "spread")) / tokens == own


def test_the_paper_s_codes_stay_to_be_had():
    """Whatever the defaults become."""
    for kind in (ShadowKV, ShadowKVPlus):
        resolved = kind.paper().resolve(LLAMA, 131_072)
        assert (resolved.keys, resolved.rank, resolved.landmarks) == (LowRank(), 160, Landmarks(tokens=8))
        assert (resolved.values, resolved.choice, resolved.outlier_chunks) == (Values(), Choice(), 48)
        assert (resolved.chunk_size, resolved.budget) == (8, 2045)


def test_bits_of_a_column_are_a_setting():
    policy = parse_policy("shadowkv", ["keys=transform", "keys.bits=1.333"])
    assert policy.resolve(SMOLLM2, 512).keys.profile == (4, 40, 32)
    assert policy.resolve(LLAMA, 512) == ShadowKV(keys=TransformCode(profile=(22, 214, 168))).resolve(LLAMA, 512)
    assert ShadowKV(keys=TransformCode(bits=1e-9)).resolve(SMOLLM2, 512).codec.profile == profile_of(192, 8)


@pytest.mark.parametrize(
    "keys",
    [
        TransformCode(bits=2.0, profile=(4, 4, 4)),
        *(TransformCode(bits=bits) for bits in (0, 8.5, True, "two", float("nan"))),
    ],
)
def test_bad_bits_are_refused(keys):
    with pytest.raises(ConfigError, match=r"shadowkv\.keys\.bits must be"):
        ShadowKV(keys=keys).resolve(SMOLLM2, 512)


# Shares


CODES: dict[str, ShadowKV] = {
    "transform": ShadowKV(keys=TransformCode(), landmarks=Landmarks(dtype="int4"), values=Values(dtype="int4")),
    "packed_plus": with_settings(ShadowKVPlus.packed(), {"keys.bits": None}),
    "lowrank_int4": ShadowKV(landmarks=Landmarks(dtype="int4")),
}
KEPT = ("keys", "landmarks.dtype", "values.dtype")


def share_of(policy: Policy, config: ModelConfig, tokens: int) -> float:
    made = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
    return made["device_bytes"] / made["full_bytes"]


@pytest.mark.parametrize("name", CODES)
def test_a_policy_keeps_its_code_at_a_share(name):
    """At or under it, not far under it where there is more to have, and the least that is told can be had."""
    policy, feasible = CODES[name], 0
    for config, tokens in ((SMOLLM2, 2304), (LLAMA, 32768), (TINY, 256)):
        taken = []
        for fraction in (0.5, 0.25, 0.12, 0.06):
            try:
                made = policy.at_share(fraction, tokens, config)
            except Infeasible as error:
                least = float(str(error).split("at least ")[1].split()[0]) + 1e-4
                assert fraction < least
                made = policy.at_share(least, tokens, config)
            else:
                feasible += 1
                taken.append(share_of(made, config, tokens))
                assert taken[-1] <= fraction
            assert type(made) is type(policy)
            assert [made.settings()[name] for name in KEPT] == [policy.settings()[name] for name in KEPT]
            assert policy.landmarks.tokens in (None, made.landmarks.tokens)
        assert taken == sorted(taken, reverse=True)
    assert feasible >= 4


def test_the_bits_follow_the_share():
    """Nothing larger fits; landmarks grow coarse with the keys; the paper's own code is brought to `nominal`."""
    policy = CODES["transform"]
    rich, middle, poor = (policy.at_share(fraction, 122_880, LLAMA) for fraction in (0.25, 0.11, 0.05))
    assert [made.landmarks.tokens for made in (rich, middle, poor)] == [2, 4, None]
    assert [made.outlier_chunks for made in (rich, middle, poor)] == [48, 0, 0]
    for made, fraction in ((rich, 0.25), (poor, 0.05)):
        size = packed_width(made.keys.profile) + 1024 // 128
        more = with_settings(made, {"keys.profile": profile_of(1024, 8 * size)})
        assert share_of(made, LLAMA, 122_880) <= fraction < share_of(more, LLAMA, 122_880)
    assert largest_shadow(dataclasses.replace(policy, chunk_size=9), 0.11, 122_880, LLAMA).landmarks.tokens == 3
    assert packed_width(rich.keys.profile) >= 2 * usual_rank(1024) > packed_width(middle.keys.profile)
    for paper in (ShadowKV(), ShadowKV(budget=512), ShadowKVPlus()):
        assert paper.at_share(0.25, 2304, SMOLLM2) == type(paper).nominal(0.25, 2304, SMOLLM2)
    assert Quest().at_share(0.25, 2304, SMOLLM2) == Quest.nominal(0.25, 2304, SMOLLM2)
    for field, value in (("bits", 2.0), ("profile", (4, 4, 4))):
        with pytest.raises(ConfigError, match=rf"keys\.{field} must be None where a share decides it"):
            with_settings(policy, {f"keys.{field}": value}).at_share(0.25, 2304, SMOLLM2)
    with pytest.raises(ConfigError, match="fraction must be above 0"):
        policy.at_share(0.0, 2304, SMOLLM2)
