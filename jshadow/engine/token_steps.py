"""The decode steps of a generation: a step and the draw of its token are one program.

Where nothing on the host decides what a step feeds, the device starts the next step before the host has read the token
of this one. So the device does not wait for the host between two tokens.
"""

import collections
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.host_notes import consuming
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.placement import commit_arrays
from jshadow.engine.sampling import Sampler, sample_checked
from jshadow.engine.step import COMPILER_OPTIONS, step_writes
from jshadow.models.config import ModelConfig
from jshadow.ops.buckets import round_up
from jshadow.weights.params import Params

STOPS = 8  # the number of stop ids is rounded up to a multiple of this, so that generations share compiled programs
NO_STOP = -2  # fills up the stop ids; neither a token nor NO_TOKEN


class Draw(NamedTuple):
    """The randomness of one step: a PRNG key, and the number of the step, int32 [], which is folded into the key."""

    key: Array
    step_number: Array


class Fed(NamedTuple):
    """The inputs of one step.

    Attributes:
        token: the token of each row, int32 [B].
        active: which rows have not ended before this token, bool [B].
        step_number: the number of the step, int32 [].
    """

    token: Array
    active: Array
    step_number: Array


class Rule(NamedTuple):
    """The inputs that all steps of a generation share.

    Attributes:
        key: a PRNG key.
        stop: the token ids that end a row, int32 [S].
    """

    key: Array
    stop: Array


@functools.partial(
    jax.jit, static_argnames=("config", "sampler"), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS
)
def step_and_sample(
    weights: dict, fed: Fed, reads: Reads, writes: Writes, rule: Rule, *, config: ModelConfig, sampler: Sampler
) -> tuple[Fed, Writes]:
    """Feed a token to each active row, except a token that ends the row. Return what the next step feeds, and `writes`.

    A row whose logits contain a NaN gets NO_TOKEN. `decode_step` and `sample_once` do the same in two programs.
    """
    active = fed.active & (fed.token[:, None] != rule.stop).all(axis=1)
    logits, writes = step_writes(weights, config, fed.token[:, None], active.astype(jnp.int32), reads, writes)
    token = sample_checked(sampler, logits, jax.random.fold_in(rule.key, fed.step_number))
    return Fed(token, active, fed.step_number + 1), writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def sample_once(logits: Array, draw: Draw, *, sampler: Sampler) -> Array:
    """Draw the next token of each row, int32 [B], from logits [B, V]. A row with a NaN gets NO_TOKEN."""
    return sample_checked(sampler, logits, jax.random.fold_in(*draw))


class TokenSteps:
    """The steps of one generation, which are dispatched in order.

    Attributes:
        flight: the results of dispatched steps whose tokens the host has not read yet.
    """

    def __init__(self, params: Params, sampler: Sampler, key: Array, stop: Iterable[int]) -> None:
        """Take the model, the sampler, the PRNG key and the token ids that end a row."""
        self.params, self.sampler = params, sampler
        ids = sorted(stop)
        ids += [NO_STOP] * (round_up(max(1, len(ids)), STOPS) - len(ids))
        self.rule = Rule(key, jnp.array(ids, jnp.int32))
        self.flight: collections.deque[Fed] = collections.deque()

    def next(
        self, state: KVState, values: np.ndarray, active: np.ndarray, index: int, *, ahead: bool
    ) -> tuple[Array, KVState]:
        """Return the tokens that step `index` draws, int32 [B], and the state after all dispatched steps.

        Args:
            state: the state after all dispatched steps. It is consumed.
            values: the tokens of the step before, int32 [B].
            active: rows that have not ended, bool [B].
            index: the number of the step.
            ahead: whether to dispatch the step after it, too.
        """
        if not self.flight:
            fed = Fed(jnp.asarray(values), jnp.asarray(active), jnp.int32(index))
            # A step returns committed arrays. With uncommitted ones here, JAX would compile a second program.
            state = self._dispatch(state, commit_arrays(fed, state.specs[0].shards))
        if ahead:
            state = self._dispatch(state, self.flight[-1])
        return self.flight.popleft().token, state

    def _dispatch(self, state: KVState, fed: Fed) -> KVState:
        with consuming(state):
            reads, writes = state.split()
            drawn, writes = run_together(
                step_and_sample,
                self.params.weights,
                fed,
                reads,
                writes,
                self.rule,
                config=self.params.config,
                sampler=self.sampler,
            )
        self.flight.append(drawn)
        return state.join(writes)
