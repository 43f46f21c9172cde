"""One cycle of speculation as one compiled program: propose, check, keep the longest equal beginning.

The model takes the newest token and the proposed ones as one turn, which gives the logits of single steps. A token is
drawn from each of them. A proposed token is accepted if it and all proposed tokens before it are the drawn ones. So the
drawn tokens up to the first difference are those that single steps draw, greedy or not.

For greedy decoding this is the rule of Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1). For sampling, their rule
keeps the distribution, but the drawn tokens depend on the drafter. Here a draw depends only on the seed, the row and
the number of the token (Gumbel coupling; Daliri et al. 2024, arXiv 2408.07978, section 4). If a drafter proposes one
token and not a distribution, both rules accept it with the same probability.

B rows, w proposed tokens.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.spec import everywhere
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.cores import scan_tokens
from jshadow.engine.sampling import Sampler, sample_numbered
from jshadow.engine.speculation.drafter import Drafter, Memory, Progress, Target
from jshadow.engine.step import COMPILER_OPTIONS
from jshadow.engine.turn import Turn
from jshadow.models.config import ModelConfig
from jshadow.planner.turn_pieces import takes_blocks, turn_piece


@dataclasses.dataclass(frozen=True)
class CyclePlan:
    """The static arguments of a cycle.

    Attributes:
        drafter: the drafter.
        width: number of proposed tokens w. 0: a plain step.
        sampler: how tokens are drawn.
        stop: token ids that end a row. No token is kept after one of them.
    """

    drafter: Drafter
    width: int
    sampler: Sampler
    stop: tuple[int, ...] = ()


class Drawn(NamedTuple):
    """The new tokens of a cycle.

    Attributes:
        tokens: int32 [B, w + 1]. NO_TOKEN where the logits contain a NaN.
        counts: how many of them are real, int32 [B]: at least 1 for an active row, else 0.
        proposed: number of proposed tokens, int32 [B]. `counts - 1` of them were accepted.
        ready: how many tokens the drafter can propose in the next cycle, int32 [B].
    """

    tokens: Array
    counts: Array
    proposed: Array
    ready: Array


def cycle(
    weights: dict, config: ModelConfig, plan: CyclePlan, state: KVState, memory: Memory, progress: Progress, key: Array
) -> tuple[Drawn, KVState, Any]:
    """Run one cycle. It can be traced by jit, and checks nothing.

    Args:
        weights, config: the model.
        plan: the drafter and how tokens are drawn.
        state: a state whose policy can give tokens back.
        memory: what the drafter remembers.
        progress: how far each row is.
        key: PRNG key. Token number i of a row is drawn as by `sample_checked` with fold_in(key, i).

    Returns:
        The new tokens, the new state, and the live part of what the drafter then remembers.
    """
    width, lengths = plan.width, state.lengths
    active = progress.left > 0
    ready = plan.drafter.ready(memory)
    proposed = jnp.minimum(jnp.minimum(ready, width), jnp.minimum(progress.left, state.room()) - 1)
    proposed = jnp.where(active, jnp.maximum(proposed, 0), 0)
    target = Target(weights, config, state, progress, proposed, plan.sampler, key)
    guesses, state, live = plan.drafter.propose(memory, target, width)
    tokens = jnp.concatenate([progress.token[:, None], guesses], axis=1)
    reads, writes = state.split()
    size = width + 1 if takes_blocks(reads) else turn_piece(reads, width + 1)
    new = jnp.where(active, proposed + 1, 0)
    logits, writes = scan_tokens(weights, config, tokens, new, reads, writes, Turn(size, "all"))
    drawn = sample_numbered(plan.sampler, logits, key, progress.number)
    ends = functools.reduce(jnp.logical_or, [drawn == token for token in plan.stop], jnp.zeros_like(drawn, bool))
    goes_on = (drawn[:, :width] == guesses) & (jnp.arange(width) < proposed[:, None]) & ~ends[:, :width]
    accepted = jnp.cumprod(goes_on, axis=1, dtype=jnp.int32).sum(axis=1)
    counts = jnp.where(active, accepted + 1, 0)
    fed = jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0]
    after = state.join(writes)
    after = after.rewound(lengths + counts, jnp.where(active, fed, after.last))
    live = plan.drafter.heard(memory._replace(live=live), drawn, counts, after)
    found = Drawn(drawn, counts, proposed, plan.drafter.ready(memory._replace(live=live)))
    found, live = everywhere((found, live), state.specs[0].shards)
    return found, after, live


@functools.partial(
    jax.jit, static_argnames=("config", "plan"), donate_argnames=("writes", "live"), compiler_options=COMPILER_OPTIONS
)
def run_cycle(
    models: tuple[dict, Any],
    reads: Reads,
    writes: Writes,
    live: Any,
    far: tuple[Progress, Array],
    *,
    config: ModelConfig,
    plan: CyclePlan,
) -> tuple[Drawn, Writes, Any]:
    """Run `cycle` as a compiled program.

    `models` has the weights and the drafter's fixed arrays, `far` the progress and the PRNG key.
    """
    (weights, fixed), state = models, KVState.of(reads, writes)
    drawn, state, live = cycle(weights, config, plan, state, Memory(fixed, live), *far)
    return drawn, state.split()[1], live
