"""Writing files that hold the SHA-256 of their header and of every tensor. `file.py` reads them."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.engine.saved.blocks import block_digests
from jshadow.engine.saved.file import header_digest
from jshadow.weights.convert.safetensors_file import TAGS, Layout, encode_header, write_payload
from jshadow.weights.digest import canonical, raw_bytes, sha256

UNKNOWN = "0" * 64  # the placeholder of a digest until its tensor is written


def write_hashed(
    path: Path, layout: Layout, texts: Mapping[str, str], read: Callable[[str], np.ndarray], block: int | None = None
) -> tuple[int, str]:
    """Write a file, reading one tensor at a time.

    Args:
        path: the file.
        layout: the dtype and shape of each tensor, in the order of the file.
        texts: the metadata. "sha256" and "header_sha256" are added.
        read: returns the tensor of a name, in C order.
        block: None: "sha256" has one digest for each tensor. Otherwise it has a list with one for each block of so
            many bytes.

    Returns:
        The bytes of the file, and the SHA-256 of its header.
    """
    digests: dict[str, Any] = {}
    for name, (dtype, shape) in layout.items():
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        digests[name] = UNKNOWN if block is None else [UNKNOWN] * -(-nbytes // block)
    table = {name: (TAGS[dtype], shape) for name, (dtype, shape) in layout.items()}

    def hashed(name: str) -> np.ndarray:
        value = read(name)
        digests[name] = sha256(raw_bytes(value)) if block is None else block_digests(value, block)
        return value

    def all_texts() -> dict[str, str]:
        known = {**texts, "sha256": canonical(digests).decode()}
        return known | {"header_sha256": header_digest(known, table)}

    with path.open("wb") as file:
        file.write(encode_header(layout, all_texts()))
        write_payload(file, layout, hashed)
        size = file.tell()
        file.seek(0)
        known = all_texts()
        file.write(encode_header(layout, known))  # as long as before
    return size, known["header_sha256"]
