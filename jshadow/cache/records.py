"""The records that a policy and a step exchange.

Sizes: B rows, S prompt tokens, T query rows of a step, h_q query heads, h_kv KV heads, d head width, D model width,
N slots of a buffer, n selected units, U stored units, w queries at the end of a prompt. A unit is what one fetch moves
(a chunk of 8 tokens in ShadowKV).
"""

from typing import Any

from flax import struct
from jax import Array


class PromptKV(struct.PyTreeNode):
    """One layer's whole ragged prompt, right padded; freed once it is compressed.

    Attributes:
        k_pre: keys before RoPE (after bias and norm) [B, S, h_kv, d].
        k_post: keys after RoPE [B, S, h_kv, d].
        v: values [B, S, h_kv, d].
        lengths: real tokens of each row, int32 [B].
        positions: int32 [B, S].
        q_tail: queries after RoPE of each row's last w real tokens [B, w, h_q, d]; w = `HookInputs.last_queries`.
        q_post: all queries after RoPE [B, S, h_q, d], only where a policy needs "q_all".
        lse: float32 log-sum-exp of each query's scores [B, h_q, S], likewise; of exact attention always.
        extra: what a prefill attention of the policy's own left behind.
    """

    k_pre: Array
    k_post: Array
    v: Array
    lengths: Array
    positions: Array
    q_tail: Array | None = None
    q_post: Array | None = None
    lse: Array | None = None
    extra: Any = None


class StepKV(struct.PyTreeNode):
    """One layer, one step of T query rows (T = 2 where a guessed token runs along).

    Attributes:
        q_pre, q_post: queries before and after RoPE [B, T, h_q, d].
        k_pre, k_post, v: the new keys and values [B, T, h_kv, d].
        positions: int32 [B, T]: lengths, lengths + 1, ...
        valid: bool [B, T]; False for every row of an inactive sequence, and for a query row that is only a guess
            and has none.
        lengths: tokens held before this step, int32 [B].
        inverse: angle per position of each rotated pair, float32 [d / 2].
        q_foreseen: this layer's queries after RoPE [B, T, h_q, d] as the layer before predicted them; None in the first
            layer, and where the policy is not one that `Foresees`.
        learned: this layer's slice of the `fitted` arrays, which the rows of a batch share; or None.
    """

    q_pre: Array
    q_post: Array
    k_pre: Array
    k_post: Array
    v: Array
    positions: Array
    valid: Array
    lengths: Array
    inverse: Array
    q_foreseen: Array | None = None
    learned: Any = None


class KeyValues(struct.PyTreeNode):
    """Exact keys (after RoPE unless a policy says otherwise) and values, [B, h_kv, N, d] each."""

    k: Array
    v: Array


class HostArray(struct.PyTreeNode):
    """Rows kept in the host tier: [B, heads, units, planes * unit * d], one unit contiguous, or bytes of `bits`.

    `memory` says where they lie: "pinned_host" when offloaded, "device" in resident mode. The field, not the array's
    sharding, carries it, so that abstract states account for it too.
    """

    array: Any  # an Array; in abstract states a ShapeDtypeStruct
    memory: str = struct.field(pytree_node=False)


class HostTier(struct.PyTreeNode):
    """A layer's offloaded rows: `prompt` is written once, `tail` (bounded) while decoding."""

    prompt: HostArray | None = None
    tail: HostArray | None = None


class HostWrite(struct.PyTreeNode):
    """Rows on their way to the host tier, executed by offload.py alone.

    Attributes:
        data: [B, heads, n, planes * unit * d], or a unit's row of bytes.
        start: tail unit of each of the n, int32 [B, n]; None: `data` is the whole prompt.
        valid: bool [B, n]; units that are False are written nowhere. None: all are written.
    """

    data: Array
    start: Array | None = None
    valid: Array | None = None


class Rebuild(struct.PyTreeNode):
    """What the keys of selected units are rebuilt from while their values travel: low-rank factors, or another code.

    Attributes:
        left: [B, U, unit * r], one unit contiguous; see key_codecs for other codes.
        right: [B, heads, r, d], or another code's tree of arrays.
        inverse: angle per position of each rotated pair, float32 [d / 2]; token j of unit u sits at u * unit + j.
        tail: left rows of the units written after the prompt [B, T, unit * r], with ids from U on.
        tail_unit: unit of the sequence at the front of the tail, int32 [B].
        codec: the KeyCodec that made it.
        unit: tokens of a unit.
    """

    left: Array
    right: Any
    inverse: Array
    tail: Array | None = None
    tail_unit: Array | None = None
    codec: Any = struct.field(pytree_node=False, kw_only=True)
    unit: int = struct.field(pytree_node=False, kw_only=True)

    def keys(self, ids: Array) -> Array:
        """Keys after RoPE of units ids int32 [B, heads, n]: [B, heads, n * unit, d], float32 or the model's dtype."""
        keys: Array = self.codec.reconstruct(self, ids)
        return keys


class Kept(struct.PyTreeNode):
    """Rows that lie on the device from the step before, in the order of the units that are selected now.

    Attributes:
        rows: [B, heads, n, planes * unit * d], numbers of the model's dtype.
        stay: bool [B, heads, n]: the row of unit n is right, or nobody attends to it; else it must be fetched.
    """

    rows: Array
    stay: Array


class Selection(struct.PyTreeNode):
    """Units to fetch.

    Attributes:
        ids: int32 [B, heads | 1, n]; prompt units first, then tail units.
        valid: bool, same shape; False ids are moved where shapes are static, but never attended.
        hit: bool, same shape: selected in the previous step as well. None: the policy does not follow that.
        rebuild: what the keys are rebuilt from, None where keys are fetched or not needed.
        kept: rows that need not travel again, only where the fetch mode can leave them out ("zero_copy").
        layer: layer whose units these are; None: the layer that selects.
        when: "now" (attended in this step) or "next_step" (received after the target has attended).
    """

    ids: Array
    valid: Array
    hit: Array | None = None
    rebuild: Rebuild | None = None
    kept: Kept | None = None
    layer: int | None = struct.field(pytree_node=False, default=None)
    when: str = struct.field(pytree_node=False, default="now")


class Fetched(struct.PyTreeNode):
    """What a fetch brought: k and v [B, heads, n * unit, d], valid bool [B, heads | 1, n * unit], ids as selected.

    k is None where values alone were fetched and nothing was rebuilt.
    """

    k: Array | None
    v: Array
    valid: Array
    ids: Array


class LayerState(struct.PyTreeNode):
    """One layer: `frozen` is read only after prefill, `live` changes each step, `host` is the offloaded part."""

    frozen: Any = None
    live: Any = None
    host: HostTier = HostTier()
