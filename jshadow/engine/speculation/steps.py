"""Many cycles in one compiled loop, for `decode_steps(speculate=)`. B rows, n steps, w proposed tokens."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.spec import everywhere
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.checks import check_ids
from jshadow.engine.host_notes import consuming
from jshadow.engine.placement import commit_arrays
from jshadow.engine.speculation.checks import check_drafter
from jshadow.engine.speculation.cycle import CyclePlan, cycle
from jshadow.engine.speculation.drafter import Drafter, Memory, Progress, Text
from jshadow.engine.speculation.run import Drawing, hear
from jshadow.engine.step import COMPILER_OPTIONS
from jshadow.errors import PromptError
from jshadow.models.config import ModelConfig
from jshadow.weights.params import Params


class StepsKeywords(TypedDict, total=False):
    """Keyword arguments of `decode_steps` for speculation."""

    speculate: Drafter | None
    before: Sequence[Sequence[int]] | None


@dataclasses.dataclass(frozen=True)
class StepsPlan:
    """The static arguments of `run_steps`: the cycle, and the number of tokens of each row."""

    cycle: CyclePlan
    n: int


@functools.partial(
    jax.jit, static_argnames=("config", "plan"), donate_argnames=("writes", "live"), compiler_options=COMPILER_OPTIONS
)
def run_steps(
    models: tuple[dict, Any],
    reads: Reads,
    writes: Writes,
    live: Any,
    far: tuple[Array, Array],
    *,
    config: ModelConfig,
    plan: StepsPlan,
) -> tuple[Array, Writes, Any]:
    """Run cycles until each row has n tokens or has ended. Return the tokens int32 [B, n], `writes` and `live`.

    `models` has the weights and the drafter's fixed arrays, `far` the tokens to feed first, int32 [B], and the PRNG
    key.
    """
    (weights, fixed), (token, key) = models, far
    shape = (len(token), plan.n)

    def some_left(carry: tuple[Writes, Any, Progress, Array]) -> Array:
        return (carry[2].left > 0).any()

    def body(carry: tuple[Writes, Any, Progress, Array]) -> tuple[Writes, Any, Progress, Array]:
        writes, live, progress, tokens = carry
        state, memory = KVState.of(reads, writes), Memory(fixed, live)
        drawn, state, live = cycle(weights, config, plan.cycle, state, memory, progress, key)
        places = jnp.arange(drawn.tokens.shape[1])
        at = jnp.where(places < drawn.counts[:, None], progress.number[:, None] + places, plan.n)
        tokens = tokens.at[jnp.arange(shape[0])[:, None], at].set(drawn.tokens, mode="drop")
        last = jnp.take_along_axis(drawn.tokens, jnp.maximum(drawn.counts - 1, 0)[:, None], axis=1)[:, 0]
        newest = jnp.where(drawn.counts > 0, last, progress.token)
        ended = functools.reduce(jnp.logical_or, [newest == token for token in plan.cycle.stop], newest < 0)
        left = jnp.where(ended, 0, progress.left - drawn.counts)
        return state.split()[1], live, Progress(newest, progress.number + drawn.counts, left), tokens

    zeros, shards = jnp.zeros(shape[0], jnp.int32), reads.specs[0].shards
    start = everywhere((Progress(token, zeros, zeros + plan.n), jnp.full(shape, -1, jnp.int32)), shards)
    writes, live, _, tokens = lax.while_loop(some_left, body, (writes, live, *start))
    return everywhere(tokens, shards), writes, live


def text_before(config: ModelConfig, state: KVState, before: Any) -> Text:
    """Return the texts that a state holds, or empty ones if `before` is None.

    Raises:
        PromptError: `before` is not a list of token ids for each row, with as many as the row holds.
    """
    if before is None:
        return Text.of([()] * state.batch, config)
    held = np.asarray(state.lengths).tolist()
    if len(before) != len(held):
        raise PromptError(f"before must have {len(held)} rows, like the state, got {len(before)}")
    rows = [check_ids(config, row, (None,), "before").tolist() for row in before]
    if [len(row) for row in rows] != held:
        raise PromptError(f"before must have the {held} tokens that the state holds, got {[len(row) for row in rows]}")
    return Text.of(rows, config)


def speculative_steps(
    params: Params,
    drafter: Drafter,
    drawing: Drawing,
    state: KVState,
    token: np.ndarray,
    n: int,
    before: Sequence[Sequence[int]] | None = None,
) -> tuple[Array, Writes]:
    """Draw up to n tokens for each row. This consumes the state.

    Args:
        params: the model.
        drafter: the drafter. Each cycle proposes its `tokens`, because a compiled loop cannot change their number.
        drawing: how tokens are drawn.
        state: the state.
        token: the token of each row to feed first, int32 [B].
        n: number of tokens.
        before: the token ids that the state holds in each row. None: not known.

    Returns:
        The tokens int32 [B, n], with -1 after a row's end, and the changed half of the state.

    Raises:
        ConfigError: the drafter cannot serve the model or the state.
        PromptError: as in `text_before`.
    """
    check_drafter(drafter, params, state, [0] * state.batch, n)
    memory = drafter.begin(text_before(params.config, state, before), state)
    one = np.ones(state.batch, np.int32)
    live, _ = hear(memory, jnp.asarray(token)[:, None], one, state, drafter=drafter.traced)
    live = commit_arrays(live, state.specs[0].shards)
    plan = StepsPlan(CyclePlan(drafter.traced, drafter.tokens, drawing.sampler, drawing.stop), n)
    far = jnp.asarray(token), drawing.key
    with consuming(state):
        reads, writes = state.split()
        models = params.weights, memory.fixed
        tokens, writes, _ = run_steps(models, reads, writes, live, far, config=params.config, plan=plan)
    return tokens, writes
