"""Saving and loading KV states. A file is loaded only for its own model and policy.

A state is stored in one safetensors file, which is written completely or not at all. The tensors are the leaves of the
state, named by their place in it ("layers.3.frozen.left", "lengths"), and the token ids if the caller passed them
("tokens.0"). A cache on which no result depends (`LayerCache.emptied`) is not stored. It is empty after loading. The
metadata holds the record of `saved_record.py`, the SHA-256 of every tensor ("sha256"), and the SHA-256 of the parsed
header, that is, of the metadata and the tensor table in canonical JSON ("header_sha256"). So a file in which any bit
has changed is refused. Only white space in the header, which the parser skips, is not checked.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine.checks import check_ids, check_state
from jshadow.engine.saved_file import described, header_digest, open_described, read_all_checked, read_checked
from jshadow.engine.saved_record import StateRecord
from jshadow.errors import CheckpointError, ConfigError, PromptError, StateMismatch
from jshadow.policies import POLICIES, WRAPPERS, Policy
from jshadow.weights.convert.files import staged_file
from jshadow.weights.convert.safetensors_file import TAGS, Layout, TensorFile, encode_header, raise_all, write_payload
from jshadow.weights.digest import canonical, host_array, raw_bytes, sha256
from jshadow.weights.params import Params

FORMAT, VERSION = "jshadow KV state", 3
KIND = "a saved KV state (safetensors)"
UNKNOWN = "0" * 64  # the placeholder of a digest until its tensor is written


def save_state(
    path: str | os.PathLike[str], state: KVState, params: Params, *, tokens: Sequence[Sequence[int]] | None = None
) -> None:
    """Write a state to one file, tensor by tensor. The state does not change.

    Args:
        path: file to create or to replace. It is written completely or not at all.
        state: a state that was not consumed yet.
        params: the Params that made it.
        tokens: the token ids that each row holds, to be stored with the state. None: they are not stored.

    Raises:
        StateMismatch: the state was consumed, is of another model, holds another number of tokens than `tokens`, or has
            several rows that share a prompt half.
        PromptError: a token id is out of range.
        CheckpointError: the file cannot be written (such as on a full disk), or JSON cannot express a setting.
    """
    target = Path(path).expanduser()
    check_state(params, state, None)
    if state.shares_prompt:
        raise StateMismatch(f"state must not share a prompt half among {state.batch} rows; save take([i]) of each row")
    record = StateRecord.of(state, params)
    check_loadable(record, state, params)
    fills = cache_fills(state)
    leaves: dict[str, Any] = {name: bare(leaf) for name, leaf in places(state).items() if name not in fills}
    ids = token_arrays(state, params, tokens)
    assert not leaves.keys() & ids.keys(), "a field of the state has the name of the token ids"
    leaves |= ids
    # Wide numbers first: readers that map a file need each tensor aligned.
    ordered = sorted(leaves.items(), key=lambda item: -item[1].dtype.itemsize)
    layout = {name: (leaf.dtype.name, tuple(leaf.shape)) for name, leaf in ordered}
    digests = dict.fromkeys(layout, UNKNOWN)

    def read(name: str) -> np.ndarray:
        value = host_array(leaves[name])
        digests[name] = sha256(raw_bytes(value))
        return value

    with staged_file(target) as fresh, fresh.open("wb") as file:
        file.write(encode_header(layout, header_texts(record, layout, digests)))
        write_payload(file, layout, read)
        file.seek(0)
        file.write(encode_header(layout, header_texts(record, layout, digests)))  # as long as before


def load_state(path: str | os.PathLike[str], params: Params, policy: Policy | None = None) -> KVState:
    """Load a state. It has the fetch mode that it was saved with.

    The whole file is checked before anything is put on a device.

    Args:
        path: file that `save_state` wrote.
        params: the model that made the state, with the same config, weights, dtype and tokenizer.
        policy: None, or the policy that made the state. A policy that is not in POLICIES must be given.

    Raises:
        StateMismatch: the file is for another model, tokenizer, dtype or policy. The message lists every difference.
        CheckpointError: the file is missing, truncated, damaged, of another kind, or of another format version.
        ConfigError: this machine does not support the fetch mode for this state.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    file, record, digests = open_state(Path(path).expanduser())
    try:
        expected = record.abstract(params.config, record.match(params, policy))
    except StateMismatch as error:
        raise StateMismatch(f"{file.path} must hold a state of these params and policy, got {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{file.path} cannot be loaded here: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    expected_leaves, fills = places(expected), cache_fills(expected)
    stored = {name: bare(leaf) for name, leaf in expected_leaves.items() if name not in fills}
    check_table(file, stored, record.batch)
    host_memory.check_host_memory([expected.specs])
    tensors = read_all_checked(file, digests, spare_bytes(expected))
    check_lengths(file, record, tensors["lengths"].tolist())

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
    if (room := np.asarray(state.room())).min() < 0:
        raise CheckpointError(f"{file.path}: room of each row must be at least 0, got {room.tolist()}")
    return state


def read_state_info(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the record of a file, its lengths and its tokens, without loading the state.

    Returns:
        The fields of StateRecord, and "format", "version", "lengths" (one for each row), "tokens" (a list of ids for
        each row, or None if they were not stored) and "nbytes" (the size of the file).

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
    return vars(record) | info


# Names


def is_place(node: Any) -> bool:
    """Whether a node of the pytree is a HostArray. It counts as one leaf: an array and its memory kind."""
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


def token_names(batch: int) -> list[str]:
    """Return the tensor names of the token ids, one for each row."""
    return [f"tokens.{row}" for row in range(batch)]


# Saving


def check_loadable(record: StateRecord, state: KVState, params: Params) -> None:
    """Raise CheckpointError if a state that is loaded by this record would have another structure than `state`."""
    try:
        policy = record.match(params, None if state.policy.name in POLICIES | WRAPPERS else state.policy)
        expected = record.abstract(params.config, policy, state.specs[0].keep)
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


def token_arrays(state: KVState, params: Params, tokens: Sequence[Sequence[int]] | None) -> dict[str, np.ndarray]:
    """Return the token ids of each row, int32 [length], by their names in the file."""
    if tokens is None:
        return {}
    lengths = np.asarray(state.lengths).tolist()
    if not all(isinstance(row, Sequence | np.ndarray) and not isinstance(row, str) for row in tokens):
        raise PromptError(f"tokens must have a list of ids for each row, got {tokens!r:.80}")
    if [len(row) for row in tokens] != lengths:
        raise StateMismatch(f"tokens must have {lengths} ids, like the state, got {[len(row) for row in tokens]}")
    return {
        name: check_ids(params.config, np.asarray(row, np.int64 if not len(row) else None), (None,), name)
        for name, row in zip(token_names(state.batch), tokens, strict=True)
    }


def header_texts(record: StateRecord, layout: Layout, digests: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a file, including the digest of its header."""
    texts = record.texts() | {"format": FORMAT, "version": str(VERSION), "sha256": canonical(dict(digests)).decode()}
    table = {name: (TAGS[dtype], shape) for name, (dtype, shape) in layout.items()}
    return texts | {"header_sha256": header_digest(texts, table)}


# Loading


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
    array = jax.device_put(value, SingleDeviceSharding(jax.devices()[0], memory_kind=memory))
    return HostArray(array, memory) if isinstance(place, HostArray) else array
