"""The keys of stored states. A key is a SHA-256 of all that determines a state: the model, the policy and the ids."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from jshadow.engine.saved.record import StateRecord, plain, policy_record
from jshadow.policies import Policy
from jshadow.weights.digest import canonical, sha256, tree_digest
from jshadow.weights.params import Params

FOLDER = 16  # hexadecimal digits in the name of a folder


@dataclasses.dataclass(frozen=True)
class Identity:
    """All that determines the states of a library, except their token ids.

    Attributes:
        digest: SHA-256 of the model's config, the digests of its weights and its tokenizer, the policy with its
            settings and learned arrays, the dtype, the capacity and the fetch mode.
    """

    digest: str

    @classmethod
    def of(cls, params: Params, policy: Policy, fitted: Any, capacity: int, fetch: str) -> "Identity":
        """Return the identity of states of these params. `policy` is resolved, and `fetch` is not "auto".

        Raises:
            CheckpointError: JSON cannot express a setting.
        """
        values = {
            "config": plain(params.config),
            "weights": params.digest,
            "tokenizer": params.tokenizer_digest,
            "policy": policy_record(policy),
            "fitted": None if fitted is None else tree_digest(fitted),
            "dtype": str(params.dtype),
        }
        return cls._of_values(values, capacity, fetch)

    @classmethod
    def of_record(cls, record: StateRecord) -> "Identity":
        """Return the identity of a saved state."""
        names = ("config", "weights", "tokenizer", "policy", "fitted", "dtype")
        return cls._of_values({name: getattr(record, name) for name in names}, record.capacity, record.fetch)

    @classmethod
    def _of_values(cls, values: dict[str, Any], capacity: int, fetch: str) -> "Identity":
        return cls(sha256(canonical(values | {"capacity": capacity, "fetch": fetch})))

    @property
    def folder(self) -> str:
        """The name of the folder in which states of this identity lie."""
        return self.digest[:FOLDER]

    def key(self, ids: np.ndarray) -> str:
        """Return the key of a state that holds these token ids, int32 [n]."""
        return self.keys(ids, [len(ids)])[len(ids)]

    def keys(self, ids: np.ndarray, lengths: Iterable[int]) -> dict[int, str]:
        """Return the key of the first n ids, for each n of `lengths`. All ids are hashed once.

        Args:
            ids: token ids, int32 [N].
            lengths: numbers of tokens, each in [0, N].
        """
        hasher, done, found = hashlib.sha256(self.digest.encode()), 0, {}
        numbers = np.ascontiguousarray(ids, "<i4")
        for length in sorted(set(lengths)):
            hasher.update(numbers[done:length].data)
            done = length
            found[length] = hasher.copy().hexdigest()
        return found
