"""Requests whose prompt begins with a stored document: they share the document's prompt half."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jshadow.cache.accounting import ByteCount, total
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, same_arrays, with_room
from jshadow.engine.placement import commit
from jshadow.errors import CheckpointError, ConfigError, DocumentError
from jshadow.library.shelf import DOCUMENT
from jshadow.planner.bytes import abstract_of, step_temporaries
from jshadow.planner.pieces import extend_peak
from jshadow.planner.sessions import halves
from jshadow.policies import Policy
from jshadow.serving.admission import (
    GroupBytes,
    PlannedClass,
    RowClass,
    effective_policy,
    settings_bytes,
    with_drafting,
)
from jshadow.serving.groups import Programs
from jshadow.serving.jobs import Job, typed


def check_library(library: Any, programs: Programs, policy: Policy | None) -> None:
    """Raise ConfigError unless a library has the engine's model, policy and learned arrays."""
    params, fitted = programs.params, programs.options.fitted
    if library.params is not params:
        raise ConfigError(f"library must have the params of the engine, got others ({library.params.config})")
    expected, fallback = effective_policy(params.config, policy, library.capacity)
    if library.policy != expected:
        raise ConfigError(f"library must have the policy of the engine, {expected}, got {library.policy}")
    if fallback is None and not same_arrays(library.fitted, fitted):
        raise ConfigError("library must have the learned arrays (options.fitted) of the engine, got others")


def find_stored(library: Any, job: Job, plans: Sequence[PlannedClass]) -> None:
    """Look for the longest stored beginning of a job's prompt.

    At least one token of the prompt stays, because its logits give the first new token. Nothing changes if there is no
    such state, or if no class has the room for the rest of the prompt and the answer.
    """
    stored = library.longest(job.ids[:-1])
    if stored is None:
        return
    new = len(job.ids) - stored.tokens + job.request.max_new_tokens
    rooms = [plan.row_class for plan in plans if plan.row_class.room >= new]
    if not rooms or stored.tokens + new > library.capacity:
        return
    job.document, job.read, job.rooms = stored.key, stored.tokens, rooms
    job.prepare = functools.partial(library.prepare, stored.key)
    job.load = functools.partial(library.prepared, stored.key)


def base_of(job: Job, held: Mapping[str | None, KVState | None]) -> KVState | None:
    """Return the stored state of a job's document, of which only the prompt half is to be shared.

    Return None if it has left memory since it was prepared. Then it is to be prepared again.

    Args:
        held: the states of the documents that groups have. Such a state is not loaded again.

    Raises:
        DocumentError: the file cannot be read, or is damaged.
        JshadowError: the stored state cannot be used for another reason.
    """
    assert job.load is not None
    try:
        read = None if job.ready is None else job.ready.result()
        state = held.get(job.document) or job.load(read)
    except CheckpointError as error:
        raise DocumentError(str(error)) from error
    if state is None:
        job.ready = None
        return None
    return commit(state)


def plan_rows(programs: Programs, job: Job, base: KVState) -> PlannedClass:
    """Return the plan of the rows that share a job's document. `base` is its stored state."""
    new = len(job.ids) - job.read + job.request.max_new_tokens
    one = min(job.rooms, key=lambda row_class: row_class.room)
    room, specs = next(found for found in _rooms_of(base, one.room) if _holds(base, found[1], new))
    rows = max(2, one.rows)  # one row alone would own the prompt half
    config, policy, options = programs.params.config, base.policy, programs.options
    prompt, live = (total(parts.values()) for parts in halves(abstract_of(specs, policy)))
    peak = extend_peak(config, abstract_of(specs, policy), options.turn_chunk)
    group = tuple(dataclasses.replace(spec, batch=rows) for spec in specs)
    sizes = GroupBytes(
        rows=total([live.times(rows), settings_bytes(programs.parts, rows)]),
        step=sum(step_temporaries(config, policy, group).values()),
        reading=total([live, ByteCount(peak["piece"] + peak["hooks"] + peak["logits"])]),
        shared=prompt,
    )
    plan = PlannedClass(RowClass(job.read, room, rows), policy, None, base.fetch, sizes, job.document, specs)
    return with_drafting(plan, options.speculate, config, specs)


def _rooms_of(state: KVState, least: int) -> Iterator[tuple[int, tuple[CacheSpec, ...]]]:
    """Yield rooms from `least` on, each twice the one before, with the specs of a row that has the room."""
    room = least
    while True:
        yield room, with_room(state.specs, room)
        if room >= state.capacity:
            return
        room *= 2


def _holds(state: KVState, specs: tuple[CacheSpec, ...], new: int) -> bool:
    """Whether a state of one row with the windows of `specs` could take `new` more tokens."""
    return int(np.asarray(state.replace(specs=specs).room())[0]) >= new


def keep(job: Job, ids: Sequence[int], make: Callable[[], KVState]) -> None:
    """Begin to store the state that `make` returns. An error is noted in the job's report, and the answer goes on.

    A file that cannot be written after the answer has ended is not in the report. The state is then not listed.
    """

    def note(done: "concurrent.futures.Future[str]") -> None:
        if (error := done.exception()) is not None:
            job.not_stored = str(error)

    assert job.keep is not None
    title = job.request.title
    try:
        kept = job.keep(list(ids), make(), **({} if title is None else {"title": title, "ends": DOCUMENT}))
        job.stored = kept
        kept.add_done_callback(note)
    except Exception as error:
        job.not_stored = str(typed(error, job.request.name))


def not_kept(_: Sequence[int], state: KVState, **note: str) -> "concurrent.futures.Future[str]":
    """Run the programs with which a library begins to store a state, and store nothing."""
    state.with_room(0)
    done: concurrent.futures.Future[str] = concurrent.futures.Future()
    done.set_result("")
    return done
