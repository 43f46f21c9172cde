"""The records that the decode step and a policy exchange.

Sizes: B rows (sequences), S prompt tokens, T query rows of a step, h_q query heads, h_kv KV heads, d head width, D
model width, N slots of a buffer, n selected units, U stored units, w queries at the end of a prompt. A unit is the
smallest piece that a fetch moves, for example a chunk of 8 tokens in ShadowKV.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.ops.layout import NewTokens, append_rows, write_rows
from jshadow.ops.rope import RopeConfig, query_factor


class PromptKV(struct.PyTreeNode):
    """One layer's keys and values of a batch of prompts. Shorter prompts are padded on the right.

    The arrays have the model's dtype unless stated otherwise. They are freed after `compress`.

    Attributes:
        k_pre: keys before RoPE (after bias and norm) [B, S, h_kv, d].
        k_post: keys after RoPE [B, S, h_kv, d].
        v: values [B, S, h_kv, d].
        lengths: real tokens of each row, int32 [B].
        positions: positions of the tokens, int32 [B, S].
        q_tail: queries after RoPE of each row's last w real tokens [B, w, h_q, d]; w is `HookInputs.last_queries`.
        q_post: all queries after RoPE [B, S, h_q, d]. None unless `HookInputs.all_queries`.
        lse: log-sum-exp of each query's scores under exact attention, and of its head's sink if the model has sinks,
            float32 [B, h_q, S]. None if q_post is None.
        second_pass: scores of the second pass, float32 [B, h_kv, S], or None. See `HookInputs.second_pass`.
        extra: the result that the policy's own prefill attention passes to `compress`, or None.
        sinks: the logit of each query head's attention sink [h_q], or None; see `jshadow/ops/attention.py`.
    """

    k_pre: Array
    k_post: Array
    v: Array
    lengths: Array
    positions: Array
    q_tail: Array | None = None
    q_post: Array | None = None
    lse: Array | None = None
    second_pass: Array | None = None
    extra: Any = None
    sinks: Array | None = None


class StepKV(struct.PyTreeNode):
    """The queries, keys and values of one step in one layer.

    T is 1 in a decode step, and 2 if a guessed token is computed along with the current one. When several new tokens
    are appended to a state, T of them can be processed at once (`HookInputs.piece`).

    Attributes:
        q_pre, q_post: queries before and after RoPE [B, T, h_q, d].
        k_pre, k_post: the new keys before and after RoPE [B, T, h_kv, d].
        v: the new values [B, T, h_kv, d].
        positions: positions of the tokens, int32 [B, T]: lengths, lengths + 1, ...
        valid: whether a token is real, bool [B, T]. It is False for padding, inactive rows and guessed tokens.
        lengths: tokens held before this step, int32 [B].
        inverse: angle per position of each rotated pair of dimensions, float32 [rotary_dim / 2].
        cos, sin: cosines and sines of the angles at `positions`, float32 [B, T, rotary_dim / 2].
        q_foreseen: this layer's queries after RoPE, as predicted in the previous layer [B, T, h_q, d]. None in the
            first layer, and if the policy does not inherit `Foresees`.
        learned: this layer's slice of the `fitted` arrays, shared by all rows, or None.
        sinks: the logit of each query head's attention sink [h_q], or None. `attend` passes it on to the functions of
            `jshadow/ops/attention.py`.
        gates, taps, skip: in a recurrent layer, those of `models.transformer.Heads`. Queries, keys and values then are
            the inputs of its convolution.
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
    cos: Array
    sin: Array
    q_foreseen: Array | None = None
    learned: Any = None
    sinks: Array | None = None
    gates: tuple[Array, Array] | None = None
    taps: tuple[Array, ...] | None = None
    skip: Array | None = None


class KeyValues(struct.PyTreeNode):
    """A buffer of exact keys and values, in the model's dtype.

    Attributes:
        k: keys [B, h_kv, N, d], after RoPE unless the policy states otherwise.
        v: values [B, h_kv, N, d].
    """

    k: Array
    v: Array

    def append(
        self, step: StepKV, slots: Array, rope: RopeConfig, first: Array | None = None, unit: int = 1
    ) -> tuple["KeyValues", Array]:
        """Write the new keys after RoPE and the new values of a step into the buffer.

        Args:
            step: the new tokens. Those whose `valid` is False are not written.
            slots: the slot of each token, int32 [B, T]. A token whose slot is past the end is not written.
            rope: the layer's RoPE settings.
            first, unit: `first` times `unit` is subtracted from the slots. int32 [B], or None for 0.

        Returns:
            The new buffer, and the step's queries after RoPE [B, T, h_q, d]. A GPU computes both in one kernel.
        """
        new = NewTokens(step.q_pre, step.k_pre, step.v, step.cos, step.sin, slots, step.valid, first)
        queries, k, v = append_rows(self.k, self.v, new, factor=query_factor(rope), unit=unit)
        return KeyValues(k, v), queries

    def written(self, k: Array, v: Array, slots: Array, valid: Array) -> "KeyValues":
        """Return the buffer with the rows [B, T, h_kv, d] that are `valid`, bool [B, T], in `slots`, int32 [B, T]."""
        return KeyValues(write_rows(self.k, k, slots, valid), write_rows(self.v, v, slots, valid))


class HostArray(struct.PyTreeNode):
    """One array of the host tier; see `HostLayout` for its layout and an example.

    Attributes:
        array: [B, heads, units, planes * unit * d] in the model's dtype, or uint16 [B, heads, units, words of a unit]
            with `HostLayout.bits`. In an abstract state it is a ShapeDtypeStruct.
        memory: memory kind of the array: "pinned_host" when offloaded, "device" in resident mode. It is a field because
            a ShapeDtypeStruct has no memory kind.
    """

    array: Any  # an Array or a ShapeDtypeStruct
    memory: str = struct.field(pytree_node=False)


class HostTier(struct.PyTreeNode):
    """The offloaded rows of one layer.

    Attributes:
        prompt: units of the prompt, which are written once, or None.
        tail: units written while decoding, or None. Its number of units is fixed by `HostLayout.tail_units`.
    """

    prompt: HostArray | None = None
    tail: HostArray | None = None


class HostWrite(struct.PyTreeNode):
    """Units that a policy asks to write to the host tier. `cache/offload.py` writes them.

    Attributes:
        data: the units [B, heads, n, planes * unit * d], or uint16 [B, heads, n, words of a unit].
        start: the tail unit to which each of the n units is written, int32 [B, n]. None: `data` is the whole prompt
            part.
        valid: which units are written, bool [B, n]. None: all of them.
    """

    data: Array
    start: Array | None = None
    valid: Array | None = None


class Rebuild(struct.PyTreeNode):
    """Compressed keys, from which the keys of selected units are rebuilt while their values are being fetched.

    The shapes below are those of low-rank factors; see policies/shadowkv/key_codecs for other codes.

    Attributes:
        left: the left factor of each unit [B, U, unit * r]. The numbers of a unit are contiguous.
        right: the right factor [B, heads, r, d], or a pytree of arrays for another code.
        inverse: angle per position of each rotated pair of dimensions, float32 [rotary_dim / 2]. Token j of unit u has
            position u * unit + j.
        tail: left factors of the T units written after the prompt [B, T, unit * r], or None. Their ids begin at U.
        tail_unit: index of the tail's first unit, counted in units from the start of the sequence, int32 [B]; or None.
        codec: the KeyCodec that made the code.
        unit: tokens in a unit.
        later: None, or the code of the units after the prompt, with a tail and no units in `left`.
        split: None, or the part of the code that this device of a mesh has. It rebuilds the keys (`split.keys`). The
            ids then count from this device's first unit.
    """

    left: Array
    right: Any
    inverse: Array
    tail: Array | None = None
    tail_unit: Array | None = None
    later: "Rebuild | None" = None
    codec: Any = struct.field(pytree_node=False, kw_only=True)
    unit: int = struct.field(pytree_node=False, kw_only=True)
    split: Any = struct.field(pytree_node=False, kw_only=True, default=None)

    @property
    def in_kernel(self) -> bool:
        """Whether the GPU kernel that fetches values can also rebuild the keys."""
        return bool(self.codec.compiled) and self.split is None and self.later is None

    def keys(self, ids: Array, values: Array | None = None) -> Array:
        """Rebuild keys after RoPE [B, h, n * unit, d] of units int32 [B, h, n], in float32 or the model's dtype.

        A codec that makes keys `from_values` needs the `values` of the units [B, h, n * unit, d].
        """
        if self.codec.from_values:
            made: Array = self.codec.keys_of(self, ids, values)
            return made
        units = self.left.shape[-2] if self.split is None else self.split.units
        if self.later is not None and units == 0:
            return self.later.keys(ids)
        keys: Array = (self.codec.reconstruct if self.split is None else self.split.keys)(self, ids)
        if self.later is None:
            return keys
        is_later = jnp.repeat(ids >= units, self.unit, axis=2)[..., None]
        return jnp.where(is_later, self.later.keys(ids - units), keys)


class Kept(struct.PyTreeNode):
    """A cache of P units for each head, which lies on the device. A unit in it needs no fetch.

    Example: B = 1, one head, and P = 4 places, of which the first three hold the units 9, 5 and 4. The units [4, 7, 9]
    are selected. Then places = [2, 3, 0] and missed = [1, 3, 3]. Only unit 7 is fetched, into place 3.

    Attributes:
        values: values of the units [B, heads, P, unit * d] in the model's dtype.
        keys: keys of the units after RoPE, in the shape and dtype of `values`.
        places: int32 [B, heads, n], the place of each selected unit, and then P.
        missed: int32 [B, heads, n], the indices of the selected units that must be fetched, in rising order, and then
            n. All other places stay as they are.
        count: int32 [B, heads], how many units must be fetched.
    """

    values: Array
    keys: Array
    places: Array
    missed: Array
    count: Array


class Selection(struct.PyTreeNode):
    """Units to fetch from the host tier.

    Ids below the layout's `units` are units of the prompt. Id units + j is unit j of the tail. Example: B = 1, 2 heads,
    a prompt part of 3 units, and n = 2. ids [[[0, 3], [2, 1]]] with valid [[[True, True], [True, False]]] fetches for
    head 0 the first unit of the prompt and the first unit of the tail. Head 1 attends only to the last unit of the
    prompt; its second unit may be moved but is masked.

    Attributes:
        ids: numbers of the units, int32 [B, heads, n], or [B, 1, n] if all heads select the same units.
        valid: bool, the shape of ids. No query attends to a unit that is False, though it may be moved.
        hit: bool, the shape of ids: whether the previous step also selected the unit. None: `counts` tells, or this is
            not counted.
        rebuild: the compressed keys from which the units' keys are rebuilt. None if keys are fetched or not needed.
        kept: the cache of units on the device. Only set with `CacheSpec.keep`.
        counts: the number of valid units, and how many of them are hits, int32 [B, heads] each. None: `hit` tells.
        layer: the layer whose units these are. None: the layer that selects.
        when: "now": this step attends to the units. "next_step": the target layer receives them after its attention.
    """

    ids: Array
    valid: Array
    hit: Array | None = None
    rebuild: Rebuild | None = None
    kept: Kept | None = None
    counts: tuple[Array, Array] | None = None
    layer: int | None = struct.field(pytree_node=False, default=None)
    when: str = struct.field(pytree_node=False, default="now")


class Fetched(struct.PyTreeNode):
    """The keys and values of the units that a Selection names.

    Attributes:
        k: keys [B, heads, n * unit, d]. Token j of the i-th unit is at index i * unit + j. With `places`, it is the
            whole cache [B, heads, P, unit * d]. None if only values were fetched and no keys were rebuilt.
        v: values, in the form of the keys.
        valid: which units may be attended to, bool [B, heads, n] or [B, 1, n].
        ids: the ids of the selection, int32 [B, heads, n] or [B, 1, n].
        places: the place of each unit in the cache, int32 [B, heads, n], as in `Kept`. None: there is no cache.
        count: number of valid units, int32 [B, heads], as in `Selection.counts`. None: `valid` tells.
    """

    k: Array | None
    v: Array
    valid: Array
    ids: Array
    places: Array | None = None
    count: Array | None = None

    def listed(self, width: int) -> "Fetched":
        """Return the rows of the selected units [B, heads, n * unit, width], in the order of the units."""
        if self.places is None:
            return self
        at, shape = self.places[..., None], (*self.v.shape[:2], -1, width)
        k, v = (
            None if x is None else jnp.take_along_axis(x, at, axis=2, mode="clip").reshape(shape)
            for x in (self.k, self.v)
        )
        assert v is not None
        return Fetched(k, v, self.valid, self.ids, count=self.count)


class LayerState(struct.PyTreeNode):
    """The state of one layer.

    Attributes:
        frozen: the policy's record of arrays that steps only read, or None.
        live: the policy's record of arrays that steps replace, or None.
        host: the rows of the host tier.
        q_post: queries after RoPE [B, T, h_q, d], only between `append` and the next hook of a step. `append` returns
            them if it computes them together with the keys. None: `StepKV.q_post` is used.
    """

    frozen: Any = None
    live: Any = None
    host: HostTier = HostTier()
    q_post: Array | None = None
