"""Properties of all policies: names, registry, checked settings, wrappers, and bytes."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import POLICY_CASES, TINY
from few import each_once, one_of
from plugins import strangers
from policy_inputs import DEEP, llama

from jshadow import policies
from jshadow.cache.records import PromptKV
from jshadow.cli import policies as command
from jshadow.cli.main import main
from jshadow.errors import ConfigError, Infeasible
from jshadow.evaluation.laws import subject_of
from jshadow.evaluation.results import label
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import footprint
from jshadow.policies import (
    H2O,
    POLICIES,
    WRAPPERS,
    DenseFirst,
    EvictingPolicy,
    ExpectedAttention,
    Full,
    InfLLM,
    OmniKV,
    Policy,
    Pyramid,
    Quest,
    RocketKV,
    ShadowKV,
    ShadowKVPlus,
    SnapKV,
    SpeCache,
    StreamingLLM,
    parse_policy,
    register,
)
from jshadow.policies.capabilities import rows_of
from jshadow.policies.eviction import best_positions
from jshadow.policies.registry import place_of
from jshadow.policies.settings import changed_settings, dotted_settings, policy_settings, setting_types, with_settings
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, Quirks, TransformCode, Values
from jshadow.policies.sizing import at_share


def test_each_constructs_without_arguments_and_names_its_source():
    for name, policy in POLICIES.items():
        instance = policy()
        assert instance.name == name
        assert instance.source
        assert hash(instance) == hash(policy())
    assert StreamingLLM in POLICIES.values()


def test_a_policy_that_is_listed_nowhere_is_found():
    """Every policy class of every file in policies/ has a registered name."""
    for file in Path(policies.__file__).parent.glob("*.py"):
        importlib.import_module(f"jshadow.policies.{file.stem}" if file.stem != "__init__" else "jshadow.policies")

    def below(kind: type) -> set[type]:
        return {kind}.union(*map(below, kind.__subclasses__()))

    classes = {kind for kind in below(Policy) if kind.__module__.startswith("jshadow.")}
    classes = {kind for kind in classes if not inspect.isabstract(kind)}
    names = {kind.name for kind in classes} - {"sliding_window", ""}  # SlidingWindow is not registered
    assert names == set(POLICIES) | set(WRAPPERS)
    assert {kind.__name__ for kind in classes if not kind.name} == {"Wrapper"}


REFUSED = """
h2o.heavy=-1 h2o.recent=0 h2o.normalize='no' less.state_rank=0 less.state_rank=10**11 less.hidden=0 less.recent=0
less.heavy=-1 snapkv.observation_window=0 snapkv.max_capacity_prompt=4 snapkv.kernel=4 snapkv.pooling='sum'
snapkv.granularity='layer' quest.unit=0 quest.budget=3 quest.dense_layers=-1 quest.top_p=0.0 quest.top_p=True
loki.columns=99 loki.calibration='later' omnikv.filter_layers=(8,) omnikv.filter_layers=(2,1) omnikv.selector='first'
offloaded.block=0 kivi.bits=3 infinigen.alpha='abc' infinigen.alpha=True infinigen.recent='abc' infllm.cached=128
infllm.fetched=2**12 infllm.budget=100 infllm.representatives=2**10 rocketkv.kept=0 kvzip.kept=0
"""
REFUSED_WITH = {
    "tova.kept=0": "must be an integer at least 1, got 0",
    "keydiff.kept=True": "must be an integer at least 1, got True",
    "expected_attention.kept=2.0": "must be an integer at least 1, got 2.0",
    "expected_attention.sinks=-1": "must be an integer at least 0, got -1",
    "expected_attention.future=0": "must be an integer in [1, 65536], got 0",
    "expected_attention.epsilon=-0.1": "must be a finite number of at least 0, got -0.1",
    "adakv.kept=0": "must be an integer at least 1, got 0",
    "adakv.safeguard=1.5": "must be at most 1, got 1.5",
    "adakv.safeguard=-1": "must be a finite number of at least 0, got -1",
    "adakv.scores='h2o'": "must be one of ('snapkv', 'expected_attention', 'keydiff', 'kvzip'), got 'h2o'",
    "kvzip.chunk=0": "must be an integer at least 1, got 0",
    "kvzip.sinks=-1": "must be an integer at least 0, got -1",
    "kvzip.normalized='yes'": "must be one of (False, True), got 'yes'",
    "rocketkv.budget=7": "must be an integer at least 8, got 7",
    "rocketkv.scores='h2o'": "must be one of ('snapkv', ",
    "kivi.group=7": "must divide",
    "quantized.dtype='fp4'": "must be one of ('fp8', 'int8', 'int4'), got 'fp4'",
}
REFUSED_AROUND = {
    "dense_first.layers": [DenseFirst(layers=9)],
    "layers that stand alone, got omnikv": [DenseFirst(OmniKV())],
    "dense_first.inner": [DenseFirst(inner=3)],
    "pyramid.inner must be a policy with a budget, got full": [Pyramid(Full())],
    "pyramid.steepness": [Pyramid(steepness=0.5), Pyramid(steepness=True)],
    "infllm.budget": [InfLLM(unit=4096)],
    "infllm.representatives": [InfLLM(unit=2, representatives=3)],
}


def test_settings_that_cannot_be_are_refused():
    cases = [(policy, message) for message, policies in REFUSED_AROUND.items() for policy in policies]
    for setting in (*REFUSED.split(), *REFUSED_WITH):
        name, field, value = re.split("[.=]", setting, maxsplit=2)
        cases.append(
            (POLICIES[name](**{field: eval(value)}), f"{name}.{field} {REFUSED_WITH.get(setting, '')}".strip())
        )
    for policy, message in cases:
        with pytest.raises(ConfigError) as raised:
            policy.resolve(DEEP, 4096)
        assert message in str(raised.value)


# GiB on the device, GiB on the host, and MiB moved in a step, by hand from the papers, at 131,072 tokens of
# Llama-3.1-8B. None: the paper does not state it. Rows that a step fetches count as moved, and not as state; some
# papers count them as device bytes.
PAPERS_BYTES = {
    ("full", "resident"): (16.0, 0, 0),
    ("streaming_llm:sinks=4:window=2000", "resident"): (0.245, 0, 0),
    ("h2o", "resident"): (3.2, 0, 0),
    ("snapkv:max_capacity_prompt=2048", "resident"): (0.25, 0, 0),
    ("snapkv:max_capacity_prompt=2048:granularity=q_head", "resident"): (1.0, 0, 0),
    ("quest:budget=2048:dense_layers=0", "resident"): (17.0, 0, 0),
    ("quest:budget=2048:dense_layers=0", "device_put"): (1.0, 16.0, 256),
    ("loki", "resident"): (16.0, 0, 0),
    ("infinigen:columns=25", "device_put"): (1.5625 * 30 / 32 + 1.0, 15.0, None),
    ("infinigen:columns=16", "device_put"): (1.0 * 30 / 32 + 1.0, 15.0, None),
    ("omnikv:budget=2048", "device_put"): (4.0, 12.0, 192),
    ("quantized:dtype=fp8", "resident"): (8 + 0.125, 0, 0),  # a scale of two bytes for 128 numbers
    ("quantized:dtype=int4", "resident"): (4 + 0.125, 0, 0),
    ("kivi:bits=2:group=32", "resident"): (3.01, 0, 0),
    ("kivi:bits=2:group=64", "resident"): (2.51, 0, 0),
    ("specache:bits=2:group=64", "device_put"): (2.51, 16.0, 8),
    ("specache:bits=1:group=64", "device_put"): (1.51, 16.0, 8),
    # The published code keeps the window twice, a buffer of the blocks that it attends to, a buffer of 768 prompt
    # tokens, and a representative of each query head. Here the window and the sinks are not on the host.
    ("infllm", "device_put"): (1.86 + 0.25 - (4096 + 2048 + 768 - 128) * 4096 * 32 / 2**30 - 0.1875, 15.5, 256),
    # The published code also keeps the selected keys and values on the device between steps, 0.25 GiB.
    ("shadowkv:rank=160:budget=2048", "device_put"): (2.57 - 0.25, 8.0, 128),
}


def rows_told(capsys, context: int) -> list:
    """The rows that `jshadow policies` prints."""
    assert main(["policies", "--context", str(context), "--model", "llama-3.1-8b", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["policies"]


def test_the_table_of_bytes_is_the_papers(capsys, monkeypatch):
    """A policy without a paper's settings, such as a new file's, has a row with its defaults."""
    rows = {(row["setting"], row["fetch"]): row for row in rows_told(capsys, 131072)}
    assert {row["policy"] for row in rows.values()} == set(POLICIES)
    for key, (device, host, moved) in PAPERS_BYTES.items():
        row = rows[key]
        assert row["bytes_device"] / 2**30 == pytest.approx(device, rel=0.02), (key, row["parts"])
        assert row["bytes_host"] / 2**30 == pytest.approx(host, rel=0.02), (key, row["parts"])
        if moved is not None:
            assert row["bytes_moved"] / 2**20 == pytest.approx(moved, rel=0.02), key
    monkeypatch.setattr(command, "PAPERS_SETTINGS", (("full", "resident"),))
    rows, names = rows_told(capsys, 8192), ["full", *(name for name in POLICIES if name != "full")]
    assert [row["policy"] for row in rows] == [row["setting"] for row in rows] == names


def test_a_class_that_is_defined_again_replaces_the_first(tmp_path):
    """As when a notebook's cell runs twice."""

    def cell(default: int) -> type[Policy]:
        @register(small={"kept": 12})
        @dataclasses.dataclass(frozen=True)
        class Again(EvictingPolicy):
            kept: int = default
            name = "again"

            def slots(self, capacity):
                return min(self.kept, capacity)

            def score(self, spec, prompt):
                raise NotImplementedError

        return Again

    with strangers(tmp_path):
        first, second = cell(1), cell(2)
        assert place_of(first) == place_of(second)
        assert POLICIES["again"] is second is not first
        assert subject_of(second).small == second(kept=12)


def test_a_name_that_is_taken_and_what_is_no_class_are_not_registered():
    class Other(Quest):
        pass

    for policy, message in (
        (dataclasses.dataclass(frozen=True)(Other), r"a policy's name must be unique, got 'quest' of .*Other"),
        (Quest(), r"must be a subclass of .*, got Quest"),
    ):
        with pytest.raises(ConfigError, match=message):
            register()(policy)  # type: ignore[type-var]
    assert POLICIES["quest"] is Quest


@pytest.mark.parametrize("name", [name for name, case in POLICY_CASES.items() if case.restricted.name in POLICIES])
def test_there_and_back(name):
    """A policy is restored from all its settings, from those that differ from the defaults, and from its label."""
    policy = POLICY_CASES[name].restricted
    kind, *settings = label(policy).split(":")
    assert with_settings(type(policy)(), dotted_settings(policy)) == policy
    assert with_settings(type(policy)(), changed_settings(policy)) == policy
    assert parse_policy(kind, settings) == policy
    assert dotted_settings(policy).keys() <= setting_types(type(policy)).keys()
    assert hash(policy) == hash(dataclasses.replace(policy))


def test_presets_have_names_on_the_command_line():
    """Other settings change them, in any order. A policy without presets refuses the key."""
    assert parse_policy("shadowkv", ["preset=packed"]) == ShadowKV.packed()
    small = parse_policy("shadowkv_plus", ["budget=64", "preset=packed_small", "keys.bits=3"])
    usual = ShadowKVPlus.packed(small=True)
    assert small == dataclasses.replace(usual, budget=64, keys=dataclasses.replace(usual.keys, bits=3))
    assert parse_policy("shadowkv", ["preset=reference"]) == ShadowKV.reference()
    with pytest.raises(ConfigError, match=r"shadowkv\.preset must be one of .*packed_small.*, got 'small'"):
        parse_policy("shadowkv", ["preset=small"])
    with pytest.raises(ConfigError, match="--set preset must be left out for quest"):
        parse_policy("quest", ["preset=packed"])


def test_dotted_names_and_records_keep_what_is_not_replaced():
    policy = ShadowKV(rank=None, keys=TransformCode(bits=2), landmarks=Landmarks(tokens=2), values=Values("int8"))
    settings = {"keys": "transform", "keys.bits": 2, "landmarks.tokens": 2, "values.dtype": "int8"}
    assert changed_settings(policy) == settings
    assert changed_settings(ShadowKV(keys=ExactKeys())) == {"keys": "exact"}
    assert policy_settings(policy)["choice.rounds"] == 1
    policy = ShadowKV(keys=TransformCode(bits=2, weights="queries"), choice=Choice(rounds=2))
    assert with_settings(policy, {"keys.bits": 3}).keys == TransformCode(bits=3, weights="queries")
    assert with_settings(policy, {"keys": "transform", "keys.bits": 3}).keys == TransformCode(3, None, "queries")
    assert with_settings(policy, {"keys": "lowrank"}).keys == LowRank()
    assert with_settings(policy, {"keys": ExactKeys(), "quirks.score_dim": 9}).quirks == Quirks(score_dim=9)


UNKNOWN = [
    (["landmark_tokens=2"], r"key of shadowkv_plus \['budget'.*nearest: landmarks\.tokens"),
    (["keys.bit=2"], r"got 'keys\.bit=2'; the nearest: keys\.bits"),
    (["keys.bits=2"], r"shadowkv_plus\.keys='lowrank' has the settings \['weights'\], got 'bits'"),
    (["keys=exact", "keys.weights=queries"], r"keys='exact' has the settings \[\], got 'weights'"),
    (["keys=zip"], r"shadowkv_plus\.keys must be one of \('lowrank', 'transform', 'exact'.*\), got 'zip'"),
    (["rank.x=2"], r"got 'rank\.x=2'; the nearest: rank"),
    (["landmarks=2"], r"got 'landmarks=2'; the nearest: landmarks\."),
    (["qqqq=2"], r"got 'qqqq=2'$"),
]


def test_what_does_not_exist_is_told_with_the_nearest():
    for settings, message in UNKNOWN:
        with pytest.raises(ConfigError, match=message):
            parse_policy("shadowkv_plus", settings)
    for wrong in ({"landmarks": 2}, {"keys": 3}, {"rank.x": 1}, {"nothing": 1}):
        with pytest.raises(ConfigError, match=r"must be|has the settings"):
            with_settings(ShadowKVPlus(), wrong)
    with pytest.raises(ConfigError, match="or of a wrapper"):
        parse_policy("quest", ["pyramid.width=3"])


def layers_of(policy) -> list:
    """What a policy is in each of eight layers."""
    policy = policy.resolve(DEEP, 4096)
    return [policy.for_layer(layer, DEEP) for layer in range(8)]


def test_a_pyramid_spends_what_it_was_given_on_the_layers_that_choose():
    """Budgets fall, are whole units, and have the mean of equal budgets. They may be fewer than sinks."""
    quest, snapkv = Quest(budget=512, unit=16, dense_layers=0), SnapKV(max_capacity_prompt=100)
    for inner in (quest, snapkv, H2O(heavy=50, recent=30)):
        for name in inner.budget_fields:
            sizes, given = (
                [getattr(layer, name) for layer in layers_of(Pyramid(inner, steepness=5.0))],
                getattr(inner, name),
            )
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] > given > sizes[-1]
            assert np.mean(sizes) == pytest.approx(given, rel=0.05)
            assert sizes[-1] == pytest.approx(given / 5, abs=16)
    for policy in (Pyramid(DenseFirst(Quest(budget=128, dense_layers=0), layers=4)), Pyramid(Quest(budget=128))):
        budgets = [layer.budget for layer in layers_of(policy) if isinstance(layer, Quest)]
        assert budgets[0] > 128 > budgets[-1]
        assert np.mean(budgets) == pytest.approx(128, rel=0.1)
    few = Pyramid(ExpectedAttention(kept=4, sinks=4), steepness=4.0).resolve(TINY, 96)
    assert [few.for_layer(layer, TINY).kept for layer in range(3)] == [7, 4, 1]


def test_a_pyramid_keeps_the_newest_tokens_of_a_prompt():
    """If the budget of a layer is too small for the observation window, the window shrinks."""
    policy = Pyramid(SnapKV(max_capacity_prompt=24, observation_window=16, kernel=3), steepness=4.0)
    specs = cache_specs(TINY, policy.resolve(TINY, 96), 1, 96, 61, "float32", "resident")
    rng = np.random.default_rng(0)
    q, k, v = (np.float32(rng.standard_normal((1, 61, heads, TINY.head_dim))) for heads in (4, 2, 2))
    for spec in specs:
        spec.policy.resolve(TINY, 96)  # the scaled settings are in range
        tail = q[:, 61 - spec.policy.observation_window :]
        prompt = PromptKV(k, k, v, np.array([61], np.int32), np.arange(61, dtype=np.int32)[None], tail)

        @jax.jit
        def compress(prompt, spec=spec):
            best = best_positions(spec.policy.score(spec, prompt)[0], np.array([61]), np.array([16]), 6)
            return best, spec.policy.compress(spec, spec.policy.init(spec), prompt)[0]

        kept, layer = jax.tree.map(np.asarray, compress(prompt))
        assert (kept[0] >= 55).all()  # of sixteen reserved tokens, the newest six
        assert layer.frozen.kept.k.shape[2] == spec.policy.max_capacity_prompt
        newest = prompt.k_post[0, 61 - spec.policy.observation_window :].swapaxes(0, 1)
        assert all((row == layer.frozen.kept.k[0, h]).all(axis=1).any() for h in range(2) for row in newest[h])
    assert [spec.policy.observation_window for spec in specs] == [16, 12, 3]


def test_dense_first_is_dense_first():
    gemma = dataclasses.replace(DEEP, sliding_window=8, sliding_layers=(0, 2, 4, 6))
    policy = DenseFirst(Quest(dense_layers=0), layers=2).resolve(gemma, 128)
    kinds = [type(spec.policy).__name__ for spec in cache_specs(gemma, policy, 1, 128, 64, "float32", "resident")]
    assert kinds == ["SlidingWindow", "Full"] * 2 + ["SlidingWindow", "Quest"] * 2


def test_wrappers_come_from_the_command_line():
    settings = ["budget=64", "dense_layers=0", "pyramid.steepness=4", "dense_first.layers=1"]
    policy = parse_policy("quest", settings)
    assert policy == DenseFirst(Pyramid(Quest(budget=64, dense_layers=0), steepness=4), layers=1)
    name, *again = label(policy).split(":")
    assert parse_policy(name, again) == policy
    assert policy_settings(policy)["inner"]["inner"]["name"] == "quest"
    assert parse_policy("omnikv", ["filter_layers=[0,3]"]) == OmniKV(filter_layers=(0, 3))


def test_what_the_planner_counts():
    """The rows of a step, the landmarks that it reads of a chunk, and the bytes of a compression, in plain numbers."""
    assert [rows_of(policy) for policy in (Full(), SpeCache(), DenseFirst(SpeCache()))] == [1, 2, 2]
    two = dataclasses.replace(ShadowKV().landmarks, tokens=4)
    parts = [ShadowKV(landmarks=one) for one in (two, dataclasses.replace(two, levels=2))]
    assert [(one.landmark_parts, one.read_parts) for one in parts] == [(2, 2), (2, 1)]
    [spec] = cache_specs(dataclasses.replace(TINY, num_layers=1), Full(), 3, 64, 1, "bfloat16", "resident")
    item = 2 * 2 * spec.kv_heads * spec.head_dim  # bytes of the keys and values of a token
    assert [Full().compress_bytes(spec, tokens) for tokens in (10, 100)] == [3 * 64 * item, 3 * 100 * item]
    rocket = RocketKV(kept=32, budget=16, unit=8)
    parts = [super(RocketKV, rocket).compress_bytes(spec, 50), rocket.scorer.compress_bytes(spec, 50)]
    assert rocket.compress_bytes(spec, 50) - sum(parts) == 2 * 3 * rocket.slots(spec) * item


SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)


@pytest.mark.parametrize(("name", "config"), one_of(7, each_once(POLICIES, ["tiny", "smollm2"])))
def test_nominal_keeps_to_its_share(name, config):
    """Device bytes, counted from the abstract state, are within the share, if the prompt fills the capacity."""
    config, dtype = {"tiny": (TINY, "float32"), "smollm2": (SMOLLM2, "bfloat16")}[config]
    feasible, refusals = 0, []
    for num_tokens in (96, 256, 500, 1024, 4096):
        for fraction in (1.0, 0.6, 0.5, 0.33, 0.25, 0.2, 0.1):
            try:
                policy = at_share(POLICIES[name](), fraction, num_tokens, config)
            except Infeasible as error:
                refusals.append((str(error), fraction))
                continue
            feasible += 1
            bytes_ = footprint(config, policy, capacity=num_tokens, prompt=num_tokens, dtype=dtype, fetch="device_put")
            assert bytes_["device_bytes"] <= fraction * bytes_["full_bytes"], (num_tokens, fraction, policy)
    assert all("at least" in message and str(fraction) in message for message, fraction in refusals)
    # two of the three layers have full attention with OmniKV
    assert feasible >= (5 if name == "full" or (name == "omnikv" and config is TINY) else 10)


def test_outliers_go_before_the_rank():
    """2,304 tokens are 288 chunks. At a quarter of the bytes, 48 exact chunks would leave room for a rank of 16."""
    found = [at_share(ShadowKV(), fraction, 2304, SMOLLM2) for fraction in (0.5, 0.25, 0.12)]
    assert [policy.outlier_chunks for policy in found] == [48, 24, 0]
    assert found[0].rank > found[1].rank == 32 > found[2].rank


@pytest.mark.parametrize("name", POLICIES)
def test_a_share_of_a_long_context_and_shares_that_cannot_be(name):
    """Device bytes are within the share, offloaded where the method can; Infeasible names the smallest share."""
    config, tokens = llama(), 32_768
    for fraction in (0.5, 0.25, 0.12):
        try:
            policy = at_share(POLICIES[name](), fraction, tokens, config)
        except Infeasible as error:
            least = float(str(error).split("at least ")[1].split()[0])
            assert fraction < least < 1 or name == "full"
            continue
        taken = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
        assert taken["device_bytes"] <= fraction * taken["full_bytes"] * 1.01
        specs = cache_specs(config, policy.resolve(config, tokens), 1, tokens, tokens, "bfloat16", "device_put")
        assert (taken["host_bytes"] > 0) == any(spec.policy.host_layout(spec) is not None for spec in specs)
    for fraction in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="fraction"):
            at_share(POLICIES[name](), fraction, 1024, TINY)
    with pytest.raises(Infeasible, match=f"{name}: fraction must be at least"):
        at_share(POLICIES[name](), 1e-4, 1024, TINY)
    # no layer uses the policy if all slide, so its settings do not matter, but it must be a policy or Infeasible
    config = dataclasses.replace(TINY, sliding_window=8, sliding_layers=(0, 1, 2))
    with contextlib.suppress(Infeasible):
        at_share(POLICIES[name](), 1.0, 256, config).resolve(config, 256)
