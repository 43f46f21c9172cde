"""Settings (`Quirks`) that reproduce where the published code differs from the paper.

The code is github.com/ByteDance-Seed/ShadowKV, e51904c. `ShadowKV.reference()` has all of these settings. One of them
needs arrays of its own (`Preload`): in the published code, a chunk that stays selected keeps its keys. The chunks that
the prompt's last query selects begin with exact keys. Once such a chunk is dropped, its keys are rebuilt from the
factors.
"""

import dataclasses
from typing import TypeVar

import jax.numpy as jnp
from flax import struct
from jax import Array

from jshadow.cache.records import Fetched
from jshadow.policies.checks import check_choice, check_range
from jshadow.policies.settings import Record
from jshadow.policies.shadowkv.landmark_levels import Marks
from jshadow.policies.shadowkv.selection import MANTISSA, Query, Scoring, by_landmarks, product_scores

N = TypeVar("N", int, Array)


@dataclasses.dataclass(frozen=True)
class Quirks(Record):
    """The published code's choices that differ from the paper. The defaults are the paper's choices.

    Attributes:
        score_dim: products are divided by the square root of this number for selection. None: by the square root of the
            head width.
        score_dtype: dtype that the softmax over landmarks is rounded to, "float32" or "bfloat16".
        exact_preload: whether the chunks that the prompt's last query selects begin with exact keys. A chunk loses its
            exact keys when a query does not select it.
        chunk_multiple: the number of a prompt's chunks is rounded down to a multiple of this.
        turn_selection: "each": every query of a turn selects its own chunks, so that a turn equals single steps.
            "shared": all queries of a piece select the same chunks.
    """

    score_dim: int | None = None
    score_dtype: str = "float32"
    exact_preload: bool = False
    chunk_multiple: int = 1
    turn_selection: str = "each"

    @classmethod
    def published(cls) -> "Quirks":
        """Return the published code's choices."""
        return cls(128, "bfloat16", exact_preload=True, chunk_multiple=8, turn_selection="shared")

    def check(self, policy: str) -> None:
        """Raise ConfigError if a setting is out of range."""
        where = f"{policy}.quirks"
        check_choice(where, "turn_selection", self.turn_selection, ("each", "shared"))
        if self.score_dim is not None:
            check_range(where, "score_dim", self.score_dim, 1)
        check_choice(where, "score_dtype", self.score_dtype, tuple(MANTISSA))
        check_choice(where, "exact_preload", self.exact_preload, (False, True))
        check_range(where, "chunk_multiple", self.chunk_multiple, 1)

    def scoring(self, scale: float) -> Scoring:
        """Return how queries score chunks. `scale` is the attention's factor on products, used if score_dim is None."""
        scale = scale if self.score_dim is None else float(self.score_dim**-0.5)
        return Scoring(scale, shared=self.turn_selection == "shared", dtype=self.score_dtype)

    def rounded(self, chunks: N) -> N:
        """Return the number of chunks, rounded down to a multiple of `chunk_multiple`."""
        return chunks // self.chunk_multiple * self.chunk_multiple


class Preload(struct.PyTreeNode):
    """The chunks that begin with exact keys.

    Attributes:
        ids: ids of the chunks, int32 [B, h_kv, n]; -1 in an unused entry.
        keys: exact keys after RoPE of these chunks [B, h_kv, n * c, d].
    """

    ids: Array
    keys: Array


def preloaded_chunks(query: Query, marks: Marks, count: int) -> Array:
    """Return the chunks that the prompt's last query selects, int32 [B, h_kv, count]; -1 in unused entries.

    Args:
        query: the prompt's last query (T = 1).
        marks: the prompt's chunks.
        count: number of chunks to select.
    """
    ids, scores = by_landmarks(query, (marks,), product_scores(query, (marks,)), count).best(count)
    return jnp.where(scores >= 0, ids, -1)[:, :, 0]


def exact_keys(preload: Preload, fresh: Array, fetched: Fetched, valid: Array) -> tuple[Array, Array]:
    """Replace rebuilt keys by exact keys, for those preloaded chunks that every query so far has selected.

    Args:
        preload: the preloaded chunks.
        fresh: which of them every query before this step has selected, bool [B, h_kv, n].
        fetched: the chunks of the step, n for each of Q queries: keys [B, h_kv, Q * n * c, d].
        valid: which queries are real, bool [B, T].

    Returns:
        The keys, in the shape of fetched.k, and `fresh` after this step.
    """
    assert fetched.k is not None
    batch, heads, count = preload.ids.shape
    rows, size = fetched.ids.shape[2], preload.keys.shape[2] // max(count, 1)
    queries = rows // count
    chosen = jnp.where(fetched.valid, fetched.ids, -2)
    chosen = chosen.reshape(batch, heads, queries, count)
    same = chosen[..., :, None] == preload.ids[:, :, None, None, :]  # [B, h_kv, Q, chosen, preloaded]
    idle = ~(valid if queries > 1 else valid.any(axis=1, keepdims=True))[:, None, :, None]
    still = fresh[:, :, None] & jnp.cumprod(same.any(axis=3) | idle, axis=2).astype(bool)  # [B, h_kv, Q, preloaded]
    same = same & still[:, :, :, None, :]
    slot = same.argmax(axis=-1).reshape(batch, heads, rows)
    exact = preload.keys.reshape(batch, heads, count, -1)
    exact = jnp.take_along_axis(exact, slot[..., None], axis=2).reshape(fetched.k.shape)
    is_exact = jnp.repeat(same.any(axis=-1).reshape(batch, heads, rows), size, axis=2)
    return jnp.where(is_exact[..., None], exact, fetched.k), still[:, :, -1]
