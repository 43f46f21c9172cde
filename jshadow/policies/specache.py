"""SpeCache: a low-bit copy, exact rows fetched a step ahead (Jie et al. 2025, arXiv 2503.16163, section 3).

A step carries two queries: of the current token, whose output counts, and of the token that is guessed to follow. What
the guess attends to most in the low-bit copy is fetched exactly while the step goes on, and takes the place of its
low-bit rows in the next one. The guess is never verified and its keys are not kept: a wrong one costs accuracy of the
next step's rows alone. Where text and printed algorithm differ (which rows are fetched, what is appended) the text is
followed. Tokens are chosen for each KV head by the mean of its query heads' probabilities; tokens that the next step
has exactly are no candidates. The first guess comes from a step that is taken back (`predecode`), as in the paper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries, masked_scores
from jshadow.ops.layout import to_chunks, top_k
from jshadow.policies.capabilities import Budgeted, PlansAhead, Speculates
from jshadow.policies.checks import check_range
from jshadow.policies.kivi import KIVI, KiviLive, never_full
from jshadow.policies.registry import register


class Guess(struct.PyTreeNode):
    """Shared by all layers.

    Attributes:
        guess: the token that is expected after the next one, int32 [B].
        known: it has been guessed, bool [B]; before, the current token stands in for it.
    """

    guess: Array
    known: Array


class SpeLive(KiviLive, kw_only=True):
    """Also the rows that came for this step.

    Attributes:
        buffer: keys after RoPE and values [B, h_kv, k, d].
        positions: theirs, int32 [B, h_kv, k]; -1 for none.
    """

    buffer: KeyValues
    positions: Array


@register(
    small={"bits": 1, "group": 8, "residual": 8, "fetched": 6},
    lossless=lambda tokens, config: never_full(tokens, config, KIVI.group),
)
@dataclasses.dataclass(frozen=True)
class SpeCache(KIVI, Speculates, PlansAhead, Budgeted):
    """KIVI whose most wanted tokens are exact, by speculation.

    Attributes:
        bits, group, residual: as in KIVI; half the residual pays for the fetched rows.
        fetched: tokens fetched for a step, of each KV head.
    """

    residual: int = 64
    fetched: int = 64

    name = "specache"
    source = "arXiv 2503.16163, section 3"
    budget_fields = ("fetched",)
    trial_step = True

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings."""
        check_range(self.name, "fetched", self.fetched, 1)
        return super().resolve(config, capacity)

    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Guess:
        """Nothing guessed."""
        return Guess(jnp.zeros(specs[0].batch, jnp.int32), jnp.zeros(specs[0].batch, bool))

    def after_step(self, shared: Guess, logits: Array, lengths: Array) -> Guess:
        """The most likely token after the guessed one; after the current one, where none was guessed yet."""
        best = logits.argmax(-1).astype(jnp.int32)
        return Guess(jnp.where(shared.known, best[:, 1], best[:, 0]), jnp.ones_like(shared.known))

    def before_trial(self, shared: Guess, token: Array) -> Guess:
        """What the trial step begins with."""
        return Guess(token, jnp.zeros_like(shared.known))

    def adopt(self, live: SpeLive, after: SpeLive) -> SpeLive:
        """The rows that came, and nothing else of that step."""
        return live.replace(buffer=after.buffer, positions=after.positions)

    def count(self, spec: CacheSpec) -> int:
        """Tokens fetched for a step."""
        return min(self.fetched, spec.capacity)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Everything, exactly, token by token."""
        return HostLayout(spec.kv_heads, spec.capacity, 1, planes=2, tail_units=spec.window)

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Nothing held, nothing fetched."""
        state = super().init(spec, fitted)
        zeros = jnp.zeros((spec.batch, spec.kv_heads, self.count(spec), spec.head_dim), spec.dtype)
        live = SpeLive(
            state.live.later,
            state.live.recent,
            buffer=KeyValues(zeros, zeros),
            positions=jnp.full(zeros.shape[:3], -1, jnp.int32),
        )
        return state.replace(live=live)

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """The low-bit copy, and the exact rows for the host."""
        state, _ = super().compress(spec, state, prompt, fitted)
        planes = [to_chunks(x, spec.capacity, 1) for x in (prompt.k_post, prompt.v)]
        return state, HostWrite(jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, spec.capacity, -1))

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """The current token's row, here and to the host; the guess's is not kept."""
        made, _ = super().append(spec, state, step)
        live = state.live.replace(later=made.live.later, recent=made.live.recent)
        row = jnp.stack([step.k_post[:, 0], step.v[:, 0]], axis=2)  # [B, h_kv, 2, d]
        data = row.reshape(spec.batch, spec.kv_heads, 1, -1)
        start = step.positions[:, :1] - state.frozen.lengths[:, None]
        return state.replace(live=live), HostWrite(data, start, step.valid[:, :1])

    # One step

    def pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[list[Piece], list[Array]]:
        """What both queries see, and the positions behind it, int32 [B, h_kv | 1, n]; -1 where nobody may choose it."""
        live: SpeLive = state.live
        batch, heads = live.positions.shape[:2]
        row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        held = step.positions[:, :1] + 1
        # Never replace rows of the exact residual: a buffered row there may belong to the rolled-back trial step.
        used = (live.positions >= 0) & (live.positions < ((held - 1) // self.residual * self.residual)[:, None])
        slot = jnp.where(used, live.positions, spec.capacity)
        exact = jnp.zeros((batch, heads, spec.capacity + 1), bool).at[row, head, slot].set(True)
        pieces, positions = [], []
        low_bit = held // self.residual * self.residual  # in the next step, which what is chosen is for
        for part in self.parts(spec, state, held):
            at = jnp.clip(part.positions, 0, spec.capacity - 1)[:, None]
            replaced = jnp.take_along_axis(exact, jnp.broadcast_to(at, (batch, heads, at.shape[2])), axis=2)
            seen = part.seen[:, None] & ~replaced
            pieces.append(part.piece(seen))
            choosable = part.positions < low_bit
            positions.append(jnp.where(choosable[:, None] & seen, part.positions[:, None], -1))
        pieces.append(Piece(live.buffer.k, live.buffer.v, used[:, :, None]))
        positions.append(jnp.where(used, live.positions, -1))
        k, v = (x[:, 1:].transpose(0, 2, 1, 3) for x in (step.k_post, step.v))
        pieces.append(Piece(k, v, jnp.array([False, True])[None, None, :, None]))
        positions.append(jnp.full((1, 1, 1), -1))
        return pieces, positions

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Attention of both queries; what came takes the place of its low-bit rows."""
        return attend(step.q_post, self.pieces(spec, state, step)[0], spec.scale), state

    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """For the next step, what the guess attended to most."""
        pieces, positions = self.pieces(spec, state, step)
        own = step.q_post[:, 1:]
        pieces = [piece.of_queries(1, 2) for piece in pieces]
        logits = jnp.concatenate([masked_scores_of(own, piece, spec.scale) for piece in pieces], axis=-1)
        probs = jax.nn.softmax(logits, axis=-1).mean(axis=2)[:, :, 0]  # [B, h_kv, n]
        at = jnp.concatenate([jnp.broadcast_to(x, (spec.batch, spec.kv_heads, x.shape[2])) for x in positions], axis=2)
        places = top_k(jnp.where(at >= 0, probs, -1.0), self.count(spec))
        chosen = jnp.take_along_axis(at, places, axis=2)
        length = state.frozen.lengths[:, None, None]
        ids = jnp.where(chosen < length, chosen, chosen - length + spec.capacity)
        valid = (chosen >= 0) & step.valid[:, :1, None]
        return (Selection(jnp.maximum(ids, 0), valid, when="next_step"),)

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Keep what came for the next step; a row without valid ids is idle and stays."""
        assert fetched.k is not None
        live: SpeLive = state.live
        length = state.frozen.lengths[:, None, None]
        ids = jnp.where(selection.ids < spec.capacity, selection.ids, selection.ids - spec.capacity + length)
        there = selection.valid.any(axis=(1, 2), keepdims=True)
        positions = jnp.where(there, jnp.where(selection.valid, ids, -1), live.positions)
        rows = (
            jnp.where(there[..., None], new, old)
            for new, old in ((fetched.k, live.buffer.k), (fetched.v, live.buffer.v))
        )
        return state.replace(live=live.replace(buffer=KeyValues(*rows), positions=positions))

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """All that lies on the device is read, the rows of the next step move."""
        parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
        numbers = 2 * spec.batch * spec.kv_heads * self.count(spec) * spec.head_dim
        size = numbers * jnp.dtype(spec.dtype).itemsize
        return parts | {"fetched": (0, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """As KIVI for two queries, and their probabilities once more."""
        return 2 * super().step_temporaries(spec)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """The most bits first, and of each the smallest groups, beside the residual and the fetched rows."""
        cls, largest = type(self), math.gcd(config.head_dim, 64)
        groups = [group for group in (16, 32, 64) if group <= largest] or [largest]
        rows = min(cls.fetched, max(1, num_tokens // 32))

        def make(bits: int, group: int) -> Any:
            residual = max(group, min(cls.residual, num_tokens // 32 // group * group))
            return cls(bits=bits, group=group, residual=residual, fetched=rows)

        return [[make(bits, group)] for bits in (8, 4, 2, 1) for group in groups]


def masked_scores_of(q: Array, piece: Piece, scale: float) -> Array:
    """Float32 scores [B, h_kv, group, T, n] of queries [B, T, h_q, d]."""
    return masked_scores(group_queries(q, piece.k.shape[1]), piece, scale)
