"""One model over several GPUs: the part of each device, and the bytes that devices exchange in a step.

A mesh of tp x sp devices serves all requests of a plan together. `tp` splits heads, MLP and vocabulary, and lies inside
a host. `sp` splits the units of a prompt. Each device of `sp` has all weights of its place in `tp`.

The bytes over links are those that one device sends, as a ring exchanges them (`policies.links`):

    per layer, [B, T, D] in the weights' dtype   2 all-reduces along tp, and one more for the embedding
    logits, float32 [B, T, V]                    an all-gather along tp
    selected left rows (left="split")            a reduce-scatter along tp of [B, h_kv, k, c * w], and the ids' gather
    scores and results of attention              along sp (`Costs.step_links`)
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from flax import traverse_util
from jax.sharding import AbstractMesh

from jshadow.cache.shards import Shards
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.partition import AXES, check_left, sharding_of
from jshadow.models.transformer import abstract_weights
from jshadow.planner.gpu_specs import NETWORK, Gpu
from jshadow.policies.links import Links, gathered, reduced

SUMMED = r"embed/embedding|layer_\d+/(attention/o|mlp/down)/kernel"  # split weights whose products are summed over tp


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """The devices that share one model.

    Attributes:
        tp: number of parts of the heads.
        sp: number of parts of the units of a prompt.
        left: where the left rows of ShadowKV's key code lie, as in `load`.
        process_devices: number of devices of one process, whose host memory they share. None: `tp`.
        network_bytes_per_second: rate at which a device sends to another process, for `sp`.
    """

    tp: int = 1
    sp: int = 1
    left: str = "split"
    process_devices: int | None = None
    network_bytes_per_second: float = NETWORK

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.tp * self.sp

    @property
    def in_process(self) -> int:
        """Number of devices of one process."""
        return self.tp if self.process_devices is None else self.process_devices

    @property
    def shards(self) -> Shards | None:
        """How the arrays of a state are split, or None for one device."""
        return shards_of_sizes(self.tp, self.sp, self.left) if self.devices > 1 else None

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if a size is out of range, or if tp does not divide the model's KV heads."""
        for name, value in (("tp", self.tp), ("sp", self.sp), ("process_devices", self.in_process)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        check_left(self.left)
        if config.kv_heads % self.tp:
            raise ConfigError(f"tp must divide the {config.kv_heads} KV heads, got tp={self.tp}")
        if self.devices % self.in_process:
            raise ConfigError(f"process_devices must divide tp * sp = {self.devices} devices, got {self.in_process}")
        if not (self.network_bytes_per_second > 0 and math.isfinite(self.network_bytes_per_second)):
            raise ConfigError(
                f"network_bytes_per_second must be above 0 and finite, got {self.network_bytes_per_second!r}"
            )

    def seconds(self, links: Links, gpu: Gpu) -> float:
        """Return the time in which a device sends the bytes.

        Bytes along tp take NVLink. Bytes along sp take it too if one process has all devices, or else the network.
        """
        along_tp, along_sp = (sum(part[axis] for part in links.values()) for axis in (0, 1))
        inside = self.in_process >= self.devices
        rate = gpu.nvlink_bytes_per_second if inside else self.network_bytes_per_second
        return along_tp / gpu.nvlink_bytes_per_second + along_sp / rate


ONE_GPU = MeshSizes()


@functools.lru_cache(maxsize=256)
def shards_of_sizes(tp: int, sp: int, left: str) -> Shards:
    """Return the shards of a mesh of devices that need not exist."""
    return Shards(AbstractMesh((1, sp, tp), AXES), left)


class DeviceWeights(NamedTuple):
    """The weights of one device of a mesh.

    Attributes:
        numbers: how many numbers they have.
        embedding: how many of them the embedding has.
        sums: number of products of a step that are summed over tp.
        splits_logits: whether each device of tp computes some of the logits.
    """

    numbers: int
    embedding: int
    sums: int
    splits_logits: bool


@functools.lru_cache(maxsize=64)
def device_weights(config: ModelConfig, shards: Shards | None) -> DeviceWeights:
    """Return the weights that a device holds. They are split as `models.partition.sharding_of` says."""
    weights = traverse_util.flatten_dict(abstract_weights(config), sep="/")
    shapes = {path: leaf.shape for path, leaf in weights.items()}
    own = dict(shapes)
    if shards is not None:
        own = {path: sharding_of(shards.mesh, path, shape).shard_shape(shape) for path, shape in shapes.items()}
    split = [path for path in shapes if own[path] != shapes[path]]
    return DeviceWeights(
        sum(map(math.prod, own.values())),
        math.prod(own["embed/embedding"]),
        sum(re.fullmatch(SUMMED, path) is not None for path in split),
        ("embed/embedding" if config.tie_embeddings else "head/kernel") in split,
    )


def model_links(config: ModelConfig, shards: Shards | None, rows: int, item: int) -> Links:
    """Return the bytes that a device sends for the model's products in one step.

    Args:
        config: the model.
        shards: the mesh, or None.
        rows: number of query rows of the step, of all requests.
        item: bytes of a number of the residual stream.
    """
    if shards is None or shards.tp == 1:
        return {}
    weights = device_weights(config, shards)
    logits = gathered(4 * rows * config.vocab_size, shards.tp) if weights.splits_logits else 0
    sums = weights.sums * reduced(rows * config.model_dim * item, shards.tp)
    return {"residual stream": (sums, 0), "logits": (logits, 0)}


def share_of(config: ModelConfig, count: int) -> ModelConfig:
    """Return the config of the part of a model that one of `count` devices of tp computes.

    Heads, MLP and vocabulary are split. The residual stream is not. `count` must divide the KV heads.
    """
    return dataclasses.replace(
        config,
        q_heads=config.q_heads // count,
        kv_heads=config.kv_heads // count,
        ffn_dim=-(-config.ffn_dim // count),
        vocab_size=-(-config.vocab_size // count),
        eos_ids=(),
    )
