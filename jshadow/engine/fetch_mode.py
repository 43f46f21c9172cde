"""The fetch mode of the states that a prefill makes."""

from jshadow.engine.placement import replicated_sharding
from jshadow.planner.fetch_choice import FetchChoice
from jshadow.planner.machine import Batch, fetch_here
from jshadow.policies import Policy
from jshadow.weights.params import Params


def fetch_for(fetch: str, params: Params, policy: Policy, batch: Batch) -> FetchChoice:
    """Return the fetch mode of a setting, and why it was chosen if the setting is "auto".

    Args:
        fetch: "auto" or a fetch mode.
        params: the model, whose weights lie on the device already.
        policy: the resolved policy.
        batch: the requests.

    Raises:
        ConfigError: `fetch` is neither "auto" nor a fetch mode.
    """
    if fetch == "auto" and replicated_sharding(params.weights) is not None:
        return FetchChoice("resident", "resident: the weights lie on several devices, where nothing is offloaded")
    return fetch_here(fetch, params.config, policy, batch)
