"""Files that jshadow seals with SHA-256 digests: their header, and tensors that are checked as they are read."""

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jshadow.engine.saved_record import read_json_text
from jshadow.errors import CheckpointError
from jshadow.weights.convert.safetensors_file import TensorFile
from jshadow.weights.digest import canonical, raw_bytes, sha256

THREADS = 4  # that read and hash; both let go of Python's lock


def header_digest(texts: Mapping[str, str], table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """SHA-256 of the parsed header. Offsets follow from the sizes, because the format allows no gap and no overlap."""
    return sha256(canonical({"metadata": dict(texts), "tensors": {name: list(entry) for name, entry in table.items()}}))


def open_described(path: Path, kind: str, form: str, version: int) -> tuple[TensorFile, dict[str, str], dict[str, str]]:
    """Open a file that jshadow wrote and check its header. Returns the file, its texts, and each tensor's SHA-256.

    Raises:
        CheckpointError: the file is missing, damaged, not of this kind, or of a newer format.
    """
    file = TensorFile(path, kind)
    texts = dict(file.metadata)
    if texts.get("format") != form:
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
    """Turn the errors of reading metadata into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} must be {kind}, got metadata that does not fit: {error}") from error


def read_checked(file: TensorFile, name: str, digests: Mapping[str, str]) -> np.ndarray:
    """Read a tensor of the file. Raises CheckpointError if its SHA-256 is not that of the header."""
    value = file.read(name)
    if sha256(raw_bytes(value)) != digests[name]:
        raise CheckpointError(f"{file.path} is damaged: {name} does not have the SHA-256 that the header gives")
    return value


def read_all_checked(file: TensorFile, digests: Mapping[str, str], spare: int) -> dict[str, np.ndarray]:
    """Read and check every tensor of a file, in a few threads.

    Args:
        file: the file.
        digests: SHA-256 of each tensor.
        spare: bytes that the returned tensors may take in all.

    Returns:
        The tensors in the order of the file, as many as fit into `spare` bytes; "lengths" always. The others are
        checked too.

    Raises:
        CheckpointError: a tensor cannot be read, or is damaged; the first one in the order of the file.
    """
    kept: dict[str, np.ndarray] = {}
    waiting: deque[tuple[str, Future[np.ndarray]]] = deque()
    names = iter(file.shapes)
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            while True:
                # No more tensors are in flight than there are threads, so that little memory is taken beside `kept`.
                for name in itertools.islice(names, THREADS - len(waiting)):
                    waiting.append((name, pool.submit(read_checked, file, name, digests)))
                if not waiting:
                    return kept
                name, result = waiting.popleft()
                value = result.result()
                if value.nbytes <= spare or name == "lengths":
                    kept[name] = value
                    spare -= value.nbytes
        finally:
            pool.shutdown(cancel_futures=True)
