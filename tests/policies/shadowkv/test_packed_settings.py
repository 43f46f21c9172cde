"""ShadowKV's settings: bytes of packed codes, profiles, shares of full attention, refusals; and later keys."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cases import LENGTHS, PLUS, PROMPT, SMALL, STEPS, TINY, model, random_tokens, run_steps
from family_cases import family_config
from few import one_of
from small_state import SMALL as SMALL_MODEL
from small_state import equal

from jshadow import load_state, save_state
from jshadow.cache.offload import FETCH_MODES
from jshadow.engine import decode
from jshadow.errors import ConfigError, Infeasible, StateMismatch
from jshadow.evaluation import metrics
from jshadow.models.config import ModelConfig, RopeConfig
from jshadow.planner.machine import abstract_state, footprint
from jshadow.policies import Full, Policy, Quest, ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import policy_settings, with_settings
from jshadow.policies.shadowkv import Choice, ExactKeys, FromValues, Landmarks, LowRank, Quirks, TransformCode, Values
from jshadow.policies.shadowkv import settings as records
from jshadow.policies.shadowkv.key_codecs import LowRankCodec, Sizes, usual_profile, usual_rank
from jshadow.policies.shadowkv.key_codecs.transform import packed_width, profile_of
from jshadow.policies.sizing import at_share, device_share

SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)
LLAMA = ModelConfig("llama", 128256, 32, 4096, 14336, 32, 8, 128, 1e-5, 131072)
KINDS = (ShadowKV, ShadowKVPlus)
ONE = dataclasses.replace(TINY, num_layers=1)  # codes are the business of a layer
PACKED = dict(landmarks=Landmarks(tokens=2, dtype="int4"), values=Values(dtype="int4"))
ODD_HEAD = dataclasses.replace(TINY, head_dim=15, rope=RopeConfig(rotary_share=0.8))


def share_of(policy: Policy, config: ModelConfig, tokens: int) -> float:
    sizes = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
    return sizes["device_bytes"] / sizes["full_bytes"]


@pytest.mark.parametrize(
    ("policy", "row", "marks"),
    [
        (ShadowKV(), 8 * 128 * 2, 128 * 2),
        (ShadowKV(keys=TransformCode(), **PACKED), 544, 4 * (64 + 2)),
        (ShadowKV(landmarks=Landmarks(dtype="int8")), 8 * 128 * 2, 128 + 2),
        (ShadowKV(keys=ExactKeys(), landmarks=Landmarks(tokens=4), values=Values("int8")), 1056, 2 * 128 * 2),
        (ShadowKV.packed(), 544, 128 + 2 + 3 * (64 + 2)),
    ],
)
def test_planned_bytes_are_the_state_s(policy, row, marks):
    """A chunk's codes and scales of 1,040 or 528 bytes are filled up to sectors of 32 bytes in a host row.

    `marks` is the bytes of a chunk's landmarks in one head. With two levels, the means have 8 bits.
    """
    planned = footprint(LLAMA, policy, capacity=32768, prompt=32768, fetch="device_put")
    resolved, parts, sizes = policy.resolve(LLAMA, 32768), planned["parts"], Sizes(8, 128, "bfloat16")
    chunks, code = resolved.max_chunks(32768), parts["left"][0] + parts.get("right", (0, 0))[0]
    assert code == 32 * resolved.codec.nbytes(chunks, resolved.chunk_size, sizes)
    assert parts["landmarks"][0] == 32 * 8 * chunks * marks
    assert planned["host_bytes"] == 32 * 8 * chunks * row
    assert device_share(resolved, 32768, LLAMA) == planned["device_bytes"] / planned["full_bytes"]


@pytest.mark.parametrize("kind", KINDS)
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
    for kind in KINDS:
        resolved = kind.paper().resolve(LLAMA, 131_072)
        assert (resolved.keys, resolved.rank, resolved.landmarks) == (LowRank(), 160, Landmarks(tokens=8))
        assert (resolved.values, resolved.choice, resolved.outlier_chunks) == (Values(), Choice(), 48)
        assert (resolved.chunk_size, resolved.budget) == (8, 2045)
    settings = ShadowKVPlus.paper(), ShadowKVPlus.reference(), ShadowKVPlus.lossless(96, TINY)
    assert {policy.later_keys for policy in settings} == {"projected"}
    assert ShadowKVPlus.packed().later_keys == ShadowKVPlus().later_keys == "int6"


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
    for size in range(1, columns + 1):
        profile = eight, four, two = profile_of(columns, 8 * size)
        assert abs(packed_width(profile) - size) <= unit // 2 or size > columns - unit or size < unit
        assert min(profile) >= 0 == eight % unit == four % (2 * unit) == two % (4 * unit)
        assert 1 <= eight + four + two <= columns
    assert profile_of(columns, 8 * columns + 3) == (columns // unit * unit, 0, 0)
    for bits in (0, 3, -8, 8 * columns + 5):
        with pytest.raises(ConfigError, match=rf"must be in \[8, {8 * columns}\], got {bits}"):
            profile_of(columns, bits)


def test_the_usual_profile_has_the_bits_of_the_usual_rank():
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(LLAMA, 4096)
    assert (policy.rank, policy.keys.profile) == (None, (80, 320, 320))
    sizes = Sizes(8, 128, "bfloat16")
    assert policy.codec.read_bytes(sizes) == LowRankCodec(160).read_bytes(sizes) == 320
    policy = ShadowKV(keys=TransformCode(), **PACKED).resolve(SMOLLM2, 4096)
    assert policy.keys.profile == (16, 64, 64)
    parts = footprint(SMOLLM2, policy, capacity=4096, prompt=4096, fetch="device_put")["parts"]
    tokens = 30 * 8 * policy.max_chunks(4096)
    # A token has its code, half a landmark of 4 bits, and half a scale for each head.
    assert (parts["left"][0], parts["landmarks"][0]) == (64 * tokens, (48 + 3) * tokens)
    for heads, dim in ((1, 8), (1, 6), (2, 16), (5, 64), (8, 256)):
        one = dataclasses.replace(LLAMA, kv_heads=heads, q_heads=heads, head_dim=dim)
        profile = ShadowKV(keys=TransformCode()).resolve(one, 4096).keys.profile
        assert 1 <= sum(profile) <= heads * dim
        assert profile[1] % 2 == profile[2] % 4 == 0


def test_settings_as_text():
    policy = parse_policy("shadowkv", ["keys=transform", "keys.profile=16,64,64", "landmarks.tokens=2"])
    assert policy == ShadowKV(keys=TransformCode(profile=(16, 64, 64)), landmarks=Landmarks(tokens=2))
    assert hash(policy) != hash(ShadowKV())
    plus = parse_policy("shadowkv_plus", ["keys.profile=16+64+64", "keys=transform"])
    assert plus == ShadowKVPlus(keys=TransformCode(profile=(16, 64, 64)))
    policy = parse_policy("shadowkv", ["keys=transform", "keys.bits=1.333"])
    assert policy.resolve(SMOLLM2, 512).keys.profile == (4, 40, 32)
    assert policy.resolve(LLAMA, 512) == ShadowKV(keys=TransformCode(profile=(16, 224, 192))).resolve(LLAMA, 512)
    assert ShadowKV(keys=TransformCode(bits=1e-9)).resolve(SMOLLM2, 512).codec.profile == profile_of(192, 8)


def test_a_saved_state_keeps_the_profile_that_it_was_coded_with(tmp_path, monkeypatch):
    """Its file has the columns of each width, so another default changes nothing; settings that ask for it fail."""
    policy = ShadowKV(budget=4, chunk_size=4, outlier_chunks=1, local_chunks=1, keys=TransformCode(bits=4.0))
    params, tokens = model(SMALL_MODEL), random_tokens(1, 13, config=SMALL_MODEL)
    profile = policy.resolve(SMALL_MODEL, 16).keys.profile
    monkeypatch.setattr(records, "profile_of", lambda columns, bits: (0, 4, 0))
    state = decode.prefill(params, tokens, np.array([13]), policy, capacity=16)[1]
    save_state(tmp_path / "state", state, params)
    monkeypatch.undo()
    loaded = load_state(tmp_path / "state", params)
    assert loaded.policy.keys.profile == (0, 4, 0) != profile
    assert equal(loaded, state)
    with pytest.raises(StateMismatch, match=r"policy\.settings\.keys\.profile"):
        load_state(tmp_path / "state", params, policy)


CODES: dict[str, ShadowKV] = {
    "transform": ShadowKV(keys=TransformCode(), landmarks=Landmarks(dtype="int4"), values=Values(dtype="int4")),
    "packed_plus": with_settings(ShadowKVPlus.packed(), {"keys.bits": None}),
    "lowrank_int4": ShadowKV(landmarks=Landmarks(dtype="int4")),
}
KEPT = ("keys", "landmarks.dtype", "values.dtype")


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


@dataclasses.dataclass(frozen=True)
class ChunksOfNine(ShadowKV):
    """The number of tokens of a landmark divides the chunk."""

    chunk_size: int = 9


def test_the_bits_follow_the_share():
    """No larger profile fits, coarser keys have coarser landmarks, and the result ignores settings of size."""
    policy = CODES["transform"]
    rich, middle, poor = (at_share(policy, fraction, 122_880, LLAMA) for fraction in (0.25, 0.11, 0.05))
    assert [found.landmarks.tokens for found in (rich, middle, poor)] == [2, 4, None]
    assert [found.outlier_chunks for found in (rich, middle, poor)] == [48, 0, 0]
    for found, fraction in ((rich, 0.25), (poor, 0.05)):
        more = with_settings(found, {"keys.profile": profile_of(1024, 8 * (packed_width(found.keys.profile) + 16))})
        assert share_of(found, LLAMA, 122_880) <= fraction < share_of(more, LLAMA, 122_880)
    nines = ChunksOfNine(keys=TransformCode()).candidates(122_880, LLAMA)
    assert {one.landmarks.tokens for group in nines for one in group} == {1, 3, None}
    assert packed_width(rich.keys.profile) >= 2 * usual_rank(1024) > packed_width(middle.keys.profile)
    for paper in (ShadowKV(), ShadowKV(budget=512), ShadowKVPlus()):
        assert at_share(paper, 0.25, 2304, SMOLLM2) == at_share(type(paper)(), 0.25, 2304, SMOLLM2)
    assert at_share(Quest(), 0.25, 2304, SMOLLM2) == at_share(Quest(budget=99), 0.25, 2304, SMOLLM2)
    for changed, fraction, message in (
        ({"keys.bits": 2.0}, 0.25, r"keys\.bits must be None where a share decides it"),
        ({"keys.profile": (4, 4, 4)}, 0.25, r"keys\.profile must be None where a share decides it"),
        ({}, 0.0, "fraction must be above 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            at_share(with_settings(policy, changed), fraction, 2304, SMOLLM2)


SHORT = {
    "small": ShadowKV.packed(small=True),
    "multiple": with_settings(
        ShadowKV(quirks=Quirks(chunk_multiple=16, exact_preload=True)),
        {"landmarks.dtype": "int8", "values.dtype": "int8"},
    ),
    "plus": ShadowKVPlus.packed(),
}


@pytest.mark.parametrize("name", one_of(3, SHORT))
def test_a_capacity_without_a_whole_chunk(name):
    """There is no chunk to select or to pack, because all tokens are in the window."""
    wanted, dense = decode.prefill(model(ONE), PROMPT[:, :12], [12, 3, 1], capacity=39)
    logits, state = decode.prefill(model(ONE), PROMPT[:, :12], [12, 3, 1], SHORT[name], capacity=39, fetch="device_put")
    assert state.specs[0].policy.max_chunks(39) == 0
    np.testing.assert_allclose(logits, wanted, atol=1e-4)
    steps = [run_steps(model(ONE), one, STEPS[:, :4])[0] for one in (state, dense)]
    np.testing.assert_allclose(*steps, atol=1e-4)


def test_a_pool_is_at_most_as_large_as_the_number_of_chunks():
    for pool in (1e308, 10**400):
        policy = ShadowKV(pool=pool).resolve(dataclasses.replace(TINY, context=4096), 4096)
        assert policy.max_places(4096) == policy.max_chunks(4096)


@pytest.mark.parametrize("kind", KINDS)
def test_zero_copy_is_refused_where_no_kernel_rebuilds_the_keys(kind, monkeypatch):
    """It is refused on a GPU, before anything runs. Other modes and packed numbers are not refused."""
    sizes = dict(batch=1, capacity=96, prompt=90, dtype="float32")
    projected = {"later_keys": "projected"} if kind is ShadowKVPlus else {}
    exact = kind(**SMALL, keys=ExactKeys(), values=Values(dtype="int4"))
    abstract_state(TINY, exact, **sizes, fetch="zero_copy")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    refused = [(exact, f"fetch must be 'device_put' or 'resident' for {kind.name} with keys='exact' on a GPU")]
    if kind is ShadowKVPlus:
        refused.append((kind(rank=4, **PLUS), "for shadowkv_plus with later_keys='int6' on a GPU"))
    for policy, message in refused:
        with pytest.raises(ConfigError, match=message):
            abstract_state(TINY, policy, **sizes, fetch="zero_copy")
        abstract_state(TINY, policy, **sizes, fetch="device_put")
    for codec, dtype in (("lowrank", "int4"), ("transform", "model"), ("transform", "int4")):
        packed = kind(**SMALL, **projected, values=Values(dtype=dtype), landmarks=Landmarks(tokens=2, dtype="int4"))
        state = abstract_state(TINY, with_settings(packed, {"keys": codec}), **sizes, fetch="zero_copy")
        assert state.fetch == "zero_copy"


BITS = TransformCode(bits=2.0, profile=(4, 4, 4)), *(TransformCode(b) for b in (0, 8.5, True, "two", float("nan")))
REFUSED = [  # settings, message, and the width of a head if it matters
    (dict(keys="zip"), r"\.keys must be LowRank or TransformCode or ExactKeys.*, got 'zip'"),
    (dict(keys=Values()), r"\.keys must be LowRank or .*, got Values"),
    (dict(landmarks=2), r"\.landmarks must be Landmarks, got 2"),
    (dict(keys=TransformCode(), rank=8), r"\.rank must be None with keys='transform'.*got 8"),
    (dict(keys=TransformCode(profile=(4, 3, 4))), r"multiple of 2 and the third of 4, got \(4, 3, 4\)"),
    (dict(keys=TransformCode(profile=(4, 4, 2))), r"the third of 4, got \(4, 4, 2\)"),
    (dict(keys=TransformCode(profile=(9, 16, 8))), r"together 1 to 32, .*got \(9, 16, 8\)"),
    (dict(keys=TransformCode(profile=(0, 0, 0))), r"got \(0, 0, 0\)"),
    (dict(keys=TransformCode(profile=(8, 8))), r"must be three numbers of columns.*got \(8, 8\)"),
    (dict(keys=TransformCode(profile=(True, 8, 8))), "must be three numbers"),
    (dict(keys=TransformCode(profile=(-1, 8, 8))), "must be three numbers"),
    *((dict(keys=code), r"\.keys\.bits must be") for code in BITS),
    (dict(keys=LowRank(weights="keys")), r"\.keys\.weights must be one of .*'none', 'queries'.* got 'keys'"),
    (dict(keys=TransformCode(weights="keys")), r"\.keys\.weights must be one of .*'none', 'queries'.* got 'keys'"),
    (dict(landmarks=Landmarks(tokens=3)), r"\.landmarks\.tokens must divide chunk_size=8, got 3"),
    (dict(landmarks=Landmarks(tokens=16)), r"\.landmarks\.tokens must be an integer in \[1, 8\], got 16"),
    (dict(landmarks=Landmarks(dtype="int2")), r"\.landmarks\.dtype must be one of \('model', 'int8', 'int4'\)"),
    (dict(landmarks=Landmarks(dtype="fp8")), r"\.landmarks\.dtype must be one of .*'int4'\), got 'fp8'"),
    (dict(landmarks=Landmarks(dtype="int4")), "='int4' must have an even head_dim, got 15", 15),
    *((dict(landmarks=Landmarks(levels=n)), r"\.landmarks\.levels must be an integer in \[1, 2\]") for n in (0, 3)),
    *(
        (dict(landmarks=Landmarks(levels=n)), r"\.landmarks\.levels must be an integer in \[1, 2\]")
        for n in (2.0, True)
    ),
    *((dict(landmarks=Landmarks(order=n)), r"\.landmarks\.order must be an integer in \[1, 2\]") for n in (0, 3)),
    *((dict(landmarks=Landmarks(order=n)), r"\.landmarks\.order must be an integer in \[1, 2\]") for n in (2.0, True)),
    (
        dict(chunk_size=6, landmarks=Landmarks(tokens=2, levels=2)),
        r"a power of two of landmarks a chunk with landmarks\.levels=2, got 3",
    ),
    (dict(values=Values(dtype=4)), r"\.values\.dtype must be one of .*'int4'\), got 4"),
    (dict(values=Values("int4")), "='int4' must have an even head_dim, got 15", 15),
    *((dict(choice=Choice(rounds=n)), r"choice\.rounds must be an integer in \[1, 2\]") for n in (0, 3, 1.0, True)),
    (dict(choice=Choice(outlier_rule="code")), r"outlier_rule must be one of .*'landmark', 'both'.* got 'code'"),
    (
        dict(choice=Choice(outlier_rule="both"), keys=ExactKeys()),
        r"outlier_rule must be 'landmark' with keys='exact', got 'both'",
    ),
    (dict(keys=FromValues()), r"keys='from_values' must have a model whose|keys must not be 'from_values': later"),
    (dict(pool=-1), r"\.pool must be a finite number of at least 0, got -1"),
    (dict(pool=float("nan")), r"\.pool must be a finite number of at least 0, got nan"),
    (dict(pool=True), r"\.pool must be a finite number of at least 0, got True"),
    (dict(pool="2"), r"\.pool must be a finite number of at least 0, got '2'"),
    (dict(later_keys="lowrank"), r"later_keys must be one of .*'int6', 'int4', 'projected'.* got 'lowrank'"),
    (dict(later_keys="int6"), "later_keys='int6' must have a head_dim that is a multiple of 4", 15),
    (dict(later_keys="int4"), "later_keys='int4' must have a head_dim that is a multiple of 2", 15),
]


@pytest.mark.parametrize(("given", "message", "width"), [(*case, 16)[:3] for case in REFUSED], ids=str)
def test_settings_that_cannot_be_are_refused(given, message, width):
    config = dataclasses.replace(ODD_HEAD if width % 2 else TINY, head_dim=width)
    for kind in KINDS[1:] if "later_keys" in given else KINDS:
        others = {"later_keys": "projected"} if kind is ShadowKVPlus else {}  # the default needs heads of other widths
        with pytest.raises(ConfigError, match=rf"{message}"):
            kind(**others | given).resolve(config, 96)


def test_keys_from_values_are_refused_where_keys_are_needed_before_them():
    config = family_config("gemma4")
    assert ShadowKV(keys=FromValues()).resolve(config, 96).codec.from_values
    for given, message in (
        (dict(choice=Choice(rounds=2)), r"choice\.rounds must be an integer in \[1, 1\], got 2"),
        (dict(choice=Choice(outlier_rule="both")), "must be 'landmark' with keys='from_values', got 'both'"),
        (dict(values=Values("int8")), r"values\.dtype must be 'model' with keys='from_values', got 'int8'"),
        (dict(rank=8), "rank must be None with keys='from_values'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShadowKV(keys=FromValues(), **given).resolve(config, 96)


def test_settings_next_to_refused_ones_are_taken():
    assert ShadowKVPlus(later_keys="projected").resolve(ODD_HEAD, 96).later_keys == "projected"
    # a chunk with a single landmark has one level, because the landmark is the mean
    assert ShadowKV(landmarks=Landmarks(levels=2)).resolve(TINY, 96).landmarks.levels == 1
    message = r"pool must make at most 2,048 places for each KV head, got 2,270 places with pool=9\.5"
    with pytest.raises(ConfigError, match=message):
        ShadowKV(pool=9.5).resolve(dataclasses.replace(TINY, context=131_072), 122_880)


POLICY = ShadowKVPlus(rank=4, budget=160, **PLUS)
PROJECTED = dataclasses.replace(POLICY, later_keys="projected")


@functools.cache
def divergence(policy, prompt: int = 24, new: int = 60) -> np.ndarray:
    """KL from full attention after each of `new` random tokens, of which all may be selected, [B, new]."""
    tokens, logits = random_tokens(2, prompt + new, seed=3), []
    for one in (Full(), policy):
        _, state = decode.prefill(model(ONE), tokens[:, :prompt], [prompt] * 2, one, capacity=160, fetch="resident")
        out, _ = decode.extend(model(ONE), tokens[:, prompt:], [new] * 2, state, logits="all")
        logits.append(np.asarray(out))
    return np.stack([metrics.kl(*pair) for pair in zip(*logits, strict=True)])


@pytest.mark.slow
def test_later_keys_lose_what_their_code_loses():
    """Of a prompt with 4 of 32 columns, projected keys lose most, as long as they are read: own keys need no basis.

    With exact keys of the prompt, projected keys are exact, keys of 6 bits nearly so, and keys of 4 bits less so.
    """
    assert divergence(POLICY)[:, 30:].mean() < 0.5 * divergence(PROJECTED)[:, 30:].mean()
    exact = dataclasses.replace(PROJECTED, rank=None, keys=ExactKeys())
    assert divergence(exact).max() < 1e-6
    four, six = (divergence(dataclasses.replace(exact, later_keys=code))[:, 30:].mean() for code in ("int4", "int6"))
    assert 1e-7 < 4 * six < four < 0.02


def live_bytes(config, policy, capacity, dtype, names=(), **sizes):
    """The bytes of the arrays of all layers that grow with the tokens after a prompt."""
    state = abstract_state(config, policy, batch=1, capacity=capacity, dtype=dtype, fetch="device_put", **sizes)
    lives = [layer.live for layer in state.layers]
    parts = [[getattr(live, name) for name in names] if names else live for live in lives]
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(parts))


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_the_bytes_of_a_later_token(dtype, item):
    """A later token has 6 bits for each number and a scale for each head, and its share of the landmark."""
    less, more = (live_bytes(TINY, POLICY, n, dtype, ("left", "landmarks"), prompt=60) for n in (96, 160))
    each = TINY.kv_heads * (TINY.head_dim * 6 // 8 + item + TINY.head_dim * item // PLUS["chunk_size"])
    assert more - less == 64 * each * TINY.num_layers


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_later_token_of_packed_takes_less_than_a_quarter(head_dim):
    """Its key and its share of the landmarks, compared with key and value in bfloat16."""
    config = dataclasses.replace(TINY, head_dim=head_dim, rope=RopeConfig())
    less, more = (live_bytes(config, ShadowKVPlus.packed(), n, "bfloat16", prompt=1024) for n in (2048, 3072))
    full = 1024 * config.num_layers * config.kv_heads * 2 * head_dim * 2
    assert 0.2 < (more - less) / full < 0.25


LEVELS = Landmarks(tokens=2, levels=2, order=2, dtype="int4")
MODES = {
    "later_levels": dataclasses.replace(POLICY, budget=16, pool=2.0, landmarks=LEVELS),
    "int8": ShadowKV(rank=12, budget=24, **SMALL, landmarks=Landmarks(dtype="int8"), values=Values("int8")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES)
def test_codes_beside_those_of_the_laws_come_alike_in_every_fetch_mode(name):
    policies, modes = [MODES[name]] * len(FETCH_MODES), list(FETCH_MODES)
    prefilled = decode.prefill_many(model(ONE), PROMPT, LENGTHS, policies, capacity=96, fetch=modes)
    logits = [run_steps(model(ONE), state, STEPS)[0] for _, state in prefilled]
    for one in logits[1:]:
        np.testing.assert_allclose(one, logits[0], atol=1e-5)
