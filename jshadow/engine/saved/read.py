"""Reading a saved state in two parts: its tensors into NumPy arrays, and these arrays into a state.

The first part reads and hashes, and can run in another thread. The second part copies to the device.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine.placement import shards_of
from jshadow.engine.saved.blocks import read_slice
from jshadow.engine.saved.file import described, open_described, read_all, read_checked
from jshadow.engine.saved.layout import filled, on_devices, put
from jshadow.engine.saved.leaves import bare, cache_fills, is_place, places, token_names
from jshadow.engine.saved.parts import INDEX_FORMAT, INDEX_VERSION, Parts, part_paths
from jshadow.engine.saved.record import StateRecord, read_json_text
from jshadow.engine.saved.slices import Place, whole, within
from jshadow.errors import CheckpointError, ConfigError, StateMismatch
from jshadow.policies import Policy
from jshadow.weights.convert.safetensors_file import TAGS, TensorFile, raise_all
from jshadow.weights.digest import host_array
from jshadow.weights.params import Params

FORMAT, VERSION = "jshadow KV state", 3
VERSIONS = {FORMAT: VERSION, INDEX_FORMAT: INDEX_VERSION}
KIND = "a saved KV state (safetensors)"

Stamp = tuple[int, int, int, int]  # device, inode, size in bytes and time of the last change in ns of a file


@dataclasses.dataclass(frozen=True)
class ReadState:
    """A saved state that was read and checked, and is not on the device yet.

    Attributes:
        file: the file. With parts, it is their index.
        parts: the parts, or None if the file has all tensors.
        record: its record.
        expected: the state with ShapeDtypeStructs in place of arrays, as it will lie on the devices.
        shapes: the shape of each array as one device has it.
        tensors: tensors by name, in host memory. One that did not fit into memory is read again by `place_state`. Of a
            state in parts, `place_state` reads the slices that this process needs.
        tokens: the token ids of each row, int32 [length], or None if they were not stored.
        stamp: the stamp of the file when it was read.
    """

    file: TensorFile
    parts: Parts | None
    record: StateRecord
    expected: KVState
    shapes: dict[str, tuple[int, ...]]
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
    parts = Parts(file) if part_paths(file) else None
    try:
        single = record.abstract(params.config, record.match(params, policy))
        expected = on_devices(single, shards_of(params, record.batch))
    except StateMismatch as error:
        raise StateMismatch(f"{file.path} must hold a state of these params and policy, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot be loaded here: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    fills = cache_fills(expected)
    stored = {name: bare(leaf) for name, leaf in places(single).items() if name not in fills}
    check_table(parts or file, stored, record.batch)
    if parts is not None:
        check_index(file)
    host_memory.check_host_memory([expected.specs])
    known = verified is not None and stamp in verified
    names = [name for name in token_names(record.batch) if name in file.shapes]
    tensors = read_all(file, None if known else digests, spare_bytes(expected), ("lengths", *names))
    if stamp is None or stamp_of(path) != stamp:
        raise CheckpointError(f"{path} must not change while it is read, got another file at its end")
    if verified is not None:
        verified.add(stamp)
    check_lengths(file, record, tensors["lengths"].tolist())
    tokens = [tensors.pop(name) for name in names] or None
    shapes = {name: leaf.shape for name, leaf in stored.items()}
    return ReadState(file, parts, record, expected, shapes, tensors, tokens, stamp)


def place_state(read: ReadState) -> KVState:
    """Copy a state that was read to the memories of its arrays. This empties `read.tensors`.

    Raises:
        CheckpointError: a row has more tokens than its window can hold, a part is damaged, or the file changed
            meanwhile.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    return check_placed(place_arrays(read), read.file.path)


def place_arrays(read: ReadState) -> KVState:
    """Do what `place_state` does, without its check of the rows. No program runs on several devices."""
    file, tensors, expected = read.file, read.tensors, read.expected
    leaves, fills = places(expected), cache_fills(expected)
    complete = read.parts is not None or leaves.keys() - fills.keys() <= tensors.keys()

    def place(name: str) -> Any:
        leaf, array = leaves[name], bare(leaves[name])
        memory = leaf.memory if is_place(leaf) else "device"
        if name in fills:
            placed = put(array, array.shape, memory, filled(array.shape, array.dtype, fills[name]))
        else:
            placed = put(array, read.shapes[name], memory, reader(read, name))
        return HostArray(placed, memory) if is_place(leaf) else placed

    with host_memory.placing([expected.specs]):
        hosted = {name: place(name) for name, leaf in leaves.items() if is_place(leaf)}
        jax.block_until_ready(hosted)
    placed = [hosted[name] if name in hosted else place(name) for name in leaves]
    tensors.clear()
    state: KVState = jax.tree.unflatten(jax.tree.structure(expected, is_leaf=is_place), placed)
    if not complete and stamp_of(file.path) != read.stamp:
        raise CheckpointError(f"{file.path} must not change while it is read, got another file at its end")
    return state


def reader(read: ReadState, name: str) -> Callable[[Place], np.ndarray]:
    """Return a function that returns slices of a tensor. A tensor in memory leaves `read.tensors` here.

    So it is freed as soon as it is placed.
    """
    file, parts, shape = read.file, read.parts, read.shapes[name]
    if name in read.tensors:
        value = read.tensors.pop(name)
        return lambda place: value[within(place, whole(shape))]
    if parts is not None:
        return lambda place: parts.read(name, place)
    return lambda place: file.read(name) if place == whole(shape) else read_slice(file, name, place)


def check_placed(state: KVState, path: Path) -> KVState:
    """Return the state. Raise CheckpointError if a row has more tokens than its window can hold."""
    if (room := host_array(state.room())).min() < 0:
        raise CheckpointError(f"{path}: room of each row must be at least 0, got {room.tolist()}")
    return state


def read_state_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record of a file, its lengths and its tokens, without loading the state.

    Returns:
        The fields of StateRecord, and "format", "version", "lengths" (one for each row), "tokens" (a list of ids for
        each row, or None if they were not stored), "note" (texts by name) and "nbytes" (the size of the file, with its
        parts).

    Raises:
        CheckpointError: as in `load_state`, except that only the tensors of lengths and tokens are checked.
    """
    file, record, digests = open_state(Path(path).expanduser())
    names = [name for name in token_names(record.batch) if name in file.shapes]
    tokens = [read_checked(file, name, digests).tolist() for name in names]
    lengths = read_checked(file, "lengths", digests).tolist()
    nbytes = sum(part.stat().st_size for part in [file.path, *part_paths(file)] if part.exists())
    form = file.metadata["format"]
    info = {"format": form, "version": VERSIONS[form], "lengths": lengths, "tokens": tokens or None, "nbytes": nbytes}
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
    file, texts, digests = open_described(path, KIND, VERSIONS)
    with described(path, KIND):
        if unknown := set(file.tags.values()) - set(TAGS.values()):
            raise ValueError(f"dtypes must be of {sorted(TAGS.values())}, got {sorted(unknown)}")
        record = StateRecord.read(texts)
        if "lengths" not in file.shapes:
            raise ValueError("the tensor lengths must be there, got none")
        # All that is made from the number of rows has the size of a tensor that is really there.
        if file.shapes["lengths"] != (record.batch,):
            raise ValueError(f"the tensor lengths must have batch={record.batch} rows, got {file.shapes['lengths']}")
        return file, record, digests


def check_table(file: TensorFile | Parts, leaves: Mapping[str, Any], batch: int) -> None:
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


def check_index(file: TensorFile) -> None:
    """Raise CheckpointError unless an index of parts has the lengths, and no other tensors but token ids."""
    others = [name for name in file.shapes if not name.startswith("tokens.")]
    if others != ["lengths"]:
        raise CheckpointError(f"{file.path} must hold the tensor lengths, and others in parts, got {others!r:.80}")


def spare_bytes(expected: KVState) -> int:
    """Return the bytes of host memory that tensors may take while a file is checked.

    It is half of the memory that the state's host rows leave free, or 0 if the system does not report its memory.
    Several processes may share a host, so each takes its share of that.
    """
    free, shards = host_memory.available_memory(), expected.specs[0].shards
    devices = 1 if shards is None else len(shards.mesh.local_devices)
    rows = devices * offload.host_bytes(expected.specs)
    return 0 if free is None else max(0, free - rows) // (2 * jax.process_count())


def check_lengths(file: TensorFile, record: StateRecord, lengths: list[int]) -> None:
    """Raise CheckpointError if a length is out of range, or differs from the number of the row's stored token ids."""
    if not all(0 <= length <= record.capacity for length in lengths):
        raise CheckpointError(f"{file.path}: lengths must lie in [0, capacity={record.capacity}], got {lengths}")
    for name, length in zip(token_names(record.batch), lengths, strict=True):
        if file.shapes.get(name, (length,)) != (length,):
            raise CheckpointError(f"{file.path}: {name} must have {length} ids, got {file.shapes[name][0]}")
