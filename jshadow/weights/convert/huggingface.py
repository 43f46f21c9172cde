"""Hugging Face directories: finding them, reading their config, and mapping tensors to weights by a family's rules.

This module has no code for single models. The family's table says which tensor becomes which weight. The config says
which shape each weight has (`abstract_weights`). All tensors that do not match are reported in one error."""

import dataclasses
import functools
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from jshadow.errors import CheckpointError, ConfigError, JshadowError
from jshadow.models.config import ACTIVATIONS, ModelConfig, token_ids
from jshadow.models.family import ModelFamily
from jshadow.models.layers import dtype_of
from jshadow.models.registry import FAMILIES, family_of, text_config
from jshadow.models.transformer import abstract_weights
from jshadow.weights.convert.files import check_path, kind_of, read_json, readable, write_json
from jshadow.weights.convert.quantized import QUANTIZATION, scheme_of
from jshadow.weights.convert.safetensors_file import (
    DTYPES,
    Layout,
    TensorFile,
    UnfitTensor,
    not_finite,
    raise_all,
    write_tensors,
)
from jshadow.weights.convert.source import Placement, Shape, Source, Stacks, placements, text_name
from jshadow.weights.convert.tensors import Tensors
from jshadow.weights.digest import host_array

_LOG = logging.getLogger(__name__)
CONFIG, GENERATION = "config.json", "generation_config.json"
_MODELOPT = "hf_quant_config.json"  # where Model Optimizer writes how the weights are quantized
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# The files that a hub download takes. It never takes *.bin, because unpickling runs code. Subfolders are ignored,
# because they hold other formats of the same weights.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt")
_HUB_IGNORED = ("*/*", "consolidated*")
_LARGEST_SIZE = 2**31 - 1
# Files that are copied along with config and weights.
_SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "*.jinja",
)
Put = Callable[[str, np.ndarray], tuple[dict[str, Any], str | None]]

HEAD = "lm_head.weight"
_BASE = "model."  # prefix of all names but the head's, unless the checkpoint was saved from the base class
# Tensors of some checkpoints that are not weights of the model: buffers that the config implies, and layers of
# multi-token prediction, which propose tokens and change none. Some models count such layers on behind the last one.
# They are known by the names of the parts that no other layer has.
_IGNORED = r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(model\.)?mtp(_layers)?\..+"
# The same for images and sounds.
_NOT_TEXT = r"(model\.)?(visual|vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..+"
_DRAFT_LAYER = r"((?:model\.)?layers\.(\d{1,9})\.)(eh_proj|enorm|hnorm|shared_head|mtp\w*|nextn\w*)\..+"


def locate(source: str | os.PathLike[str]) -> Path:
    """Return the directory of a checkpoint, or its GGUF file. A hub id ("org/name") that is not a local path is
    downloaded first.

    Raises:
        CheckpointError: the directory does not exist, it is another file, or the download failed.
    """
    path = check_path("checkpoint", source)
    if path.suffix == ".gguf":
        return path
    with readable(path):
        is_folder, there = path.is_dir(), path.exists()
    if is_folder:
        return path
    if there:
        raise CheckpointError(f"checkpoint {path} must be a directory with {CONFIG} and *.safetensors, got a file")
    # "checkpoints/name" also has the form of a hub id. If its first part is a local directory, it is a path.
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(source)) and not path.parent.is_dir():
        return _download(str(source))
    raise CheckpointError(f"checkpoint directory {path} does not exist (and a hub id has the form org/name)")


def _download(hub_id: str) -> Path:
    import huggingface_hub  # imported here: it is slow, and a local checkpoint does not need it

    try:
        found = huggingface_hub.snapshot_download(
            hub_id, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_IGNORED)
        )
    except Exception as error:  # the hub client and its transport raise many unrelated types
        raise CheckpointError(
            f"checkpoint {hub_id!r} is not a local directory and could not be downloaded as a hub id: {error}"
        ) from error
    return Path(found)


def read_config(directory: Path) -> tuple[dict[str, Any], ModelFamily, ModelConfig]:
    """Read config.json. The end tokens are those of generation_config.json and of config.json.

    Returns:
        The parsed config.json, the model family and the ModelConfig. The ModelConfig does not tell how the weights are
        quantized. A `quantization_config` in the parsed file does.

    Raises:
        CheckpointError: a file is missing or does not parse.
        ConfigError: the model_type is unknown, the weights are quantized in a way that is not read, the model needs
            remote code, or a value is out of range or of the wrong type.
    """
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint directory {directory} does not exist")
    hf, family, config = read_config_file(directory / CONFIG)
    if (directory / _MODELOPT).exists() and "quant_algo" not in (hf.get(QUANTIZATION) or {}):
        hf = hf | {QUANTIZATION: {"quant_method": "modelopt"} | _object(directory / _MODELOPT, "quantization")}
        scheme_of(hf)
    if hf.get(QUANTIZATION) is not None and kind_of(directory) == "orbax":
        raise ConfigError(f"config.json {QUANTIZATION} must be absent (orbax weights are plain)")
    if (directory / GENERATION).exists():
        eos = token_ids(read_json(directory / GENERATION).get("eos_token_id"))
        config = with_ends(config, eos, first=True)
    return hf, family, config


def _object(path: Path, key: str) -> dict[str, Any]:
    value = read_json(path).get(key)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key} must be an object, got {value!r:.80}")
    return value


def with_ends(config: ModelConfig, ids: Iterable[int], *, first: bool = False) -> ModelConfig:
    """Return a config with more end tokens, behind those that it has or, with `first`, before them."""
    both = [*ids, *config.eos_ids] if first else [*config.eos_ids, *ids]
    return dataclasses.replace(config, eos_ids=tuple(dict.fromkeys(both)))


def untied(tensors: Tensors, config: ModelConfig) -> bool:
    """Return whether a config says that the head is the embedding, but the files have another head. Warn of it.

    Raises:
        CheckpointError: the files cannot be read.
    """
    if not config.tie_embeddings:
        return False
    found = {text_name(name).removeprefix(_BASE): name for name in tensors.shapes}
    rules = FAMILIES[config.model_type].rules
    names = [name.removeprefix(_BASE) for rule in rules for name in rule.sources("embed/embedding", ())]
    embedding = next((found[name] for name in names if name in found), None)
    if HEAD not in found or embedding is None or tensors.same(found[HEAD], embedding):
        return False
    _LOG.warning(
        "%s: tie_word_embeddings is true, but %s is not the embedding; it is used as the head", tensors.directory, HEAD
    )
    return True


def read_config_file(path: Path) -> tuple[dict[str, Any], ModelFamily, ModelConfig]:
    """Read a config.json without generation_config.json. Results and errors are those of `read_config`."""
    hf = read_json(path)
    try:
        hf = text_config(hf)
        family = family_of(hf)
        scheme_of(hf)
        config = family.config_from_hf({key: value for key, value in hf.items() if key != QUANTIZATION})
    except JshadowError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path} has a value of the wrong type: {error}") from error
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and value > _LARGEST_SIZE:
            raise ConfigError(f"config.{field.name} must be at most {_LARGEST_SIZE}, got {value}")
    return hf, family, config


def open_tensors(directory: Path, hf: Mapping[str, Any]) -> Tensors:
    """Open the safetensors files of a directory. `hf` is its parsed config.json, from `read_config`.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    return Tensors(directory, _open_files(directory), scheme_of(hf))


def _open_files(directory: Path) -> list[TensorFile]:
    """Open the safetensors files of a directory: model.safetensors, or every shard of the index."""
    if (directory / WEIGHTS).exists():
        return [TensorFile(directory / WEIGHTS)]
    if not (directory / INDEX).exists():
        pickles = sorted(path.name for pattern in _PICKLED for path in directory.glob(pattern))
        loose = sorted(path.name for path in directory.glob("*.safetensors"))
        hint = ""
        if loose:
            hint = f"; {loose[0]} is there, but {INDEX} is not"
        elif pickles:
            hint = f"; {', '.join(pickles)} is refused: unpickling runs code, save the model as safetensors"
        raise CheckpointError(f"{directory} must hold {WEIGHTS} or {INDEX}{hint}")
    table = read_json(directory / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise CheckpointError(f"{directory / INDEX}: weight_map must map tensor names to file names")
    shards = sorted(set(table.values()))
    foreign = [name for name in shards if Path(name).name != name or not name.endswith(".safetensors")]
    if foreign:
        raise CheckpointError(f"{directory / INDEX}: weight_map must name *.safetensors beside it, got {foreign[0]!r}")
    missing = [name for name in shards if not (directory / name).exists()]
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} of {len(shards)} shards: {', '.join(missing)}")
    return [TensorFile(directory / name) for name in shards]


def flat_abstract(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return a mapping from weight path ("layer_0/mlp/up/kernel") to shape, computed from the config only."""
    try:
        tree = abstract_weights(config)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"config.json describes a model that cannot be built: {error}") from error
    return {path: tuple(leaf.shape) for path, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def place(
    shapes: Mapping[str, Shape | None],
    family: ModelFamily,
    config: ModelConfig,
    is_spare: Callable[[str], bool] = lambda name: False,
) -> tuple[dict[str, Placement], list[str]]:
    """Match the tensors of a checkpoint with the weights of a model.

    Args:
        shapes: tensor name -> shape in the checkpoint. None is not compared.
        family: the family, which has the rules.
        config: the config, which defines the weights and their shapes.
        is_spare: returns whether the model may lack the tensor with this name.

    Returns:
        Placements by the tensor's name in the checkpoint, and one line for every tensor that is missing, extra or
        misshaped.
    """
    if config.num_layers > len(shapes):  # checked first, because tracing a billion layers would never end
        return {}, [f"config.json num_hidden_layers is {config.num_layers}, but there are {len(shapes)} tensors"]
    weight_shapes = flat_abstract(config)
    alone = {name: text_name(name) for name in shapes}
    expected = placements(family, weight_shapes, {*alone.values()})
    if not any(name.startswith(_BASE) for name in alone.values()):
        expected = {name.removeprefix(_BASE): placement for name, placement in expected.items()}
    unused = _ignored(alone.values(), config)
    problems: list[str] = []
    for name, shape in shapes.items():
        placement = expected.get(alone[name])
        if placement is None:
            if alone[name] not in unused and not is_spare(name):
                problems.append(f"{name}: extra, this {config.model_type} config has no such weight")
        elif shape is not None and shape != (right := placement.tensor_shape(weight_shapes)):
            paths = ", ".join(placement.paths)
            problems.append(f"{name}: misshaped, expected {list(right)}, got {list(shape)} (it becomes {paths})")
    found = set(alone.values())
    problems += [f"{name}: missing" for name in expected if name not in found]
    return {name: expected[inner] for name, inner in alone.items() if inner in expected}, problems


def _ignored(names: Iterable[str], config: ModelConfig) -> set[str]:
    """Return those of the tensors of a checkpoint that are not weights of the model."""
    drafts = [match for name in names if (match := re.fullmatch(_DRAFT_LAYER, name))]
    beginnings = tuple({match[1] for match in drafts if int(match[2]) >= config.num_layers})
    tied = {HEAD} if config.tie_embeddings else set()  # a copy of the embedding
    return tied | {
        name for name in names if name.startswith(beginnings) or re.fullmatch(f"{_IGNORED}|{_NOT_TEXT}", name)
    }


def plan(tensors: Tensors, family: ModelFamily, config: ModelConfig) -> tuple[list[tuple[str, Placement]], list[str]]:
    """Match the tensors of a checkpoint with the weights.

    Returns:
        One (name in the file, placement) for each matching tensor, in file order, and one line for every other tensor.
    """
    placed, misfits = place(tensors.shapes, family, config, tensors.is_spare)
    wrong = {name: lines for name in placed if (lines := tensors.misfits(name))}
    problems = [*tensors.repeated, *(line for lines in wrong.values() for line in lines)]
    return [pair for pair in placed.items() if pair[0] not in wrong], problems + misfits


def open_huggingface(directory: Path) -> Source:
    """Open a Hugging Face directory for conversion.

    Raises:
        CheckpointError: files are damaged, or tensors are missing, extra or misshaped (all listed in one error).
        ConfigError: see `read_config`.
    """
    hf, family, config = read_config(directory)
    tensors = open_tensors(directory, hf)
    if untied(tensors, config):
        hf, config = hf | {"tie_word_embeddings": False}, dataclasses.replace(config, tie_embeddings=False)
    order, problems = plan(tensors, family, config)
    raise_all(str(directory), problems)
    stored, weight_shapes = {placement.name: name for name, placement in order}, flat_abstract(config)
    return Source(
        {key: value for key, value in hf.items() if key != QUANTIZATION},
        family,
        config,
        {placement.name: placement.tensor_shape(weight_shapes) for _, placement in order},
        lambda name: tensors.read(stored[name]),
        functools.partial(copy_side_files, directory),
    )


def copy_side_files(directory: Path, target: Path) -> None:
    """Copy the tokenizer and generation files of a directory to `target`. Code (*.py) is never copied."""
    for path in sorted({path for pattern in _SIDE_FILES for path in directory.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, target / path.name)


def read_weights(
    tensors: Tensors, family: ModelFamily, config: ModelConfig, put: Put, dtype: np.dtype[Any]
) -> dict[str, Any]:
    """Read all weights, tensor by tensor.

    Args:
        tensors: the checkpoint.
        family: the family from `read_config`.
        config: the config from `read_config`.
        put: called with (weight path, NumPy value). It returns the leaf or leaves to keep, by path, and a text about
            invalid values, or None if all are valid.
        dtype: dtype to which quantized weights are decoded.

    Returns:
        The nested weight tree of `abstract_weights(config)`.

    Raises:
        CheckpointError: files are damaged, or tensors are missing, extra, misshaped or not finite (all listed in one
            error).
    """
    order, problems = plan(tensors, family, config)
    read = functools.partial(tensors.read, dtype=dtype)
    return _filled(str(tensors.directory), order, read, config, put, problems)


def read_source(source: Source, put: Put) -> dict[str, Any]:
    """Read all weights of a source, tensor by tensor. `put`, the result and the errors are those of `read_weights`."""
    placed = placements(source.family, flat_abstract(source.config), source.shapes)
    order = [(name, placed[name]) for name in source.shapes]
    return _filled("the checkpoint", order, source.read, source.config, put, [])


def _filled(
    owner: str,
    order: Iterable[tuple[str, Placement]],
    read: Callable[[str], np.ndarray],
    config: ModelConfig,
    put: Put,
    problems: list[str],
) -> dict[str, Any]:
    sound = not problems
    weight_shapes = flat_abstract(config) if sound else {}
    flat: dict[str, Any] = {}
    stacks = Stacks()
    for name, placement in order:
        try:
            value = read(name)
        except UnfitTensor as error:
            problems.append(str(error))
            continue
        if sound:
            for path, part in placement.to_weights(value, weight_shapes, config).items():
                whole = stacks.whole(path, part, placement.expert, weight_shapes[path])
                if whole is None:
                    continue
                leaves, problem = put(path, whole)
                flat |= leaves
                if problem:
                    problems.append(f"{name}: {problem}")
        elif problem := not_finite(value):  # after a problem, the rest is only checked
            problems.append(f"{name}: {problem}")
    raise_all(owner, problems)
    return dict(traverse_util.unflatten_dict(flat, sep="/"))


SHARD_BYTES = 5 * 10**9  # maximum bytes of a file, as in transformers
_NAMES_OF_ACTIVATIONS = {ours: theirs for theirs, ours in ACTIVATIONS.items()}


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
        "hidden_act": _NAMES_OF_ACTIVATIONS.get(config.activation),
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
    own = family.write(config)
    if "rope_parameters" in own:  # the newer form of the same key
        del hf["rope_scaling"]
    return hf | {"architectures": [family.architecture]} | own


def layout_of(shapes: Mapping[str, Shape], family: ModelFamily, config: ModelConfig, dtype: str) -> Layout:
    """Return the shapes of tensors with the dtypes in which they are written. `dtype` is that of most of them."""
    tensors = placements(family, flat_abstract(config), shapes)
    return {name: (dtype_of(tensors[name].paths[0], DTYPES[dtype]).name, shape) for name, shape in shapes.items()}


def tensors_of(weights: dict[str, Any], config: ModelConfig, dtype: str) -> tuple[Layout, Callable[[str], np.ndarray]]:
    """Map a weight tree of a dtype to Hugging Face's tensors.

    Returns:
        Tensor name -> (dtype, shape), and a function that builds the tensor of a name.
    """
    flat = traverse_util.flatten_dict(weights, sep="/")
    weight_shapes = {path: tuple(leaf.shape) for path, leaf in flat.items()}
    tensors = placements(FAMILIES[config.model_type], weight_shapes)

    on_host = functools.lru_cache(maxsize=2)(lambda path: host_array(flat[path]))  # experts share an array

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return tensor.to_tensor({path: on_host(path) for path in tensor.paths}, config)

    shapes = {name: tensor.tensor_shape(weight_shapes) for name, tensor in tensors.items()}
    return layout_of(shapes, FAMILIES[config.model_type], config, dtype), read


def write_shards(
    directory: Path,
    layout: Layout,
    read: Callable[[str], np.ndarray],
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write tensors in the format of Hugging Face: `model.safetensors`, or numbered shards and an index.

    Args:
        directory: directory to write to.
        layout: tensor name -> (dtype, shape), in the order of the files.
        read: returns the tensor of a name, in any float dtype. It is called once for each tensor.
        shard_bytes: maximum bytes of a file. A single larger tensor gets one file.
        progress: called with (number of tensors written, number of all tensors).

    Raises:
        CheckpointError: tensors have NaN or Inf. The message lists all such tensors of one file.
    """
    shards = [dict[str, tuple[str, Shape]]()]
    shard_size = total = 0
    for name, (dtype, shape) in layout.items():
        size = DTYPES[dtype].itemsize * math.prod(shape)
        if shards[-1] and shard_size + size > shard_bytes:
            shards.append({})
            shard_size = 0
        shards[-1][name] = (dtype, shape)
        shard_size, total = shard_size + size, total + size
    done, count = 0, len(shards)
    names = [WEIGHTS] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    def advance(_: int, __: int) -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, len(layout))

    for name, shard in zip(names, shards, strict=True):
        write_tensors(directory / name, shard, read, advance)
    if count > 1:
        table = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": table})
