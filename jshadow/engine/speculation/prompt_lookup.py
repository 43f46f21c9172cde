"""Prompt lookup: the newest tokens stood in the text before, so what followed them there may follow again.

Source: Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding). transformers
(`prompt_lookup_num_tokens`) and vLLM (n-gram speculation) have it too. Here the whole batch is searched on the device.
Among all places whose tokens agree with the newest ones, the one with the longest agreement is taken, and of equal ones
the newest. If the text ends before enough tokens were proposed, it is taken to repeat from that place on.

B rows, H tokens of history, w proposed tokens.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jshadow.cache.state import KVState
from jshadow.engine.speculation.drafter import Drafter, Memory, Proposal, Target, Text

LONGEST = 16  # agreements of more tokens count as this many


class History(NamedTuple):
    """The text so far, and the place whose continuation is proposed.

    Attributes:
        tokens: int32 [B, H].
        counts: number of tokens of each row, int32 [B].
        places: index of the token to propose first, int32 [B]. -1: no place agrees with the newest tokens.
    """

    tokens: Array
    counts: Array
    places: Array


@dataclasses.dataclass(frozen=True)
class PromptLookup(Drafter):
    """Propose what followed the newest tokens when they stood in the prompt or in the answer before.

    If `generate` continues a state, only the tokens of the new turn are searched, because a state does not have the
    tokens that it has read. `jshadow generate --load-state` and `jshadow.Library` know them.

    Attributes:
        tokens: the most tokens that are proposed at once.
        ngram: number of newest tokens that must have stood there.
    """

    ngram: int = 3

    name = "prompt_lookup"
    on_meshes = True
    source = "github.com/apoorvumang/prompt-lookup-decoding"

    def __post_init__(self) -> None:
        self.check_numbers(tokens=self.tokens, ngram=self.ngram)

    def begin(self, text: Text, state: KVState) -> Memory:
        """Store the texts, with space for as many tokens as a row can hold. `heard` searches them."""
        tokens = np.zeros((len(text.tokens), state.capacity + self.tokens + 1), np.int32)
        tokens[:, : text.tokens.shape[1]] = text.tokens
        none = jnp.full(len(tokens), -1, jnp.int32)
        return Memory(None, History(jnp.asarray(tokens), jnp.asarray(text.lengths, jnp.int32), none))

    def ready(self, memory: Memory) -> Array:
        """Return `tokens` for rows with such a place, and 0 for the others."""
        return jnp.where(memory.live.places >= 0, self.tokens, 0)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Return the tokens from the place on. At the end of the text, go on at the place."""
        history: History = memory.live
        period = jnp.maximum(history.counts - history.places, 1)[:, None]
        index = jnp.maximum(history.places[:, None] + jnp.arange(width) % period, 0)
        return Proposal(jnp.take_along_axis(history.tokens, index, axis=1, mode="clip"), target.state, history)

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> History:
        """Append the new tokens to the text, and search again."""
        history: History = memory.live
        rows, count = jnp.arange(tokens.shape[0])[:, None], tokens.shape[1]
        index = jnp.where(jnp.arange(count) < counts[:, None], history.counts[:, None] + jnp.arange(count), -1)
        index = jnp.where(index < 0, history.tokens.shape[1], index)  # an index past the end is dropped
        text = history.tokens.at[rows, index].set(tokens, mode="drop")
        held = history.counts + counts
        return History(text, held, self.search(text, held))

    def search(self, tokens: Int[Array, "B H"], counts: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the index after the best agreement with the newest tokens, or -1."""
        width, places = tokens.shape[1], jnp.arange(tokens.shape[1])
        agree, length = jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32)
        for back in range(1, max(LONGEST, self.ngram) + 1):
            newest = jnp.take_along_axis(tokens, jnp.maximum(counts - back, 0)[:, None], axis=1)
            before = jnp.pad(tokens, ((0, 0), (back, 0)))[:, :width]
            agree = agree & (before == newest) & (places >= back)
            length = length + agree
        good = (length >= self.ngram) & (places < counts[:, None])
        score = jnp.where(good, length * width + places, -1)
        best = score.argmax(axis=1)
        return jnp.where(score.max(axis=1) >= 0, best, -1).astype(jnp.int32)
