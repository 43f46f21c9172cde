"""What an engine has done, and what it holds now."""

import dataclasses


@dataclasses.dataclass
class Counts:
    """Counts since the engine was made.

    Attributes:
        finished, failed, cancelled: number of requests that ended in each way.
        tokens: number of drawn tokens.
        steps: number of steps of groups.
        units: number of turns in which a prompt was read.
        most_units: the largest number of such turns between two steps of running rows.
        busy_seconds: seconds in which the engine stepped rows or read prompts.
        queue_seconds, prefill_seconds, decode_seconds: sums over the finished requests, as in `AnswerReport`.
    """

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    steps: int = 0
    units: int = 0
    most_units: int = 0
    busy_seconds: float = 0.0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineReport:
    """The figures of an engine.

    Attributes:
        counts: counts since the engine was made.
        waiting: number of requests that wait for a row.
        reading: whether a prompt is being read.
        groups: number of groups.
        rows: number of their rows.
        rows_in_use: number of these that a request has, including the row of the prompt that is being read.
        device_bytes: planned bytes of the groups in device memory.
        host_bytes: planned bytes of the groups in host memory.
        programs: number of programs that the process has compiled since the engine was made.
    """

    counts: Counts
    waiting: int
    reading: bool
    groups: int
    rows: int
    rows_in_use: int
    device_bytes: int
    host_bytes: int
    programs: int
