"""Properties of all policies: names, defaults, checked settings, and the bytes that the papers state."""

import importlib
import inspect
from pathlib import Path

import pytest
from cases import TINY
from policy_inputs import DEEP

from jshadow import policies
from jshadow.errors import ConfigError
from jshadow.policies import (
    H2O,
    KIVI,
    LESS,
    POLICIES,
    WRAPPERS,
    DenseFirst,
    Full,
    InfiniGen,
    InfLLM,
    Loki,
    OmniKV,
    Policy,
    Pyramid,
    Quest,
    SnapKV,
    StreamingLLM,
)


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
