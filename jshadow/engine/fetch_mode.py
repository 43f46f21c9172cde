"""The fetch mode of the states that a prefill makes."""

import dataclasses

from jshadow.engine.placement import shards_of
from jshadow.planner.bytes import Workload
from jshadow.planner.fetch_choice import FetchChoice
from jshadow.planner.machine import fetch_here
from jshadow.policies import Policy
from jshadow.weights.params import Params


def fetch_for(params: Params, policy: Policy, workload: Workload, *, states: int = 1) -> FetchChoice:
    """Return the fetch mode of a workload, and why it was chosen if its setting is "auto".

    Args:
        params: the model, whose weights lie on the devices already.
        policy: the resolved policy.
        workload: the requests.
        states: number of states of this size that the call makes.

    Raises:
        ConfigError: the setting is neither "auto" nor a fetch mode.
    """
    shards = shards_of(params, workload.batch or 1)
    return fetch_here(params.config, policy, dataclasses.replace(workload, shards=shards), states=states)
