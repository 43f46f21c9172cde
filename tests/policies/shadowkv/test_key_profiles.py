"""Profiles of the transform code: the default for any width and bits; packed settings, and policies that keep
their code at a share of full attention's bytes.
"""

import dataclasses

import pytest
from cases import TINY

from jshadow.errors import ConfigError, Infeasible
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import Policy, Quest, ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.shadowkv.key_codecs import usual_profile, usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import packed_width
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from jshadow.policies.shadowkv.shares import largest_shadow

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


# Settings


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_packed_settings(kind):
    """Bytes of a prompt token and layer: what BENCHMARKS tells of SmolLM2, scales counted."""
    for small, profile, own in ((False, (28, 40, 0), 48 + 63 + 3.75), (True, (4, 40, 32), 32 + 12.75 + 0.75)):
        policy = kind.packed(small=small)
        assert type(policy) is kind
        resolved = policy.resolve(SMOLLM2, 4096)
        assert resolved == resolved.resolve(SMOLLM2, 4096)
        assert (resolved.key_profile, resolved.key_bits, resolved.rank) == (profile, None, None)
        parts = footprint(SMOLLM2, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
        tokens = 30 * 8 * resolved.max_chunks(4096) + (30 * 8 * -(-resolved.window_slots(4096, 4096) // 8)) * (
            kind is ShadowKVPlus
        )
        assert sum(parts[part][0] for part in ("left", "landmarks", "spread")) / tokens == own


def test_the_paper_s_codes_stay_to_be_had():
    """Whatever the defaults become."""
    for kind in (ShadowKV, ShadowKVPlus):
        resolved = kind.paper().resolve(LLAMA, 131_072)
        assert (resolved.key_codec, resolved.rank, resolved.landmark_tokens) == ("lowrank", 160, 8)
        assert (resolved.landmark_dtype, resolved.value_dtype, resolved.outlier_chunks) == ("model", "model", 48)
        assert (resolved.chunk_size, resolved.budget) == (8, 2045)


def test_bits_of_a_column_are_a_setting():
    policy = parse_policy("shadowkv", ["key_codec=transform", "key_bits=1.333"])
    assert policy.resolve(SMOLLM2, 512).key_profile == (4, 40, 32)
    assert policy.resolve(LLAMA, 512) == ShadowKV(key_codec="transform", key_profile=(22, 214, 168)).resolve(LLAMA, 512)
    assert ShadowKV(key_codec="transform", key_bits=1e-9).resolve(SMOLLM2, 512).codec.profile == profile_of(192, 8)


@pytest.mark.parametrize("settings", [
    dict(key_codec="lowrank", key_bits=2), dict(key_codec="int4", key_bits=2.0),
    dict(key_bits=2.0, key_profile=(4, 4, 4)), dict(key_bits=0), dict(key_bits=8.5), dict(key_bits=True),
    dict(key_bits="two"), dict(key_bits=float("nan")),
])  # fmt: skip
def test_bad_bits_are_refused(settings):
    with pytest.raises(ConfigError, match=r"shadowkv\.key_bits must be"):
        ShadowKV(**{"key_codec": "transform"} | settings).resolve(SMOLLM2, 512)


# Shares


CODES: dict[str, ShadowKV] = {
    "transform": ShadowKV(key_codec="transform", landmark_dtype="int4", value_dtype="int4"),
    "packed_plus": dataclasses.replace(ShadowKVPlus.packed(), key_bits=None),
    "int4": ShadowKV(key_codec="int4", landmark_dtype="int8"),
    "lowrank_int4": ShadowKV(landmark_dtype="int4"),
}
KEPT = ("key_codec", "landmark_dtype", "value_dtype")


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
            assert [getattr(made, field) for field in KEPT] == [getattr(policy, field) for field in KEPT]
            assert policy.landmark_tokens in (None, made.landmark_tokens)
        assert taken == sorted(taken, reverse=True)
    assert feasible >= 4


def test_the_bits_follow_the_share():
    """Nothing larger fits; landmarks grow coarse with the keys; the paper's own code is brought to `nominal`."""
    policy = CODES["transform"]
    rich, middle, poor = (policy.at_share(fraction, 122_880, LLAMA) for fraction in (0.25, 0.11, 0.05))
    assert [made.landmark_tokens for made in (rich, middle, poor)] == [2, 4, None]
    assert [made.outlier_chunks for made in (rich, middle, poor)] == [48, 0, 0]
    for made, fraction in ((rich, 0.25), (poor, 0.05)):
        size = packed_width(made.key_profile) + 1024 // 128
        more = dataclasses.replace(made, key_profile=profile_of(1024, 8 * size))
        assert share_of(made, LLAMA, 122_880) <= fraction < share_of(more, LLAMA, 122_880)
    assert largest_shadow(dataclasses.replace(policy, chunk_size=9), 0.11, 122_880, LLAMA).landmark_tokens == 3
    assert packed_width(rich.key_profile) >= 2 * usual_rank(1024) > packed_width(middle.key_profile)
    for paper in (ShadowKV(), ShadowKV(budget=512), ShadowKVPlus()):
        assert paper.at_share(0.25, 2304, SMOLLM2) == type(paper).nominal(0.25, 2304, SMOLLM2)
    assert Quest().at_share(0.25, 2304, SMOLLM2) == Quest.nominal(0.25, 2304, SMOLLM2)
    for given in (dict(key_bits=2.0), dict(key_profile=(4, 4, 4))):
        with pytest.raises(ConfigError, match=f"{next(iter(given))} must be None where a share decides it"):
            dataclasses.replace(policy, **given).at_share(0.25, 2304, SMOLLM2)
    with pytest.raises(ConfigError, match="fraction must be above 0"):
        policy.at_share(0.0, 2304, SMOLLM2)
