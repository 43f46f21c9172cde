"""OmniKV: which layers each filter serves, and a model in which all layers are filters."""

import dataclasses

import numpy as np
from cases import TINY
from policy_inputs import DEEP

from jshadow.evaluation.laws import inputs
from jshadow.policies import Full, OmniKV
from jshadow.policies.omnikv.policy import OmniKVFilter, OmniKVSparse


def test_omnikv_s_plan_of_layers():
    policy = OmniKV(filter_layers=(1, 4)).resolve(DEEP, 64)
    kinds = [type(policy.for_layer(layer, DEEP)) for layer in range(8)]
    assert kinds == [Full, OmniKVFilter, Full, OmniKVSparse, OmniKVFilter, Full, OmniKVSparse, OmniKVSparse]
    assert [policy.for_layer(layer, DEEP).serves for layer in (1, 4)] == [(3,), (6, 7)]
    for layers, filters in ((32, (2, 8, 18)), (48, (6, 11, 30)), (80, (4, 19, 41)), (30, (1, 7, 16))):
        config = dataclasses.replace(TINY, num_layers=layers)
        assert OmniKV().resolve(config, 64).filter_layers == filters
    sliding = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=(0, 2, 4, 6))
    policy = OmniKV(filter_layers=(1,)).resolve(sliding, 64)
    assert policy.for_layer(1, sliding).serves == (5, 7)


def test_all_layers_filters_attend_to_everything():
    every = OmniKV(budget=3, filter_layers=(0, 1, 2))
    got, want = (inputs.teacher_forced(policy, "resident") for policy in (every, Full()))
    np.testing.assert_allclose(got, want, atol=1e-5)
