"""Cases of a step of a recurrent layer, and its definition in NumPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from random_arrays import array, wide

from jshadow.cache.recurrence import Recurrence, RecurrentTokens
from jshadow.models.config import Recurrent
from jshadow.ops.delta_rule import Recent


@dataclass(frozen=True)
class Steps:
    """A layer, and one new token in each row. `group` is how many value heads share a key head."""

    batch: int
    key_heads: int
    group: int
    key_dim: int
    value_dim: int
    kind: str = "delta"
    taps: int = 4
    biases: bool = False
    slots: int = 32  # of the ring of pending tokens
    dtype: str = "float32"

    @property
    def sizes(self) -> Recurrent:
        heads = self.key_heads, self.key_heads * self.group
        return Recurrent((0,), *heads, self.key_dim, self.value_dim, self.taps, self.kind, self.biases)


STEPS = (
    Steps(7, 2, 3, 64, 128),
    Steps(4, 1, 5, 128, 64, "mamba2", biases=True),
    Steps(6, 3, 1, 16, 16, taps=2, slots=16),
    Steps(5, 2, 2, 32, 64, "mamba2", taps=3, slots=64),
    Steps(5, 1, 3, 256, 256, biases=True, dtype="bfloat16"),
)
REAL_STEPS = (
    Steps(4, 16, 3, 128, 128),
    Steps(4, 16, 3, 128, 128, dtype="bfloat16"),
    Steps(4, 1, 48, 128, 64, "mamba2", biases=True),
)


def step_inputs(case: Steps) -> dict[str, Any]:
    """Arguments of a step. All slots of the rings have numbers, also those that hold no token of their row.

    The rings of the first rows are empty, as full as they can be, and about to wrap. Row 3 has no valid token, and the
    last row is a text of one token. A third of the decays is strong.
    """
    rng, sizes, batch = np.random.default_rng(case.batch), case.sizes, case.batch
    keys, values = (sizes.key_heads, sizes.key_dim), (sizes.value_heads, sizes.value_dim)

    def draw(*shape: int, dtype: str = "float32", scale: float = 1.0) -> Any:
        return array(scale * rng.standard_normal(shape), dtype)

    def decays(*shape: int) -> Any:
        return array(-rng.random(shape) * rng.choice([0.01, 0.3, 60.0], shape), np.float32)

    pending = rng.integers(0, case.slots, batch)
    pending[:3] = 0, case.slots - 1, case.slots - 2
    lengths = case.slots * rng.integers(1, 4, batch) + rng.integers(0, case.slots, batch)
    lengths[2], lengths[-1], pending[-1] = 3 * case.slots - 1, 1, 1
    rings = draw(batch, case.slots, *keys, scale=sizes.key_dim**-0.5), draw(batch, case.slots, *values)
    recent = Recent(*rings, decays(batch, case.slots, sizes.value_heads))
    slots = 16 + case.taps - 1
    inputs = tuple(draw(batch, slots, *shape, dtype=case.dtype) for shape in (keys, keys, values))
    state = draw(
        batch, sizes.value_heads, sizes.key_dim, sizes.value_dim, scale=1.0 if case.dtype == "float32" else 0.1
    )
    heads = tuple(draw(batch, 1, *shape, dtype=case.dtype) for shape in (keys, keys, values))
    gates = decays(batch, 1, sizes.value_heads), array(rng.random((batch, 1, sizes.value_heads)), np.float32)
    taps = tuple(draw(case.taps + case.biases, *shape, dtype=case.dtype) for shape in (keys, keys, values))
    skip = None if sizes.corrects else draw(sizes.value_heads, dtype=case.dtype)
    valid = array(np.arange(batch)[:, None] != 3)
    held = Recurrence(state, recent, array(lengths - pending, np.int32), inputs)
    return {"held": held, "new": RecurrentTokens(heads, gates, taps, skip, array(lengths, np.int32), valid, sizes)}


def step_truth(held: Recurrence, new: RecurrentTokens) -> tuple[np.ndarray, ...]:
    """The outputs and the arrays of the layer after the step, by the rule's definition, in float64."""
    sizes, lengths, slots = new.sizes, np.asarray(new.lengths), held.recent.k.shape[1]
    state, folded, valid = np.array(held.state, np.float64), np.array(held.folded), np.asarray(new.valid)[:, 0]
    ring, inputs = ([np.array(x, np.float64) for x in some] for some in (held.recent, held.inputs))
    outs, group = np.zeros((len(lengths), 1, *new.heads[2].shape[2:])), sizes.value_heads // sizes.key_heads

    def added(state: np.ndarray, k: np.ndarray, u: np.ndarray, log_decay: np.ndarray) -> np.ndarray:
        return np.exp(log_decay)[:, None, None] * state + np.repeat(k, group, 0)[:, :, None] * u[:, None]

    for row, length in enumerate(lengths):
        q, k, v = (
            convolved(inputs[n][row], wide(x[row, 0]), wide(new.taps[n]), length, sizes)
            for n, x in enumerate(new.heads)
        )
        if sizes.corrects:
            q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
            q = q * sizes.key_dim**-0.5
        log_decay, beta = (wide(gate[row, 0]) for gate in new.gates)
        whole = state[row]
        for position in range(folded[row], length):
            whole = added(whole, *(x[row, position % slots] for x in ring))
        seen = np.exp(log_decay)[:, None] * np.einsum("hde,hd->he", whole, np.repeat(k, group, 0))
        u = beta[:, None] * (v - sizes.corrects * seen)
        outs[row, 0] = np.einsum("hde,hd->he", added(whole, k, u, log_decay), np.repeat(q, group, 0))
        if new.skip is not None:
            outs[row, 0] += wide(new.skip)[:, None] * v
        if valid[row]:
            kept = length + 1 - slots // 2 if length + 1 - folded[row] >= slots else folded[row]
            for position in range(folded[row], kept):
                state[row] = added(state[row], *(x[row, position % slots] for x in ring))
            folded[row] = kept
            for one, x in zip(ring, (k, u, log_decay), strict=True):
                one[row, length % slots] = x
            for one, x in zip(inputs, new.heads, strict=True):
                one[row, length % one.shape[1]] = x[row, 0]
    return outs, state, *ring, folded, *inputs


def convolved(ring: np.ndarray, x: np.ndarray, taps: np.ndarray, length: int, sizes: Recurrent) -> np.ndarray:
    """The token after the convolution of one input and silu, [heads, dim]. Before the text there are zeros."""
    count = sizes.taps
    before = [ring[at % len(ring)] if at >= 0 else 0 * x for at in range(length - count + 1, length)]
    total = sum(tap * one for tap, one in zip(taps[:count], [*before, x], strict=True))
    total = total + taps[count] if sizes.tap_biases else total
    return total / (1 + np.exp(-total))
