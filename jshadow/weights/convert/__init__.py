"""Converts checkpoints tensor by tensor. It reads GGUF, Hugging Face and orbax, and writes Hugging Face and orbax."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jshadow.errors import ConfigError
from jshadow.weights.convert.files import check_path, readable, refuse_existing, staged, write_json
from jshadow.weights.convert.gguf import open_gguf
from jshadow.weights.convert.huggingface import CONFIG, flat_abstract, locate, open_huggingface
from jshadow.weights.convert.huggingface_write import SHARD_BYTES, write_shards
from jshadow.weights.convert.manifest import KINDS, ORBAX_WEIGHTS, check_manifest, kind_of, write_manifest
from jshadow.weights.convert.orbax import open_orbax, write_orbax
from jshadow.weights.convert.safetensors_file import DTYPES, check_dtype
from jshadow.weights.convert.source import Source
from jshadow.weights.convert.tensors import placements

__all__ = ["convert"]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
    *,
    format: str = "huggingface",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the checkpoint `src` as a new directory `dst`, with a manifest of all files.

    Tensors are read, cast and written one after the other, so that memory does not grow with the checkpoint. The
    directory is made under a temporary name beside `dst` and renamed when it is complete and synced. After a failure,
    Ctrl-C included, nothing is left. What a killed process left is removed by the next conversion to the same place.

    Args:
        src: a .gguf file, a directory (Hugging Face, or orbax as made here), or a hub id.
        dst: directory to make; must not exist.
        dtype: of the weights written: "float32", "bfloat16" or "float16".
        progress: called after each tensor with (tensors written, tensors in all).
        format: "huggingface" (safetensors) or "orbax".
        shard_bytes: most bytes of a safetensors file, unless one tensor is larger; above it there are several.

    Raises:
        CheckpointError: `dst` exists or cannot be written; `src` is missing, damaged, of an unsafe kind, does not fit
            its own config, or is not as its manifest says.
        ConfigError: a model, tokenizer, dtype or format that is not supported.
    """
    check_dtype(dtype)
    if format not in KINDS:
        raise ConfigError(f"format must be one of {KINDS}, got {format!r}")
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ConfigError(f"shard_bytes must be an integer of at least 1, got {shard_bytes!r}")
    check_path("src", src)
    target = check_path("dst", dst)
    refuse_existing(target)  # before minutes of download
    source = open_source(src)
    with staged(target) as partial:
        config = {key: value for key, value in source.hf.items() if key != "dtype"}  # the newer spelling
        write_json(partial / CONFIG, config | {"torch_dtype": dtype})
        with readable(Path(src)):
            source.accompany(partial)
        if format == "orbax":
            _write_orbax(source, partial / ORBAX_WEIGHTS, dtype, progress)
        else:
            write_shards(partial, source.shapes, dtype, source.read, shard_bytes, progress)
        write_manifest(partial, format)


def open_source(src: str | os.PathLike[str]) -> Source:
    """A checkpoint of any kind, opened for reading."""
    path = check_path("src", src)
    if path.suffix == ".gguf":
        return open_gguf(path)
    directory = locate(src)
    with readable(directory):
        check_manifest(directory)
    return open_orbax(directory) if kind_of(directory) == "orbax" else open_huggingface(directory)


def _write_orbax(source: Source, path: Path, dtype: str, progress: Callable[[int, int], None] | None = None) -> None:
    """The weights of a source as an orbax checkpoint."""
    weight_shapes = flat_abstract(source.config)
    tensor_of = {path: tensor for tensor in placements(source.family, weight_shapes).values() for path in tensor.paths}

    def read(path: str) -> np.ndarray:
        tensor = tensor_of[path]
        return tensor.to_weights(source.read(tensor.name), weight_shapes, source.config)[path]

    write_orbax(path, weight_shapes, DTYPES[dtype], read, progress)
