"""Requests whose prompt begins with a stored document: they share the document's prompt half."""

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import jax

from jshadow.cache.state import KVState
from jshadow.errors import JshadowError
from jshadow.serving.classes import ClassPlan, GroupBytes, RowClass
from jshadow.serving.jobs import Job


def find(library: Any, job: Job, plans: Sequence[ClassPlan]) -> None:
    """Look for the longest stored beginning of a job's prompt, and begin to prepare it.

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
    job.stored, job.read = stored, stored.tokens
    job.ready = library.prepare(stored.key)


def load(library: Any, job: Job, plans: Sequence[ClassPlan]) -> tuple[ClassPlan, KVState]:
    """Return the plan of the rows that share a job's document, and the state of one row with room for its answer.

    Raises:
        JshadowError: the stored state cannot be used.
    """
    job.ready.result()
    new = len(job.ids) - job.read + job.request.max_new_tokens
    one = min((plan.row_class for plan in plans if plan.row_class.room >= new), key=lambda row_class: row_class.room)
    room = min(one.room, library.capacity - job.read)
    state = library.load(job.stored.key).with_room(room)
    reads, writes = state.split()
    shared, own = bytes_of(reads), bytes_of(writes)
    row_class = RowClass(job.read, room, max(2, one.rows))  # one row alone would own the prompt half
    sizes = GroupBytes(shared[0] + row_class.rows * own[0], shared[1] + row_class.rows * own[1])
    return ClassPlan(row_class, state.policy, None, state.fetch, sizes, job.stored.key), state


def bytes_of(tree: Any) -> tuple[int, int]:
    """Return the bytes of the arrays of a pytree on the device and on the host."""
    device = host = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind == "pinned_host":
            host += leaf.nbytes
        else:
            device += leaf.nbytes
    return device, host


def store(library: Any, job: Job, ids: Sequence[int], state: KVState) -> None:
    """Begin to store the state of a job. An error is noted in its report, and the answer goes on.

    A file that cannot be written after the answer has ended is not in the report. The state is then not listed.
    """

    def note(done: "concurrent.futures.Future[str]") -> None:
        if (error := done.exception()) is not None:
            job.not_stored = str(error)

    try:
        library.start_store(list(ids), state).add_done_callback(note)
    except JshadowError as error:
        job.not_stored = str(error)
