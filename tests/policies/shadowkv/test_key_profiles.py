"""Profiles of the transform code: the defaults for all widths and bits, packed settings, and settings for a share of
full attention's bytes.
"""

import dataclasses

import numpy as np
import pytest
from cases import TINY, random_tokens
from few import one_of
from small_state import SMALL, equal

from jshadow import load_state, save_state
from jshadow.engine import decode
from jshadow.errors import ConfigError, Infeasible, StateMismatch
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import footprint
from jshadow.policies import Policy, Quest, ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import policy_settings, with_settings
from jshadow.policies.shadowkv import Choice, Landmarks, LowRank, TransformCode, Values, records
from jshadow.policies.shadowkv.key_codecs import usual_profile, usual_rank
from jshadow.policies.shadowkv.key_codecs.midrise import packed_width
from jshadow.policies.shadowkv.key_codecs.profiles import profile_of
from jshadow.policies.shadowkv.sizes import shadow_candidates
from jshadow.policies.sizing import at_share
from jshadow.weights.params import init_params

SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)
LLAMA = ModelConfig("llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 131072)


def test_the_measured_profiles_come_out():
    assert profile_of(192, 512) == (16, 64, 64) == usual_profile(192)
    assert profile_of(192, 256) == (4, 40, 32)
    assert profile_of(192, 384) == (28, 40, 0)
    assert profile_of(1024, 2560) == (80, 320, 320) == usual_profile(1024)
    # near the shares of 192 columns, in pieces of 16 bytes
    assert [profile_of(1024, 1024 * bits) for bits in (4 / 3, 2)] == [(16, 224, 192), (144, 224, 0)]
    assert [profile_of(192, bits) for bits in (768, 1024, 1280)] == [(33, 102, 48), (75, 96, 20), (130, 58, 4)]
    assert profile_of(192, 8 * 192) == (192, 0, 0)


@pytest.mark.parametrize("columns", [1, 2, 3, 6, 12, 22, 44, 192, 320, 511, 512, 520, 1024])
def test_every_profile_fills_its_bytes(columns):
    """With many columns, each part fills pieces of 16 bytes, as many as come nearest to what was asked for."""
    unit = 16 if columns >= 512 else 1
    sizes = range(1, columns + 1)
    for size in sizes:
        profile = eight, four, two = profile_of(columns, 8 * size)
        assert abs(packed_width(profile) - size) <= unit // 2 or size > columns - unit or size < unit
        assert min(profile) >= 0 == eight % unit == four % (2 * unit) == two % (4 * unit)
        assert 1 <= eight + four + two <= columns
    assert profile_of(columns, 8 * columns + 3) == (columns // unit * unit, 0, 0)
    for bits in (0, 3, -8, 8 * columns + 5):
        with pytest.raises(ConfigError, match=rf"must be in \[8, {8 * columns}\], got {bits}"):
            profile_of(columns, bits)


# Settings


@pytest.mark.parametrize("kind", [ShadowKV, ShadowKVPlus])
def test_packed_settings(kind):
    """Bytes of a prompt token in a layer, with scales, as docs/benchmarks/key_codes.md states them for SmolLM2.

    The key of a later token of ShadowKV+ has 50 bytes in each of 3 heads, whatever the code of the prompt is. Unless
    they are small, its settings have half as many landmarks.
    """
    fine = 63 + 3.75 if kind is ShadowKV else 37.5 + 2.25
    for small, profile, key, marks in ((False, (28, 40, 0), 48, fine), (True, (4, 40, 32), 32, 12.75 + 0.75)):
        policy = kind.packed(small=small)
        assert type(policy) is kind
        resolved = policy.resolve(SMOLLM2, 4096)
        assert resolved == resolved.resolve(SMOLLM2, 4096)
        assert (resolved.keys.profile, resolved.keys.bits, resolved.rank) == (profile, None, None)
        parts = footprint(SMOLLM2, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
        later = -(-resolved.window_slots(4096, 4096) // 8) if kind is ShadowKVPlus else 0
        wanted = 30 * 8 * (resolved.max_chunks(4096) * (key + marks) + later * (3 * 50 + marks))
        assert sum(parts[part][0] for part in ("left", "landmarks", "spread")) == wanted


def test_the_paper_s_codes_stay_to_be_had():
    """`paper()` gives the paper's settings, independent of the defaults."""
    for kind in (ShadowKV, ShadowKVPlus):
        resolved = kind.paper().resolve(LLAMA, 131_072)
        assert (resolved.keys, resolved.rank, resolved.landmarks) == (LowRank(), 160, Landmarks(tokens=8))
        assert (resolved.values, resolved.choice, resolved.outlier_chunks) == (Values(), Choice(), 48)
        assert (resolved.chunk_size, resolved.budget) == (8, 2045)


def test_bits_of_a_column_are_a_setting():
    policy = parse_policy("shadowkv", ["keys=transform", "keys.bits=1.333"])
    assert policy.resolve(SMOLLM2, 512).keys.profile == (4, 40, 32)
    assert policy.resolve(LLAMA, 512) == ShadowKV(keys=TransformCode(profile=(16, 224, 192))).resolve(LLAMA, 512)
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


def test_a_saved_state_keeps_the_profile_that_it_was_coded_with(tmp_path, monkeypatch):
    """Its file has the columns of each width, so another default changes nothing; settings that ask for it fail."""
    policy = ShadowKV(budget=4, chunk_size=4, outlier_chunks=1, local_chunks=1, keys=TransformCode(bits=4.0))
    params, tokens = init_params(SMALL), random_tokens(1, 13, config=SMALL)
    profile = policy.resolve(SMALL, 16).keys.profile
    monkeypatch.setattr(records, "profile_of", lambda columns, bits: (0, 4, 0))
    state = decode.prefill(params, tokens, np.array([13]), policy, capacity=16)[1]
    save_state(tmp_path / "state", state, params)
    monkeypatch.undo()
    loaded = load_state(tmp_path / "state", params)
    assert loaded.policy.keys.profile == (0, 4, 0) != profile
    assert equal(loaded, state)
    with pytest.raises(StateMismatch, match=r"policy\.settings\.keys\.profile"):
        load_state(tmp_path / "state", params, policy)


# Shares


CODES: dict[str, ShadowKV] = {
    "transform": ShadowKV(keys=TransformCode(), landmarks=Landmarks(dtype="int4"), values=Values(dtype="int4")),
    "packed_plus": with_settings(ShadowKVPlus.packed(), {"keys.bits": None}),
    "lowrank_int4": ShadowKV(landmarks=Landmarks(dtype="int4")),
}
KEPT = ("keys", "landmarks.dtype", "values.dtype")


def share_of(policy: Policy, config: ModelConfig, tokens: int) -> float:
    sizes = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
    return sizes["device_bytes"] / sizes["full_bytes"]


@pytest.mark.parametrize("name", one_of(3, CODES))
def test_a_policy_keeps_its_code_at_a_share(name):
    """The policy's bytes are within the share, its codes stay, and the least share of an Infeasible is possible."""
    policy, feasible = CODES[name], 0
    for config, tokens in ((SMOLLM2, 2304), (LLAMA, 32768), (TINY, 256)):
        taken = []
        for fraction in (0.5, 0.25, 0.12, 0.06):
            try:
                found = at_share(policy, fraction, tokens, config)
            except Infeasible as error:
                least = float(str(error).split("at least ")[1].split()[0]) + 1e-4
                assert fraction < least
                found = at_share(policy, least, tokens, config)
            else:
                feasible += 1
                taken.append(share_of(found, config, tokens))
                assert taken[-1] <= fraction
            assert type(found) is type(policy)
            assert [policy_settings(found)[name] for name in KEPT] == [policy_settings(policy)[name] for name in KEPT]
            assert policy.landmarks.tokens in (None, found.landmarks.tokens)
        assert taken == sorted(taken, reverse=True)
    assert feasible >= 4


def test_the_bits_follow_the_share():
    """No larger profile fits, coarser keys have coarser landmarks, and the result ignores settings of size."""
    policy = CODES["transform"]
    rich, middle, poor = (at_share(policy, fraction, 122_880, LLAMA) for fraction in (0.25, 0.11, 0.05))
    assert [found.landmarks.tokens for found in (rich, middle, poor)] == [2, 4, None]
    assert [found.outlier_chunks for found in (rich, middle, poor)] == [48, 0, 0]
    for found, fraction in ((rich, 0.25), (poor, 0.05)):
        size = packed_width(found.keys.profile) + 16
        more = with_settings(found, {"keys.profile": profile_of(1024, 8 * size)})
        assert share_of(found, LLAMA, 122_880) <= fraction < share_of(more, LLAMA, 122_880)
    nines = shadow_candidates(dataclasses.replace(policy, chunk_size=9), LLAMA)
    assert {one.landmarks.tokens for group in nines for one in group} == {1, 3, None}
    assert packed_width(rich.keys.profile) >= 2 * usual_rank(1024) > packed_width(middle.keys.profile)
    for paper in (ShadowKV(), ShadowKV(budget=512), ShadowKVPlus()):
        assert at_share(paper, 0.25, 2304, SMOLLM2) == at_share(type(paper)(), 0.25, 2304, SMOLLM2)
    assert at_share(Quest(), 0.25, 2304, SMOLLM2) == at_share(Quest(budget=99), 0.25, 2304, SMOLLM2)
    for field, value in (("bits", 2.0), ("profile", (4, 4, 4))):
        with pytest.raises(ConfigError, match=rf"keys\.{field} must be None where a share decides it"):
            at_share(with_settings(policy, {f"keys.{field}": value}), 0.25, 2304, SMOLLM2)
    with pytest.raises(ConfigError, match="fraction must be above 0"):
        at_share(policy, 0.0, 2304, SMOLLM2)
