"""The records that a policy and a step exchange.

Sizes: B rows, S prompt tokens, T query rows of a step, h_q query heads, h_kv KV heads, d head width, D model width,
N slots of a buffer, n selected units, U stored units, w queries at the end of a prompt. A unit is what one fetch moves
(a chunk of 8 tokens in ShadowKV).
"""

from typing import Any

from flax import struct
from jax import Array


class PromptKV(struct.PyTreeNode):
    """One layer's keys and values of a ragged batch of prompts, right padded. Freed once they are compressed.

    Attributes:
        k_pre: keys before RoPE (after bias and norm) [B, S, h_kv, d].
        k_post: keys after RoPE [B, S, h_kv, d].
        v: values [B, S, h_kv, d].
        lengths: real tokens of each row, int32 [B].
        positions: of the tokens, int32 [B, S].
        q_tail: queries after RoPE of each row's last w real tokens [B, w, h_q, d]; w = `HookInputs.last_queries`.
        q_post: all queries after RoPE [B, S, h_q, d]; None unless a policy reads all of them.
        lse: log-sum-exp of each query's scores under exact attention, float32 [B, h_q, S]; None as `q_post`.
        extra: what the prefill attention of the policy itself left behind, or None.
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
        k_pre, k_post: the new keys before and after RoPE [B, T, h_kv, d].
        v: the new values [B, T, h_kv, d].
        positions: of the tokens, int32 [B, T]: lengths, lengths + 1, ...
        valid: whether a token is real, bool [B, T]. It is False for an inactive sequence, and for a guessed token.
        lengths: tokens held before this step, int32 [B].
        inverse: angle per position of each rotated pair, float32 [d / 2].
        q_foreseen: this layer's queries after RoPE [B, T, h_q, d] as the layer before predicted them; None in the first
            layer, and where the policy is not one that `Foresees`.
        learned: this layer's slice of the `fitted` arrays, which all rows share, or None.
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
    """Exact keys and values.

    Attributes:
        k: keys [B, h_kv, N, d], after RoPE unless a policy says otherwise.
        v: values [B, h_kv, N, d].
    """

    k: Array
    v: Array


class HostArray(struct.PyTreeNode):
    """Rows in the host tier.

    Attributes:
        array: [B, heads, units, planes * unit * d], each unit contiguous; or bytes, see `HostLayout.bits`.
        memory: "pinned_host" when offloaded, "device" in resident mode. It is a field because abstract states have no
            sharding that could say it.
    """

    array: Any  # an Array; in abstract states a ShapeDtypeStruct
    memory: str = struct.field(pytree_node=False)


class HostTier(struct.PyTreeNode):
    """A layer's offloaded rows.

    Attributes:
        prompt: units of the prompt, written once; or None.
        tail: units written while decoding, of a bounded number; or None.
    """

    prompt: HostArray | None = None
    tail: HostArray | None = None


class HostWrite(struct.PyTreeNode):
    """Rows to write to the host tier. Only offload.py moves them.

    Attributes:
        data: [B, heads, n, planes * unit * d], or a unit's row of bytes.
        start: the tail unit to which each of the n is written, int32 [B, n]; None: `data` is the whole prompt.
        valid: bool [B, n]; units that are False are not written. None: all are written.
    """

    data: Array
    start: Array | None = None
    valid: Array | None = None


class Rebuild(struct.PyTreeNode):
    """From what the keys of selected units are rebuilt while their values travel: low-rank factors, or another code.

    Attributes:
        left: the left factor of each unit [B, U, unit * r], each unit contiguous; see key_codecs for other codes.
        right: the right factor [B, heads, r, d], or the tree of arrays of another code.
        inverse: angle per position of each rotated pair, float32 [d / 2]. Token j of unit u is at position
            u * unit + j.
        tail: left factors of the units written after the prompt [B, T, unit * r], whose ids begin at U; or None.
        tail_unit: number of the unit of the sequence that is first in the tail, int32 [B]; or None.
        codec: the KeyCodec that made the code.
        unit: tokens in a unit.
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
        stay: bool [B, heads, n]. True: the row is that of the selected unit, or no query attends to it. False: the row
            must be fetched.
    """

    rows: Array
    stay: Array


class Selection(struct.PyTreeNode):
    """Units to fetch.

    Attributes:
        ids: numbers of the units, int32 [B, heads | 1, n]. Tail units follow those of the prompt.
        valid: bool, same shape. Units that are False may be moved, because shapes are static, but are never attended.
        hit: bool, same shape: the unit was selected in the previous step too. None: the policy does not count that.
        rebuild: from what the keys are rebuilt; None where keys are fetched or not needed.
        kept: rows that need not travel again; only where the fetch mode can leave them out ("zero_copy").
        layer: the layer whose units these are; None: the layer that selects.
        when: "now" (attended in this step) or "next_step" (received after the target layer has attended).
    """

    ids: Array
    valid: Array
    hit: Array | None = None
    rebuild: Rebuild | None = None
    kept: Kept | None = None
    layer: int | None = struct.field(pytree_node=False, default=None)
    when: str = struct.field(pytree_node=False, default="now")


class Fetched(struct.PyTreeNode):
    """Fetched units.

    Attributes:
        k: keys [B, heads, n * unit, d]; None where only values were fetched and no keys were rebuilt.
        v: values [B, heads, n * unit, d].
        valid: which tokens may be attended, bool [B, heads | 1, n * unit].
        ids: as in the selection, int32 [B, heads | 1, n].
    """

    k: Array | None
    v: Array
    valid: Array
    ids: Array


class LayerState(struct.PyTreeNode):
    """The state of one layer.

    Attributes:
        frozen: arrays of the policy that steps only read.
        live: arrays of the policy that change with each step.
        host: the offloaded rows.
    """

    frozen: Any = None
    live: Any = None
    host: HostTier = HostTier()
