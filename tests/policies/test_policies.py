"""Properties of all policies: names, registry, checked settings, wrappers, and the bytes that the papers state."""

import dataclasses
import importlib
import inspect
from pathlib import Path

import jax
import numpy as np
import pytest
from cases import POLICY_CASES, TINY
from plugins import strangers
from policy_inputs import DEEP, llama, prompt_of

from jshadow import policies
from jshadow.errors import ConfigError
from jshadow.evaluation.laws import subject_of
from jshadow.evaluation.plots import style
from jshadow.evaluation.results import label
from jshadow.planner.bytes import cache_specs, footprint
from jshadow.policies import (
    H2O,
    KIVI,
    LESS,
    POLICIES,
    WRAPPERS,
    DenseFirst,
    EvictingPolicy,
    Full,
    InfiniGen,
    InfLLM,
    Loki,
    OmniKV,
    Policy,
    Pyramid,
    Quest,
    ShadowKV,
    ShadowKVPlus,
    SnapKV,
    StreamingLLM,
    parse_policy,
    register,
)
from jshadow.policies.eviction import best_positions
from jshadow.policies.registry import place_of
from jshadow.policies.settings import changed_settings, dotted_settings, policy_settings, setting_types, with_settings
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, Quirks, TransformCode, Values


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


SETTINGS = {
    "h2o heavy": (H2O(heavy=-1), "h2o.heavy"),
    "h2o recent": (H2O(recent=0), "h2o.recent"),
    "snapkv window": (SnapKV(observation_window=0), "snapkv.observation_window"),
    "snapkv prompt": (SnapKV(max_capacity_prompt=4), "snapkv.max_capacity_prompt"),
    "snapkv kernel": (SnapKV(kernel=4), "snapkv.kernel"),
    "snapkv pooling": (SnapKV(pooling="sum"), "snapkv.pooling"),
    "snapkv granularity": (SnapKV(granularity="layer"), "snapkv.granularity"),
    "quest unit": (Quest(unit=0), "quest.unit"),
    "quest budget": (Quest(budget=3), "quest.budget"),
    "quest dense": (Quest(dense_layers=-1), "quest.dense_layers"),
    "loki columns": (Loki(columns=99), "loki.columns"),
    "loki calibration": (Loki(calibration="later"), "loki.calibration"),
    "omnikv layers": (OmniKV(filter_layers=(7,)), "omnikv.filter_layers"),
    "omnikv order": (OmniKV(filter_layers=(2, 1)), "omnikv.filter_layers"),
    "omnikv selector": (OmniKV(selector="first"), "omnikv.selector"),
    "kivi bits": (KIVI(bits=3), "kivi.bits"),
    "kivi group": (KIVI(group=7), "kivi.group must divide"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_checked(case):
    policy, message = SETTINGS[case]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        policy.resolve(TINY, 96)


WRAPPED = {
    "layers": (DenseFirst(layers=9), "dense_first.layers"),
    "coupled": (DenseFirst(OmniKV()), "layers that stand alone, got omnikv"),
    "no policy": (DenseFirst(inner=3), "dense_first.inner"),
    "no budget": (Pyramid(Full()), "pyramid.inner must be a policy with a budget, got full"),
    "steepness": (Pyramid(steepness=0.5), "pyramid.steepness"),
    "flag": (Pyramid(steepness=True), "pyramid.steepness"),
    "top_p": (Quest(top_p=0.0), "quest.top_p"),
    "top_p flag": (Quest(top_p=True), "quest.top_p"),
    "infllm pool": (InfLLM(budget=256, cached=128), "infllm.cached"),
    "infllm fetched": (InfLLM(budget=256, fetched=512), "infllm.fetched"),
    "normalize": (H2O(normalize="no"), "h2o.normalize"),
    "alpha": (InfiniGen(alpha="abc"), "infinigen.alpha"),
    "alpha flag": (InfiniGen(alpha=True), "infinigen.alpha"),
    "recent": (InfiniGen(recent="abc"), "infinigen.recent"),
    "state rank": (LESS(state_rank=10**11), "less.state_rank"),
    "infllm unit": (InfLLM(unit=4096), "infllm.budget"),
    "infllm representatives": (InfLLM(unit=2, representatives=3), "infllm.representatives"),
}


@pytest.mark.parametrize("case", WRAPPED)
def test_what_is_put_around_is_checked(case):
    policy, message = WRAPPED[case]
    with pytest.raises(ConfigError, match=message):
        policy.resolve(DEEP, 4096)


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


def test_the_table_of_bytes_is_the_papers(capsys):
    import json

    from jshadow.cli.main import main

    assert main(["policies", "--context", "131072", "--model", "llama-3.1-8b", "--json"]) == 0
    rows = {(row["setting"], row["fetch"]): row for row in json.loads(capsys.readouterr().out)["policies"]}
    assert {row["policy"] for row in rows.values()} == set(POLICIES)
    for key, (device, host, moved) in PAPERS_BYTES.items():
        row = rows[key]
        assert row["bytes_device"] / 2**30 == pytest.approx(device, rel=0.02), (key, row["parts"])
        assert row["bytes_host"] / 2**30 == pytest.approx(host, rel=0.02), (key, row["parts"])
        if moved is not None:
            assert row["bytes_moved"] / 2**20 == pytest.approx(moved, rel=0.02), key


def test_a_policy_without_a_paper_s_settings_has_a_row_with_its_defaults(capsys, monkeypatch):
    """`jshadow policies` shows the bytes of a new file's policy too."""
    import json

    from jshadow.cli import policies as command
    from jshadow.cli.main import main

    monkeypatch.setattr(command, "PAPERS_SETTINGS", (("full", "resident"),))
    assert main(["policies", "--context", "8192", "--model", "llama-3.1-8b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["policies"]
    names = ["full", *(name for name in POLICIES if name != "full")]
    assert [row["policy"] for row in rows] == [row["setting"] for row in rows] == names


@pytest.mark.parametrize(("bits", "group", "gib"), [(2, 32, 3.01), (2, 64, 2.51), (1, 32, 2.01), (1, 64, 1.51)])
def test_kivi_s_bytes_at_128k_are_the_papers(bits, group, gib):
    """The sizes are computed by hand from the papers of KIVI and SpeCache, at 131,072 tokens of Llama-3.1-8B."""
    sizes = footprint(llama(), KIVI(bits=bits, group=group), capacity=131_072, prompt=131_072, fetch="resident")
    assert sizes["device_bytes"] / 2**30 == pytest.approx(gib, rel=0.02)
    words = sum(sizes["parts"][part][0] for part in ("quantized",))
    assert words <= sizes["device_bytes"]


@pytest.fixture
def folder(tmp_path: Path):
    with strangers(tmp_path):
        yield tmp_path


def test_a_class_that_is_defined_again_replaces_the_first(folder):
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

    first, second = cell(1), cell(2)
    assert place_of(first) == place_of(second)
    assert POLICIES["again"] is second is not first
    assert subject_of(second).small == second(kept=12)


def test_two_policies_of_one_name():
    with pytest.raises(ConfigError, match=r"a policy's name must be unique, got 'quest' of .*Other"):

        @register()
        @dataclasses.dataclass(frozen=True)
        class Other(Quest):
            pass

    assert POLICIES["quest"] is Quest


def test_what_is_no_class_is_not_registered():
    with pytest.raises(ConfigError, match=r"must be a subclass of .*, got Quest"):
        register()(Quest())  # type: ignore[type-var]


def test_an_unknown_method_has_a_look():
    one, other = style.look_of("newest"), style.look_of("newest", 1)
    assert one == style.look_of("newest")
    assert one["color"] == other["color"]
    assert one != other


NAMED = [name for name, case in POLICY_CASES.items() if case.restricted.name in POLICIES]


@pytest.mark.parametrize("name", NAMED)
def test_there_and_back(name):
    """A policy is restored from all its settings, from those that differ from the defaults, and from its label."""
    policy = POLICY_CASES[name].restricted
    fresh = type(policy)()
    assert with_settings(fresh, dotted_settings(policy)) == policy
    assert with_settings(fresh, changed_settings(policy)) == policy
    kind, *settings = label(policy).split(":")
    assert parse_policy(kind, settings) == policy
    assert dotted_settings(policy).keys() <= setting_types(type(policy)).keys()
    assert hash(policy) == hash(dataclasses.replace(policy))


def test_dotted_names():
    policy = ShadowKV(rank=None, keys=TransformCode(bits=2), landmarks=Landmarks(tokens=2), values=Values("int8"))
    assert changed_settings(policy) == {
        "keys": "transform",
        "keys.bits": 2,
        "landmarks.tokens": 2,
        "values.dtype": "int8",
    }
    assert changed_settings(ShadowKV(keys=ExactKeys())) == {"keys": "exact"}
    assert policy_settings(policy)["choice.rounds"] == 1


def test_a_record_keeps_what_is_not_replaced():
    policy = ShadowKV(keys=TransformCode(bits=2, weights="queries"), choice=Choice(rounds=2))
    assert with_settings(policy, {"keys.bits": 3}).keys == TransformCode(bits=3, weights="queries")
    assert with_settings(policy, {"keys": "transform", "keys.bits": 3}).keys == TransformCode(3, None, "queries")
    assert with_settings(policy, {"keys": "lowrank"}).keys == LowRank()
    assert with_settings(policy, {"keys": ExactKeys(), "quirks.score_dim": 9}).quirks == Quirks(score_dim=9)


UNKNOWN = {
    "field": (["landmark_tokens=2"], r"key of shadowkv_plus \['budget'.*nearest: landmarks\.tokens"),
    "inside": (["keys.bit=2"], r"got 'keys\.bit=2'; the nearest: keys\.bits"),
    "other record": (["keys.bits=2"], r"shadowkv_plus\.keys='lowrank' has the settings \['weights'\], got 'bits'"),
    "record": (["keys=zip"], r"shadowkv_plus\.keys must be one of \('lowrank', .*'channel'\), got 'zip'"),
    "no record": (["rank.x=2"], r"got 'rank\.x=2'; the nearest: rank"),
    "whole record": (["landmarks=2"], r"got 'landmarks=2'; the nearest: landmarks\."),
    "like nothing": (["qqqq=2"], r"got 'qqqq=2'$"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_does_not_exist_is_told_with_the_nearest(case):
    settings, message = UNKNOWN[case]
    with pytest.raises(ConfigError, match=message):
        parse_policy("shadowkv_plus", settings)


def test_records_are_set_by_their_parts():
    for wrong in ({"landmarks": 2}, {"keys": 3}, {"rank.x": 1}, {"nothing": 1}):
        with pytest.raises(ConfigError, match=r"must be|has the settings"):
            with_settings(ShadowKVPlus(), wrong)


def test_a_pyramid_spends_what_it_was_given():
    """Budgets fall, are whole units, and have the mean of equal budgets."""
    for inner in (
        Quest(budget=512, unit=16, dense_layers=0),
        SnapKV(max_capacity_prompt=100),
        H2O(heavy=50, recent=30),
    ):
        policy = Pyramid(inner, steepness=5.0).resolve(DEEP, 4096)
        layers = [policy.for_layer(layer, DEEP) for layer in range(8)]
        for name in inner.budget_fields:
            sizes = [getattr(layer, name) for layer in layers]
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] > getattr(inner, name) > sizes[-1]
            assert np.mean(sizes) == pytest.approx(getattr(inner, name), rel=0.05)
            assert sizes[-1] == pytest.approx(getattr(inner, name) / 5, abs=16)


def test_a_pyramid_spends_it_on_the_layers_that_choose():
    for policy in (Pyramid(DenseFirst(Quest(budget=128, dense_layers=0), layers=4)), Pyramid(Quest(budget=128))):
        policy = policy.resolve(DEEP, 4096)
        layers = [policy.for_layer(layer, DEEP) for layer in range(8)]
        budgets = [layer.budget for layer in layers if isinstance(layer, Quest)]
        assert budgets[0] > 128 > budgets[-1]
        assert np.mean(budgets) == pytest.approx(128, rel=0.1)


def test_a_pyramid_keeps_the_newest_tokens_of_a_prompt():
    """If the budget of a layer is too small for the observation window, the window shrinks."""
    policy = Pyramid(SnapKV(max_capacity_prompt=24, observation_window=16, kernel=3), steepness=4.0)
    specs = cache_specs(TINY, policy.resolve(TINY, 96), 1, 96, 61, "float32", "resident")
    for spec in specs:
        spec.policy.resolve(TINY, 96)  # the scaled settings are in range
        prompt = prompt_of(TINY, 61, tail=spec.policy.observation_window)

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
    with pytest.raises(ConfigError, match="or of a wrapper"):
        parse_policy("quest", ["pyramid.width=3"])
