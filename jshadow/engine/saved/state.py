"""Saving and loading KV states. A file is loaded only for its own model and policy.

A state is stored in one safetensors file, which is written completely or not at all. If it lies on devices of several
processes, it is stored in parts (`parts.py`). Whatever mesh it lies on, its arrays are stored as one device has them.
The tensors are the leaves of the state, named by their place in it ("layers.3.frozen.left", "lengths"), and the token
ids if the caller passed them ("tokens.0"). A cache on which no result depends (`LayerCache.emptied`) is not stored. It
is empty after loading. The metadata holds the record of `record.py`, the SHA-256 of every tensor ("sha256"), and the
SHA-256 of the parsed header, that is, of the metadata and the tensor table in canonical JSON ("header_sha256"). So a
file in which any bit has changed is refused. Only white space in the header, which the parser skips, is not checked.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jshadow.cache.state import KVState
from jshadow.engine.checks import check_ids, check_state
from jshadow.engine.placement import shards_of
from jshadow.engine.saved.layout import Split, on_devices, spans_processes
from jshadow.engine.saved.leaves import bare as bare
from jshadow.engine.saved.leaves import cache_fills as cache_fills
from jshadow.engine.saved.leaves import places as places
from jshadow.engine.saved.leaves import token_names
from jshadow.engine.saved.read import FORMAT, VERSION, check_placed, place_arrays, place_state, read_state
from jshadow.engine.saved.read import read_state_info as read_state_info
from jshadow.engine.saved.record import StateRecord
from jshadow.engine.saved.together import together
from jshadow.engine.saved.write import write_hashed
from jshadow.engine.saved.write_parts import replacing, write_parts
from jshadow.errors import CheckpointError, PromptError, StateMismatch
from jshadow.policies import POLICIES, WRAPPERS, Policy
from jshadow.weights.convert.files import staged_file
from jshadow.weights.digest import canonical, host_array
from jshadow.weights.params import Params


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
    write_state(Path(path).expanduser(), state, params, tokens, {})


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
    if not spans_processes(shards_of(params, 1)):
        return place_state(read_state(source, params, policy))
    params.digest  # noqa: B018, all processes compute it together
    placed: list[KVState] = []
    together(f"loading {source.name}", lambda: placed.append(place_arrays(read_state(source, params, policy))))
    return check_placed(placed.pop(), source)


def write_state(
    target: Path,
    state: KVState,
    params: Params,
    tokens: Sequence[Sequence[int]] | None,
    note: Mapping[str, str],
) -> None:
    """Write a state as `save_state` does, and with it the texts of `note`, by name."""
    StateContent.of(state, params, tokens, note).write(target)


@dataclasses.dataclass(frozen=True)
class StateContent:
    """The content of the file of a state. `of` has checked the state.

    Attributes:
        record: the record of the state.
        leaves: arrays by their names in the file, in the order of the file.
        note: texts by name.
        index: the names of the arrays that the index of a state in parts holds.
        spans: whether the arrays lie on devices of several processes. Then each process writes its part.
    """

    record: StateRecord
    leaves: dict[str, Any]
    note: Mapping[str, str]
    index: frozenset[str] = frozenset()
    spans: bool = False

    @classmethod
    def of(
        cls, state: KVState, params: Params, tokens: Sequence[Sequence[int]] | None, note: Mapping[str, str]
    ) -> "StateContent":
        """Check a state, and refer to its arrays. The errors are those of `save_state`, without those of writing."""
        check_state(params, state, None)
        if state.shares_prompt:
            raise StateMismatch(f"state must not share a prompt half among {state.batch} rows; save take([i]) of each")
        record = StateRecord.of(state, params)
        single = places(check_loadable(record, state, params))
        fills = cache_fills(state)
        leaves: dict[str, Any] = {}
        for name, leaf in places(state).items():
            if name not in fills:
                leaves[name] = as_stored(state, bare(leaf), bare(single[name]))
        leaves["lengths"] = host_array(state.lengths)
        ids = token_arrays(state, params, tokens)
        assert not leaves.keys() & ids.keys(), "a field of the state has the name of the token ids"
        # Wide numbers first: readers that map a file need each tensor aligned.
        ordered = dict(sorted((leaves | ids).items(), key=lambda item: -item[1].dtype.itemsize))
        return cls(record, ordered, note, frozenset({"lengths", *ids}), spans_processes(state.specs[0].shards))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, as one device has them."""
        return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in self.leaves.values())

    def copied(self) -> "StateContent":
        """Copy the arrays in device memory to NumPy arrays. Then another thread can write while the device computes.

        Arrays in pinned host memory stay where they are.
        """
        return dataclasses.replace(self, leaves={name: off_device(leaf) for name, leaf in self.leaves.items()})

    def write(self, target: Path, *, private: bool = False) -> int:
        """Write the file completely or not at all, and return its bytes. One array at a time is copied to the host.

        `private`: only the user of this process may read the file.

        Raises:
            CheckpointError: the file cannot be written (such as on a full disk).
        """
        texts = self.record.texts()
        if self.note:
            texts["note"] = canonical(dict(self.note)).decode()
        if self.spans:
            return write_parts(target, texts, self.leaves, self.index)
        texts |= {"format": FORMAT, "version": str(VERSION)}
        layout = {name: (leaf.dtype.name, tuple(leaf.shape)) for name, leaf in self.leaves.items()}
        with replacing(target), staged_file(target) as fresh:
            size, _ = write_hashed(fresh, layout, texts, lambda name: on_host(self.leaves[name]))
            if private:
                fresh.chmod(0o600)
        return size


def as_stored(state: KVState, leaf: Any, single: Any) -> Any:
    """Return an array of a state as its file has it: as one device has it, where its shape is that of `single`."""
    return leaf if state.specs[0].shards is None else Split.of(leaf, single.shape)


def on_host(leaf: Any) -> np.ndarray:
    """Copy an array, which may be split over devices of this process, to a NumPy array in C order."""
    return leaf.on_host() if isinstance(leaf, Split) else host_array(leaf)


def off_device(leaf: Any) -> Any:
    """Copy an array in device memory to a NumPy array. Return any other array as it is."""
    if isinstance(leaf, Split):
        return leaf.copied(off_device)
    if not isinstance(leaf, jax.Array) or leaf.sharding.memory_kind == "pinned_host":
        return leaf
    value = host_array(leaf)
    return value.copy() if jax.default_backend() == "cpu" else value  # there, it is a view of the device's memory


def check_loadable(record: StateRecord, state: KVState, params: Params) -> KVState:
    """Return the state that this record describes on one device, with ShapeDtypeStructs in place of arrays.

    Raises:
        CheckpointError: a state that is loaded by this record would have another structure than `state`.
    """
    try:
        policy = record.match(params, None if state.policy.name in POLICIES | WRAPPERS else state.policy)
        single = record.abstract(params.config, policy, state.specs[0].keep)
        expected = on_devices(single, state.specs[0].shards)
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


def token_arrays(state: KVState, params: Params, tokens: Sequence[Sequence[int]] | None) -> dict[str, np.ndarray]:
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
        for name, row in zip(token_names(state.batch), tokens, strict=True)
    }
