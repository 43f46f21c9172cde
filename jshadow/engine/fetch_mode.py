"""The fetch mode of the states that a prefill makes."""

import dataclasses

from jshadow.engine.placement import shards_of
from jshadow.planner.fetch_choice import FetchChoice
from jshadow.planner.machine import Batch, fetch_here
from jshadow.policies import Policy
from jshadow.weights.params import Params


def fetch_for(fetch: str, params: Params, policy: Policy, batch: Batch) -> FetchChoice:
    """Return the fetch mode of a setting, and why it was chosen if the setting is "auto".

    Args:
        fetch: "auto" or a fetch mode.
        params: the model, whose weights lie on the devices already.
        policy: the resolved policy.
        batch: the requests.

    Raises:
        ConfigError: `fetch` is neither "auto" nor a fetch mode.
    """
    batch = dataclasses.replace(batch, shards=shards_of(params, batch.rows))
    return fetch_here(fetch, params.config, policy, batch)
