"""`at_share` keeps to its share of full attention's bytes, or says the least that would do."""

import dataclasses

import pytest
from cases import TINY
from policy_inputs import llama

from jshadow.errors import ConfigError, Infeasible
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import cache_specs, footprint
from jshadow.policies import POLICIES, ShadowKV
from jshadow.policies.sizing import at_share


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
@pytest.mark.parametrize("fraction", [0.5, 0.25, 0.12])
def test_nominal_is_at_or_under_its_share(name, fraction):
    """Of full attention's device bytes, offloaded where the method can be; what is infeasible says the least share."""
    config, tokens = llama(), 32_768
    try:
        policy = at_share(POLICIES[name](), fraction, tokens, config)
    except Infeasible as error:
        least = float(str(error).split("at least ")[1].split()[0])
        assert fraction < least < 1
        return
    taken = footprint(config, policy, capacity=tokens, prompt=tokens, fetch="device_put")
    assert taken["device_bytes"] <= fraction * taken["full_bytes"] * 1.01
    specs = cache_specs(config, policy.resolve(config, tokens), 1, tokens, tokens, "bfloat16", "device_put")
    assert (taken["host_bytes"] > 0) == any(spec.policy.host_layout(spec) is not None for spec in specs)


SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)


@pytest.mark.parametrize(("config", "dtype"), [(TINY, "float32"), (SMOLLM2, "bfloat16")], ids=["tiny", "smollm2"])
@pytest.mark.parametrize("name", POLICIES)
def test_nominal_keeps_to_its_share(name, config, dtype):
    """By the abstract state's own count of device bytes, prompt = capacity, values offloaded."""
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
    # of three layers, two of OmniKV's are dense
    assert feasible >= (5 if name == "full" or (name == "omnikv" and config is TINY) else 10)


def test_outliers_go_before_the_rank():
    """2,304 tokens are 288 chunks: 48 of them exact would leave a quarter of the bytes to a rank of 16."""
    made = [at_share(ShadowKV(), fraction, 2304, SMOLLM2) for fraction in (0.5, 0.25, 0.12)]
    assert [policy.outlier_chunks for policy in made] == [48, 24, 0]
    assert made[0].rank > made[1].rank == 32 > made[2].rank


@pytest.mark.parametrize("name", POLICIES)
def test_nominal_refuses_what_cannot_be(name):
    for fraction in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="fraction"):
            at_share(POLICIES[name](), fraction, 1024, TINY)
    with pytest.raises(Infeasible, match=f"{name}: fraction must be at least"):
        at_share(POLICIES[name](), 1e-4, 1024, TINY)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "probe"])
def test_nominal_of_a_model_whose_layers_all_slide(name):
    """Nothing is the policy's: what it is set to does not matter, but it must be an answer or an Infeasible."""
    config = dataclasses.replace(TINY, sliding_window=8, sliding_layers=(0, 1, 2))
    try:
        policy = at_share(POLICIES[name](), 1.0, 256, config)
    except Infeasible:
        return
    policy.resolve(config, 256)
