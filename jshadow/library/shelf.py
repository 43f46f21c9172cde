"""The records of stored states: what a caller sees, and what the catalog knows."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jshadow.engine.saved.record import StateRecord, plain, policy_record
from jshadow.library.tiers import DISK, REMOTE, Size
from jshadow.policies import Policy
from jshadow.weights.digest import canonical, sha256, tree_digest
from jshadow.weights.params import Params

_FOLDER = 16  # hexadecimal digits in the name of a folder


@dataclasses.dataclass(frozen=True)
class Identity:
    """The SHA-256 of all that determines the states of a library, except their token ids."""

    digest: str

    @classmethod
    def of(cls, params: Params, policy: Policy, fitted: Any, capacity: int, fetch: str) -> "Identity":
        """Return the identity of states of these params. `policy` is resolved, and `fetch` is not "auto".

        Raises CheckpointError if JSON cannot express a setting.
        """
        values = {
            "config": plain(params.config),
            "weights": params.digest,
            "tokenizer": params.tokenizer_digest,
            "policy": policy_record(policy),
            "fitted": None if fitted is None else tree_digest(fitted),
            "dtype": str(params.dtype),
            "capacity": capacity,
            "fetch": fetch,
        }
        return cls(sha256(canonical(values)))

    @classmethod
    def of_record(cls, record: StateRecord) -> "Identity":
        """Return the identity of a saved state."""
        names = ("config", "weights", "tokenizer", "policy", "fitted", "dtype", "capacity", "fetch")
        return cls(sha256(canonical({name: getattr(record, name) for name in names})))

    @property
    def folder(self) -> str:
        """The name of the folder in which states of this identity lie."""
        return self.digest[:_FOLDER]

    def key(self, ids: np.ndarray) -> str:
        """Return the key of a state that holds these token ids, int32 [n]."""
        return self.keys(ids, [len(ids)])[len(ids)]

    def keys(self, ids: np.ndarray, lengths: Iterable[int]) -> dict[int, str]:
        """Return the key of the first n of `ids`, int32 [N], for each n of `lengths`, each in [0, N]."""
        hasher, done, found = hashlib.sha256(self.digest.encode()), 0, {}
        numbers = np.ascontiguousarray(ids, "<i4")
        for length in sorted(set(lengths)):
            hasher.update(numbers[done:length].data)
            done = length
            found[length] = hasher.copy().hexdigest()
        return found


DOCUMENT, ANSWER = "document", "answer"

SUFFIX = ".safetensors"  # of the file of a state


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
    """What the index knows of a stored state."""

    ids: np.ndarray  # its token ids, int32 [n]; empty if its file cannot be read
    note: dict[str, str] = dataclasses.field(default_factory=dict)  # "title" and "ends", as in Stored
    file: int = 0  # bytes of its file in the directory, or 0 if there is none
    object: int = 0  # bytes of its object in the object store, or 0 if there is none
    size: Size | None = None  # in memory, if that is known
    problem: str | None = None  # as in Stored

    def stored(self, key: str, tier: str | None) -> Stored:
        """Return the public description. `tier` is the state's tier in memory, or None if it is not in memory."""
        size = self.size.total if tier is not None and self.size is not None else self.file or self.object
        where = tier or (DISK if self.file or not self.object else REMOTE)
        title, ends = self.note.get("title", ""), self.note.get("ends", "")
        device = None if self.size is None else self.size.device
        return Stored(key, len(self.ids), size, where, title, ends, self.problem, device)
