"""SHA-256 digests of trees of arrays, tokenizers and records. A saved state stores those of its model and tokenizer."""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def canonical(value: Any) -> bytes:
    """Encode a plain value as JSON in a canonical form: sorted keys, no spaces, ASCII. NaN and Inf raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(content: Any) -> str:
    """Return the hexadecimal SHA-256 digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def host_array(leaf: Any) -> np.ndarray:
    """Copy a leaf to a NumPy array in C order.

    A jax.Array caches the NumPy copy that is made of it. This function copies an alias of the array instead, whose
    cache is freed with the alias. So reading a whole tree never holds more than one leaf on the host.

    If the devices of this process do not have the whole array, those of other processes send the rest. Then all
    processes must call this function.
    """
    if isinstance(leaf, jax.Array):
        if len(leaf.devices()) == 1 or (leaf.is_fully_replicated and not leaf.is_fully_addressable):
            leaf = leaf.addressable_data(0)
        elif not leaf.is_fully_addressable:
            return _gathered(leaf)
    return np.asarray(leaf, order="C")


def _gathered(leaf: jax.Array) -> np.ndarray:
    """Copy an array that lies on devices of several processes to a NumPy array in C order."""
    shards = {str(shard.index): shard for shard in leaf.addressable_shards}
    if sum(shard.data.size for shard in shards.values()) < leaf.size:
        assert isinstance(leaf.sharding, NamedSharding)
        return np.asarray(_copy_to_all(leaf.sharding.mesh)(leaf).addressable_data(0), order="C")
    out = np.empty(leaf.shape, leaf.dtype)
    for shard in shards.values():
        out[shard.index] = np.asarray(shard.data)
    return out


@functools.cache
def _copy_to_all(mesh: Any) -> Callable[[jax.Array], jax.Array]:
    """Return a program that copies an array to every device of a mesh."""
    return jax.jit(lambda leaf: leaf, out_shardings=NamedSharding(mesh, PartitionSpec()))


def raw_bytes(value: np.ndarray) -> memoryview:
    """Return the bytes of a C-ordered array without copying them."""
    return value.reshape(-1).view(np.uint8).data


def tree_digest(tree: Any) -> str:
    """Return the SHA-256 of the path, dtype, shape and bytes of all leaves. Only one leaf is on the host at a time."""
    hasher = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        value = host_array(leaf)
        hasher.update(canonical([jax.tree_util.keystr(path), value.dtype.name, value.shape]))
        hasher.update(raw_bytes(value))
    return hasher.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Return the SHA-256 of all data that determines the token ids of a text or chat, or None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # The tokenizer also stores the padding and truncation of its last call. They are left out.
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    else:
        content = {"vocab": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    return sha256(canonical([content, getattr(tokenizer, "chat_template", None)]))
