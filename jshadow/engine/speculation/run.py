"""A run of cycles over the rows of a state, as `generate` uses it."""

import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine.host_notes import consuming
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.placement import commit_arrays
from jshadow.engine.sampling import Sampler
from jshadow.engine.speculation.cycle import CyclePlan, run_cycle
from jshadow.engine.speculation.drafter import Drafter, Memory, Progress, Text
from jshadow.engine.speculation.pace import Pace
from jshadow.engine.text import TextStream
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True)
class Drawing:
    """How tokens are drawn: the sampler, its PRNG key, and the token ids that end a row."""

    sampler: Sampler
    key: Array
    stop: tuple[int, ...] = ()


@dataclasses.dataclass
class Tally:
    """Counts of a run, one number for each row, int64 [B].

    Attributes:
        cycles: cycles in which the row was active.
        proposed: proposed tokens.
        accepted: proposed tokens that were accepted.
    """

    cycles: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray


@functools.partial(jax.jit, static_argnames="drafter")
def hear(memory: Memory, tokens: Array, counts: Array, state: KVState, *, drafter: Drafter) -> tuple[Any, Array]:
    """Return the live part of a drafter's memory after new tokens, and how many tokens it can propose then."""
    live = drafter.heard(memory, tokens, counts, state)
    return live, drafter.ready(memory._replace(live=live))


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
        self.pace, self.tally = Pace(drafter.tokens, drafter.cost), Tally(*np.zeros((3, len(prompt)), np.int64))
        self.number = np.zeros(len(prompt), np.int32)
        self.ready = np.zeros(len(prompt), np.int32)

    def begin(self, tokens: np.ndarray, state: KVState) -> None:
        """Take the first token of each row, int32 [B], which was drawn from the logits of the prompt, and the state."""
        self.newest = np.asarray(tokens, np.int32)
        self.number += 1
        memory = self.drafter.begin(self.text, state)
        live, ready = hear(memory, self.newest[:, None], self.number, state, drafter=self.drafter.traced)
        live = commit_arrays(live, state.specs[0].shards)
        self.memory, self.ready = memory._replace(live=live), np.asarray(ready)

    def cycle(self, state: KVState, left: np.ndarray) -> tuple[np.ndarray, np.ndarray, KVState]:
        """Run a cycle. This consumes the state.

        Args:
            state: the state, which has not read the newest tokens.
            left: how many more tokens each row may get, int [B]; 0 for a row that has ended.

        Returns:
            The new tokens int32 [B, n], how many of them are real int32 [B], and the new state.
        """
        active = left > 0
        width = self.pace.choose(self.ready[active])
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
        """Give back the tokens after the end of each row's text, which a stop string may have ended inside a cycle.

        Args:
            state: the state after the last cycle.
            streams: the text of each row.
            marked: rows whose state is another one, so that theirs does not matter.

        Returns:
            The state, and how many new tokens it holds in each row.
        """
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
