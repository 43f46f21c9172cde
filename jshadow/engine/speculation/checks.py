"""Checks of a speculation, before anything runs."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState
from jshadow.engine.placement import shards_of
from jshadow.engine.speculation.drafter import Drafter
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, abstract_state
from jshadow.policies import POLICIES, Policy
from jshadow.weights.params import Params

TOKENS = 4096  # the capacity at which `rewinding` looks at the policies


def check_drafter(drafter: Any, params: Params, state: KVState, prompts: Sequence[int], new: int) -> None:
    """Raise ConfigError unless a drafter suits a model, and a state can give back as many tokens as it proposes.

    Args:
        drafter: any value. An error is raised if it is not a Drafter.
        params: the model.
        state: the state before the prompts, or an abstract one.
        prompts: number of tokens of each prompt, which the state has not read yet.
        new: the most tokens that a row can get.
    """
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"speculate must be a drafter, such as PromptLookup(), got {drafter!r:.80}")
    config = params.config
    if shards_of(params, state.batch) is not None and not drafter.on_meshes:
        raise ConfigError(f"speculate={drafter.name!r} needs a model on one device, got one on a mesh")
    drafter.check_tokenizer(params.tokenizer)
    if not can_rewind(state):
        raise ConfigError(
            f"policy must be able to give tokens back to speculate, as {', '.join(rewinding(config))} are, got "
            f"{state.policy.name}"
        )
    drafter.check_target(config, state)
    is_abstract = isinstance(state.lengths, jax.ShapeDtypeStruct)
    held, reached = (np.zeros((2, len(prompts)), np.int64)) if is_abstract else (state.lengths, state.reached())
    first = np.asarray(held) + np.asarray(prompts)
    for start in (first, np.minimum(first + max(new - 2, 0), state.capacity - 1)):
        fed = np.minimum(start + 1 + drafter.tokens, state.capacity)
        limit = np.asarray(limits(state, jnp.asarray(np.maximum(reached, fed), jnp.int32)))
        missing = limit - (start + 1)
        if (row := int(np.argmax(missing))) >= 0 and missing[row] > 0:
            most = max(drafter.tokens - int(missing[row]), 0)
            raise ConfigError(
                f"speculate.tokens must be at most {most}, because {state.policy} "
                f"cannot give back more when row {row} holds {int(fed[row])} tokens, got {drafter.tokens}"
            )


def check_gives_back(drafter: Drafter, specs: tuple[CacheSpec, ...], policy: Policy, state: KVState) -> None:
    """Raise ConfigError unless the own cache of a drafter can give back all tokens of a proposal at any time.

    Args:
        drafter: the drafter.
        specs, policy: its own cache.
        state: the state of the target, which may be abstract.
    """
    own = abstract_of(specs, policy)
    if not can_rewind(own):
        raise ConfigError(f"{drafter.name}.policy must be able to give tokens back, got {policy}")
    reached = jnp.full(state.batch, state.capacity, jnp.int32)
    kept = max(state.capacity - drafter.tokens, 1)  # a proposal stores `tokens` + 1 tokens, and one of them is kept
    if (least := int(limits(own, reached).max())) > kept:
        raise ConfigError(
            f"{drafter.name}.tokens must be at most {max(state.capacity - least, 0)}, because {policy} cannot give "
            f"back more, got {drafter.tokens}"
        )


def limits(state: KVState, reached: Array) -> Array:
    """Return `earliest` of a state, or of an abstract state as if all its arrays were zero, int32 [B]."""
    if not isinstance(state.lengths, jax.ShapeDtypeStruct):
        return state.earliest(reached)

    leaves, tree = jax.tree.flatten(state)
    return _limits_of_zeros((tree, tuple(leaves)), reached)


@functools.partial(jax.jit, static_argnums=0)
def _limits_of_zeros(abstract: tuple[Any, tuple[Any, ...]], reached: Array) -> Array:
    """Return `earliest` of a state of zeros. `abstract` is the tree of the state and its ShapeDtypeStructs."""
    tree, leaves = abstract
    # The compiler removes the arrays that `earliest` does not read, so the caches are not allocated.
    zeros: KVState = jax.tree.unflatten(tree, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
    return zeros.earliest(reached)


def can_rewind(state: KVState) -> bool:
    """Return whether the policy of a state, which may be abstract, can give tokens back."""
    try:
        jax.eval_shape(KVState.earliest, state, state.lengths)
    except ConfigError:
        return False
    return True


def rewinding(config: ModelConfig) -> Iterator[str]:
    """Yield the names of the registered policies whose usual settings can give tokens back."""
    for name, policy in POLICIES.items():
        try:
            if can_rewind(empty(config, policy().resolve(config, TOKENS), TOKENS)):
                yield name
        except ConfigError:
            continue


def empty(config: ModelConfig, policy: Policy, capacity: int, batch: int = 1) -> KVState:
    """Return the abstract state of a resolved policy, in one memory."""
    return abstract_state(config, policy, batch=batch, capacity=capacity, prompt=1, fetch="resident", dtype="float32")
