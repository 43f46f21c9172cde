"""Reading a saved state in two parts: its tensors into NumPy arrays, and these arrays into a state.

The first part reads and hashes, and can run in another thread. The second part copies to the device.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine.saved.file import described, open_described, read_all, read_checked
from jshadow.engine.saved.leaves import bare, cache_fills, is_place, places, token_names
from jshadow.engine.saved.record import StateRecord, read_json_text
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.policies import Policy
from jshadow.weights.convert.safetensors_file import TAGS, TensorFile, raise_all
from jshadow.weights.params import Params

FORMAT, VERSION = "jshadow KV state", 3
KIND = "a saved KV state (safetensors)"

Stamp = tuple[int, int, int, int]  # device, inode, size in bytes and time of the last change in ns of a file


@dataclasses.dataclass(frozen=True)
class ReadState:
    """A saved state that was read and checked, and is not on the device yet.

    Attributes:
        file: the file.
        record: its record.
        expected: the state with ShapeDtypeStructs in place of arrays.
        tensors: tensors by name, in host memory. One that did not fit into memory is read again by `place_state`.
        tokens: the token ids of each row, int32 [length], or None if they were not stored.
        stamp: the stamp of the file when it was read.
    """

    file: TensorFile
    record: StateRecord
    expected: KVState
    tensors: dict[str, np.ndarray]
    tokens: list[np.ndarray] | None
    stamp: Stamp


def read_state(path: Path, params: Params, policy: Policy | None, verified: set[Stamp] | None = None) -> ReadState:
    """Read and check a saved state.

    Args:
        path: file that `save_state` wrote.
        params, policy: as in `load_state`.
        verified: stamps of files whose SHA-256 digests were compared before. They are not compared again. The stamp of
            this file is added. None: all digests are compared.

    Raises:
        StateMismatch, CheckpointError, ConfigError, HostMemoryError: as in `load_state`.
        CheckpointError: the file changed while it was read.
    """
    stamp = stamp_of(path)
    file, record, digests = open_state(path)
    try:
        expected = record.abstract(params.config, record.match(params, policy))
    except StateMismatch as error:
        raise StateMismatch(f"{file.path} must hold a state of these params and policy, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot be loaded here: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    fills = cache_fills(expected)
    stored = {name: bare(leaf) for name, leaf in places(expected).items() if name not in fills}
    check_table(file, stored, record.batch)
    host_memory.check_host_memory([expected.specs])
    known = verified is not None and stamp in verified
    names = [name for name in token_names(record.batch) if name in file.shapes]
    tensors = read_all(file, None if known else digests, spare_bytes(expected), ("lengths", *names))
    if stamp is None or stamp_of(path) != stamp:
        raise CheckpointError(f"{path} must not change while it is read, got another file at its end")
    if verified is not None:
        verified.add(stamp)
    check_lengths(file, record, tensors["lengths"].tolist())
    return ReadState(file, record, expected, tensors, [tensors.pop(name) for name in names] or None, stamp)


def place_state(read: ReadState) -> KVState:
    """Copy a state that was read to the memories of its arrays. This empties `read.tensors`.

    Raises:
        CheckpointError: a row has more tokens than its window can hold, or the file changed meanwhile.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    file, tensors, expected = read.file, read.tensors, read.expected
    expected_leaves, fills = places(expected), cache_fills(expected)
    whole = expected_leaves.keys() - fills.keys() <= tensors.keys()

    def place(name: str) -> Any:
        leaf = expected_leaves[name]
        if name in fills:
            return put(leaf, np.full(leaf.shape, fills[name], leaf.dtype))
        # Each tensor leaves `tensors` here, so that it is freed as soon as it is placed.
        value = tensors.pop(name) if name in tensors else file.read(name)
        return put(leaf, value)

    with host_memory.placing([expected.specs]):
        hosted = {name: place(name) for name, leaf in expected_leaves.items() if is_place(leaf)}
        jax.block_until_ready(hosted)
    leaves = [hosted[name] if name in hosted else place(name) for name in expected_leaves]
    state: KVState = jax.tree.unflatten(jax.tree.structure(expected, is_leaf=is_place), leaves)
    if not whole and stamp_of(file.path) != read.stamp:
        raise CheckpointError(f"{file.path} must not change while it is read, got another file at its end")
    if (room := np.asarray(state.room())).min() < 0:
        raise CheckpointError(f"{file.path}: room of each row must be at least 0, got {room.tolist()}")
    return state


def read_state_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record of a file, its lengths and its tokens, without loading the state.

    Returns:
        The fields of StateRecord, and "format", "version", "lengths" (one for each row), "tokens" (a list of ids for
        each row, or None if they were not stored), "note" (texts by name) and "nbytes" (the size of the file).

    Raises:
        CheckpointError: as in `load_state`, except that only the tensors of lengths and tokens are checked.
    """
    file, record, digests = open_state(Path(path).expanduser())
    names = [name for name in token_names(record.batch) if name in file.shapes]
    if "lengths" not in file.shapes:
        raise CheckpointError(f"{file.path} must hold the tensor lengths, got none")
    tokens = [read_checked(file, name, digests).tolist() for name in names]
    lengths, nbytes = read_checked(file, "lengths", digests).tolist(), file.path.stat().st_size
    info = {"format": FORMAT, "version": VERSION, "lengths": lengths, "tokens": tokens or None, "nbytes": nbytes}
    return vars(record) | info | {"note": read_note(file)}


def read_note(file: TensorFile) -> dict[str, str]:
    """Return the texts that were stored beside a state. Raises CheckpointError if they are not as jshadow writes."""
    with described(file.path, KIND):
        note = read_json_text(file.metadata, "note") if "note" in file.metadata else {}
        if not isinstance(note, dict) or not all(isinstance(value, str) for value in note.values()):
            raise ValueError(f"note must be texts by name, got {note!r:.80}")
        return note


def stamp_of(path: Path) -> Stamp | None:
    """Return the stamp of a file, by which a changed file is noticed, or None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def open_state(path: Path) -> tuple[TensorFile, StateRecord, dict[str, str]]:
    """Open a saved state and check its header. Return the file, its record, and the SHA-256 of each tensor.

    Raises:
        CheckpointError: the file is missing, damaged, of another kind, or of another format version.
    """
    file, texts, digests = open_described(path, KIND, FORMAT, VERSION)
    with described(path, KIND):
        if unknown := set(file.tags.values()) - set(TAGS.values()):
            raise ValueError(f"dtypes must be of {sorted(TAGS.values())}, got {sorted(unknown)}")
        return file, StateRecord.read(texts), digests


def check_table(file: TensorFile, leaves: Mapping[str, Any], batch: int) -> None:
    """Raise CheckpointError unless the file has exactly the tensors of the leaves. Token ids may be there or not."""
    extra = [name for name in file.shapes if name not in leaves]
    if set(extra) == set(token_names(batch)):
        extra = [name for name in extra if file.tags[name] != TAGS["int32"] or len(file.shapes[name]) != 1]
    problems = [f"{name}: extra, no such place in this state" for name in extra]
    for name, leaf in leaves.items():
        expected, got = (TAGS[leaf.dtype.name], leaf.shape), (file.tags.get(name), file.shapes.get(name))
        if got != expected:
            problems.append(f"{name}: " + ("missing" if name not in file.shapes else f"expected {expected}, got {got}"))
    raise_all(str(file.path), problems)


def spare_bytes(expected: KVState) -> int:
    """Return the bytes of host memory that tensors may take while a file is checked.

    It is half of the memory that the state's host rows leave free, or 0 if the system does not report its memory.
    """
    free = host_memory.available_memory()
    return 0 if free is None else max(0, free - offload.host_bytes(expected.specs)) // 2


def check_lengths(file: TensorFile, record: StateRecord, lengths: list[int]) -> None:
    """Raise CheckpointError if a length is out of range, or differs from the number of the row's stored token ids."""
    if not all(0 <= length <= record.capacity for length in lengths):
        raise CheckpointError(f"{file.path}: lengths must lie in [0, capacity={record.capacity}], got {lengths}")
    for name, length in zip(token_names(record.batch), lengths, strict=True):
        if file.shapes.get(name, (length,)) != (length,):
            raise CheckpointError(f"{file.path}: {name} must have {length} ids, got {file.shapes[name][0]}")


def put(place: Any, value: np.ndarray) -> Any:
    """Copy an array to the memory of its place. It is committed to the device, so that no step is compiled again."""
    memory = place.memory if isinstance(place, HostArray) else "device"
    array = jax.device_put(value, SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory))
    return HostArray(array, memory) if isinstance(place, HostArray) else array
