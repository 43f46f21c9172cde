"""A store of states in tiers, from the device to an object store. States are found by their token ids."""

import concurrent.futures
import os
import threading
from collections.abc import Sequence
from typing import Self

import numpy as np

from jshadow.cache.shared_rows import same_arrays
from jshadow.cache.state import KVState, is_deleted
from jshadow.engine.checks import check_capacity, check_ids, check_policy, check_state
from jshadow.engine.fetch_mode import fetch_for
from jshadow.engine.saved.read import ReadState, place_state
from jshadow.engine.types import Fitted
from jshadow.errors import JshadowError, StateMismatch
from jshadow.library.catalog import Catalog
from jshadow.library.files import Files, Maker
from jshadow.library.identity import Identity
from jshadow.library.memory import size_of, to_device, to_host
from jshadow.library.shelf import Entry, Stored
from jshadow.library.tiers import DEVICE, Held, MemoryTiers, TierLimits
from jshadow.planner.machine import Batch
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.base import why_dense
from jshadow.policies.checks import check_fitted
from jshadow.weights.params import Params

NO_LIMITS = TierLimits()


class StateStore:
    """The part of `Library` that stores, finds and loads states."""

    def __init__(
        self,
        place: str | os.PathLike[str],
        params: Params,
        policy: Policy | None = None,
        *,
        capacity: int,
        fetch: str = "auto",
        limits: TierLimits = NO_LIMITS,
        fitted: Fitted | None = None,
    ) -> None:
        """Open a library, or begin one.

        Args:
            place: a directory, which need not exist, or the URL of an object store ("s3://bucket/path").
            params: the model.
            policy: how keys and values are kept. None means ShadowKV().
            capacity: maximum number of tokens that a state can ever hold, with questions and answers.
            fetch: "auto", "resident", "device_put" or "zero_copy".
            limits: limits of the tiers in bytes.
            fitted: arrays that the policy learned, or None.

        Raises:
            CapacityError: capacity is not within the model's context.
            ConfigError: a setting is out of range, or `place` is a URL and the package obstore is missing.
            CheckpointError: `place` is not a directory, or the object store cannot be read.
        """
        check_capacity(params.config, capacity, 1)
        policy = ShadowKV() if policy is None else policy
        check_policy(policy)
        check_fitted(policy, params.config, fitted)
        self.params, self.capacity, self.fitted, self.limits = params, capacity, fitted, limits
        resolved = policy.resolve(params.config, capacity)
        self.policy = Full() if why_dense(resolved, params.config, capacity) else resolved
        sizes = Batch(1, capacity, capacity, capacity, str(params.dtype))
        self.fetch = fetch_for(fetch, params, self.policy, sizes).fetch
        self.identity = Identity.of(params, self.policy, fitted, capacity, self.fetch)
        self.files = Files(place, Maker(params, self.policy, self.identity), limits)
        self.tiers = MemoryTiers[KVState](limits, to_host, self._leave)
        self.catalog = Catalog(self.files, self.tiers.tier_of)
        self.work = threading.RLock()  # held by all that uses JAX or changes a tier

    def longest(self, ids: Sequence[int] | np.ndarray) -> Stored | None:
        """Return the stored state that holds the most of the first tokens of `ids`, int [n], or None."""
        return self.catalog.longest(np.asarray(ids, np.int32))

    def documents(self) -> list[Stored]:
        """Return all stored states, the least recently used first, and the files that cannot be used."""
        return self.catalog.stored()

    def ids(self, key: str) -> np.ndarray:
        """Return the token ids of a stored state, int32 [n]. Raises CheckpointError if there is no such state."""
        return self.catalog.entry(key).ids

    def prepare(self, key: str) -> "concurrent.futures.Future[ReadState] | concurrent.futures.Future[None]":
        """Begin to read and check the file of a state in other threads, so that `load` need not wait for it.

        The arrays wait in host memory until `load` is called, for at most a few states. The future is done when they
        are read. It has the error that `load` would raise. If the state is in memory, it is done at once.
        """
        if self.tiers.tier_of(key) is not None:
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            done.set_result(None)
            return done
        return self.catalog.reading(key)

    def load(self, key: str) -> KVState:
        """Return a stored state of one row, ready for a step. Its rows have the least window.

        The library keeps the state too. So it must not be consumed: call `with_room`, `share` or `fork` first.

        Raises:
            CheckpointError: there is no such state, or its file is damaged, was removed or is of a newer version.
            StateMismatch: the file is of another model, policy, dtype, capacity or fetch mode.
            HostMemoryError: the host lacks the memory for the offloaded rows.
        """
        with self.work:
            held = self.tiers.get(key)
            if held is not None and is_deleted(vars(held.state)["lengths"]):
                self.tiers.drop(key)  # a step has consumed it
                held = None
            state = self._read(key) if held is None else self._raised(key, held)
            if (entry := self.catalog.find(key)) is not None:
                self.catalog.put(key, entry)
            return state

    def store(
        self,
        ids: Sequence[int] | np.ndarray,
        state: KVState,
        *,
        title: str = "",
        ends: str = "",
        durable: bool = True,
    ) -> str:
        """Store a state, and return its key. The state stays usable, and later steps do not change what is stored.

        Args:
            ids: the token ids that the state holds, int [n].
            state: a state of one row, of this library's model, policy, capacity and fetch mode.
            title: a title for `documents`.
            ends: what the last tokens are, "document", "answer" or "". A question in `ask` is framed by it.
            durable: whether a file is written at once. If not, the state is written only when it leaves memory, and it
                is forgotten if the disk has no room then.

        Raises:
            StateMismatch: the state is another model's or another library's, holds another number of tokens, or was
                consumed.
            PromptError: a token id is out of range.
            CapacityError: the state fits no tier. The message has the limit and its bytes.
            CheckpointError: the file cannot be written. Nothing half-written is left.
        """
        with self.work:
            tokens = check_ids(self.params.config, np.asarray(ids), (None,), "ids")
            self._check_own(state, len(tokens))
            key = self.identity.key(tokens)
            entry = self.catalog.find(key)
            if entry is not None and entry.problem is not None:
                self.files.remove(key)
                entry = None
            if entry is None:
                entry = Entry(tokens, {"title": title, "ends": ends})
            least = state.with_room(0)
            entry.size = size_of(least)
            if durable and not (entry.file or entry.object):
                self.files.write(key, least, entry)
            if self.tiers.put(key, least, entry.size) is None and not (entry.file or entry.object):
                self.files.write(key, least, entry)
            self.catalog.put(key, entry)
            return key

    def remove(self, key: str) -> None:
        """Forget a state, and remove its file and its object. Also a damaged file can be removed.

        Raises:
            CheckpointError: there is no such state, or it cannot be removed.
        """
        with self.work:
            self.catalog.entry(key)
            self.files.remove(key)
            self.tiers.drop(key)
            self.catalog.drop(key)

    def close(self) -> None:
        """Free the memory of all states, and end the threads. States that have no file are forgotten."""
        with self.work:
            self.files.close()
            self.tiers.held.clear()
            self.catalog.reads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Parts. `work` is held.

    def _read(self, key: str) -> KVState:
        """Return a state from its file, and keep it in memory if it fits."""
        try:
            read = self.catalog.reading(key).result()
            size = size_of(read.expected)
            self.tiers.make_room(size)
            state = place_state(read)
        except JshadowError as error:
            self.catalog.failed(key, error)
            raise
        assert read.tokens is not None
        self.catalog.loaded(key, read.tokens[0]).size = size
        self.tiers.put(key, state, size)
        return state

    def _raised(self, key: str, held: Held[KVState]) -> KVState:
        """Return a state that is in memory, and move it to the device tier if it fits."""
        if held.tier == DEVICE:
            return held.state
        if self.tiers.fitting(held.size) != DEVICE:
            return to_device(held.state)
        self.tiers.drop(key)  # so that its bytes do not count while room is made
        try:
            self.tiers.make_room(held.size)
            state = to_device(held.state)
        except Exception:
            self.tiers.held[key] = held
            raise
        self.tiers.put(key, state, held.size)
        return state

    def _leave(self, key: str, state: KVState) -> None:
        """Write a state that leaves memory and has no file. If there is no room for it, it is forgotten."""
        entry = self.catalog.entries.get(key)
        if entry is None or entry.file or entry.object:
            return
        try:
            self.files.write(key, state, entry)
        except JshadowError:
            self.catalog.drop(key)

    def _check_own(self, state: KVState, tokens: int) -> None:
        """Raise StateMismatch unless a state is one row of this library, and holds this number of tokens."""
        check_state(self.params, state, self.policy)
        ours, theirs = (self.capacity, self.fetch, 1), (state.capacity, state.fetch, state.batch)
        if ours != theirs:
            raise StateMismatch(f"state must have (capacity, fetch, rows) = {ours}, got {theirs}")
        if not same_arrays(self.fitted, state.fitted):
            raise StateMismatch("state must have the learned arrays (fitted) of this library, got others")
        if (length := int(np.asarray(state.lengths)[0])) != tokens:
            raise StateMismatch(f"state must hold the {tokens} tokens of ids, got {length}")
