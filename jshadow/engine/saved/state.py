"""Saving and loading KV states. A file is loaded only for its own model and policy.

A state is stored in one safetensors file, which is written completely or not at all. If it lies on devices of several
processes, it is stored in parts (`file.py`). Whatever mesh it lies on, its arrays are stored as one device has them.
The tensors are the leaves of the state, named by their place in it ("layers.3.frozen.left", "lengths"), and the token
ids if the caller passed them ("tokens.0"). A cache on which no result depends (`LayerCache.emptied`) is not stored. It
is empty after loading. A single file has no zeros at the end of one axis of a tensor. They are most of the state of a
short prompt, because its arrays have the capacity of the longest.

The metadata holds the record of `record.py`, the SHA-256 of every tensor ("sha256"), and the SHA-256 of the parsed
header, that is, of the metadata and the tensor table in canonical JSON ("header_sha256"). So a file in which any bit
has changed is refused. Only white space in the header, which the parser skips, is not checked.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostArray, LayerState
from jshadow.cache.rows import layer_shapes, layer_splits
from jshadow.cache.spec import CacheSpec, Shards, local_spec, whole_shape
from jshadow.cache.state import KVState
from jshadow.cache.system_memory import available_memory
from jshadow.engine.checks import check_ids, check_state
from jshadow.engine.placement import check_shards, shards_of
from jshadow.engine.saved.file import (
    INDEX_FORMAT,
    INDEX_VERSION,
    Parts,
    Place,
    Split,
    described,
    open_described,
    padded,
    part_paths,
    place_of,
    read_all,
    read_checked,
    read_slice,
    replacing,
    sizes,
    together,
    whole,
    within,
    without_zeros,
    write_hashed,
    write_parts,
)
from jshadow.engine.saved.record import StateRecord, read_json_text
from jshadow.errors import CheckpointError, ConfigError, PromptError, StateMismatch
from jshadow.policies import POLICIES, WRAPPERS, Policy
from jshadow.weights.convert.files import staged_file
from jshadow.weights.convert.safetensors_file import TAGS, TensorFile, raise_all
from jshadow.weights.digest import canonical, host_array
from jshadow.weights.params import Params


def is_place(node: Any) -> bool:
    """Return whether a node of the pytree is a HostArray, which counts as one leaf."""
    return isinstance(node, HostArray)


def places(state: KVState) -> dict[str, Any]:
    """Return every array or HostArray of a state by its name. Raises CheckpointError if two have the same name."""
    flat = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_place)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in flat}
    if len(named) != len(flat):
        raise CheckpointError(f"leaves of the state must have distinct names, got {len(flat)} with {len(named)} names")
    return named


def cache_fills(state: KVState) -> dict[str, int]:
    """Return the names of the leaves that are only a cache, and what fills each of them in an empty cache."""
    return {
        f"layers.{index}.live.{field}": fill
        for index, spec in enumerate(state.specs)
        for field, fill in spec.policy.emptied.items()
    }


def bare(leaf: Any) -> Any:
    """Return the array of a leaf, which may be a HostArray."""
    return leaf.array if isinstance(leaf, HostArray) else leaf


def _token_names(batch: int) -> list[str]:
    return [f"tokens.{row}" for row in range(batch)]


def _on_devices(state: KVState, shards: Shards | None) -> KVState:
    """Return a state with ShapeDtypeStructs that have shardings, as it lies on a mesh."""
    if shards is None:
        return state
    specs = tuple(local_spec(spec, shards) for spec in state.specs)
    check_shards([specs])
    layers = tuple(_layer_on_devices(dataclasses.replace(spec, layer=None), shards) for spec in specs)
    everywhere = shards.sharding(PartitionSpec())
    others = {name: getattr(state, name) for name in ("shared", "lengths", "last", "counters", "fitted")}
    spread = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), others)
    return state.replace(layers=layers, specs=specs, **spread)


def _layer_on_devices(spec: CacheSpec, shards: Shards) -> LayerState:
    """Return a layer's state with ShapeDtypeStructs that have the shapes and shardings of the global arrays."""

    def spread(part: Any, split: Any) -> Any:
        if isinstance(part, HostArray):
            return HostArray(placed(part.array, split.array, part.memory), part.memory)
        return placed(part, split, "device")

    def placed(part: Any, split: PartitionSpec, memory: str) -> jax.ShapeDtypeStruct:
        shape = whole_shape(shards, split, part.shape)
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=shards.sharding(split, memory))

    layer: LayerState = jax.tree.map(spread, layer_shapes(spec), layer_splits(spec), is_leaf=is_place)
    return layer


def _spans_processes(shards: Shards | None) -> bool:
    """Return whether the devices of a mesh belong to several processes."""
    return shards is not None and len({device.process_index for device in shards.mesh.devices.flat}) > 1


def _put(leaf: Any, shape: tuple[int, ...], memory: str, read: Callable[[Place], np.ndarray]) -> jax.Array:
    """Copy an array to its devices. It is committed to them, so that no step is compiled again."""
    sharding: Sharding | None = leaf.sharding
    if sharding is None:
        value = padded(whole(leaf.shape), shape, leaf.dtype, read)
        return jax.device_put(value, SingleDeviceSharding(jax.local_devices()[0], memory_kind=memory))
    parts: dict[Place, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        place = place_of(index, leaf.shape)
        if place not in parts:
            parts[place] = padded(place, shape, leaf.dtype, read)
        return parts[place]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _filled(dtype: Any, fill: int, place: Place) -> np.ndarray:
    return np.full(sizes(place), fill, dtype)


FORMAT, VERSION = "jshadow KV state", 4
_VERSIONS = {FORMAT: [3, VERSION], INDEX_FORMAT: [INDEX_VERSION]}  # files of version 3 have the zeros at an end too
_KIND = "a saved KV state (safetensors)"

Stamp = tuple[int, int, int, int]  # device, inode, size in bytes and time of the last change in ns of a file


@dataclasses.dataclass(frozen=True)
class ReadState:
    """A saved state that was read and checked, and is not on the device yet.

    `tensors` are in host memory, by name. One that did not fit into memory is read again by `place_state`. Of a state
    in parts, `place_state` reads the slices that this process needs.
    """

    file: TensorFile  # with parts, their index
    parts: Parts | None  # None: the file has all tensors
    record: StateRecord
    expected: KVState  # as it will lie on the devices, with ShapeDtypeStructs
    shapes: dict[str, tuple[int, ...]]  # of each array as one device has it, without the zeros that are not stored
    tensors: dict[str, np.ndarray]
    tokens: list[np.ndarray] | None  # of each row, int32 [length], if they were stored
    stamp: Stamp  # of the file when it was read


def read_state(path: Path, params: Params, policy: Policy | None, verified: set[Stamp] | None = None) -> ReadState:
    """Read and check a saved state. The arguments and errors are those of `load_state`.

    `verified` has the stamps of files whose digests were compared before, and are not again. The stamp of this file is
    added. Raises CheckpointError also if the file changed while it was read.
    """
    stamp = stamp_of(path)
    file, record, digests = _open_state(path)
    parts = Parts(file) if part_paths(file) else None
    try:
        single = record.abstract(params.config, record.match(params, policy))
        expected = _on_devices(single, shards_of(params, record.batch))
    except StateMismatch as error:
        raise StateMismatch(f"{file.path} must hold a state of these params and policy, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot be loaded here: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    fills = cache_fills(expected)
    stored = {name: bare(leaf) for name, leaf in places(single).items() if name not in fills}
    _check_table(parts or file, stored, record.batch)
    if parts is not None:
        _check_index(file)
    host_memory.check_host_memory([expected.specs])
    known = verified is not None and stamp in verified
    names = [name for name in _token_names(record.batch) if name in file.shapes]
    tensors = read_all(file, None if known else digests, spare_bytes(expected), ("lengths", *names))
    if stamp is None or stamp_of(path) != stamp:
        raise CheckpointError(f"{path} must not change while it is read, got another file at its end")
    if verified is not None:
        verified.add(stamp)
    _check_lengths(file, record, tensors["lengths"].tolist())
    tokens = [tensors.pop(name) for name in names] or None
    shapes = {name: (parts or file).shapes[name] for name in stored}
    return ReadState(file, parts, record, expected, shapes, tensors, tokens, stamp)


def place_state(read: ReadState) -> KVState:
    """Copy a state that was read to the memories of its arrays. This empties `read.tensors`.

    Raises CheckpointError if a row has more tokens than its window can hold, a part is damaged, or the file changed
    meanwhile, and HostMemoryError if the host lacks the memory for the offloaded rows.
    """
    return _check_placed(_place_arrays(read), read.file.path)


def _place_arrays(read: ReadState) -> KVState:
    """Do what `place_state` does, without its check of the rows. No program runs on several devices."""
    file, tensors, expected = read.file, read.tensors, read.expected
    leaves, fills = places(expected), cache_fills(expected)
    complete = read.parts is not None or leaves.keys() - fills.keys() <= tensors.keys()

    def place(name: str) -> Any:
        leaf, array = leaves[name], bare(leaves[name])
        memory = leaf.memory if is_place(leaf) else "device"
        if name in fills:
            read_fill = functools.partial(_filled, array.dtype, fills[name])
            placed = _put(array, array.shape, memory, read_fill)
        else:
            placed = _put(array, read.shapes[name], memory, _reader(read, name))
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


def _reader(read: ReadState, name: str) -> Callable[[Place], np.ndarray]:
    """Return a function that returns slices of a tensor. It leaves `read.tensors`, so that it is freed when placed."""
    file, parts, shape = read.file, read.parts, read.shapes[name]
    if name in read.tensors:
        value = read.tensors.pop(name)
        return lambda place: value[within(place, whole(shape))]
    if parts is not None:
        return lambda place: parts.read(name, place)
    return lambda place: file.read(name) if place == whole(shape) else read_slice(file, name, place)


def _check_placed(state: KVState, path: Path) -> KVState:
    """Return the state. Raise CheckpointError if a row has more tokens than its window can hold."""
    if (room := host_array(state.room())).min() < 0:
        raise CheckpointError(f"{path}: room of each row must be at least 0, got {room.tolist()}")
    return state


def read_state_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record of a file, its lengths and its tokens, without loading the state.

    Return the fields of StateRecord, and "format", "version", "lengths" (one for each row), "tokens" (a list of ids for
    each row, or None if they were not stored), "note" (texts by name) and "nbytes" (the size of the file, with its
    parts). Raises CheckpointError as `load_state` does, but only the tensors of lengths and tokens are checked.
    """
    file, record, digests = _open_state(Path(path).expanduser())
    names = [name for name in _token_names(record.batch) if name in file.shapes]
    tokens = [read_checked(file, name, digests).tolist() for name in names]
    lengths = read_checked(file, "lengths", digests).tolist()
    nbytes = sum(part.stat().st_size for part in [file.path, *part_paths(file)] if part.exists())
    form = file.metadata["format"]
    info = {
        "format": form,
        "version": int(file.metadata["version"]),
        "lengths": lengths,
        "tokens": tokens or None,
        "nbytes": nbytes,
    }
    return vars(record) | info | {"note": _read_note(file)}


def _read_note(file: TensorFile) -> dict[str, str]:
    """Return the texts that were stored beside a state. Raises CheckpointError if they are not as jshadow writes."""
    with described(file.path, _KIND):
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


def _open_state(path: Path) -> tuple[TensorFile, StateRecord, dict[str, str]]:
    """Open a saved state and check its header. Return the file, its record, and the SHA-256 of each tensor."""
    file, texts, digests = open_described(path, _KIND, _VERSIONS)
    with described(path, _KIND):
        if unknown := set(file.tags.values()) - set(TAGS.values()):
            raise ValueError(f"dtypes must be of {sorted(TAGS.values())}, got {sorted(unknown)}")
        record = StateRecord.read(texts)
        if "lengths" not in file.shapes:
            raise ValueError("the tensor lengths must be there, got none")
        # All that is made from the number of rows has the size of a tensor that is really there.
        if file.shapes["lengths"] != (record.batch,):
            raise ValueError(f"the tensor lengths must have batch={record.batch} rows, got {file.shapes['lengths']}")
        return file, record, digests


def _check_table(file: TensorFile | Parts, leaves: Mapping[str, Any], batch: int) -> None:
    """Raise CheckpointError unless the file has exactly the tensors of the leaves. Token ids may be there or not.

    In a single file, a tensor may be shorter on one axis, unless it is the lengths.
    """
    extra = [name for name in file.shapes if name not in leaves]
    if set(extra) == set(_token_names(batch)):
        extra = [name for name in extra if file.tags[name] != TAGS["int32"] or len(file.shapes[name]) != 1]
    problems = [f"{name}: extra, no such place in this state" for name in extra]
    for name, leaf in leaves.items():
        expected, got = (TAGS[leaf.dtype.name], leaf.shape), (file.tags.get(name), file.shapes.get(name))
        cuts = isinstance(file, TensorFile) and name != "lengths"
        if got != expected and not (cuts and got[0] == expected[0] and _is_cut(got[1], leaf.shape)):
            problems.append(f"{name}: " + ("missing" if name not in file.shapes else f"expected {expected}, got {got}"))
    raise_all(str(file.path), problems)


def _is_cut(shape: tuple[int, ...] | None, of: tuple[int, ...]) -> bool:
    """Return whether `shape` is the shape `of` with a shorter axis, and all other axes as they are."""
    if shape is None or len(shape) != len(of):
        return False
    pairs = list(zip(shape, of, strict=True))
    return all(0 < size <= full for size, full in pairs) and sum(size < full for size, full in pairs) == 1


def _check_index(file: TensorFile) -> None:
    """Raise CheckpointError unless an index of parts has the lengths, and no other tensors but token ids."""
    others = [name for name in file.shapes if not name.startswith("tokens.")]
    if others != ["lengths"]:
        raise CheckpointError(f"{file.path} must hold the tensor lengths, and others in parts, got {others!r:.80}")


def spare_bytes(expected: KVState) -> int:
    """Return the bytes of host memory that tensors may take while a file is checked, 0 if it is not known.

    It is half of what the state's host rows leave free. Several processes may share a host, so each takes its share.
    """
    free, shards = available_memory(), expected.specs[0].shards
    devices = 1 if shards is None else len(shards.mesh.local_devices)
    rows = devices * offload.host_bytes(expected.specs)
    return 0 if free is None else max(0, free - rows) // (2 * jax.process_count())


def _check_lengths(file: TensorFile, record: StateRecord, lengths: list[int]) -> None:
    """Raise CheckpointError if a length is out of range, or differs from the number of the row's stored token ids."""
    if not all(0 <= length <= record.capacity for length in lengths):
        raise CheckpointError(f"{file.path}: lengths must lie in [0, capacity={record.capacity}], got {lengths}")
    for name, length in zip(_token_names(record.batch), lengths, strict=True):
        if file.shapes.get(name, (length,)) != (length,):
            raise CheckpointError(f"{file.path}: {name} must have {length} ids, got {file.shapes[name][0]}")


def save_state(
    path: str | os.PathLike[str], state: KVState, params: Params, *, tokens: Sequence[Sequence[int]] | None = None
) -> None:
    """Write a state to one file, tensor by tensor. The state does not change.

    If its mesh goes over several processes, all of them must call this together. Each writes its part into a folder
    beside `path`, and process 0 writes the index to `path`.

    Args:
        path: file to create or to replace. It is written completely or not at all. Processes must share its directory.
        state: a state that was not consumed yet.
        params: the Params that made it.
        tokens: the token ids that each row holds, to be stored with the state. None: they are not stored.

    Raises:
        StateMismatch: the state was consumed, is of another model, holds another number of tokens than `tokens`, or has
            several rows that share a prompt half.
        PromptError: a token id is out of range.
        CheckpointError: the file cannot be written (such as on a full disk), in this process or in another, or JSON
            cannot express a setting.
        DistributedError: another process did not come.
    """
    StateContent.of(state, params, tokens, {}).write(Path(path).expanduser())


def load_state(path: str | os.PathLike[str], params: Params, policy: Policy | None = None) -> KVState:
    """Load a state. It has the fetch mode that it was saved with.

    It lies on the devices of the weights, whatever devices it was saved from. A single file is checked as a whole
    before anything is put on a device. Of a state in parts, each process reads and checks the blocks that its devices
    need. If the mesh goes over several processes, all of them must call this together.

    Args:
        path: file that `save_state` wrote.
        params: the model that made the state, with the same config, weights, dtype and tokenizer.
        policy: None, or the policy that made the state. A policy that is not in POLICIES must be given.

    Raises:
        StateMismatch: the file is for another model, tokenizer, dtype or policy. The message lists every difference.
        CheckpointError: the file or a part is missing, truncated, damaged, of another kind, run or format version, or
            another process could not load its slices.
        ConfigError: this machine does not support the fetch mode for this state, or its policy cannot run on the mesh.
        DistributedError: another process did not come.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    source = Path(path).expanduser()
    if not _spans_processes(shards_of(params, 1)):
        return place_state(read_state(source, params, policy))
    params.digest  # noqa: B018, all processes compute it together
    placed: list[KVState] = []
    together(f"loading {source.name}", lambda: placed.append(_place_arrays(read_state(source, params, policy))))
    return _check_placed(placed.pop(), source)


@dataclasses.dataclass(frozen=True)
class StateContent:
    """The content of the file of a state. `of` has checked the state."""

    record: StateRecord
    leaves: dict[str, Any]  # arrays by their names in the file, in the order of the file
    note: Mapping[str, str]
    index: frozenset[str]  # the names of the arrays that the index of a state in parts holds
    spans: bool  # whether the arrays lie on devices of several processes; then each process writes its part

    @classmethod
    def of(
        cls, state: KVState, params: Params, tokens: Sequence[Sequence[int]] | None, note: Mapping[str, str]
    ) -> "StateContent":
        """Check a state, and refer to its arrays. The errors are those of `save_state`, without those of writing."""
        check_state(params, state, None)
        if state.shares_prompt:
            raise StateMismatch(f"state must not share a prompt half among {state.batch} rows; save take([i]) of each")
        record = StateRecord.of(state, params)
        single = places(_check_loadable(record, state, params))
        fills = cache_fills(state)
        leaves: dict[str, Any] = {}
        shards = state.specs[0].shards
        for name, leaf in places(state).items():
            if name not in fills:
                leaves[name] = bare(leaf) if shards is None else Split.of(bare(leaf), bare(single[name]).shape)
        leaves["lengths"] = host_array(state.lengths)
        ids = _token_arrays(state, params, tokens)
        assert not leaves.keys() & ids.keys(), "a field of the state has the name of the token ids"
        # Wide numbers first: readers that map a file need each tensor aligned.
        ordered = dict(sorted((leaves | ids).items(), key=lambda item: -item[1].dtype.itemsize))
        return cls(record, ordered, note, frozenset({"lengths", *ids}), _spans_processes(shards))

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each array in the file. A single file has no zeros at the end of an axis."""
        return {
            name: tuple(leaf.shape) if self.spans or name in self.index else without_zeros(_on_host(leaf))
            for name, leaf in self.leaves.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the file."""
        return sum(leaf.dtype.itemsize * math.prod(self.shapes[name]) for name, leaf in self.leaves.items())

    def copied(self) -> "StateContent":
        """Copy the arrays in device memory, so that another thread can write while the device computes."""
        return dataclasses.replace(self, leaves={name: _off_device(leaf) for name, leaf in self.leaves.items()})

    def write(self, target: Path, *, private: bool = False) -> int:
        """Write the file completely or not at all, and return its bytes. One array at a time is copied to the host.

        `private`: only the user of this process may read the file. Raises CheckpointError if it cannot be written.
        """
        texts = self.record.texts()
        if self.note:
            texts["note"] = canonical(dict(self.note)).decode()
        if self.spans:
            return write_parts(target, texts, self.leaves, self.index)
        texts |= {"format": FORMAT, "version": str(VERSION)}
        layout = {name: (leaf.dtype.name, self.shapes[name]) for name, leaf in self.leaves.items()}

        def read(name: str) -> np.ndarray:
            value = _on_host(self.leaves[name])
            return np.asarray(value[within(whole(self.shapes[name]), whole(value.shape))], order="C")

        with replacing(target), staged_file(target) as fresh:
            size, _ = write_hashed(fresh, layout, texts, read)
            if private:
                fresh.chmod(0o600)
        return size


def _on_host(leaf: Any) -> np.ndarray:
    """Copy an array, which may be split over devices of this process, to a NumPy array in C order."""
    return leaf.on_host() if isinstance(leaf, Split) else host_array(leaf)


def _off_device(leaf: Any) -> Any:
    """Copy an array in device memory to a NumPy array. Return any other array as it is."""
    if isinstance(leaf, Split):
        return leaf.copied(_off_device)
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind == "pinned_host":
        return leaf
    value = host_array(leaf)
    return value.copy() if jax.default_backend() == "cpu" else value  # there, it is a view of the device's memory


def _check_loadable(record: StateRecord, state: KVState, params: Params) -> KVState:
    """Return the state that this record describes on one device, with ShapeDtypeStructs in place of arrays."""
    try:
        policy = record.match(params, None if state.policy.name in POLICIES | WRAPPERS else state.policy)
        single = record.abstract(params.config, policy, state.specs[0].keep)
        expected = _on_devices(single, state.specs[0].shards)
    except ValueError as error:
        raise CheckpointError(f"state cannot be stored: {error}") from error
    structure: Any = jax.tree.structure(expected)  # static fields are part of it: specs, policy, memory kinds
    same = structure == jax.tree.structure(state) and all(
        (like.shape, like.dtype) == (leaf.shape, leaf.dtype)
        for like, leaf in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True)
    )
    if not same:
        raise CheckpointError(
            f"state must have the structure that {state.policy} makes for these params, got another one"
        )
    return single


def _token_arrays(state: KVState, params: Params, tokens: Sequence[Sequence[int]] | None) -> dict[str, np.ndarray]:
    """Return the token ids of each row, int32 [length], by their names in the file."""
    if tokens is None:
        return {}
    lengths = host_array(state.lengths).tolist()
    if not all(isinstance(row, Sequence | np.ndarray) and not isinstance(row, str) for row in tokens):
        raise PromptError(f"tokens must have a list of ids for each row, got {tokens!r:.80}")
    if [len(row) for row in tokens] != lengths:
        raise StateMismatch(f"tokens must have {lengths} ids, like the state, got {[len(row) for row in tokens]}")
    return {
        name: check_ids(params.config, np.asarray(row, np.int64 if not len(row) else None), (None,), name)
        for name, row in zip(_token_names(state.batch), tokens, strict=True)
    }
