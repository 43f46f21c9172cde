"""SHA-256 digests of trees of arrays, tokenizers and records, to which a saved state belongs. One leaf at a time."""

import hashlib
import json
from typing import Any

import jax
import numpy as np


def canonical(value: Any) -> bytes:
    """The one JSON text of a plain value: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(content: Any) -> str:
    """Hexadecimal digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def host_array(leaf: Any) -> np.ndarray:
    """A leaf as a NumPy array in C order.

    A jax.Array keeps the NumPy copy that was made of it. Here the copy is made of an alias and is freed with it, so
    that reading a whole tree never has more than one leaf on the host.
    """
    if isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
        leaf = leaf.addressable_data(0)
    return np.asarray(leaf, order="C")


def raw_bytes(value: np.ndarray) -> memoryview:
    """The bytes of a C-ordered array, not copied."""
    return value.reshape(-1).view(np.uint8).data


def tree_digest(tree: Any) -> str:
    """Digest over the path, dtype, shape and bytes of every leaf."""
    hasher = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        value = host_array(leaf)
        hasher.update(canonical([jax.tree_util.keystr(path), value.dtype.name, value.shape]))
        hasher.update(raw_bytes(value))
    return hasher.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str | None:
    """Digest of everything that decides the token ids of a text, chat template included; None without a tokenizer."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        # The last call left its padding and truncation there. They are not part of the tokenizer.
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    else:
        content = {"vocab": tokenizer.get_vocab(), "special": tokenizer.special_tokens_map}
    return sha256(canonical([content, getattr(tokenizer, "chat_template", None)]))
