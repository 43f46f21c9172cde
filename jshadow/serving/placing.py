"""Gives rows to jobs: the groups of an engine, within the limits of its memory."""

from collections.abc import Iterator
from typing import Any

from jshadow.serving import documents
from jshadow.serving.admission import Admission
from jshadow.serving.classes import PlannedClass
from jshadow.serving.groups import Group
from jshadow.serving.jobs import Job
from jshadow.serving.programs import Programs


class Groups:
    """The groups of an engine. An empty group is kept until another class needs its bytes."""

    def __init__(self, programs: Programs, admission: Admission) -> None:
        self.programs, self.admission = programs, admission
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))

    def __len__(self) -> int:
        return len(self._groups)

    def has(self, plan: PlannedClass) -> bool:
        """Whether there is a group of a class."""
        return any(group.plan.key == plan.key for group in self._groups)

    def clear(self) -> None:
        """Forget all groups."""
        self._groups = []

    def release(self, job: Job) -> None:
        """Free the row of a job."""
        for group in self._groups:
            if job in group.jobs:
                group.release(group.jobs.index(job))

    def sweep(self) -> None:
        """Drop the groups on a document that have no job. Not before the end of a turn: another job may get a row."""
        self._groups = [group for group in self._groups if group.base is None or not group.empty]

    def place(self, job: Job, paused: PlannedClass | None = None) -> tuple[Group, int] | None:
        """Reserve a row for a job, and return its group and slot.

        Return None if no row is free and no group fits, or if the job's document must be prepared again.

        Args:
            job: a job without a row.
            paused: the class of a prompt whose reading is paused meanwhile. Its bytes are counted too.

        Raises:
            JshadowError: the stored state of the job's document cannot be used, or its rows can never fit.
        """
        base = None
        if not job.planned:
            base = self._base(job)
            if base is None:
                return None
            plan = documents.plan_rows(self.programs, job, base)
            self.admission.check(plan)
            job.plans = [plan]
        plans = [group.plan for group in self._groups]
        for group in self._groups:
            fits = group.plan.key == job.plan.key and (paused is None or self.admission.fits(plans, paused))
            if fits and (slot := group.reserve(job)) is not None:
                return group, slot
        kept = [group.plan for group in self._groups if not group.empty]
        if not self.admission.fits([*kept, job.plan], paused):
            return None
        for group in [group for group in self._groups if group.empty]:
            if self.admission.fits([*(other.plan for other in self._groups), job.plan], paused):
                break
            self._groups.remove(group)
        if job.document is not None and base is None:
            base = self._base(job)
            if base is None:
                return None
        group = Group(job.plan, self.programs, base)
        self._groups.append(group)
        slot = group.reserve(job)
        assert slot is not None
        return group, slot

    def _base(self, job: Job) -> Any:
        """Return the stored state of a job's document. If a group has it, its prompt half is not loaded again."""
        return documents.base_of(job, {group.plan.document: group.base for group in self._groups})
