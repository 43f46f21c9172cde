"""How the arrays of a layer are split over the devices of a mesh.

A mesh has two axes. `data` splits the rows of a batch. `tp` splits heads, and lies inside a host, where links are fast.

The hooks of a policy run on one device each, inside `jax.shard_map`. The CacheSpec of a layer therefore describes the
arrays of one device: its rows and its heads. The arrays of a KVState are global. Their sharding follows from the table
below, which `splits` reads off the shapes of `LayerCache.init`: an array is split along the axis that grows with the
rows, the heads or the left rows of a device.

    part of a state                            tp
    host rows, landmarks, outliers             by KV head
    window, right factor                       by KV head
    left rows, which serve all heads           by chunk, or with left="everywhere" on every device
    left rows of later chunks                  by KV head, or on every device
    steps of the transform code                on every device
    lengths, last tokens, counters             on every device

Later chunks are those that ShadowKV+ adds after the prompt. Their left rows lie on every device if they serve all
heads (`later_keys="projected"`). The transform code has a step for each column, float32 [B, r], which all heads share.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Shards:
    """The mesh over which the arrays of a state are split. It is hashable and static under jit.

    Attributes:
        mesh: a mesh with the axes `models.partition.AXES`.
        left: "split": the left rows of ShadowKV's key code are split over `tp` by chunk. A step sends the selected rows
            to the heads that need them. "everywhere": every device of `tp` has all of them.
        rows: whether the rows of the batch are split over `data`. They are not if their number is not a multiple.
        grown: whether a device has one left row more than the real one. Only `splits` uses it.
    """

    mesh: Mesh | AbstractMesh
    left: str = "split"
    rows: bool = True
    grown: bool = False

    @property
    def data(self) -> int:
        """Number of parts of the rows."""
        return int(self.mesh.shape["data"]) if self.rows else 1

    @property
    def tp(self) -> int:
        """Number of parts of the heads."""
        return int(self.mesh.shape["tp"])

    @property
    def splits_left(self) -> bool:
        """Whether left rows are split over `tp`."""
        return self.left == "split" and self.tp > 1

    def left_units(self, count: int) -> int:
        """Return how many of the left rows of `count` chunks a device holds."""
        parts = self.tp if self.splits_left else 1
        return -(-count // parts) + self.grown

    def spec(self, *axes: Any) -> PartitionSpec:
        """Return a PartitionSpec with these axes, without "data" if the rows are not split."""
        return PartitionSpec(*(None if axis == "data" and not self.rows else axis for axis in axes))

    def sharding(self, spec: PartitionSpec, memory: str = "device") -> NamedSharding:
        """Return the sharding of an array in a memory. The mesh must be a real one.

        Axes of size 1 are left out, as in what a compiled step returns. So no step is compiled a second time.
        """
        assert isinstance(self.mesh, Mesh)
        axes: list[Any] = []
        for axis in spec:
            names = tuple(
                name for name in (axis if isinstance(axis, tuple) else (axis,)) if name and self.mesh.shape[name] > 1
            )
            axes.append(names if len(names) > 1 else names[0] if names else None)
        while axes and axes[-1] is None:
            axes.pop()
        return NamedSharding(self.mesh, PartitionSpec(*axes), memory_kind=memory)


def local_spec(spec: Any, shards: Shards | None) -> Any:
    """Return the CacheSpec of one device, from that of the whole layer.

    The sizes must be multiples of the mesh's axes.
    """
    if shards is None:
        return spec
    return dataclasses.replace(
        spec,
        shards=shards,
        batch=spec.batch // shards.data,
        q_heads=spec.q_heads // shards.tp,
        kv_heads=spec.kv_heads // shards.tp,
    )


def with_rows(spec: Any, rows: int) -> Any:
    """Return the CacheSpec of one device of a state of `rows` rows, from that of a state of another number of rows."""
    if spec.shards is None:
        return dataclasses.replace(spec, batch=rows)
    parts = spec.shards.mesh.shape["data"]
    split = rows % parts == 0
    shards = dataclasses.replace(spec.shards, rows=split)
    return dataclasses.replace(spec, batch=rows // parts if split else rows, shards=shards)


@functools.lru_cache(maxsize=1024)
def splits(spec: Any, shapes: Any) -> Any:
    """Return the PartitionSpec of every array of a layer's state, in a pytree of the same structure.

    Args:
        spec: the spec of one device, with `shards`. `layer` must be None.
        shapes: maps a spec to the state of one device, with ShapeDtypeStructs in place of arrays.
    """
    shards: Shards = spec.shards
    kinds = {
        "data": dataclasses.replace(spec, batch=spec.batch + 1),
        "tp": dataclasses.replace(spec, q_heads=2 * spec.q_heads, kv_heads=2 * spec.kv_heads),
        "left": dataclasses.replace(spec, shards=dataclasses.replace(shards, grown=True)),
    }
    grown = {kind: jax.tree.leaves(shapes(more)) for kind, more in kinds.items()}
    leaves, structure = jax.tree.flatten(shapes(spec))

    def split(place: int, leaf: Any) -> PartitionSpec:
        axes: list[Any] = [None] * len(leaf.shape)
        for kind in kinds:
            axis = next((i for i, size in enumerate(grown[kind][place].shape) if size != leaf.shape[i]), None)
            if axis is not None:
                axes[axis] = kind if kind != "left" else "tp" if shards.splits_left else None
        return shards.spec(*axes)

    return jax.tree.unflatten(structure, [split(place, leaf) for place, leaf in enumerate(leaves)])


def whole_shape(shards: Shards, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an array whose part on one device has the shape `shape`."""
    names = [axis if isinstance(axis, tuple) else (axis,) for axis in (*spec, *[None] * (len(shape) - len(spec)))]
    return tuple(
        size * math.prod(shards.mesh.shape[name] for name in axis if name is not None)
        for size, axis in zip(shape, names, strict=True)
    )


def everywhere(x: Any, shards: Shards | None) -> Any:
    """Return a pytree of arrays with a copy on every device of the mesh. None: return it as it is."""
    if shards is None or not isinstance(shards.mesh, Mesh):
        return x
    return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, shards.sharding(PartitionSpec())), x)


def gathered(logits: Any, shards: Shards | None) -> Any:
    """Return logits [B, ..., V] with a copy on every device of the mesh. None: return them as they are.

    They are split over `tp` first. Otherwise the compiler may gather the weights of the head, which are larger.
    """
    if shards is None or not isinstance(shards.mesh, Mesh):
        return logits
    if logits.shape[-1] % shards.tp == 0:
        split = shards.spec("data", *[None] * (logits.ndim - 2), "tp")
        logits = lax.with_sharding_constraint(logits, shards.sharding(split))
    return everywhere(logits, shards)
