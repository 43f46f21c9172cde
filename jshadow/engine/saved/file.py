"""Reading files that hold SHA-256 digests of their header and tensors. All digests are checked."""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jshadow.engine.saved.record import read_json_text
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TensorFile
from jshadow.weights.digest import canonical, raw_bytes, sha256

THREADS = 4  # number of threads that read and hash; both release Python's global lock


def header_digest(texts: Mapping[str, str], table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Return the SHA-256 of the parsed header: the metadata `texts`, and the dtype tag and shape of each tensor.

    Offsets are left out. They follow from the sizes, because the format allows no gap and no overlap.
    """
    return sha256(canonical({"metadata": dict(texts), "tensors": {name: list(entry) for name, entry in table.items()}}))


def open_described(
    path: Path, kind: str, versions: Mapping[str, int]
) -> tuple[TensorFile, dict[str, str], dict[str, Any]]:
    """Open a file that jshadow wrote, and check its header.

    Args:
        path: the file.
        kind: description of the kind of file, for error messages.
        versions: the format names that the metadata may have, each with its required format version.

    Returns:
        The file, its metadata texts, and the SHA-256 of each tensor, or a list of one for each block of it.

    Raises:
        CheckpointError: the file is missing, damaged, not of this kind, or of another format version.
    """
    file = TensorFile(path, kind)
    texts = dict(file.metadata)
    version = versions.get(texts.get("format", ""))
    if version is None:
        raise CheckpointError(f"{path} must be {kind}, got a safetensors file of format {texts.get('format')!r:.80}")
    with described(path, kind):
        number = read_json_text(texts, "version")
        if number != version:
            raise CheckpointError(f"{path} is of format version {number}; this jshadow understands version {version}")
        recorded = texts.pop("header_sha256", None)
        if recorded != header_digest(texts, {name: (file.tags[name], shape) for name, shape in file.shapes.items()}):
            raise CheckpointError(f"{path} is damaged: its header does not have the SHA-256 that it gives")
        digests = read_json_text(texts, "sha256")
        if not isinstance(digests, dict) or digests.keys() != file.shapes.keys():
            raise ValueError("sha256 must have one digest for each tensor")
    return file, texts, digests


@contextlib.contextmanager
def described(path: Path, kind: str) -> Iterator[None]:
    """A context manager that turns errors of reading metadata into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} must be {kind}, got metadata that does not fit: {error}") from error


def read_checked(file: TensorFile, name: str, digests: Mapping[str, str] | None) -> np.ndarray:
    """Read a tensor of the file, and compare its SHA-256 with that of the header.

    Args:
        file: the file.
        name: the tensor.
        digests: SHA-256 of each tensor. None: it is not compared.

    Raises:
        CheckpointError: the tensor cannot be read or is damaged.
    """
    value = file.read(name)
    if digests is not None and sha256(raw_bytes(value)) != digests[name]:
        raise CheckpointError(f"{file.path} is damaged: {name} does not have the SHA-256 that the header gives")
    return value


def read_all(
    file: TensorFile, digests: Mapping[str, str] | None, spare: int, always: Sequence[str]
) -> dict[str, np.ndarray]:
    """Read every tensor of a file, in a few threads, and check it. Return those that fit into memory.

    Args:
        file: the file.
        digests: SHA-256 of each tensor. None: the tensors are not checked.
        spare: maximum number of bytes of all returned tensors together.
        always: names of tensors that are returned in any case.

    Returns:
        Tensors by name. In the order of the file, each tensor that still fits into `spare` bytes is returned. The other
        tensors are only read and checked.

    Raises:
        CheckpointError: a tensor cannot be read or is damaged. The message names the first such tensor in the file.
    """
    kept: dict[str, np.ndarray] = {}
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    names = iter(file.shapes)
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            while True:
                # At most one tensor for each thread is in flight, so that little memory is taken beside `kept`.
                for name in itertools.islice(names, THREADS - len(waiting)):
                    waiting.append((name, pool.submit(read_checked, file, name, digests)))
                if not waiting:
                    return kept
                name, result = waiting.popleft()
                value = result.result()
                if value.nbytes <= spare or name in always:
                    kept[name] = value
                    spare -= value.nbytes
        finally:
            pool.shutdown(cancel_futures=True)
