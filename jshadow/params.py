"""A model in memory: weights, config and tokenizer; loading, saving, and random weights for tests."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from jshadow.config import ModelConfig
from jshadow.convert.files import read_json, staged, write_json
from jshadow.convert.huggingface import CONFIG, GENERATION, WEIGHTS, flat_abstract, locate, read_config, read_weights
from jshadow.convert.huggingface_write import config_to_hf, write_weights
from jshadow.convert.quiet import quiet_transformers
from jshadow.convert.safetensors_file import check_dtype
from jshadow.digest import tokenizer_digest, tree_digest
from jshadow.errors import CheckpointError, ConfigError
from jshadow.models.registry import FAMILIES

# Any of these makes a tokenizer; tokenizer_config.json alone does not.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Params:
    """A loaded model. Not a pytree: jitted code takes `weights` and the static `config`, never this.

    Attributes:
        weights: nested dict of arrays, the tree of `models.transformer.abstract_weights(config)`, one dtype.
        config: sizes and switches; equal for two loads of one checkpoint.
        tokenizer: a transformers tokenizer, or None where the checkpoint has none (token ids still work).
    """

    weights: dict[str, Any]
    config: ModelConfig
    tokenizer: Any = None

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weights."""
        return np.dtype(self.weights["embed"]["embedding"].dtype)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over the names, dtype, shapes and bytes of all weights; read leaf by leaf on first use."""
        return tree_digest(self.weights)

    @functools.cached_property
    def tokenizer_digest(self) -> str | None:
        """SHA-256 of the tokenizer and its chat template; None without one."""
        return tokenizer_digest(self.tokenizer)

    def __repr__(self) -> str:
        tokenizer = type(self.tokenizer).__name__ if self.tokenizer is not None else None
        return f"Params(weights={self.dtype.name}, config={self.config}, tokenizer={tokenizer})"


def load(path_or_hub_id: str | os.PathLike[str], dtype: str = "bfloat16") -> Params:
    """Load a Hugging Face checkpoint.

    Args:
        path_or_hub_id: a local directory (config.json, one or many safetensors, tokenizer files if any); where there
            is none of that name, a hub id "org/name", of which only JSON, safetensors and tokenizer files are taken.
        dtype: "float32", "bfloat16" or "float16"; tensors are cast while they are read.

    Returns:
        Params with every weight checked: present once, shaped as the config says, finite.

    Raises:
        CheckpointError: missing, damaged, pickled or GGUF weights, or tensors that do not fit (all in one error).
        ConfigError: an unknown dtype or model_type, a quantised or remote-code model, a config out of range.
    """
    check_dtype(dtype)
    if not isinstance(path_or_hub_id, str | os.PathLike):
        raise ConfigError(f"path_or_hub_id must be a string or a path, got {path_or_hub_id!r}")
    directory = locate(path_or_hub_id)
    _, family, config = read_config(directory)
    tokenizer = load_tokenizer(directory)  # before the weights: it fails sooner
    return Params(read_weights(directory, family, config, dtype), config, tokenizer)


def load_tokenizer(directory: Path) -> Any:
    """The transformers tokenizer of a checkpoint directory, or None where it has no tokenizer files.

    Raises:
        CheckpointError: the files do not make a tokenizer, or it would need remote code.
    """
    if not any((directory / name).exists() for name in TOKENIZER_FILES):
        return None
    settings = directory / "tokenizer_config.json"
    if settings.exists() and (code := read_json(settings).get("auto_map")):
        raise CheckpointError(f"{settings}: auto_map must be absent (remote code is never run), got {code!r}")
    with quiet_transformers() as transformers:
        try:
            return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers and its Rust parts raise many unrelated types on damaged files
            raise CheckpointError(f"{directory}: the tokenizer files do not load: {error}") from error


def save(params: Params, directory: str | os.PathLike[str]) -> None:
    """Write an ordinary Hugging Face directory that `load` and transformers read.

    Args:
        params: any dtype of the three; the file keeps it.
        directory: must not exist; it appears complete or not at all.

    Raises:
        CheckpointError: `directory` exists or cannot be written, or a weight is NaN or Inf.
        ConfigError: the weights' dtype is none of the three, or the config's family is unknown.
    """
    config, dtype = params.config, params.dtype.name
    check_dtype(dtype)
    if config.model_type not in FAMILIES:
        raise ConfigError(f"config.model_type must be one of {sorted(FAMILIES)}, got {config.model_type!r}")
    with staged(Path(directory)) as partial:
        special = {name: getattr(params.tokenizer, name, None) for name in ("bos_token_id", "pad_token_id")}
        write_json(partial / CONFIG, config_to_hf(config, dtype) | special)
        write_json(partial / GENERATION, {"eos_token_id": list(config.eos_ids)} if config.eos_ids else {})
        if params.tokenizer is not None:
            params.tokenizer.save_pretrained(partial)
        write_weights(partial / WEIGHTS, params.weights, config, dtype)


def init_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Random weights, for tests and for timing without a checkpoint; the same seed gives the same weights.

    Kernels are normal with deviation 1 / sqrt(fan_in), the embedding with 1 / sqrt(D), so that queries, keys and
    logits have about unit variance and attention is neither flat nor one-hot. Biases are normal with 0.02 (a zero
    bias would hide a forgotten one); norms are one.

    Args:
        config: sizes.
        seed: integer of at least 0.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ConfigError: an unknown dtype or a bad seed.
    """
    target = check_dtype(dtype)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be an integer of at least 0, got {seed!r}")
    flat = {}
    for index, (path, shape) in enumerate(sorted(flat_abstract(config).items())):
        values = _initial(path, shape, np.random.default_rng((seed, index)))
        flat[path] = jnp.asarray(values.astype(target))
    return Params(traverse_util.unflatten_dict(flat, sep="/"), config)


def _initial(path: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    kind = path.rsplit("/", 1)[-1]
    if kind == "scale":
        return np.ones(shape, np.float32)
    deviation = {"bias": 0.02, "embedding": shape[-1] ** -0.5}.get(kind, shape[0] ** -0.5)
    return generator.standard_normal(shape, np.float32) * np.float32(deviation)
