"""Writing Hugging Face directories: config.json from a ModelConfig, and the tensors in one file or in shards."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from jshadow.models.config import ACTIVATIONS, ModelConfig
from jshadow.models.registry import FAMILIES
from jshadow.weights.convert.files import write_json
from jshadow.weights.convert.huggingface import INDEX, WEIGHTS
from jshadow.weights.convert.safetensors_file import check_dtype, write_tensors
from jshadow.weights.convert.tensors import Shape, placements
from jshadow.weights.digest import host_array

SHARD_BYTES = 5 * 10**9  # maximum bytes of a file, as in transformers
NAMES_OF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json that is read back as `config`."""
    hf = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_dim,
        "intermediate_size": config.ffn_dim,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.rope.original_context if config.rope.kind == "dynamic" else config.context,
        "hidden_act": NAMES_OF_ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "eos_token_id": list(config.eos_ids) or None,
        "bos_token_id": None,  # always written, because a family's default may lie outside the vocabulary
        "pad_token_id": None,
        "torch_dtype": dtype,  # the older name, which every reader knows; the RoPE keys also have older names
        **config.rope.to_hf(),
    }
    family = FAMILIES[config.model_type]
    return hf | {"architectures": [family.architecture]} | family.write(config)


def tensors_of(weights: dict[str, Any], config: ModelConfig) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    """Map a weight tree to Hugging Face's tensors.

    Returns:
        Tensor name -> shape, and a function that builds the tensor of a name.
    """
    flat = traverse_util.flatten_dict(weights, sep="/")
    weight_shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    tensors = placements(FAMILIES[config.model_type], weight_shapes)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return tensor.to_tensor({path: host_array(flat[path]) for path in tensor.paths}, config)

    return {name: tensor.tensor_shape(weight_shapes) for name, tensor in tensors.items()}, read


def write_shards(
    directory: Path,
    shapes: Mapping[str, Shape],
    dtype: str,
    read: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write tensors in the format of Hugging Face: `model.safetensors`, or numbered shards and an index.

    Args:
        directory: directory to write to.
        shapes: tensor name -> shape, in the order of the files.
        dtype: dtype of every written tensor.
        read: returns the tensor of a name, in any float dtype. It is called once for each tensor.
        shard_bytes: maximum bytes of a file. A single larger tensor gets one file.
        progress: called with (number of tensors written, number of all tensors).

    Raises:
        CheckpointError: tensors have NaN or Inf. The message lists all such tensors of one file.
    """
    item, shards = check_dtype(dtype).itemsize, [dict[str, Shape]()]
    shard_size = 0
    for name, shape in shapes.items():
        size = item * math.prod(shape)
        if shards[-1] and shard_size + size > shard_bytes:
            shards.append({})
            shard_size = 0
        shards[-1][name] = shape
        shard_size += size
    done, count = 0, len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def advance(_: int, __: int) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, len(shapes))

    for name, shard in zip(names, shards, strict=True):
        write_tensors(directory / name, shard, dtype, read, advance)
    if count > 1:
        table = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = item * sum(map(math.prod, shapes.values()))
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": table})
