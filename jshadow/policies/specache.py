"""SpeCache: a low-bit copy on the device, and exact rows fetched one step ahead (Jie et al. 2025, arXiv 2503.16163).

A step has two queries: that of the current token, whose output is used, and that of a guess of the next token. The
tokens that the guess attends to most in the low-bit copy are fetched exactly during the step. In the next step they
replace their low-bit rows. The guess is not verified, and its key and value are not stored. A wrong guess only makes
the fetched rows less useful in the next step.

Where the paper's text (section 3) and its printed algorithm differ (which rows are fetched, what is appended), this
follows the text. Tokens are chosen for each KV head by the mean of its query heads' probabilities, in which an
attention sink of the model has its part. Tokens that the next step has exactly anyway are not chosen. The first guess
comes from a trial step that is undone, as in the paper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched, HostWrite, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries, masked_scores, softmax_with
from jshadow.ops.layout import to_chunks, top_k
from jshadow.policies.base import Bytes, fetched_bytes
from jshadow.policies.capabilities import Budgeted, PlansAhead, Speculates
from jshadow.policies.checks import check_range
from jshadow.policies.kivi import KIVI, KiviLive, never_full
from jshadow.policies.registry import register


class Guess(struct.PyTreeNode):
    """The state that all layers share.

    Attributes:
        guess: the guess of the token that follows the next step's token, int32 [B].
        known: whether a guess was made, bool [B]. Before the first guess, `guess` is the current token.
    """

    guess: Array
    known: Array


class SpeLive(KiviLive, kw_only=True):
    """KIVI's state and the exact rows that were fetched for this step.

    Example: B = 1, 2 KV heads and k = 3. positions [[[7, 2, -1], [4, 2, 9]]] means that head 0 has the exact tokens 7
    and 2, and its last slot is unused. Head 1 has the exact tokens 4, 2 and 9.

    Attributes:
        buffer: exact keys after RoPE and values [B, h_kv, k, d].
        positions: the tokens' positions, int32 [B, h_kv, k]; -1 in an unused slot.
    """

    buffer: KeyValues
    positions: Array


@register(
    small={"bits": 1, "group": 8, "residual": 8, "fetched": 6},
    lossless=lambda tokens, config: never_full(tokens, config, KIVI.group),
)
@dataclasses.dataclass(frozen=True)
class SpeCache(KIVI, Speculates, PlansAhead, Budgeted):
    """KIVI in which the tokens that matter most are exact, chosen by speculation.

    Attributes:
        bits: bits of a quantized number: 1, 2, 4 or 8.
        group: numbers that share a scale and a zero point, as in KIVI. It must divide the residual and the head width.
        residual: number of newest tokens whose values are exact, as in KIVI. The default is half of KIVI's, which pays
            for the fetched rows.
        fetched: number of tokens that each KV head fetches for a step.
    """

    splits_heads = False

    residual: int = 64
    fetched: int = 64

    name = "specache"
    source = "arXiv 2503.16163, section 3"
    budget_fields = ("fetched",)
    trial_step = True

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "fetched", self.fetched, 1)
        return super().resolve(config, capacity)

    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Guess:
        return Guess(jnp.zeros(specs[0].batch, jnp.int32), jnp.zeros(specs[0].batch, bool))

    def after_step(self, shared: Guess, logits: Array, lengths: Array) -> Guess:
        """Return the most likely token after the guess, or after the current token in rows without a guess."""
        best = logits.argmax(-1).astype(jnp.int32)
        return Guess(jnp.where(shared.known, best[:, 1], best[:, 0]), jnp.ones_like(shared.known))

    def before_trial(self, shared: Guess, token: Array) -> Guess:
        return Guess(token, jnp.zeros_like(shared.known))

    def adopt(self, live: SpeLive, after: SpeLive) -> SpeLive:
        return live.replace(buffer=after.buffer, positions=after.positions)

    def count(self, spec: CacheSpec) -> int:
        """Return the number of tokens k that a head fetches for a step."""
        return min(self.fetched, spec.capacity)

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return KIVI's slots, with space for the trial step after a prompt even if no token may follow it."""
        return super().window_slots(max(capacity, shortest + 1), shortest)

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        return HostLayout(spec.kv_heads, spec.capacity, 1, planes=2, tail_units=spec.window)

    # State

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
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
        state, _ = super().compress(spec, state, prompt, fitted)
        planes = [to_chunks(x, spec.capacity, 1) for x in (prompt.k_post, prompt.v)]
        return state, HostWrite(jnp.stack(planes, axis=3).reshape(spec.batch, spec.kv_heads, spec.capacity, -1))

    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        appended, _ = super().append(spec, state, step)
        live = state.live.replace(later=appended.live.later, recent=appended.live.recent)
        row = jnp.stack([step.k_post[:, 0], step.v[:, 0]], axis=2)  # [B, h_kv, 2, d]
        data = row.reshape(spec.batch, spec.kv_heads, 1, -1)
        start = step.positions[:, :1] - state.frozen.lengths[:, None]
        return state.replace(live=live), HostWrite(data, start, step.valid[:, :1])

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return None: the exact rows of the next step were fetched for the token after the newest one."""
        return None

    # One step

    def pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[list[Piece], list[Array]]:
        """Return the pieces that both queries attend to, and which tokens of each piece may be fetched.

        The tokens are given by their positions, int32 [B, h_kv, n] or [B, 1, n], with -1 for a token that may not be
        fetched.
        """
        live: SpeLive = state.live
        batch, heads = live.positions.shape[:2]
        row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        held = step.positions[:, :1] + 1
        # Never replace rows of the exact residual: a buffered row there may belong to the rolled-back trial step.
        used = (live.positions >= 0) & (live.positions < ((held - 1) // self.residual * self.residual)[:, None])
        slot = jnp.where(used, live.positions, spec.capacity)
        exact = jnp.zeros((batch, heads, spec.capacity + 1), bool).at[row, head, slot].set(True)
        pieces, positions = [], []
        low_bit = held // self.residual * self.residual  # tokens whose keys are quantized in the next step
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
        return attend(step.q_post, self.pieces(spec, state, step)[0], spec.scale, step.sinks), state

    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """Select for the next step the tokens that the guess attends to most."""
        pieces, positions = self.pieces(spec, state, step)
        guess_query = step.q_post[:, 1:]
        pieces = [piece.of_queries(1, 2) for piece in pieces]
        logits = jnp.concatenate([_masked_scores_of(guess_query, piece, spec.scale) for piece in pieces], axis=-1)
        probs = softmax_with(logits, step.sinks).mean(axis=2)[:, :, 0]  # [B, h_kv, n]
        at = jnp.concatenate([jnp.broadcast_to(x, (spec.batch, spec.kv_heads, x.shape[2])) for x in positions], axis=2)
        places = top_k(jnp.where(at >= 0, probs, -1.0), self.count(spec))
        chosen = jnp.take_along_axis(at, places, axis=2)
        length = state.frozen.lengths[:, None, None]
        ids = jnp.where(chosen < length, chosen, chosen - length + spec.capacity)
        valid = (chosen >= 0) & step.valid[:, :1, None]
        return (Selection(jnp.maximum(ids, 0), valid, when="next_step"),)

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Store the fetched rows for the next step. A row without valid ids is inactive and keeps its buffer."""
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

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        parts = fetched_bytes(spec, state, "fetched", self.count(spec))
        return parts | {"fetched": (0, parts["fetched"][1])}

    def step_temporaries(self, spec: CacheSpec) -> int:
        return 2 * super().step_temporaries(spec)

    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        cls, largest = type(self), math.gcd(config.head_dim, 64)
        groups = [group for group in (16, 32, 64) if group <= largest] or [largest]
        rows = min(cls.fetched, max(1, num_tokens // 32))

        def make(bits: int, group: int) -> Any:
            residual = max(group, min(cls.residual, num_tokens // 32 // group * group))
            return cls(bits=bits, group=group, residual=residual, fetched=rows)

        return [[make(bits, group)] for bits in (8, 4, 2, 1) for group in groups]


def _masked_scores_of(q: Array, piece: Piece, scale: float) -> Array:
    """Return the scores of queries [B, T, h_q, d] with a piece's keys, float32 [B, h_kv, group, T, n]."""
    return masked_scores(group_queries(q, piece.k.shape[1]), piece, scale)
