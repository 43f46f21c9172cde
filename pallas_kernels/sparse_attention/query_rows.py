"""The query rows of a program, which both kernels of sparse_attention have.

A query row is one query head of a KV head at one position. Row r belongs to position r // group and to query head
r % group of the KV head.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tiles import iota


class Queries(NamedTuple):
    """The query rows of one program.

    Attributes:
        b: index in the batch.
        h: index of the KV head.
        row: int32 [rows], numbers of the query rows.
        there: bool [rows], False past the last query row.
        query: int32 [rows], position of each row among the queries.
        head: int32 [rows], query head of each row.
    """

    b: jax.Array
    h: jax.Array
    row: jax.Array
    there: jax.Array
    query: jax.Array
    head: jax.Array


def queries_of(q: Any, group: int, rows: int) -> Queries:
    """Return the query rows of this program. `q` is the ref of an array [B, T, h_q, d]."""
    i, h, b = (pl.program_id(axis) for axis in (1, 2, 3))
    row = iota(i * rows, rows)
    query = lax.div(row, jnp.int32(group))
    return Queries(b, h, row, row < q.shape[1] * group, query, h * group + lax.rem(row, jnp.int32(group)))
