"""The records of stored states: what a caller sees, and what the catalog knows."""

import dataclasses

import numpy as np

from jshadow.library.tiers import DISK, REMOTE, Size

DOCUMENT, ANSWER = "document", "answer"


@dataclasses.dataclass(frozen=True)
class Stored:
    """A stored state.

    Attributes:
        key: SHA-256 of the model, the policy and the token ids, as hexadecimal digits.
        tokens: number of tokens that the state holds. 0 for a file that cannot be read.
        bytes: bytes of the state in memory, or of its file if it is not in memory.
        tier: the fastest tier that has it: "device", "host", "disk" or "remote".
        title: the title that it was stored with, such as the name of a file.
        ends: what its last tokens are: "document", "answer", or "" if that is not known.
        problem: why the state cannot be used, such as a damaged file. None: no problem is known.
        device_bytes: bytes of device memory of the state while it is ready for a step. None: it was not in memory yet.
    """

    key: str
    tokens: int
    bytes: int
    tier: str
    title: str = ""
    ends: str = ""
    problem: str | None = None
    device_bytes: int | None = None


@dataclasses.dataclass
class Entry:
    """What the index knows of a stored state.

    Attributes:
        ids: its token ids, int32 [n]. Empty if its file cannot be read.
        note: "title" and "ends", as in Stored.
        file: bytes of its file in the directory, or 0 if there is none.
        object: bytes of its object in the object store, or 0 if there is none.
        size: its size in memory, if that is known.
        problem: as in Stored.
    """

    ids: np.ndarray
    note: dict[str, str] = dataclasses.field(default_factory=dict)
    file: int = 0
    object: int = 0
    size: Size | None = None
    problem: str | None = None

    def stored(self, key: str, tier: str | None) -> Stored:
        """Return the public description. `tier` is the state's tier in memory, or None if it is not in memory."""
        size = self.size.total if tier is not None and self.size is not None else self.file or self.object
        where = tier or (DISK if self.file or not self.object else REMOTE)
        title, ends = self.note.get("title", ""), self.note.get("ends", "")
        device = None if self.size is None else self.size.device
        return Stored(key, len(self.ids), size, where, title, ends, self.problem, device)
