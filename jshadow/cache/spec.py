"""The static description of one layer's cache: its sizes, its policy, and the layout of its rows in host memory."""

import dataclasses
from typing import Any

from jshadow.cache.shards import Shards
from jshadow.errors import ConfigError
from jshadow.models.config import RopeConfig


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
