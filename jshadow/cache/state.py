"""The KV state as a value: an immutable pytree, and the small records that a policy and the decode step exchange.

Sizes: B rows, S prompt tokens, T query rows of a step, h_q query heads, h_kv KV heads, d head width, D model width,
N slots of a buffer, n selected units, U stored units. A unit is what one fetch moves (a chunk of 8 tokens in
ShadowKV). Knows no policy and runs no model.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jshadow.errors import StateMismatch
from jshadow.models.config import RopeConfig


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about the cache of one layer.

    Attributes:
        layer: index of the layer; None while a prompt is compressed, for one compiled program serves all layers.
        num_layers: layers of the model.
        batch: rows.
        capacity: tokens that a row may ever hold, prompt and generated.
        window: slots for tokens that are kept exactly beside a policy's prompt structures.
        q_heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        model_dim: width of the residual stream.
        dtype: name of the dtype of keys and values.
        scale: factor on attention scores, 1 / sqrt(head_dim).
        rope: rotary position embedding.
        sliding_window: tokens that this layer's attention reaches back, None for all of them.
        fetch: "resident", "device_put" or "zero_copy".
        policy: this layer's policy, resolved: no setting of it is None any more.
    """

    layer: int | None
    num_layers: int
    batch: int
    capacity: int
    window: int
    q_heads: int
    kv_heads: int
    head_dim: int
    model_dim: int
    dtype: str
    scale: float
    rope: RopeConfig
    sliding_window: int | None
    fetch: str
    policy: Any

    def __hash__(self) -> int:
        # Asked for at every step as a part of the jit key, for every layer: computed once.
        if "_hash" not in self.__dict__:
            fields = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
            object.__setattr__(self, "_hash", hash(fields))
        return int(self.__dict__["_hash"])

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads


class PromptKV(struct.PyTreeNode):
    """One layer's whole ragged prompt, right padded; freed once it is compressed.

    Attributes:
        k_pre: keys before RoPE (after bias and norm) [B, S, h_kv, d].
        k_post: keys after RoPE [B, S, h_kv, d].
        v: values [B, S, h_kv, d].
        lengths: real tokens of each row, int32 [B].
        positions: int32 [B, S].
        q_tail: queries after RoPE of each row's last w real tokens [B, w, h_q, d]; w = policy.q_tail.
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
    """One layer, one step of T query rows (T = policy.step_rows).

    Attributes:
        q_pre, q_post: queries before and after RoPE [B, T, h_q, d].
        k_pre, k_post, v: the new keys and values [B, T, h_kv, d].
        positions: int32 [B, T]: lengths, lengths + 1, ...
        valid: bool [B, T]; False for every row of an inactive sequence, and for a query row that is only a guess
            and has none.
        lengths: tokens held before this step, int32 [B].
        x_in: normed input of the attention [B, T, D].
        inverse: angle per position of each rotated pair, float32 [d / 2].
        q_next: x_in -> queries after RoPE that the next layer would make of it; None in the last layer.
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
    x_in: Array
    inverse: Array
    q_next: Callable[[Array], Array] | None = struct.field(pytree_node=False, default=None)
    learned: Any = None


class KeyValues(struct.PyTreeNode):
    """Exact keys (after RoPE unless a policy says otherwise) and values, [B, h_kv, N, d] each."""

    k: Array
    v: Array


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """How a policy's offloaded rows lie in host memory.

    Attributes:
        heads: heads of the array, usually h_kv.
        units: units of the prompt.
        unit: tokens in a unit.
        planes: 1 for values, 2 for keys and values.
        tail_units: units that may be written after the prompt (0: nothing is).
        bits: of a number: 8 or 4; a unit is then one row of bytes with a scale for each token, as `packing.join_rows`
            makes it (planes = 1). None: numbers of the model's dtype.
        no_kernel: settings for which there is no GPU kernel that reads host memory itself ("" where there is one).
    """

    heads: int
    units: int
    unit: int
    planes: int = 1
    tail_units: int = 0
    bits: int | None = None
    no_kernel: str = ""


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


class Counters(struct.PyTreeNode):
    """What the steps did, per row [B].

    Attributes:
        steps: steps in which the row was active, uint32.
        attended: sum over those steps and all layers of the tokens attended, mean over heads, float32.
        selected: valid units selected with their hits followed, summed over layers and heads, uint32.
        hits: those of them that the step before had selected too, uint32.
        fetched: bytes moved from the host tier, in units of 64 bytes, uint32 (wraps: read differences).
    """

    steps: Array
    attended: Array
    selected: Array
    hits: Array
    fetched: Array

    @classmethod
    def zeros(cls, batch: int) -> "Counters":
        """No step taken yet."""
        names = [field.name for field in dataclasses.fields(cls)]
        kinds = {name: jnp.float32 if name == "attended" else jnp.uint32 for name in names}
        return cls(**{name: jnp.zeros(batch, kind) for name, kind in kinds.items()})


class Reads(struct.PyTreeNode):
    """The half of a KVState that a step reads and never returns."""

    layers: tuple[tuple[Any, HostArray | None], ...]
    fitted: Any
    specs: tuple[CacheSpec, ...] = struct.field(pytree_node=False)
    policy: Any = struct.field(pytree_node=False)


class Writes(struct.PyTreeNode):
    """The half of a KVState that a step consumes (it is donated) and returns anew."""

    layers: tuple[tuple[Any, HostArray | None], ...]
    shared: Any
    lengths: Array
    last: Array
    counters: Counters


class KVState(struct.PyTreeNode):
    """Everything a batch of sequences remembers, as an immutable pytree.

    A step consumes the state it is given (the changing half is donated to the compiled program); `fork()` first to
    keep it. The prompt half is shared by all forks.

    Attributes:
        layers: one LayerState a layer.
        shared: what a policy carries across layers and steps, or None.
        lengths: tokens held by each row, int32 [B].
        last: the last token that each row holds, int32 [B].
        counters: what was attended, selected and fetched so far.
        fitted: arrays a policy learned beforehand, or None.
        specs: static description, one a layer.
    """

    layers: tuple[LayerState, ...]
    shared: Any
    lengths: Array
    last: Array
    counters: Counters
    fitted: Any
    specs: tuple[CacheSpec, ...] = struct.field(pytree_node=False)
    policy: Any = struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """Tokens that a row may ever hold."""
        return self.specs[0].capacity

    @property
    def fetch(self) -> str:
        """How values reach the device: "resident", "device_put" or "zero_copy"."""
        return self.specs[0].fetch

    @property
    def batch(self) -> int:
        """Rows."""
        return self.specs[0].batch

    def split(self) -> tuple[Reads, Writes]:
        """The half that a step reads and the half that it consumes."""
        reads = tuple((layer.frozen, layer.host.prompt) for layer in self.layers)
        writes = tuple((layer.live, layer.host.tail) for layer in self.layers)
        return Reads(reads, self.fitted, self.specs, self.policy), Writes(
            writes, self.shared, self.lengths, self.last, self.counters
        )

    @classmethod
    def of(cls, reads: Reads, writes: Writes) -> "KVState":
        """The state of two halves."""
        layers = tuple(
            LayerState(frozen, live, HostTier(prompt, tail))
            for (frozen, prompt), (live, tail) in zip(reads.layers, writes.layers, strict=True)
        )
        return cls(
            layers, writes.shared, writes.lengths, writes.last, writes.counters, reads.fitted, reads.specs,
            reads.policy,
        )  # fmt: skip

    def join(self, writes: Writes) -> "KVState":
        """This state's prompt half with a new changing half."""
        return self.of(self.split()[0], writes)

    def fork(self) -> "KVState":
        """An independent copy: the prompt half is shared by reference, the changing half is copied."""
        self.check_alive()
        _, writes = self.split()
        return self.join(jax.tree.map(lambda leaf: leaf.copy(), writes))

    def check_alive(self) -> None:
        """Raise StateMismatch where a step has already consumed this state."""
        _, writes = self.split()
        for leaf in jax.tree.leaves(writes):
            if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
                raise StateMismatch("state was consumed by an earlier step; use the state it returned, or fork() first")

    def take(self, rows: Sequence[int]) -> "KVState":
        """A new state of the given rows, in the given order (a row may repeat).

        Raises:
            StateMismatch: no rows, or a row outside [0, B).
        """
        self.check_alive()
        try:
            found = [operator.index(row) for row in rows]
        except TypeError as error:
            raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}") from error
        if any(isinstance(row, bool) for row in rows):  # a mask, which would be rows 0 and 1
            raise StateMismatch(f"rows must be whole numbers, got {rows!r:.80}")
        rows = found
        if not rows or not all(0 <= row < self.batch for row in rows):
            raise StateMismatch(f"rows must be a non-empty list of numbers in [0, {self.batch}), got {rows}")
        specs = tuple(dataclasses.replace(spec, batch=len(rows)) for spec in self.specs)
        return self.map_rows(lambda leaf: leaf[np.asarray(rows)]).replace(specs=specs)

    def insert(self, row: int, other: "KVState") -> "KVState":
        """A new state in which `row` is the only row of `other` (same model, policy, capacity and fetch mode).

        The windows of the two may differ, for each prefill sizes its own: what the other holds must fit this one's.

        Raises:
            StateMismatch: the states do not fit each other, or row is outside [0, B).
        """
        self.check_alive()
        other.check_alive()
        if not 0 <= row < self.batch:
            raise StateMismatch(f"row must lie in [0, {self.batch}), got {row}")
        wanted = tuple(dataclasses.replace(spec, batch=1, window=0) for spec in self.specs)
        came = tuple(dataclasses.replace(spec, window=0) for spec in other.specs)
        if wanted != came:
            raise StateMismatch(f"other must be one row of {self.specs[0]}, got {other.specs[0]}")
        if not same_arrays(self.fitted, other.fitted):
            raise StateMismatch("other must have the learned arrays (fitted) of this state, got others")
        new = self.map_rows(lambda mine, theirs: set_row(mine, row, theirs), other)
        if new.room()[row] < 0:
            raise StateMismatch(
                f"other holds {int(other.lengths[0])} tokens, more than fit this state's window={self.specs[0].window}"
            )
        return new

    def room(self) -> Array:
        """Tokens that each row can still take, int32 [B]: the least over the layers. Traceable."""
        distinct = {spec.policy: (spec, layer) for spec, layer in zip(self.specs, self.layers, strict=True)}
        rooms = [spec.policy.room(spec, layer, self.lengths) for spec, layer in distinct.values()]
        return jnp.min(jnp.stack(rooms), axis=0)

    def map_rows(self, change: Callable[..., Any], *others: "KVState") -> "KVState":
        """Apply change to the arrays that have a row axis, each leaf staying in its memory."""

        def leaf_map(leaf: Array, *theirs: Array) -> Array:
            leaves: tuple[Any, ...] = (leaf, *theirs)
            if leaf.sharding.memory_kind == "pinned_host":
                # Through NumPy: a gather on a pinned-host array has no good program on a GPU, a memcpy has.
                leaves = tuple(np.asarray(one) for one in leaves)
            new = change(*leaves)
            # What holds nothing comes back as the very array that it was, and a step on either would consume both.
            return jax.device_put(new if new.size else jnp.array(np.zeros(new.shape, new.dtype)), leaf.sharding)

        new = jax.tree.map(leaf_map, self.row_trees(), *[other.row_trees() for other in others])
        return self.replace(layers=new[0], shared=new[1], lengths=new[2], last=new[3], counters=new[4])

    def row_trees(self) -> tuple[Any, ...]:
        """The parts whose leaves have rows as their first axis."""
        return self.layers, self.shared, self.lengths, self.last, self.counters


def of_layer(fitted: Any, layer: int) -> Any:
    """What a policy learned about one layer: its slice of arrays whose first axis are the layers."""
    return jax.tree.map(lambda leaf: leaf[layer], fitted)


def same_arrays(mine: Any, theirs: Any) -> bool:
    """Whether two trees hold the same arrays."""
    if mine is theirs:
        return True
    leaves, others = jax.tree.leaves(mine), jax.tree.leaves(theirs)
    alike = str(jax.tree.structure(mine)) == str(jax.tree.structure(theirs))
    return alike and all(a is b or np.array_equal(a, b) for a, b in zip(leaves, others, strict=True))


def set_row(mine: Any, row: int, theirs: Any) -> Any:
    """mine with its row replaced by theirs[0], cut or zero-padded where a buffer is sized otherwise."""
    overlap = tuple(slice(0, min(a, b)) for a, b in zip(mine.shape[1:], theirs.shape[1:], strict=True))
    if isinstance(mine, np.ndarray):
        new = mine.copy()
        new[row] = 0
        new[row : row + 1][(slice(None), *overlap)] = theirs[(slice(0, 1), *overlap)]
        return new
    return mine.at[row].set(jnp.zeros_like(mine[row]).at[overlap].set(theirs[0][overlap]))
