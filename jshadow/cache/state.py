"""The state of a batch of sequences, as one immutable pytree.

B is the number of rows (sequences). This module does not depend on a policy, and does not run the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array
from jax.sharding import PartitionSpec

from jshadow.cache import offload
from jshadow.cache.records import HostArray as HostArray
from jshadow.cache.records import HostTier as HostTier
from jshadow.cache.records import LayerState as LayerState
from jshadow.cache.rows import Moves, insert_row, layer_shapes, layer_splits, resized, row_numbers, take_rows
from jshadow.cache.spec import CacheSpec as CacheSpec
from jshadow.cache.spec import everywhere, with_rows
from jshadow.errors import CapacityError, ConfigError, StateMismatch

CONSUMED = "state was consumed by an earlier step or insert; use the state it returned, or fork() before a step"
_UNKNOWN = -1  # the last token of a row that gave tokens back, if the caller does not tell it


class Counters(struct.PyTreeNode):
    """Counts of what the decode steps did. Every field is an array [B], one number for each row.

    Attributes:
        steps: steps in which the row was active, uint32.
        attended: tokens attended to, float32. It is the mean over heads, summed over steps and layers.
        selected: valid units that were selected, uint32, summed over steps, layers and heads. Only selections that have
            `counts` or a `hit` mask are counted.
        hits: units in `selected` that the previous step had also selected, or that were in the policy's cache, uint32.
        fetched: data moved from the host tier, in units of 64 bytes, uint32. The count wraps around, so compare two
            counts by their difference.
        reached: the most tokens that the row held before it gave some back (`KVState.rewind`), int32, or 0.
    """

    steps: Array
    attended: Array
    selected: Array
    hits: Array
    fetched: Array
    reached: Array

    @classmethod
    def zeros(cls, batch: int) -> "Counters":
        """Return the counts before the first step, for `batch` rows."""
        kinds = {"attended": jnp.float32, "reached": jnp.int32}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: jnp.zeros(batch, kinds.get(name, jnp.uint32)) for name in names})


class Reads(struct.PyTreeNode):
    """The half of a KVState that a step reads and never returns; see KVState.

    Attributes:
        layers: for each layer, its frozen part and the host rows of the prompt (None if there are no such rows).
        fitted: arrays that the policy learned beforehand, or None.
        specs: the static description of each layer.
        policy: the policy of the whole model, resolved.
    """

    layers: tuple[tuple[Any, HostArray | None], ...]
    fitted: Any
    specs: tuple[CacheSpec, ...] = struct.field(pytree_node=False)
    policy: Any = struct.field(pytree_node=False)


class Writes(struct.PyTreeNode):
    """The half of a KVState that a step replaces; see KVState. A step donates these buffers to the compiled program.

    Attributes:
        layers: for each layer, its live part and the host rows written after the prompt (None if there are none).
        shared: arrays that the policy carries across layers and steps, or None.
        lengths: tokens held by each row, int32 [B].
        last: the last token of each row, int32 [B].
        counters: counts of the tokens attended to, the units selected and the bytes fetched.
    """

    layers: tuple[tuple[Any, HostArray | None], ...]
    shared: Any
    lengths: Array
    last: Array
    counters: Counters


class KVState(struct.PyTreeNode):
    """The state of a batch of sequences between two steps, as an immutable pytree.

    A state has two halves. The prompt half is only read (`Reads`). The changing half is replaced by every step
    (`Writes`): its buffers are donated to the compiled program, so a step makes the state it was given unusable. Call
    `fork()` first to keep a state. All forks share the prompt half.

    Attributes:
        layers: one LayerState for each layer.
        shared: arrays that the policy carries across layers and steps, or None.
        lengths: tokens held by each row, int32 [B].
        last: the last token of each row, int32 [B].
        counters: counts of the tokens attended to, the units selected and the bytes fetched.
        fitted: arrays that the policy learned beforehand, or None.
        specs: the static description of each layer.
        policy: the policy of the whole model, resolved.
    """

    layers: tuple[LayerState, ...]
    shared: Any
    lengths: Array
    last: Array
    counters: Counters
    fitted: Any
    specs: tuple[CacheSpec, ...] = struct.field(pytree_node=False)
    policy: Any = struct.field(pytree_node=False)

    def __getattribute__(self, name: str) -> Any:
        """Return an attribute. Raises StateMismatch for `lengths` and `last` if the state was consumed."""
        value = super().__getattribute__(name)
        if name in ("lengths", "last") and is_deleted(value):
            raise StateMismatch(CONSUMED)
        return value

    def __repr__(self) -> str:
        """Return the lengths, the sizes and the policy as text. The lengths of a consumed state are "consumed"."""
        lengths = vars(self)["lengths"]
        held = "consumed" if is_deleted(lengths) else getattr(lengths, "shape", None)
        if isinstance(lengths, Array) and not isinstance(lengths, jax.core.Tracer) and held != "consumed":
            held = np.asarray(lengths).tolist()
        return f"KVState(lengths={held}, capacity={self.capacity}, fetch={self.fetch!r}, policy={self.policy})"

    @property
    def capacity(self) -> int:
        """Maximum number of tokens that a row can hold."""
        return self.specs[0].capacity

    @property
    def fetch(self) -> str:
        """The fetch mode: "resident", "device_put" or "zero_copy"."""
        return self.specs[0].fetch

    @property
    def batch(self) -> int:
        """Number of rows (sequences)."""
        return int(vars(self)["lengths"].shape[-1])

    @property
    def shares_prompt(self) -> bool:
        """Whether all rows have one prompt half, as after `share`. Then the specs describe one row."""
        shards = self.specs[0].shards
        return self.batch != self.specs[0].batch * (shards.data if shards else 1)

    def split(self) -> tuple[Reads, Writes]:
        """Return the half that a step only reads, and the half that it replaces. The arrays are not copied."""
        writes = tuple((layer.live, layer.host.tail) for layer in self.layers)
        return self.reads(), Writes(writes, self.shared, self.lengths, self.last, self.counters)

    def reads(self) -> Reads:
        """Return the half that a step only reads. It remains valid after the step."""
        layers = tuple((layer.frozen, layer.host.prompt) for layer in self.layers)
        return Reads(layers, self.fitted, self.specs, self.policy)

    @classmethod
    def of(cls, reads: Reads, writes: Writes) -> "KVState":
        """Return the state that consists of these two halves. The arrays are not copied."""
        layers = tuple(
            LayerState(frozen, live, HostTier(prompt, tail))
            for (frozen, prompt), (live, tail) in zip(reads.layers, writes.layers, strict=True)
        )
        changed = writes.shared, writes.lengths, writes.last, writes.counters
        return cls(layers, *changed, reads.fitted, reads.specs, reads.policy)

    def join(self, writes: Writes) -> "KVState":
        """Return a state with this state's prompt half and the given changing half."""
        return self.of(self.reads(), writes)

    def fork(self) -> "KVState":
        """Return an independent state. It shares the prompt half by reference and copies the changing half.

        Raises:
            StateMismatch: a step has already consumed this state.
        """
        self.check_alive()
        _, writes = self.split()
        try:
            return self.join(jax.tree.map(lambda leaf: leaf.copy(), writes))
        except RuntimeError:
            self.check_alive()  # another thread may have consumed it meanwhile
            raise

    def check_alive(self) -> None:
        """Raise StateMismatch if a step or an insert has already consumed this state."""
        for leaf in jax.tree.leaves(self.row_trees()):
            if is_deleted(leaf):
                raise StateMismatch(CONSUMED)

    def take(self, rows: Sequence[int]) -> "KVState":
        """Return a new state that consists of the given rows, in the given order. A row may be repeated.

        Raises:
            StateMismatch: rows is empty, a row is not an integer in [0, B), or a step has consumed this state.
        """
        self.check_alive()
        numbers = row_numbers(rows, self.batch)
        if self.shares_prompt:
            return self._take_shared(numbers)
        specs, trees = tuple(with_rows(spec, len(numbers)) for spec in self.specs), self.row_trees()
        return self.with_row_trees(take_rows(trees, numbers, self._moves(trees, specs))).replace(specs=specs)

    def _take_shared(self, rows: list[int]) -> "KVState":
        """Return a state with the prompt half of this one, and rows of its changing half."""
        writes = self.split()[1]
        return self.join(take_rows(writes, rows, self._moves(writes)))

    def insert(self, row: int, other: "KVState", *, consume: bool = False) -> "KVState":
        """Return a new state in which row `row` is replaced by the only row of `other`.

        The two states must have the same model, policy, capacity and fetch mode. Their windows may differ, because each
        prefill sizes its own. The tokens of `other` must fit the window of this state.

        Args:
            row: the number of the row.
            other: a state of one row. It can be used again.
            consume: whether the result may reuse the memory of this state, in both memories. Then only a row is
                allocated. This state and all its forks cannot be used again, because forks share the prompt half. A
                state that `take` returned remains valid. If False, the whole state is copied.

        Raises:
            StateMismatch: the states do not match, row is not a whole number in [0, B), or one of the states was
                consumed. Then this state is not consumed.
        """
        self.check_alive()
        other.check_alive()
        self._check_inserted(row, other)
        try:
            if self.shares_prompt:
                writes = (self if consume else self.fork()).split()[1]
                return self.join(insert_row(writes, int(row), other.split()[1], self._moves(writes)))
            trees = (self if consume else self.take(range(self.batch))).row_trees()
            return self.with_row_trees(insert_row(trees, int(row), other.row_trees(), self._moves(trees)))
        except RuntimeError:
            self.check_alive()  # another thread may have consumed it meanwhile
            raise

    def _check_inserted(self, row: Any, other: "KVState") -> None:
        """Check the arguments of `insert`. Both states must not be consumed."""
        if isinstance(row, bool) or not isinstance(row, int | np.integer) or not 0 <= row < self.batch:
            raise StateMismatch(f"row must be a whole number in [0, {self.batch}), got {row!r:.80}")
        row_specs = tuple(with_rows(dataclasses.replace(spec, window=0), 1) for spec in self.specs)
        other_specs = tuple(dataclasses.replace(spec, window=0) for spec in other.specs)
        if row_specs != other_specs or other.batch != 1:
            raise StateMismatch(f"other must be one row of {self.specs[0]}, got {other.batch} of {other.specs[0]}")
        if not same_arrays(self.fitted, other.fitted):
            raise StateMismatch("other must have the learned arrays (fitted) of this state, got others")
        if self.shares_prompt:
            own, others = jax.tree.leaves(self.reads()), jax.tree.leaves(other.reads())
            if len(own) != len(others) or not all(one is its for one, its in zip(own, others, strict=True)):
                raise StateMismatch("other must have the prompt half of this state, the same arrays, got others")
        specs = tuple(with_rows(spec, 1) for spec in self.specs)
        if other.replace(specs=specs).room()[0] < 0:
            raise StateMismatch(
                f"other holds {int(other.lengths[0])} tokens, more than fit this state's window={self.specs[0].window}"
            )

    def with_room(self, room: int) -> "KVState":
        """Return an independent state whose rows can take at least `room` more tokens.

        It shares the prompt half by reference, as a fork does. The arrays of the changing half are copied with as many
        slots as `room` needs, so they can become larger or smaller. Just after a prefill, the windows are those of a
        prefill with this `room`. Some policies have no such slots (`Full`), so their rows keep space up to the
        capacity.

        Raises:
            CapacityError: room is not an integer of at least 0, or a row and `room` exceed the capacity.
            StateMismatch: a step or an insert has already consumed this state.
        """
        self.check_alive()
        if room is None:
            raise CapacityError("room must be an integer of at least 0, got None")
        check_room_size(room)
        held = int(np.max(np.asarray(self.lengths)))
        if held + room > self.capacity:
            raise CapacityError(
                f"room must be at most {self.capacity - held}, as a row holds {held} tokens of "
                f"capacity={self.capacity}, got {room}"
            )
        # A prompt leaves at most so many exact tokens in the window. Tokens after the prompt take slots of their own.
        asked, missing, specs = int(room), 1, self.specs
        while missing > 0:
            specs = with_room(self.specs, asked)
            missing = int(room) - int(np.min(np.asarray(self.replace(specs=specs).room())))
            asked += missing
        return self.with_windows(specs)

    def with_windows(self, specs: tuple[CacheSpec, ...]) -> "KVState":
        """Return a state with the windows of `specs`, as `with_room` does. The tokens that it holds must fit."""
        writes = self.split()[1]
        rest = writes.replace(layers=())
        if specs[0].shards is not None:
            shapes = [(like.live, like.host.tail) for like in map(layer_shapes, specs)]
            kept = [jax.ShapeDtypeStruct((1, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(rest)]
            return self.join(resized(writes, (shapes, kept), self._moves(writes))).replace(specs=specs)
        layers = []
        for index, ((live, tail), spec) in enumerate(zip(writes.layers, specs, strict=True)):
            like = layer_shapes(spec, of_layer(self.fitted, index))
            layers.append((resized(live, like.live), resized(tail, like.host.tail)))
        rest = jax.tree.map(lambda leaf: leaf.copy(), rest)
        return self.join(rest.replace(layers=tuple(layers))).replace(specs=specs)

    def with_fetch(self, fetch: str) -> "KVState":
        """Return a state whose offloaded rows lie where another fetch mode has them. Its steps give the same results.

        Only these rows are copied, and the copies may still be on their way. All other arrays are shared, so a step on
        one of the two states consumes both.

        Raises:
            ConfigError: `fetch` is not the name of a fetch mode, or its steps need other arrays than this state has.
            StateMismatch: a step or an insert has already consumed this state.
        """
        self.check_alive()
        if fetch == "auto":
            raise ConfigError("fetch must be the name of a fetch mode, got 'auto'")
        specs = specs_with_fetch(self.specs, fetch, self.fitted)
        if specs is None:
            raise ConfigError(f"fetch must be a mode that has the arrays of {self.fetch!r}, got {fetch!r}")
        layers = tuple(layer.replace(host=offload.moved(layer.host, fetch)) for layer in self.layers)
        return self.replace(layers=layers, specs=specs)

    def rewind(self, lengths: Any, last: Any = None) -> "KVState":
        """Return the state after each row gave back its newest tokens. Later steps are those of a state without them.

        The two states share their arrays, so a step on one of them consumes both. Counters keep the work that was done.
        Tokens of the prompt can be given back only where the method stores them like later tokens. What the method has
        learned from the whole prompt stays. A ring buffer has lost the oldest tokens for the newest ones, so it can go
        back a few tokens only.

        Args:
            lengths: number of tokens that each row then holds, int [B].
            last: the last of these tokens, int [B]. None: -1 in a row that gives tokens back. It tells `generate`
                whether a chat template's end of an answer is missing.

        Raises:
            ConfigError: the method cannot give tokens back.
            StateMismatch: `lengths` or `last` has another shape, a row cannot go back so far or holds fewer tokens, or
                a step or an insert has already consumed this state.
        """
        self.check_alive()
        held, wanted = np.asarray(self.lengths), np.asarray(lengths)
        if wanted.shape != held.shape or wanted.dtype.kind not in "iu":
            raise StateMismatch(f"lengths must be integers of shape {held.shape}, got {wanted.dtype} {wanted.shape}")
        least = np.minimum(np.asarray(self.earliest(self.reached())), held)  # a row may always stay as it is
        if (bad := np.flatnonzero((wanted < least) | (wanted > held))).size:
            row = int(bad[0])
            raise StateMismatch(
                f"lengths of row {row} must lie in [{least[row]}, {held[row]}] for {self.policy.name}, got "
                f"{wanted[row]}"
            )
        if last is None:
            tokens = jnp.where(wanted == held, self.last, _UNKNOWN)
        else:
            tokens = jnp.asarray(last, jnp.int32)
            if tokens.shape != held.shape:
                raise StateMismatch(f"last must be integers of shape {held.shape}, got {tokens.shape}")
            tokens = jnp.where(wanted >= 0, tokens, self.last)
        # The new lengths are computed from an array of the state, so that they are placed like it. If they were placed
        # otherwise, JAX would compile the next step again.
        return self.rewound(jnp.minimum(self.lengths, wanted.astype(np.int32)), tokens)

    def reached(self) -> Array:
        """Return the most tokens that each row has ever held, int32 [B]."""
        return jnp.maximum(self.counters.reached, self.lengths)

    def earliest(self, reached: Array) -> Array:
        """Return the fewest tokens that each row can hold after a rewind, int32 [B]. It can be traced by jit.

        `reached` is the most tokens that each row has held by then, int32 [B].

        Raises:
            ConfigError: a layer's method cannot give tokens back.
        """
        if self.shares_prompt:
            shared: Array = self.each_row(KVState.earliest, reached)
            return shared
        distinct = {spec.policy: (spec, layer) for spec, layer in zip(self.specs, self.layers, strict=True)}
        limits = [spec.policy.earliest(spec, layer, reached) for spec, layer in distinct.values()]
        if any(limit is None for limit in limits):
            raise ConfigError(f"policy must be one that can give tokens back (KVState.rewind), got {self.policy}")
        return jnp.max(jnp.stack(limits), axis=0)

    def rewound(self, lengths: Array, last: Array) -> "KVState":
        """Return the state after each row went back to `lengths` tokens. It can be traced by jit, and checks nothing.

        Args:
            lengths: number of tokens of each row, int32 [B], from `earliest` to the number that it holds.
            last: the last token of each row then, int32 [B].
        """
        if self.shares_prompt:
            return self.join(
                self.each_row(lambda one, lengths, last: one.rewound(lengths, last).split()[1], lengths, last)
            )
        counters = self.counters.replace(reached=self.reached())
        layers = tuple(
            spec.policy.rewound(spec, layer, lengths) for spec, layer in zip(self.specs, self.layers, strict=True)
        )
        return self.replace(layers=layers, lengths=lengths, last=last, counters=counters)

    def share(self, rows: int) -> "KVState":
        """Return a state of `rows` sequences that begin as the only row of this state does.

        The prompt half is held once, by reference. The changing half has a copy for each row. Steps, `extend` and
        `generate` take the state as any other. `insert` takes a row that has the same prompt half, such as one that
        `take`, `fork` or `with_room` returned. With rows=1, the result is a copy that has its own prompt half.

        Raises:
            StateMismatch: rows is not an integer of at least 1, this state has several rows, or was consumed.
        """
        self.check_alive()
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
            raise StateMismatch(f"rows must be an integer of at least 1, got {rows!r}")
        if self.batch != 1:
            raise StateMismatch(f"state must have one row, got {self.batch}; use take([i]) first")
        # `insert` may consume the prompt half of a state with as many rows as its prompt half.
        return self._take_shared([0] * int(rows)) if rows > 1 else self.take([0])

    def each_row(self, function: Callable[..., Any], *rows: Array) -> Any:
        """Run a function on each row of this state, whose rows have one prompt half, by `jax.vmap`.

        Nothing of the prompt half is repeated.

        Args:
            function: called with a state of one row and the arrays [1, ...] of that row. It returns a pytree of arrays
                [1, ...].
            *rows: arrays [B, ...].

        Returns:
            The result of the function, with arrays [B, ...].
        """
        reads, writes = self.split()

        def one(writes: Any, *rows: Array) -> Any:
            alone, *others = jax.tree.map(lambda leaf: leaf[None], (writes, *rows))
            return jax.tree.map(lambda leaf: leaf[0], function(self.of(reads, alone), *others))

        return jax.vmap(one)(writes, *rows)

    def room(self) -> Array:
        """Return the number of tokens that each row can still take, int32 [B]. It can be traced by jit.

        Raises:
            StateMismatch: a step or an insert has already consumed this state.
        """
        self.check_alive()
        if self.shares_prompt:
            shared: Array = self.each_row(KVState.room)
            return shared
        distinct = {spec.policy: (spec, layer) for spec, layer in zip(self.specs, self.layers, strict=True)}
        rooms = [spec.policy.room(spec, layer, self.lengths) for spec, layer in distinct.values()]
        return everywhere(jnp.min(jnp.stack(rooms), axis=0), self.specs[0].shards)

    def row_trees(self) -> tuple[Any, ...]:
        """Return the parts of the state in which axis 0 of every array is the row."""
        return self.layers, self.shared, self.lengths, self.last, self.counters

    def with_row_trees(self, trees: tuple[Any, ...]) -> "KVState":
        """Return the state with these arrays in place of those of `row_trees`."""
        return self.replace(**dict(zip(("layers", "shared", "lengths", "last", "counters"), trees, strict=True)))

    def _moves(self, tree: Any, after: tuple[CacheSpec, ...] | None = None) -> Moves | None:
        """Return how the arrays of `row_trees` or of the changing half are split on a mesh, or None on one device.

        `after` has the specs of the state that results. None: the same.
        """
        shards = self.specs[0].shards
        if shards is None:
            return None
        count = len(jax.tree.leaves(tree))

        def splits(specs: tuple[CacheSpec, ...]) -> tuple[PartitionSpec, ...]:
            layers = map(layer_splits, specs)
            wheres = [(one.live, one.host.tail) if isinstance(tree, Writes) else one for one in layers]
            leaves = jax.tree.leaves(wheres, is_leaf=lambda split: isinstance(split, PartitionSpec))
            return (*leaves, *[PartitionSpec()] * (count - len(leaves)))  # all other arrays lie on every device

        return Moves(shards, splits(self.specs), splits(after or self.specs))


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is an array whose buffer was donated to a step."""
    return isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def of_layer(fitted: Any, layer: int) -> Any:
    """Return one layer's slice of learned arrays. Axis 0 of each array is the layer."""
    return jax.tree.map(lambda leaf: leaf[layer], fitted)


def same_arrays(tree: Any, other: Any) -> bool:
    """Return whether two pytrees have the same structure and equal arrays."""
    if tree is other:
        return True
    leaves, other_leaves = jax.tree.leaves(tree), jax.tree.leaves(other)
    alike = str(jax.tree.structure(tree)) == str(jax.tree.structure(other))
    return alike and all(a is b or np.array_equal(a, b) for a, b in zip(leaves, other_leaves, strict=True))


def with_room(specs: tuple[CacheSpec, ...], room: int | None) -> tuple[CacheSpec, ...]:
    """Return the specs with windows in which every row can take `room` tokens after its prompt, of any length.

    None: return the specs as they are, so that a row may grow to the capacity.

    Raises:
        CapacityError: room is not an integer of at least 0.
    """
    check_room_size(room)
    if room is None:
        return specs
    windows = [_window_with_room(spec.policy, spec.capacity, int(room)) for spec in specs]
    return tuple(dataclasses.replace(spec, window=window) for spec, window in zip(specs, windows, strict=True))


@functools.lru_cache(maxsize=256)
def _window_with_room(cache: Any, capacity: int, room: int) -> int:
    """Return the window in which a prompt of any length that fits the capacity can take `room` more tokens.

    A row still holds at most `capacity` tokens. `cache` is the `LayerCache` of a layer.
    """
    return max(cache.window_slots(min(prompt + room, capacity), prompt) for prompt in range(1, capacity + 1))


def specs_with_fetch(specs: tuple[CacheSpec, ...], fetch: str, fitted: Any = None) -> tuple[CacheSpec, ...] | None:
    """Return the specs of `KVState.with_fetch`, or None if steps in that mode need other arrays.

    Raises:
        ConfigError: `fetch` is not a fetch mode, or no kernel serves the policy's settings with "zero_copy" on a GPU.
    """
    offload.check_fetch(fetch)
    keep = offload.keeps(fetch, jax.default_backend())
    after = tuple(dataclasses.replace(spec, fetch=fetch, keep=keep) for spec in specs)

    def live(specs: tuple[CacheSpec, ...]) -> Any:
        shapes = [layer_shapes(spec, of_layer(fitted, index)) for index, spec in enumerate(specs)]
        return jax.tree.structure([one.live for one in shapes])

    return after if live(specs) == live(after) else None


def check_room_size(room: Any) -> None:
    """Raise CapacityError unless room is None or an integer of at least 0."""
    if room is not None and (isinstance(room, bool) or not isinstance(room, int | np.integer) or room < 0):
        raise CapacityError(f"room must be an integer of at least 0, or None, got {room!r}")
