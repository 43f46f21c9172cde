"""One model over several GPUs: the part of each device, and the bytes that devices exchange in a step.

A mesh of tp devices serves all requests of a plan together. It splits heads, MLP and vocabulary, and lies inside a
host.

The bytes over links are those that one device sends, as a ring exchanges them (`policies.base`):

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
from jshadow.errors import check_integer
from jshadow.models.config import ModelConfig
from jshadow.models.partition import AXES, check_left, sharding_of
from jshadow.models.quantization import check_quantize, stored
from jshadow.models.transformer import abstract_weights
from jshadow.policies.base import Links, gathered, reduced

# Split weights whose products are summed over tp
_SUMMED = r"embed/embedding|layer_\d+/((attention|recurrent)/o|mlp/((experts|shared)/)?down)/kernel"


@functools.lru_cache(maxsize=256)
def mesh_shards(tp: int = 1, left: str = "split") -> Shards | None:
    """Return how states are split over a mesh of devices that need not exist, or None for one device.

    Args:
        tp: number of devices over which heads, MLP and vocabulary are split.
        left: where the left rows of ShadowKV's key code lie, as in `load`.

    Raises:
        ConfigError: tp is not an integer of at least 1, or left is unknown.
    """
    check_integer("tp", tp, least=1)
    check_left(left)
    return Shards(AbstractMesh((1, tp), AXES), left) if tp > 1 else None


class _DeviceWeights(NamedTuple):
    """The weights of one device of a mesh.

    Attributes:
        numbers: how many numbers they have.
        embedding: how many of them the embedding has.
        experts: how many of them the experts of all layers have.
        bytes: the bytes of all of them.
        expert_bytes: those of the experts of all layers.
        sums: number of products of a step that are summed over tp.
        splits_logits: whether each device of tp computes some of the logits.
    """

    numbers: int
    embedding: int
    experts: int
    bytes: int
    expert_bytes: int
    sums: int
    splits_logits: bool


@functools.lru_cache(maxsize=64)
def device_weights(
    config: ModelConfig, shards: Shards | None, item: int = 2, quantize: str | None = None
) -> _DeviceWeights:
    """Return the weights that a device holds. They are split as `models.partition.sharding_of` says.

    Args:
        item: bytes of a number that is not quantized.
        quantize: as in `jshadow.load`.

    Raises:
        ConfigError: `quantize` is unknown, or its codes cannot be packed or split.
    """
    check_quantize(quantize)
    weights = traverse_util.flatten_dict(abstract_weights(config), sep="/")
    shapes = {path: leaf.shape for path, leaf in weights.items()}

    def part(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if shards is None else sharding_of(shards.mesh, path, shape).shard_shape(shape)

    own = {path: part(path, shape) for path, shape in shapes.items()}
    split = [path for path in shapes if own[path] != shapes[path]]
    sizes = {
        path: math.prod(part(path, shape)) * (item if dtype is None else dtype.itemsize)
        for path, (shape, dtype) in stored(shapes, quantize).items()
    }
    return _DeviceWeights(
        sum(map(math.prod, own.values())),
        math.prod(own["embed/embedding"]),
        sum(math.prod(shape) for path, shape in own.items() if "/experts/" in path),
        sum(sizes.values()),
        sum(size for path, size in sizes.items() if "/experts/" in path),
        sum(re.fullmatch(_SUMMED, path) is not None for path in split),
        ("embed/embedding" if config.tie_embeddings else "head/kernel") in split,
    )


def model_links(config: ModelConfig, shards: Shards | None, rows: int, item: int) -> Links:
    """Return the bytes that a device sends for the model's products in one step.

    Args:
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
    experts = config.experts
    if experts is not None:
        widths = {name: -(-getattr(experts, name) // count) for name in ("width", "shared_width")}
        experts = dataclasses.replace(experts, **widths)
    near, recurrent = config.sliding_heads, config.recurrent
    if recurrent is not None:
        heads = {name: getattr(recurrent, name) // count for name in ("key_heads", "value_heads")}
        recurrent = dataclasses.replace(recurrent, **heads)
    return dataclasses.replace(
        config,
        sliding_heads=near and (near[0] // count, near[1]),
        q_heads=config.q_heads // count,
        kv_heads=config.kv_heads // count,
        ffn_dim=-(-config.ffn_dim // count),
        experts=experts,
        recurrent=recurrent,
        vocab_size=-(-config.vocab_size // count),
        eos_ids=(),
    )
