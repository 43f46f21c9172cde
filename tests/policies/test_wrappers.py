"""The wrappers: pyramids keep the total budget, the first layers are dense, and both have settings."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import TINY
from policy_inputs import DEEP, prompt_of

from jshadow.errors import ConfigError
from jshadow.evaluation.results import label
from jshadow.planner.bytes import cache_specs
from jshadow.policies import H2O, DenseFirst, OmniKV, Pyramid, Quest, SnapKV, parse_policy
from jshadow.policies.eviction import best_positions
from jshadow.policies.settings import policy_settings


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
