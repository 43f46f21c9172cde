"""One model over several GPUs: the part of each device, and the bytes that devices exchange in a step.

A mesh of tp devices serves all requests of a plan together. It splits heads, MLP and vocabulary, and lies inside a
host.

The bytes over links are those that one device sends, as a ring exchanges them (`policies.links`):

    per layer, [B, T, D] in the weights' dtype   2 all-reduces, and one more for the embedding
    logits, float32 [B, T, V]                    an all-gather
    selected left rows (left="split")            a reduce-scatter of [B, h_kv, k, c * w], and the gather of the ids
"""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from flax import traverse_util
from jax.sharding import AbstractMesh

from jshadow.cache.spec import Shards
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.partition import AXES, check_left, sharding_of
from jshadow.models.transformer import abstract_weights
from jshadow.policies.links import Links, gathered, reduced

SUMMED = r"embed/embedding|layer_\d+/(attention/o|mlp/down)/kernel"  # split weights whose products are summed over tp


@dataclasses.dataclass(frozen=True)
class MeshSizes:
    """The devices that share one model.

    Attributes:
        tp: number of parts of the heads.
        left: where the left rows of ShadowKV's key code lie, as in `load`.
    """

    tp: int = 1
    left: str = "split"

    @property
    def shards(self) -> Shards | None:
        """How the arrays of a state are split, or None for one device."""
        return shards_of_sizes(self.tp, self.left) if self.tp > 1 else None

    def check(self, config: ModelConfig) -> None:
        """Raise ConfigError if a size is out of range, or if tp does not divide the model's KV heads."""
        if isinstance(self.tp, bool) or not isinstance(self.tp, int) or self.tp < 1:
            raise ConfigError(f"tp must be an integer of at least 1, got {self.tp!r}")
        check_left(self.left)
        if config.kv_heads % self.tp:
            raise ConfigError(f"tp must divide the {config.kv_heads} KV heads, got tp={self.tp}")


ONE_GPU = MeshSizes()


@functools.lru_cache(maxsize=256)
def shards_of_sizes(tp: int, left: str) -> Shards:
    """Return the shards of a mesh of devices that need not exist."""
    return Shards(AbstractMesh((1, tp), AXES), left)


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
    return {"residual stream": sums, "logits": logits}


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
