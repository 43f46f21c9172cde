"""Orbax checkpoints. They are written tensor by tensor, and read as a whole, onto a mesh, or tensor by tensor.

A directory has `config.json` and tokenizer files in the format of Hugging Face, a manifest, and `weights/`, an ordinary
orbax checkpoint of the weight tree. Orbax writes a tree of arrays, but the tree of a large model does not fit into host
memory. So the leaves are `_Promise` objects, and a type handler for orbax reads them one after another. While small
tensors are being written, the next ones are read.
"""

import asyncio
import contextlib
import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from flax import traverse_util
from orbax.checkpoint import type_handlers

from jshadow.errors import CheckpointError
from jshadow.models.config import ModelConfig
from jshadow.models.layers import dtype_of
from jshadow.weights.convert.files import ORBAX_WEIGHTS
from jshadow.weights.convert.huggingface import Put, copy_side_files, flat_abstract, read_config
from jshadow.weights.convert.safetensors_file import UnfitTensor, cast, raise_all
from jshadow.weights.convert.source import Shape, Source, placements

_CHUNK_BYTES = 2**24  # size of a chunk of a stored array, and so the smallest read of a device that needs a part of it
_IN_FLIGHT_BYTES = 2**25  # maximum bytes of tensors being written at once; a larger tensor is written alone
_CACHE_BYTES = 2**20  # size of the cache of written data; it is small because the data is not read again
_CONCURRENT_GB = 1  # maximum GB of arrays being read at once


class _Promise:
    """A weight that is not read yet.

    Attributes:
        shape: shape of the array.
        dtype: dtype of the array.
        read: function that returns the array.
    """

    def __init__(self, shape: Shape, dtype: np.dtype[Any], read: Callable[[], np.ndarray]) -> None:
        self.shape, self.dtype, self.read = shape, dtype, read

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize


class _PromiseHandler(type_handlers.NumpyHandler):
    """Type handler that makes orbax write promises in the format of NumPy arrays."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
        """Read and write the values one after another. Small tensors are written while the next one is read."""
        writing: list[Any] = []
        held = 0
        # The default context of orbax caches up to 100 MB.
        context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_BYTES}})
        infos = [copy.copy(info) for info in infos]
        for info in infos:
            info.ts_context = context
        try:
            for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
                if held + value.nbytes > _IN_FLIGHT_BYTES:
                    for done in writing:
                        await asyncio.to_thread(done.result)
                    writing, held = [], 0
                array = await asyncio.to_thread(value.read)
                writing += await super().serialize([array], [info], [arg])
                held += value.nbytes
                del array
        except BaseException:  # also for an interrupt; no thread may still write when the directory is removed
            for done in writing:
                with contextlib.suppress(Exception):
                    done.result()
            raise
        return writing


def write_orbax(
    path: Path,
    shapes: Mapping[str, Shape],
    dtype: np.dtype[Any],
    read: Callable[[str], np.ndarray],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a weight tree as an orbax checkpoint.

    Args:
        path: directory to create.
        shapes: weight path ("layer_0/mlp/up/kernel") -> shape.
        dtype: dtype of the written weights. The bias of a router is float32.
        read: returns the weight at a path, in any float dtype. It is called once for each weight.
        progress: called with (number of weights written, number of all weights).

    Raises:
        CheckpointError: the directory cannot be written, or weights have NaN or Inf (all listed in one message).
    """
    problems: list[str] = []
    done = 0

    def checked(name: str) -> np.ndarray:
        nonlocal done
        try:
            value, problem = cast(read(name), dtype_of(name, dtype))
        except UnfitTensor as error:
            value, problem = np.zeros(shapes[name], dtype), str(error)
        if problem:
            problems.append(f"{name}: {problem}")
        done += 1
        if progress:
            progress(done, len(shapes))
        return value

    flat = {
        name: _Promise(shape, dtype_of(name, dtype), functools.partial(checked, name)) for name, shape in shapes.items()
    }
    tree = traverse_util.unflatten_dict(flat, sep="/")
    saving = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    registry = type_handlers.create_type_handler_registry((_Promise, _PromiseHandler()))
    with _typed_errors(path, "cannot be written"):
        # Compression hardly makes weights smaller, and decompression on one core would slow down reading.
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=saving))
    raise_all(str(path), problems)


class _OrbaxWeights:
    """The orbax weights of a directory, opened for reading.

    Attributes:
        path: the orbax checkpoint.
        shapes: weight path -> shape.
        dtypes: weight path -> dtype.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ORBAX_WEIGHTS
        if not self.path.is_dir():
            raise CheckpointError(f"{directory} must hold an orbax checkpoint named {ORBAX_WEIGHTS}, but there is none")
        with (
            _typed_errors(self.path, "cannot be read"),
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        ):
            metadata = checkpointer.metadata(self.path.absolute()).item_metadata
        if metadata is None:
            raise CheckpointError(f"orbax checkpoint {self.path} cannot be read: its metadata is missing or damaged")
        tree = dict(metadata.tree)
        leaves = traverse_util.flatten_dict(tree, sep="/")
        self.shapes = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
        self.dtypes = {name: np.dtype(leaf.dtype) for name, leaf in leaves.items()}

    def misfits(self, weight_shapes: Mapping[str, Shape]) -> list[str]:
        """Return one line for every weight that is missing, extra or misshaped."""
        lines = [f"{path}: missing" for path in weight_shapes if path not in self.shapes]
        lines += [f"{path}: extra, the config has no such weight" for path in self.shapes if path not in weight_shapes]
        lines += [
            f"{path}: misshaped, expected {list(weight_shapes[path])}, got {list(shape)}"
            for path, shape in self.shapes.items()
            if path in weight_shapes and shape != weight_shapes[path]
        ]
        return lines

    def read(self, names: tuple[str, ...]) -> dict[str, np.ndarray]:
        """Read the weights at these paths as NumPy arrays, by path."""
        return self._restore({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})

    def restore(
        self, names: tuple[str, ...], dtype: np.dtype[Any], sharding: Callable[[str], jax.sharding.Sharding]
    ) -> dict[str, jax.Array]:
        """Read the weights at these paths onto the devices of their shardings. Each device reads only its part."""
        return self._restore(
            {
                name: ocp.ArrayRestoreArgs(
                    sharding=sharding(name), global_shape=self.shapes[name], dtype=dtype_of(name, dtype)
                )
                for name in names
            }
        )

    def _restore(self, wanted: dict[str, Any]) -> dict[str, Any]:
        args = traverse_util.unflatten_dict(wanted, sep="/")
        item = jax.tree.map(lambda _: 0, args)
        handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_CONCURRENT_GB)
        with _typed_errors(self.path, "cannot be read"), ocp.Checkpointer(handler) as checkpointer:
            asked = ocp.args.PyTreeRestore(item=item, restore_args=args, partial_restore=True)
            restored = checkpointer.restore(self.path.absolute(), args=asked)
        return dict(traverse_util.flatten_dict(restored, sep="/"))


@contextlib.contextmanager
def _typed_errors(path: Path, what: str) -> Iterator[None]:
    """Turn all errors of orbax and tensorstore into a CheckpointError, and suppress their log messages."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tensorstore raises ValueError for a full disk and for damaged files
        raise CheckpointError(f"orbax checkpoint {path} {what}: {error}") from error
    finally:
        logger.setLevel(level)


def open_orbax(directory: Path) -> Source:
    """Open a directory with an orbax checkpoint for conversion.

    Raises:
        CheckpointError: the checkpoint is damaged, or weights are missing, extra or misshaped (all in one error).
        ConfigError: see `read_config`.
    """
    hf, family, config = read_config(directory)
    weights, weight_shapes = _OrbaxWeights(directory), flat_abstract(config)
    raise_all(str(directory), weights.misfits(weight_shapes))
    tensors = placements(family, weight_shapes)

    read_paths = functools.lru_cache(maxsize=1)(weights.read)  # experts share an array

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return tensor.to_tensor(read_paths(tensor.paths), config)

    shapes = {name: tensor.tensor_shape(weight_shapes) for name, tensor in tensors.items()}
    return Source(hf, family, config, shapes, read, functools.partial(copy_side_files, directory))


@jax.jit
def not_finite(leaf: jax.Array) -> jax.Array:
    """Return how many values of an array are NaN or Inf."""
    return leaf.size - jnp.isfinite(leaf).sum()


def read_orbax(
    directory: Path,
    config: ModelConfig,
    dtype: np.dtype[Any],
    put: Put | None,
    sharding: Callable[[str, Shape], jax.sharding.Sharding] | None,
) -> dict[str, Any]:
    """Read all weights of a directory.

    Args:
        config: the config of the checkpoint.
        put: turns each weight into leaves, one weight after another (see `huggingface.read_weights`). With None, all
            weights are read at once, directly onto their devices.
        sharding: called with (weight path, shape), returns the sharding of the weight. None means the default device.

    Returns:
        The nested weight tree.

    Raises:
        CheckpointError: the checkpoint is damaged, or weights are missing, extra, misshaped or not finite (all listed
            in one error).
    """
    weights, weight_shapes = _OrbaxWeights(directory), flat_abstract(config)
    raise_all(str(directory), weights.misfits(weight_shapes))
    flat: dict[str, Any] = {}
    problems: list[str] = []
    if put is not None:
        for path in weight_shapes:
            leaves, problem = put(path, weights.read((path,))[path])
            flat |= leaves
            if problem:
                problems.append(f"{path}: {problem}")
    else:
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        flat = weights.restore(
            tuple(weight_shapes), dtype, lambda path: sharding(path, weight_shapes[path]) if sharding else one
        )
        bad = {path: int(not_finite(leaf)) for path, leaf in flat.items()}
        problems = [f"{path}: {count} values are NaN or Inf in {dtype.name}" for path, count in bad.items() if count]
    raise_all(str(directory), problems)
    return dict(traverse_util.unflatten_dict(flat, sep="/"))
