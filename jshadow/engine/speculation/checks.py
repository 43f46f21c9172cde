"""Checks of a speculation, before anything runs."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.cache.rewind import earliest, reached_tokens
from jshadow.cache.state import KVState
from jshadow.engine.speculation.drafter import Drafter
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_state
from jshadow.policies import POLICIES, Policy

TOKENS = 4096  # the capacity at which `rewinding` looks at the policies


def check_drafter(drafter: Any, config: ModelConfig, policy: Policy, capacity: int) -> None:
    """Raise ConfigError unless `drafter` is a drafter, and the policy can give tokens back.

    Args:
        drafter: any value.
        config: the model.
        policy: the resolved policy.
        capacity: maximum number of tokens that a row can hold.
    """
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"speculate must be a drafter, such as PromptLookup(), got {drafter!r:.80}")
    if not can_rewind(config, policy, capacity):
        raise ConfigError(
            f"policy must be able to give tokens back to speculate, as {', '.join(rewinding(config))} are, got {policy}"
        )


def check_run(drafter: Drafter, state: KVState, new: int) -> None:
    """Raise ConfigError unless a state can give back as many tokens as a drafter proposes, at any time of a run.

    Args:
        drafter: the drafter.
        state: the state before the first cycle.
        new: the most tokens that a row can get.
    """
    held, reached = np.asarray(state.lengths), np.asarray(reached_tokens(state))
    for start in (held, np.minimum(held + max(new - 2, 0), state.capacity - 1)):
        fed = np.minimum(start + 1 + drafter.tokens, state.capacity)
        limit = np.asarray(earliest(state, jnp.asarray(np.maximum(reached, fed), jnp.int32)))
        if (missing := int((limit - (start + 1)).max())) > 0:
            row = int(np.argmax(limit - (start + 1)))
            raise ConfigError(
                f"speculate.tokens must be at most {max(drafter.tokens - missing, 0)}, as row {row} of "
                f"{state.policy.name} cannot give back more of {int(fed[row])} tokens, got {drafter.tokens}"
            )


def can_rewind(config: ModelConfig, policy: Policy, capacity: int) -> bool:
    """Return whether a resolved policy can give tokens back."""
    state = abstract_state(config, policy, batch=1, capacity=capacity, prompt=1, fetch="resident", dtype="float32")
    try:
        jax.eval_shape(earliest, state, state.lengths)
    except ConfigError:
        return False
    return True


def rewinding(config: ModelConfig) -> Iterator[str]:
    """Yield the names of the registered policies whose usual settings can give tokens back."""
    for name, policy in POLICIES.items():
        try:
            if can_rewind(config, policy().resolve(config, TOKENS), TOKENS):
                yield name
        except ConfigError:
            continue
