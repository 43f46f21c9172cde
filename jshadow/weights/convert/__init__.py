"""Conversion of checkpoints, tensor by tensor. Reads GGUF, Hugging Face and orbax; writes Hugging Face and orbax."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jshadow.errors import check_integer, check_one_of
from jshadow.models.config import ModelConfig
from jshadow.weights.convert.files import (
    KINDS,
    ORBAX_WEIGHTS,
    check_manifest,
    check_path,
    kind_of,
    readable,
    refuse_existing,
    staged,
    write_json,
    write_manifest,
)
from jshadow.weights.convert.gguf import open_gguf
from jshadow.weights.convert.huggingface import (
    CONFIG,
    SHARD_BYTES,
    flat_abstract,
    layout_of,
    locate,
    open_huggingface,
    read_config,
    read_config_file,
    write_shards,
)
from jshadow.weights.convert.orbax import open_orbax, write_orbax
from jshadow.weights.convert.safetensors_file import DTYPES, check_dtype
from jshadow.weights.convert.source import Placement, Source, Stacks, placements

__all__ = ["config_of", "convert"]


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

    Tensors are read, cast and written one after another, so memory does not grow with the size of the checkpoint. The
    directory is written under a temporary name beside `dst`. It is renamed when it is complete and synced to disk. If
    the conversion fails or is interrupted with Ctrl-C, the temporary directory is removed. If the process is killed,
    the next conversion to the same `dst` removes it.

    Args:
        src: a .gguf file, a directory (Hugging Face, or orbax as written by this function), or a hub id.
        dst: directory to create. It must not exist.
        dtype: dtype of the written weights: "float32", "bfloat16" or "float16". The bias of a router, and the rates
            of a recurrent state, are float32.
        progress: called after each tensor with (number of tensors written, number of all tensors).
        format: "huggingface" (safetensors) or "orbax".
        shard_bytes: maximum bytes of a safetensors file. Larger checkpoints are split into several files. A single
            larger tensor gets one file.

    Raises:
        CheckpointError: `dst` exists or cannot be written. Or `src` is missing, damaged or of an unsafe kind, or it
            does not match its config or its manifest.
        ConfigError: the model, tokenizer, dtype or format is not supported.
    """
    check_dtype(dtype)
    check_one_of("format", format, KINDS)
    check_integer("shard_bytes", shard_bytes, least=1)
    check_path("src", src)
    target = check_path("dst", dst)
    refuse_existing(target)  # checked here because a download may take minutes
    source = _open_source(src)
    with staged(target) as partial:
        # "dtype" is the newer name of "torch_dtype". Only the older name is written, because every reader knows it.
        config = {key: value for key, value in source.hf.items() if key != "dtype"}
        write_json(partial / CONFIG, config | {"torch_dtype": dtype})
        with readable(Path(src)):
            source.accompany(partial)
        if format == "orbax":
            _write_orbax(source, partial / ORBAX_WEIGHTS, dtype, progress)
        else:
            layout = layout_of(source.shapes, source.family, source.config, dtype)
            write_shards(partial, layout, source.read, shard_bytes, progress)
        write_manifest(partial, format)


def config_of(src: str | os.PathLike[str]) -> ModelConfig:
    """Return the config of a checkpoint, or of a single config.json. `src` and the errors are those of `convert`."""
    path = check_path("src", src)
    if path.suffix == ".json":
        return read_config_file(path)[2]
    found = locate(src)
    return open_gguf(found).config if found.suffix == ".gguf" else read_config(found)[2]


def _open_source(src: str | os.PathLike[str]) -> Source:
    """Open a checkpoint of any format for reading. Raises the errors of `convert` that concern `src`."""
    directory = locate(src)
    if directory.suffix == ".gguf":
        return open_gguf(directory)
    with readable(directory):
        check_manifest(directory)
    return open_orbax(directory) if kind_of(directory) == "orbax" else open_huggingface(directory)


def _write_orbax(source: Source, path: Path, dtype: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the weights of a source as an orbax checkpoint at `path`."""
    weight_shapes = flat_abstract(source.config)
    tensors_of: dict[str, list[Placement]] = {}
    for tensor in placements(source.family, weight_shapes, source.shapes).values():
        for name in tensor.paths:
            tensors_of.setdefault(name, []).append(tensor)

    def read(path: str) -> np.ndarray:
        stacks, whole = Stacks(), None
        for tensor in tensors_of[path]:
            part = tensor.to_weights(source.read(tensor.name), weight_shapes, source.config)[path]
            whole = stacks.whole(path, part, tensor.expert, weight_shapes[path])
        assert whole is not None
        return whole

    write_orbax(path, weight_shapes, DTYPES[dtype], read, progress)
