"""The static description of one layer's cache: its sizes, its policy, its mesh, and its rows in host memory."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jshadow.errors import ConfigError
from jshadow.models.config import RopeConfig


@dataclasses.dataclass(frozen=True)
class Shards:
    """The mesh over which the arrays of a state are split. It is hashable and static under jit.

    The axis `data` splits the rows of a batch. `tp` splits heads, and lies inside a host, where links are fast. The
    hooks of a policy run on one device each, inside `jax.shard_map`, so the CacheSpec of a layer describes the arrays
    of one device. The arrays of a KVState are global. An array is split along the axis that grows with the rows, the
    heads or the left rows of a device (`cache.rows.layer_splits`):

        part of a state                            tp
        host rows, landmarks, outliers             by KV head
        window, right factor                       by KV head
        left rows, which serve all heads           by chunk, or with left="everywhere" on every device
        left rows of later chunks (ShadowKV+)      by KV head, or on every device if they serve all heads
        steps of the transform code                on every device, as all heads share them
        lengths, last tokens, counters             on every device

    Attributes:
        mesh: a mesh with the axes `models.partition.AXES`.
        left: "split": the left rows of ShadowKV's key code are split over `tp` by chunk. A step sends the selected rows
            to the heads that need them. "everywhere": every device of `tp` has all of them.
        rows: whether the rows of the batch are split over `data`. They are not if their number is not a multiple.
        grown: whether a device has one left row more than the real one. Only `layer_splits` uses it.
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


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about the cache of one layer. It is hashable, and jit takes it as a static argument.

    Attributes:
        layer: index of the layer. It is None while a prompt is compressed, so that one compiled program serves all
            layers.
        num_layers: number of layers of the model.
        batch: number of rows (sequences).
        capacity: maximum number of tokens that a row can hold, counting the prompt and the generated tokens.
        window: number of slots for tokens that are kept exactly, in addition to the policy's compressed prompt.
        q_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: width of a head.
        model_dim: width of the residual stream.
        dtype: name of the dtype of keys and values, such as "bfloat16".
        scale: factor by which attention scores are multiplied, usually 1 / sqrt(head_dim).
        rope: rotary position embedding.
        sliding_window: number of newest tokens that this layer attends to. None means all tokens.
        fetch: "resident", "device_put" or "zero_copy"; see cache/offload.py.
        policy: this layer's policy. It is resolved, so none of its settings is None.
        keep: whether the keys and values of units that stay selected remain on the device from step to step, so that
            only the others are fetched and rebuilt; see `offload.keeps`.
        values_from_keys: whether a value, times a weight for each column of a head, is the key before RoPE.
        shards: the mesh over which the arrays are split, or None for one device. With a mesh, `batch`, `q_heads` and
            `kv_heads` are those of one device, because the hooks run on each device.
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
    keep: bool = False
    values_from_keys: bool = False
    shards: Shards | None = None

    def __hash__(self) -> int:
        # jit hashes the spec of every layer in every step, so the hash is computed once and stored.
        if "_hash" not in self.__dict__:
            fields = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
            object.__setattr__(self, "_hash", hash(fields))
        return int(self.__dict__["_hash"])

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def heads_axis(self) -> str | None:
        """The axis of the mesh that splits the heads, inside shard_map, or None on one device."""
        return None if self.shards is None else "tp"


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """How a policy's offloaded rows lie in host memory.

    The unit is the smallest piece that a fetch moves: a few consecutive tokens of one head. Its numbers are contiguous.

    Example: one row (B = 1), 2 KV heads of width 64, a capacity of 24 tokens in 3 chunks of 8, and only values are
    offloaded. `HostLayout(heads=2, units=3, unit=8)` stands for a prompt array [1, 2, 3, 512]. Entry [0, h, u] holds
    the values of tokens 8u to 8u + 7 in head h, 64 numbers a token. With planes=2 the array is [1, 2, 3, 1024], and
    each entry holds the 8 keys and then the 8 values. With bits=8 it is uint16 [1, 2, 3, 272] for bfloat16: 256 words
    of 16 bits with two codes each, 8 scales of one word, and 8 words of zeros.

    Attributes:
        heads: heads of the array, usually h_kv.
        units: maximum number of units in a prompt.
        unit: number of tokens in a unit.
        planes: 1 if only values are stored, 2 if keys and values are stored.
        tail_units: number of units that can be written after the prompt; 0 if none are written.
        bits: None: numbers have the model's dtype. 8 or 4: numbers are stored in that many bits. A unit is then one row
            of words of 16 bits with a scale for each token, in the layout of `pallas_kernels.bits`, and planes is 1.
        no_kernel: "" if a GPU kernel can read these rows from host memory itself. Otherwise the settings that prevent
            it, as text for an error message.
    """

    heads: int
    units: int
    unit: int
    planes: int = 1
    tail_units: int = 0
    bits: int | None = None
    no_kernel: str = ""

    def check_kernel(self, policy: str) -> None:
        """Raise ConfigError if no GPU kernel serves these rows of a policy with "zero_copy"."""
        if self.no_kernel:
            raise ConfigError(
                f"fetch must be 'device_put' or 'resident' for {policy} with {self.no_kernel} on a GPU, as no kernel "
                "fetches these values and rebuilds these keys, got 'zero_copy'"
            )


def local_spec(spec: CacheSpec, shards: Shards | None) -> CacheSpec:
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


def with_rows(spec: CacheSpec, rows: int) -> CacheSpec:
    """Return the CacheSpec of one device of a state of `rows` rows, from that of a state of another number of rows."""
    if spec.shards is None:
        return dataclasses.replace(spec, batch=rows)
    parts = spec.shards.mesh.shape["data"]
    split = rows % parts == 0
    shards = dataclasses.replace(spec.shards, rows=split)
    return dataclasses.replace(spec, batch=rows // parts if split else rows, shards=shards)
