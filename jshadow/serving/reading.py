"""The reading of one prompt, part by part, so that running answers wait for one part at most."""

from typing import Any, Protocol

from jshadow.serving.groups import Group
from jshadow.serving.jobs import Job
from jshadow.serving.programs import Programs


class Reader(Protocol):
    """A prompt that is being read."""

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""

    def end(self) -> tuple[Any, Any]:
        """Return the logits [1, V] for the first token, and the state of the row."""


class PromptReader:
    """A prompt that is read from its beginning: a part is that of `Programs.advance`."""

    def __init__(self, programs: Programs, job: Job) -> None:
        self.programs = programs
        self.partial = programs.begin(job.plan, job.ids)

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""
        self.partial = self.programs.advance(self.partial)
        return self.partial.done

    def end(self) -> tuple[Any, Any]:
        """Return the logits [1, V] for the first token, and the state of the row."""
        return self.programs.finish(self.partial)


class DocumentReader:
    """A prompt whose beginning is stored: a part has up to `turn_chunk` of the other tokens."""

    def __init__(self, programs: Programs, job: Job, base: Any) -> None:
        """Take the stored state of the beginning. It is only read."""
        self.programs, self.rest = programs, job.ids[job.read :]
        self.state: Any = programs.begin_on(job.plan, base)
        self.logits: Any = None

    def advance(self) -> bool:
        """Read the next part. Return whether it was the last one."""
        count = self.programs.options.turn_chunk
        self.logits, self.state = self.programs.extend(self.state, self.rest[:count])
        self.rest = self.rest[count:]
        return not self.rest

    def end(self) -> tuple[Any, Any]:
        """Return the logits [1, V] for the first token, and the state of the row."""
        return self.logits, self.state


class Reading:
    """A job that is being read, and the row that is reserved for it.

    Attributes:
        moved: whether a part was read since the last interruption. If not, it may not be interrupted again.
    """

    def __init__(self, programs: Programs, job: Job, group: Group, slot: int) -> None:
        self.job, self.group, self.slot, self.moved = job, group, slot, False
        self.reader: Reader = (
            PromptReader(programs, job) if group.base is None else DocumentReader(programs, job, group.base)
        )
