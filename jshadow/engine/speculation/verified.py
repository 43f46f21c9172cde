"""Speculation beside single steps that are verified: for `generate(verify=True)`."""

import jax.numpy as jnp
import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine.sampling import sample_numbered
from jshadow.engine.speculation.run import Drawing, SpeculativeRun
from jshadow.engine.verify import TOLERANCE, Verifier
from jshadow.errors import VerificationError


class VerifiedRun(SpeculativeRun):
    """Draws tokens in cycles, and feeds them one by one to a copy of the state, in steps that are verified.

    Attributes:
        verifier: verifies the single steps.
        steps: the copy, which has read all tokens but the newest of each row.
    """

    verifier: Verifier
    steps: KVState

    def watch(self, verifier: Verifier, state: KVState) -> "VerifiedRun":
        """Take a verifier, and a state that no step consumes otherwise. Return this run."""
        self.verifier, self.steps = verifier, state
        return self

    def cycle(self, state: KVState, left: np.ndarray) -> tuple[np.ndarray, np.ndarray, KVState]:
        """Run a cycle, and compare its tokens with those that single steps draw.

        Raises:
            VerificationError: a token differs, and its logit is not as large as that of the single step's token up to
                rounding. Or a verified step finds a difference.
        """
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
