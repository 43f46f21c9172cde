"""A model in memory (weights, config and tokenizer): loading it, saving it, and random weights for tests."""

import dataclasses
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax import Array
from jax.sharding import Mesh

from jshadow.errors import CheckpointError, ConfigError, check_integer, check_one_of
from jshadow.models.config import ModelConfig
from jshadow.models.layers import dtype_of
from jshadow.models.partition import check_heads, check_left, check_mesh, sharding_of
from jshadow.models.quantization import check_quantize, kind_of_kernel, quantize_kernel, stored
from jshadow.models.registry import FAMILIES
from jshadow.ops.projections import KINDS as CODES
from jshadow.weights.convert.files import (
    KINDS,
    ORBAX_WEIGHTS,
    check_manifest,
    check_path,
    kind_of,
    quiet_transformers,
    read_json,
    readable,
    staged,
    write_json,
    write_manifest,
)
from jshadow.weights.convert.gguf import open_gguf
from jshadow.weights.convert.huggingface import (
    CONFIG,
    GENERATION,
    Put,
    config_to_hf,
    flat_abstract,
    locate,
    open_tensors,
    plan,
    read_config,
    read_source,
    read_weights,
    tensors_of,
    untied,
    with_ends,
    write_shards,
)
from jshadow.weights.convert.orbax import read_orbax, write_orbax
from jshadow.weights.convert.safetensors_file import cast, check_dtype
from jshadow.weights.digest import host_array, tokenizer_digest, tree_digest
from jshadow.weights.templates import end_tokens

# A directory with one of these files has a tokenizer. A tokenizer_config.json without one of them is not enough.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclasses.dataclass(frozen=True, eq=False)
class Params:
    """A loaded model. It is not a pytree. Jitted functions take `weights` and the static `config` instead.

    Attributes:
        weights: nested dict of arrays with the structure of `models.transformer.abstract_weights(config)`. All have one
            dtype, except that a quantized `kernel` has its factors beside it (`jshadow.ops.projections`).
        config: sizes and switches. Its end tokens are those that config.json, generation_config.json, the tokenizer and
            its chat template name. Two loads of one checkpoint have equal configs.
        tokenizer: a transformers tokenizer, or None if the checkpoint has none. Without it prompts must be token ids.
        left: on a mesh, where the left rows of ShadowKV's key code lie; see `load`.
    """

    weights: dict[str, Any]
    config: ModelConfig
    tokenizer: Any = None
    left: str = "split"

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weights that are not quantized."""
        return np.dtype(self.weights["embed"]["embedding"].dtype)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the names, dtypes, shapes and bytes of all weights. It is computed on first use, leaf by leaf."""
        return tree_digest(self.weights)

    @functools.cached_property
    def tokenizer_digest(self) -> str | None:
        """SHA-256 of the tokenizer and its chat template, or None if there is no tokenizer."""
        return tokenizer_digest(self.tokenizer)

    def __repr__(self) -> str:
        tokenizer = type(self.tokenizer).__name__ if self.tokenizer is not None else None
        return f"Params(weights={self.dtype.name}, config={self.config}, tokenizer={tokenizer})"


def load(
    path_or_hub_id: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    left: str = "split",
    verify: bool = True,
) -> Params:
    """Load a checkpoint: a Hugging Face directory, a directory that `convert` or `save` wrote, or a GGUF file.

    Quantized weights in the formats of docs/models.md are decoded while they are read.

    Args:
        path_or_hub_id: a local directory with config.json, weights (safetensors files or an orbax checkpoint) and
            usually tokenizer files. Or a file whose name ends in ".gguf". Or a hub id "org/name", if there is no such
            directory. Only JSON, safetensors and tokenizer files are downloaded.
        dtype: "float32", "bfloat16" or "float16". Tensors are cast while they are read.
        quantize: "int8", "fp8" (E4M3) or "int4" stores the projections of all layers in that type. Each output has a
            float32 factor. int4 has a factor and a smallest value for each group of 32 inputs; see docs/models.md.
        mesh: devices over which the model and its states are split. Its axes are named `data` (rows of a batch) and
            `tp` (heads, MLP and vocabulary); see docs/several_devices.md. From an orbax checkpoint, each device reads
            only its part. None means the default device.
        left: with a mesh, where the left rows of ShadowKV's key code lie, which serve all heads. "split": by chunk over
            `tp`, so that a step sends the selected rows over links. "everywhere": whole on each device of `tp`.
        verify: whether to compare every file with the manifest, if there is one.

    Returns:
        Params whose weights are all present, finite, and of the shapes that the config defines.

    Raises:
        CheckpointError: weights are missing, damaged or pickled, files differ from their manifest, or tensors do not
            match the config. The message lists all such tensors.
        ConfigError: dtype, quantize, left or model_type is unknown, the weights are quantized in a way that is not
            read, the model needs remote code, a value of the config is out of range, the axes of the mesh do not fit,
            or int4 cannot pack a kernel or split its groups.
    """
    target = check_dtype(dtype)
    check_quantize(quantize)
    mesh = check_mesh(mesh)
    check_left(left)
    check_path("path_or_hub_id", path_or_hub_id)
    directory = locate(path_or_hub_id)
    if directory.suffix == ".gguf":
        return _load_gguf(directory, _placing(target, quantize, mesh), quantize, mesh, left)
    return _load_directory(directory, target, quantize, mesh, left, verify)


def _load_gguf(file: Path, put: Put, quantize: str | None, mesh: Mesh | None, left: str) -> Params:
    """Load a GGUF file. The arguments are those of `load`, checked."""
    source = open_gguf(file)
    check_heads(mesh, source.config)
    check_records(quantize, source.config, mesh)
    with tempfile.TemporaryDirectory() as folder:
        source.accompany(Path(folder))
        tokenizer = load_tokenizer(Path(folder))
    return Params(read_source(source, put), _ended(source.config, tokenizer), tokenizer, left)


def _load_directory(
    directory: Path, target: np.dtype[Any], quantize: str | None, mesh: Mesh | None, left: str, verify: bool
) -> Params:
    """Load a directory. The arguments are those of `load`, checked."""
    put = _placing(target, quantize, mesh)
    with readable(directory):
        hf, family, config = read_config(directory)
        check_heads(mesh, config)
        tokenizer = load_tokenizer(directory)  # before the weights, so that its errors come early
        config = _ended(config, tokenizer)
        orbax = kind_of(directory) == "orbax"
        tensors = None if orbax else open_tensors(directory, hf)
        sound = tensors is None
        if tensors is not None:
            if untied(tensors, config):
                config = dataclasses.replace(config, tie_embeddings=False)
            # before the manifest, because its errors say more than that a file changed
            sound = not plan(tensors, family, config)[1]
        if verify:
            check_manifest(directory)
        if sound:  # the config of a huge model, which the files do not have, is not built
            check_records(quantize, config, mesh)
    if tensors is not None:
        wanted = target if quantize is None else np.dtype(np.float32)
        return Params(read_weights(tensors, family, config, put, wanted), config, tokenizer, left)
    places = (lambda path, shape: sharding_of(mesh, path, shape)) if mesh is not None else None
    weights = read_orbax(directory, config, target, None if quantize is None else put, places)
    return Params(weights, config, tokenizer, left)


def _ended(config: ModelConfig, tokenizer: Any) -> ModelConfig:
    """Return a config that also has the end tokens of the tokenizer and its chat template."""
    if tokenizer is None:
        return config
    return with_ends(config, (token for token in end_tokens(tokenizer) if token < config.vocab_size))


def _placing(dtype: np.dtype[Any], quantize: str | None, mesh: Mesh | None) -> Put:
    """Return the function that casts a weight, quantizes it if wanted, and puts it onto its devices."""

    def give(path: str, value: np.ndarray) -> Array:
        if mesh is None:
            return jax.device_put(value, may_alias=False)  # jnp.array would compile a program for each shape
        return jax.device_put(value, sharding_of(mesh, path, value.shape))

    def put(path: str, value: np.ndarray) -> tuple[dict[str, Array], str | None]:
        value_cast, problem = cast(value, dtype_of(path, dtype))
        kind = kind_of_kernel(path, value.shape, quantize)
        if kind is None or problem:
            return {path: give(path, value_cast)}, problem
        own = path.removesuffix("kernel")
        return {own + name: give(own + name, part) for name, part in quantize_kernel(kind, value).items()}, None

    return put


def check_records(quantize: str | None, config: ModelConfig, mesh: Mesh | None) -> None:
    """Raise ConfigError if a kernel cannot be quantized, or its codes cannot be split as it is."""
    for path, (shape, _) in stored(flat_abstract(config), quantize).items() if quantize is not None else ():
        if mesh is not None:
            sharding_of(mesh, path, shape)


def spread(params: Params, mesh: Mesh, left: str = "split") -> Params:
    """Return a model with its weights on a mesh, as `load` places them. `mesh` and `left` are as in `load`.

    Raises:
        ConfigError: as in `load`.
    """
    checked = check_mesh(mesh)
    assert checked is not None
    check_heads(checked, params.config)
    check_left(left)
    flat = traverse_util.flatten_dict(params.weights, sep="/")
    placed = {path: jax.device_put(leaf, sharding_of(checked, path, leaf.shape)) for path, leaf in flat.items()}
    return dataclasses.replace(params, weights=traverse_util.unflatten_dict(placed, sep="/"), left=left)


def load_tokenizer(directory: Path) -> Any:
    """Load the transformers tokenizer of a checkpoint directory, or return None if it has no tokenizer files.

    Raises:
        CheckpointError: the files do not form a valid tokenizer, or it needs remote code.
    """
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    settings = directory / "tokenizer_config.json"
    if settings.exists() and (code := read_json(settings).get("auto_map")):
        raise CheckpointError(f"{settings}: auto_map must be absent (remote code is never run), got {code!r}")
    with quiet_transformers() as transformers:
        try:
            return transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # transformers and its Rust parts raise many unrelated types on damaged files
            raise CheckpointError(f"{directory}: the tokenizer files do not load: {error}") from error


def save(params: Params, directory: str | os.PathLike[str], *, format: str = "huggingface") -> None:
    """Write a directory that `load` can read. With the format "huggingface", transformers can also read it.

    Args:
        params: a model in float32, bfloat16 or float16. The files have its dtype, and the bias of a router is float32.
            Its weights may be sharded.
        directory: directory to create. It must not exist. It is written completely or not at all.
        format: "huggingface" (safetensors), or "orbax" (with a manifest).

    Raises:
        CheckpointError: `directory` exists or cannot be written, or a weight is NaN or Inf.
        ConfigError: the dtype of the weights is not one of the three, the weights are quantized, or the model_type of
            the config or the format is unknown.
    """
    config, dtype = params.config, params.dtype.name
    check_dtype(dtype)
    check_one_of("format", format, KINDS)
    check_one_of("config.model_type", config.model_type, sorted(FAMILIES))
    held = {leaf.dtype for leaf in jax.tree.leaves(params.weights)}
    if codes := [kind for kind, code in CODES.items() if code in held]:
        raise ConfigError(f"params must hold plain weights, got {codes[-1]}: save what they were loaded from")
    with staged(check_path("directory", directory)) as partial:
        named = {name: getattr(params.tokenizer, name, None) for name in ("bos_token_id", "pad_token_id")}
        special = {name: token for name, token in named.items() if token is not None}
        write_json(partial / CONFIG, config_to_hf(config, dtype) | special)
        write_json(partial / GENERATION, {"eos_token_id": list(config.eos_ids)} if config.eos_ids else {})
        if params.tokenizer is not None:
            params.tokenizer.save_pretrained(partial)
        if format == "huggingface":
            write_shards(partial, *tensors_of(params.weights, config, dtype))
        else:
            flat = traverse_util.flatten_dict(params.weights, sep="/")
            shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
            write_orbax(partial / ORBAX_WEIGHTS, shapes, params.dtype, lambda path: host_array(flat[path]))
            write_manifest(partial, format)


def init_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Create a model with random weights, for tests and for timing without a checkpoint.

    The same seed gives the same weights. Kernels are normal with standard deviation 1 / sqrt(fan_in), and the embedding
    with 1 / sqrt(D). So queries, keys and logits have about unit variance, and attention is neither uniform nor
    one-hot. Biases are normal with standard deviation 0.02, because tests would not notice a missing zero bias. Norm
    scales are one.

    Args:
        config: sizes and switches of the model.
        seed: integer of at least 0.
        dtype: "float32", "bfloat16" or "float16".

    Raises:
        ConfigError: the dtype is unknown, or the seed is not an integer of at least 0.
    """
    target = check_dtype(dtype)
    check_integer("seed", seed, least=0)
    flat = {}
    for index, (path, shape) in enumerate(sorted(flat_abstract(config).items())):
        values = _initial(path, shape, np.random.default_rng((seed, index)))
        flat[path] = jax.device_put(values.astype(dtype_of(path, target)), may_alias=False)
    return Params(traverse_util.unflatten_dict(flat, sep="/"), config)


def _initial(path: str, shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    kind = path.rsplit("/", 1)[-1]
    if kind == "scale":
        return np.ones(shape, np.float32)
    deviation = {"bias": 0.02, "correction": 0.02, "embedding": shape[-1] ** -0.5}.get(
        kind, shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    )
    return generator.standard_normal(shape, np.float32) * np.float32(deviation)
