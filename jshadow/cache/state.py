"""The state of a batch of sequences, as one immutable pytree.

B is the number of rows (sequences). This module does not depend on a policy, and does not run the model.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jshadow.cache.counters import Counters as Counters
from jshadow.cache.halves import Reads as Reads
from jshadow.cache.halves import Writes as Writes
from jshadow.cache.records import HostTier as HostTier
from jshadow.cache.records import LayerState as LayerState
from jshadow.cache.rewind import rewind
from jshadow.cache.row_room import roomy
from jshadow.cache.rows import insert_row, row_numbers, take_rows
from jshadow.cache.shards import everywhere, with_rows
from jshadow.cache.shared_rows import check_inserted, each_row, insert_shared, share, take_shared
from jshadow.cache.spec import CacheSpec as CacheSpec
from jshadow.cache.state_splits import Moves, moves_of, row_splits
from jshadow.errors import StateMismatch

CONSUMED = "state was consumed by an earlier step or insert; use the state it returned, or fork() before a step"


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
        return cls(
            layers,
            writes.shared,
            writes.lengths,
            writes.last,
            writes.counters,
            reads.fitted,
            reads.specs,
            reads.policy,
        )

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
            return take_shared(self, numbers)
        specs = tuple(with_rows(spec, len(numbers)) for spec in self.specs)
        return self.with_row_trees(take_rows(self.row_trees(), numbers, self.moves(specs))).replace(specs=specs)

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
        check_inserted(self, row, other)
        try:
            if self.shares_prompt:
                return insert_shared(self, int(row), other, consume)
            whole = self if consume else self.take(range(self.batch))
            return self.with_row_trees(insert_row(whole.row_trees(), int(row), other.row_trees(), self.moves()))
        except RuntimeError:
            self.check_alive()  # another thread may have consumed it meanwhile
            raise

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
        return roomy(self, room)

    def rewind(self, lengths: Any, last: Any = None) -> "KVState":
        """Return the state after each row gave back its newest tokens. Later steps are those of a state without them.

        The two states share their arrays, so a step on one of them consumes both. Counters keep the work that was done.
        Tokens of the prompt can be given back only where the method stores them like later tokens. What the method has
        learned from the whole prompt stays.

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
        return rewind(self, lengths, last)

    def share(self, rows: int) -> "KVState":
        """Return a state of `rows` sequences that begin as the only row of this state does.

        The prompt half is held once, by reference. The changing half has a copy for each row. Steps, `extend` and
        `generate` take the state as any other. `insert` takes a row that has the same prompt half, such as one that
        `take`, `fork` or `with_room` returned. With rows=1, the result is a copy that has its own prompt half.

        Raises:
            StateMismatch: rows is not an integer of at least 1, this state has several rows, or was consumed.
        """
        self.check_alive()
        return share(self, rows)

    def room(self) -> Array:
        """Return the number of tokens that each row can still take, int32 [B]. It can be traced by jit.

        Raises:
            StateMismatch: a step or an insert has already consumed this state.
        """
        self.check_alive()
        if self.shares_prompt:
            shared: Array = each_row(lambda one: one.room(), self)
            return shared
        distinct = {spec.policy: (spec, layer) for spec, layer in zip(self.specs, self.layers, strict=True)}
        rooms = [spec.policy.room(spec, layer, self.lengths) for spec, layer in distinct.values()]
        return everywhere(jnp.min(jnp.stack(rooms), axis=0), self.specs[0].shards)

    def with_row_trees(self, trees: tuple[Any, ...]) -> "KVState":
        """Return the state with these arrays in place of those of `row_trees`."""
        return self.replace(**dict(zip(("layers", "shared", "lengths", "last", "counters"), trees, strict=True)))

    def moves(self, after: tuple[CacheSpec, ...] | None = None) -> Moves | None:
        """Return how the arrays of `row_trees` are split on a mesh, before and after rows move; None on one device."""
        return moves_of(self.row_trees(), self.specs, after, row_splits)

    def row_trees(self) -> tuple[Any, ...]:
        """Return the parts of the state in which axis 0 of every array is the row."""
        return self.layers, self.shared, self.lengths, self.last, self.counters


def is_deleted(leaf: Any) -> bool:
    """Whether a leaf is an array whose buffer was donated to a step."""
    return isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def of_layer(fitted: Any, layer: int) -> Any:
    """Return one layer's slice of learned arrays. Axis 0 of each array is the layer."""
    return jax.tree.map(lambda leaf: leaf[layer], fitted)
