"""Cycles of speculation: a drafter proposes tokens, and one turn of the model draws the tokens that follow.

A proposed token is accepted if it and all proposed tokens before it are the drawn ones. So the drawn tokens up to the
first difference are those that single steps draw, greedy or not.

For greedy decoding this is the rule of Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1). For sampling, their rule
keeps the distribution, but the drawn tokens depend on the drafter. Here a draw depends only on the seed, the row and
the number of the token (Gumbel coupling; Daliri et al. 2024, arXiv 2408.07978, section 4). If a drafter proposes one
token and not a distribution, both rules accept it with the same probability.

B rows, w proposed tokens, n steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.spec import everywhere
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.agree import run_together
from jshadow.engine.checks import check_ids, consuming
from jshadow.engine.cores import Turn, scan_tokens
from jshadow.engine.placement import commit_arrays
from jshadow.engine.sampling import Sampler, sample_numbered
from jshadow.engine.speculation.drafter import Drafter, Memory, Pace, Progress, Target, Text, check_drafter
from jshadow.engine.step import COMPILER_OPTIONS
from jshadow.engine.text import TextStream
from jshadow.engine.verify import TOLERANCE, Verifier
from jshadow.errors import PromptError, VerificationError
from jshadow.models.config import ModelConfig
from jshadow.planner.pieces import takes_blocks, turn_piece
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True)
class GuessPlan:
    """The static arguments of `read_guesses`.

    Attributes:
        width: number of proposed tokens w. 0: a plain step.
    """

    drafter: Drafter
    width: int


@dataclasses.dataclass(frozen=True)
class CyclePlan(GuessPlan):
    """The static arguments of a cycle.

    Attributes:
        stop: token ids that end a row. No token is kept after one of them.
    """

    sampler: Sampler
    stop: tuple[int, ...] = ()


class _Drawn(NamedTuple):
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


class Guesses(NamedTuple):
    """Proposed tokens that the model has read.

    Attributes:
        tokens: the newest token of each row, and the proposed ones, int32 [B, w + 1].
        proposed: number of proposed tokens, int32 [B].
        lengths: number of tokens that the state held before, int32 [B].
        logits: those that follow each of the tokens, float32 [B, w + 1, V].
    """

    tokens: Array
    proposed: Array
    lengths: Array
    logits: Array


_Draw = Callable[[Array, Array], Array]  # see `Target`


def read_guesses(
    weights: dict,
    config: ModelConfig,
    plan: GuessPlan,
    state: KVState,
    memory: Memory,
    at: Progress,
    draw: _Draw,
) -> tuple[Guesses, KVState, Any]:
    """Let a drafter propose tokens, and the model read them.

    Return the guesses, the state after them, and the live part of the drafter's memory.
    """
    drafter, width = plan.drafter, plan.width
    proposed = jnp.minimum(jnp.minimum(drafter.ready(memory), width), jnp.minimum(at.left, state.room()) - 1)
    proposed = jnp.where(at.left > 0, jnp.maximum(proposed, 0), 0)
    guesses, state, live = drafter.propose(memory, Target(weights, config, state, at, proposed, draw), width)
    tokens = jnp.concatenate([at.token[:, None], guesses], axis=1)
    reads, writes = state.split()
    size = width + 1 if takes_blocks(reads) else turn_piece(reads, width + 1)
    new = jnp.where(at.left > 0, proposed + 1, 0)
    logits, writes = scan_tokens(weights, config, tokens, new, reads, writes, Turn(size, "all"))
    return Guesses(tokens, proposed, state.lengths, logits), state.join(writes), live


def without_refused(guesses: Guesses, counts: Array, state: KVState) -> KVState:
    """Return the state after `read_guesses` without the guesses that were refused.

    `counts` is the number of new tokens of each row, int32 [B]: at least 1 for an active row, else 0.
    """
    fed = jnp.take_along_axis(guesses.tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    return state.rewound(guesses.lengths + counts, jnp.where(counts > 0, fed, state.last))


def cycle(
    weights: dict, config: ModelConfig, plan: CyclePlan, state: KVState, memory: Memory, progress: Progress, key: Array
) -> tuple[_Drawn, KVState, Any]:
    """Run one cycle. It can be traced by jit, and checks nothing."""
    drafter, width = plan.drafter, plan.width

    def draw(logits: Array, place: Array) -> Array:
        return sample_numbered(plan.sampler, logits[:, None], key, progress.number + place)[:, 0]

    guesses, state, live = read_guesses(weights, config, plan, state, memory, progress, draw)
    drawn = sample_numbered(plan.sampler, guesses.logits, key, progress.number)
    ends = functools.reduce(jnp.logical_or, [drawn == token for token in plan.stop], jnp.zeros_like(drawn, bool))
    are_drawn = (drawn[:, :width] == guesses.tokens[:, 1:]) & ~ends[:, :width]
    goes_on = are_drawn & (jnp.arange(width) < guesses.proposed[:, None])
    accepted = jnp.cumprod(goes_on, axis=1, dtype=jnp.int32).sum(axis=1)
    counts = jnp.where(progress.left > 0, accepted + 1, 0)
    after = without_refused(guesses, counts, state)
    live = drafter.heard(memory._replace(live=live), drawn, counts, after)
    found = _Drawn(drawn, counts, guesses.proposed, drafter.ready(memory._replace(live=live)))
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
) -> tuple[_Drawn, Writes, Any]:
    """Run `cycle` as a compiled program.

    `models` has the weights and the drafter's fixed arrays, `far` the progress and the PRNG key.
    """
    (weights, fixed), state = models, KVState.of(reads, writes)
    drawn, state, live = cycle(weights, config, plan, state, Memory(fixed, live), *far)
    return drawn, state.split()[1], live


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: the sampler, its PRNG key, and the token ids that end a row."""

    sampler: Sampler
    key: Array
    stop: tuple[int, ...] = ()


@dataclasses.dataclass
class _Tally:
    """Counts of a run, one number for each row, int64 [B].

    Attributes:
        accepted: proposed tokens that were accepted.
    """

    cycles: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="live")
def _hear(
    fixed: Any, live: Any, tokens: Array, counts: Array, state: KVState, *, drafter: Drafter
) -> tuple[Any, Array]:
    live = drafter.heard(Memory(fixed, live), tokens, counts, state)
    return everywhere((live, drafter.ready(Memory(fixed, live))), state.specs[0].shards)


def hear(
    drafter: Drafter, memory: Memory, tokens: np.ndarray | Array, counts: np.ndarray | Array, state: KVState
) -> tuple[Memory, Array]:
    """Return a drafter's memory after new tokens, and how many tokens it can propose then. This consumes `memory`.

    The other arguments are those of `Drafter.heard`.
    """
    live, ready = _hear(memory.fixed, memory.live, tokens, counts, state, drafter=drafter.traced)
    return memory._replace(live=commit_arrays(live, state.specs[0].shards)), ready


class SpeculativeRun:
    """Draws tokens in cycles. Each cycle gives each active row one token or more.

    Attributes:
        tally: counts of the cycles so far.
    """

    def __init__(self, params: Params, drafter: Drafter, drawing: Drawing, prompt: list[list[int]]) -> None:
        """Take the texts of the rows, prompts included."""
        self.params, self.drafter, self.drawing, self.prompts = params, drafter, drawing, prompt
        self.text = Text.of(prompt, params.config)
        self.memory = Memory(None, None)
        self.pace = Pace(drafter.tokens, drafter.cost, len(prompt))
        self.tally = _Tally(*np.zeros((3, len(prompt)), np.int64))
        self.number = np.zeros(len(prompt), np.int32)
        self.ready = np.zeros(len(prompt), np.int32)

    def begin(self, tokens: np.ndarray, state: KVState) -> None:
        """Take the first token of each row, int32 [B], which was drawn from the logits of the prompt, and the state."""
        self.newest = np.asarray(tokens, np.int32)
        self.number += 1
        memory = self.drafter.begin(self.text, state)
        self.memory, ready = hear(self.drafter, memory, self.newest[:, None], self.number, state)
        self.ready = np.asarray(ready)

    def cycle(self, state: KVState, left: np.ndarray) -> tuple[np.ndarray, np.ndarray, KVState]:
        """Run a cycle. This consumes the state.

        Args:
            left: how many more tokens each row may get, int [B]; 0 for a row that has ended.

        Returns:
            The new tokens int32 [B, n], how many of them are real int32 [B], and the new state.
        """
        active = left > 0
        width = self.pace.choose(self.ready, active)
        plan = CyclePlan(self.drafter.traced, width, self.drawing.sampler, self.drawing.stop)
        progress = Progress(*(jnp.asarray(part, jnp.int32) for part in (self.newest, self.number, left)))
        with consuming(state):
            reads, writes = state.split()
            drawn, writes, live = run_together(
                run_cycle,
                (self.params.weights, self.memory.fixed),
                reads,
                writes,
                self.memory.live,
                (progress, self.drawing.key),
                config=self.params.config,
                plan=plan,
            )
        self.memory = self.memory._replace(live=live)
        tokens, counts, proposed, self.ready = map(np.asarray, drawn)
        rows, last = np.arange(len(left)), np.maximum(counts - 1, 0)
        self.newest = np.where(active, tokens[rows, last], self.newest)
        self.number = self.number + counts
        accepted = np.where(active, last, 0)
        self.pace.heard(proposed, accepted)
        self.tally.cycles += active
        self.tally.proposed += proposed
        self.tally.accepted += accepted
        return tokens, counts, state.join(writes)

    def ended(self, state: KVState, streams: Sequence[TextStream], marked: Container[int]) -> tuple[KVState, list[int]]:
        """Give back the tokens after the end of each row's text, which a stop string may have ended inside a cycle."""
        fed = (self.number - 1).tolist()
        ends = [min(count, stream.kept()) for count, stream in zip(fed, streams, strict=True)]
        kept = [count if row in marked else end for row, (count, end) in enumerate(zip(fed, ends, strict=True))]
        if kept == fed:
            return state, fed
        texts = [[*prompt, *stream.tokens] for prompt, stream in zip(self.prompts, streams, strict=True)]
        last = [
            text[min(len(prompt) + count, len(text)) - 1]
            for text, prompt, count in zip(texts, self.prompts, kept, strict=True)
        ]
        lengths = np.asarray(state.lengths) - (np.array(fed) - np.array(kept))
        return state.rewind(lengths, last), kept

    def figures(self, row: int) -> dict[str, int]:
        """Return the counts of a row, by the names of the fields of `Report`."""
        tally = self.tally
        return {
            "cycles": int(tally.cycles[row]),
            "proposed_tokens": int(tally.proposed[row]),
            "accepted_tokens": int(tally.accepted[row]),
        }


@dataclasses.dataclass(frozen=True)
class _StepsPlan:
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
    plan: _StepsPlan,
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


def _text_before(config: ModelConfig, state: KVState, before: Any) -> Text:
    """Return the texts that a state holds, or empty ones if `before` is None."""
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
        token: the token of each row to feed first, int32 [B].
        before: the token ids that the state holds in each row. None: not known.

    Returns:
        The tokens int32 [B, n], with -1 after a row's end, and the changed half of the state.
    """
    check_drafter(drafter, params, state, [0] * state.batch, n)
    memory = drafter.begin(_text_before(params.config, state, before), state)
    memory, _ = hear(drafter, memory, jnp.asarray(token)[:, None], np.ones(state.batch, np.int32), state)
    plan = _StepsPlan(CyclePlan(drafter.traced, drafter.tokens, drawing.sampler, drawing.stop), n)
    far = jnp.asarray(token), drawing.key
    with consuming(state):
        reads, writes = state.split()
        models = params.weights, memory.fixed
        tokens, writes, _ = run_steps(models, reads, writes, memory.live, far, config=params.config, plan=plan)
    return tokens, writes


class VerifiedRun(SpeculativeRun):
    """Draws tokens in cycles, and feeds them one by one to a copy of the state, in steps that are verified.

    Attributes:
        steps: the copy, which has read all tokens but the newest of each row.
    """

    verifier: Verifier
    steps: KVState

    def watch(self, verifier: Verifier, state: KVState) -> "VerifiedRun":
        """Take a verifier, and a state that no step consumes otherwise. Return this run."""
        self.verifier, self.steps = verifier, state
        return self

    def cycle(self, state: KVState, left: np.ndarray) -> tuple[np.ndarray, np.ndarray, KVState]:
        """Run a cycle, and compare its tokens with those that single steps draw."""
        fed, number = self.newest, self.number
        tokens, counts, state = super().cycle(state, left)
        for place in range(tokens.shape[1]):
            active = place < counts
            if not active.any():
                break
            logits, self.steps = self.verifier.step(fed[:, None], active.astype(np.int32), self.steps)
            drawn = self.draw(logits, number + place)
            differs = active & (drawn != tokens[:, place]) & ~self.near(logits, drawn, tokens[:, place])
            if differs.any():
                row = int(np.argmax(differs))
                raise VerificationError(
                    f"cycle {int(self.tally.cycles[row])}, row {row}: speculation drew token {tokens[row, place]} as "
                    f"number {number[row] + place}, and a single step draws {drawn[row]}"
                )
            fed = np.where(active, tokens[:, place], fed)
        return tokens, counts, state

    def draw(self, logits: jnp.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens that are drawn from logits [B, V], int32 [B]."""
        drawing: Drawing = self.drawing
        return np.asarray(sample_numbered(drawing.sampler, logits[:, None], drawing.key, jnp.asarray(numbers)))[:, 0]

    def near(self, logits: jnp.ndarray, drawn: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return in which rows two tokens have equal logits up to rounding, bool [B]. Only for greedy decoding."""
        values, rows = np.asarray(logits), np.arange(len(tokens))
        limit = TOLERANCE[str(self.params.dtype)] * np.abs(values).max(axis=1)
        near: np.ndarray = np.abs(values[rows, drawn] - values[rows, np.maximum(tokens, 0)]) <= limit
        return near if self.drawing.sampler.temperature == 0 else np.zeros_like(near)
