"""`at_share` finds settings within a share of full attention's bytes, or names the smallest possible share."""

import contextlib
import dataclasses

import pytest
from cases import TINY
from few import quick
from policy_inputs import llama

from jshadow.errors import ConfigError, Infeasible
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import footprint
from jshadow.policies import POLICIES, ShadowKV
from jshadow.policies.sizing import at_share

SMOLLM2 = ModelConfig("llama", 49152, 30, 576, 1536, 9, 3, 64, 1e-5, 8192)


@pytest.mark.parametrize(("config", "dtype"), [(TINY, "float32"), (SMOLLM2, "bfloat16")], ids=["tiny", "smollm2"])
@pytest.mark.parametrize("name", quick(["full", "quest", "shadowkv"], POLICIES))
def test_nominal_keeps_to_its_share(name, config, dtype):
    """Device bytes, counted from the abstract state, are within the share, if the prompt fills the capacity."""
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
