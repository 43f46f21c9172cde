"""What is static about a layer's cache: its sizes, its policy, and how its offloaded rows lie in host memory."""

import dataclasses
from typing import Any

from jshadow.models.config import RopeConfig


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Everything static about the cache of one layer.

    Attributes:
        layer: index of the layer; None while a prompt is compressed, so that one compiled program serves all layers.
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
        # jit asks for the hash of every layer's spec at every step, so it is computed once.
        if "_hash" not in self.__dict__:
            fields = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
            object.__setattr__(self, "_hash", hash(fields))
        return int(self.__dict__["_hash"])

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.q_heads // self.kv_heads


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """How a policy's offloaded rows lie in host memory.

    Attributes:
        heads: heads of the array, usually h_kv.
        units: units of the prompt.
        unit: tokens in a unit.
        planes: 1 for values, 2 for keys and values.
        tail_units: units that may be written after the prompt (0: nothing is).
        bits: 8 or 4 bits a number: a unit is then one row of bytes with a scale for each token, as `packing.join_rows`
            makes it (planes = 1). None: numbers of the model's dtype.
        float8: whether numbers are float8_e4m3fn, stored as bytes (planes = 1, no bits).
        no_kernel: the settings for which no GPU kernel reads host memory itself; "" where there is a kernel.
    """

    heads: int
    units: int
    unit: int
    planes: int = 1
    tail_units: int = 0
    bits: int | None = None
    float8: bool = False
    no_kernel: str = ""
