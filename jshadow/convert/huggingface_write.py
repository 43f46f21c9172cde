"""Writing Hugging Face directories: from a weight tree, or from another directory in a new dtype."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from jshadow.config import ACTIVATIONS, ModelConfig
from jshadow.convert.files import staged, write_json
from jshadow.convert.huggingface import CONFIG, WEIGHTS, plan, read_config
from jshadow.convert.safetensors_file import check_dtype, raise_all, write_tensors
from jshadow.convert.tensors import placements
from jshadow.models.registry import FAMILIES

# What a directory may carry beside config and weights; code (*.py) is never copied.
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
              "special_tokens_map.json", "added_tokens.json", "merges.txt", "*.jinja")  # fmt: skip
NAMES_OF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The config.json that reads back as `config`."""
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
        "bos_token_id": None,  # said, for else a family's default stands, which may lie outside the vocabulary
        "pad_token_id": None,
        "torch_dtype": dtype,  # the older spelling, as of the RoPE keys: everything reads it
        **config.rope.to_hf(),
    }
    family = FAMILIES[config.model_type]
    return hf | {"architectures": [family.architecture]} | family.write(config)


def write_weights(path: Path, weights: dict[str, Any], config: ModelConfig, dtype: str) -> None:
    """Write a weight tree under its Hugging Face tensor names. Raises CheckpointError on NaN or Inf."""
    flat = traverse_util.flatten_dict(weights, sep="/")
    wanted = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    tensors = placements(FAMILIES[config.model_type], wanted)
    shapes = {name: tensor.tensor_shape(wanted) for name, tensor in tensors.items()}

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return tensor.to_tensor({path: np.asarray(flat[path]) for path in tensor.paths}, config)

    write_tensors(path, shapes, dtype, read)


def rewrite(source: Path, target: Path, dtype: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Copy a checkpoint directory into a fresh one: one safetensors file in `dtype`, checked on the way.

    Args:
        source: a Hugging Face directory.
        target: directory to make.
        dtype: dtype of the new weights.
        progress: called with (tensors written, tensors in all).

    Raises:
        CheckpointError, ConfigError: as `read_weights`; nothing is left at `target`.
    """
    check_dtype(dtype)
    hf, family, config = read_config(source)
    order, problems = plan(source, family, config)
    raise_all(str(source), problems)
    files = {placement.name: file for file, placement in order}
    shapes = {name: file.shapes[name] for name, file in files.items()}
    with staged(target) as partial:
        hf.pop("dtype", None)  # the newer spelling of torch_dtype
        write_json(partial / CONFIG, hf | {"torch_dtype": dtype})
        for path in sorted({path for pattern in SIDE_FILES for path in source.glob(pattern) if path.is_file()}):
            shutil.copyfile(path, partial / path.name)
        write_tensors(partial / WEIGHTS, shapes, dtype, lambda name: files[name].read(name), progress)
