"""Settings in records: dotted names, round trips, and the errors for names that do not exist."""

import dataclasses

import pytest
from cases import POLICY_CASES

from jshadow.errors import ConfigError
from jshadow.evaluation.results import label
from jshadow.policies import POLICIES, ShadowKV, ShadowKVPlus, parse_policy
from jshadow.policies.settings import changed_settings, dotted_settings, policy_settings, setting_types, with_settings
from jshadow.policies.shadowkv import Choice, ExactKeys, Landmarks, LowRank, Quirks, TransformCode, Values

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
