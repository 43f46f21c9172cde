"""The Triton kernel that chooses chunks. One program handles one KV head of one row.

Scores that are not negative have the same order as their bits, read as whole numbers. The program holds the bits of
all scores in registers. It finds the k-th largest number bit by bit, and counts in each round how many scores reach
it. Then it writes the chosen chunks side by side to memory, compares them with the resident chunks, and fills the free
places.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.select_chunks.operands import Candidates, Chosen
from pallas_kernels.tiles import can_do, iota, power_of_two

MOST = 32_768  # candidates of a head; their scores must fit into the registers of one program
MOST_PLACES = 2_048
TILE = 16  # places that are compared with all chosen chunks at once
SCAN = 4_096  # candidates whose places are counted at once
BITS = 31  # of a score that is not negative


def number_of(mask: jax.Array) -> jax.Array:
    """Return how many entries of a tile are True, int32."""
    return mask.astype(jnp.int32).sum(dtype=jnp.int32)


def select_chunks_kernel(candidates, results, chosen, *, interpret):  # type: ignore[no-untyped-def]
    """One program: choose the chunks of one head. `chosen` is scratch memory, int32 [B, h, k]."""
    ids, valid, hit, missed = results
    h, b = pl.program_id(0), pl.program_id(1)
    scores, asked, resident, numbers = candidates
    count = resident.shape[2]
    size, wanted_row = scores.shape[2], pltriton.load(asked.at[b])

    def keys_of(at: jax.Array) -> jax.Array:
        """Load the scores at `at`. Return their bits as int32, which is negative where the score is negative."""
        score = pltriton.load(scores.at[b, h, at], mask=(at < size) & wanted_row, other=-1.0)
        return lax.bitcast_convert_type(score, jnp.int32)

    key = keys_of(iota(0, power_of_two(size)))

    def higher(round_: jax.Array, least: jax.Array) -> jax.Array:
        raised = least | (jnp.int32(1) << (BITS - 1 - round_))
        return jnp.where(number_of(key >= raised) >= count, raised, least)

    least = lax.fori_loop(0, BITS, higher, jnp.int32(0))
    equals = count - number_of(key > least)  # so many of the scores that equal the least are chosen, the first of them

    def write(step: jax.Array, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        equal_before, total = before
        at = iota(step * SCAN, min(SCAN, power_of_two(size)))
        key = keys_of(at)  # again, because all keys and what follows would not fit into the registers
        equal = key == least
        first = equal_before + jnp.cumsum(equal.astype(jnp.int32), axis=0) <= equals
        picked = (key > least) | equal & first
        # Pallas' interpreter writes the old value where a mask is False, so these lanes point past the end.
        rank = jnp.where(picked, total + jnp.cumsum(picked.astype(jnp.int32), axis=0) - 1, count)
        number = at if numbers is None else pltriton.load(numbers.at[b, h, at], mask=picked, other=0)
        pltriton.store(chosen.at[b, h, rank], number, mask=picked)
        return equal_before + number_of(equal), total + number_of(picked)

    steps, none = -(-power_of_two(size) // SCAN), jnp.int32(0)
    _, total = lax.fori_loop(0, steps, write, (none, none))
    lane = iota(0, power_of_two(count))
    pltriton.store(chosen.at[b, h, lane], jnp.full_like(lane, -1), mask=(lane >= total) & (lane < count))
    if not interpret:
        pltriton.debug_barrier()  # all threads of the program see what was stored

    there = lane < total
    new = pltriton.load(chosen.at[b, h, lane], mask=there, other=-1)

    def tile(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        place = iota(index * TILE, TILE)
        exists = place < count
        old = pltriton.load(resident.at[b, h, place], mask=exists, other=-1)
        same = (new[:, None] == old[None]) & there[:, None]
        return place, exists, old, same

    def look(index: jax.Array, found: jax.Array) -> jax.Array:
        return jnp.maximum(found, tile(index)[3].astype(jnp.int32).max(axis=1))

    tiles = -(-count // TILE)
    found = lax.fori_loop(0, tiles, look, jnp.zeros(lane.shape, jnp.int32))
    without = there & (found == 0)
    turn = jnp.where(without, jnp.cumsum(without.astype(jnp.int32), axis=0), -1)  # 1, 2, ... of those without a place
    new_chunks = number_of(without)
    pltriton.store(missed.at[b, h, lane], jnp.full_like(lane, count), mask=(lane >= new_chunks) & (lane < count))

    def fill(index: jax.Array, filled: jax.Array) -> jax.Array:
        place, exists, old, same = tile(index)
        taken = same.astype(jnp.int32).max(axis=0) > 0
        free = exists & ~taken
        number = filled + jnp.cumsum(free.astype(jnp.int32), axis=0)
        pair = same | (turn[:, None] == jnp.where(free, number, -2)[None])
        mine = jnp.where(pair, new[:, None] + 1, 0).sum(axis=0) - 1  # -1: no chunk gets this place
        pltriton.store(ids.at[b, h, place], jnp.maximum(mine, 0), mask=exists)
        pltriton.store(valid.at[b, h, place], mine >= 0, mask=exists)
        pltriton.store(hit.at[b, h, place], taken & (mine == old), mask=exists)
        filling = free & (number <= new_chunks)
        pltriton.store(missed.at[b, h, jnp.where(filling, number - 1, count)], place, mask=filling)
        return filled + number_of(free)

    lax.fori_loop(0, tiles, fill, jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("interpret",))
def select_chunks(candidates: Candidates, interpret: bool) -> Chosen:
    """See `pallas_kernels.select_chunks`.

    Raises:
        NotImplementedError: there are more than MOST candidates or MOST_PLACES places, or an array is empty.
    """
    scores, _, resident, _ = candidates
    batch, heads, size = scores.shape
    if size > MOST or resident.shape[2] > MOST_PLACES:
        raise NotImplementedError(
            f"select_chunks: the kernel takes up to {MOST} candidates and {MOST_PLACES} places, got {size} and "
            f"{resident.shape[2]}"
        )
    can_do("select_chunks", 1, scores, packed=(resident,))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    kinds = (jnp.int32, jnp.bool_, jnp.bool_, jnp.int32)
    results: Any = Chosen(*(jax.ShapeDtypeStruct(resident.shape, kind) for kind in kinds))  # type: ignore[arg-type]
    scratch = jax.ShapeDtypeStruct(resident.shape, jnp.int32)
    chosen: Chosen
    chosen, _ = pl.pallas_call(
        functools.partial(select_chunks_kernel, interpret=interpret),
        grid=(heads, batch),
        in_specs=[jax.tree.map(lambda _: anywhere, candidates)],
        out_specs=[jax.tree.map(lambda _: anywhere, results), anywhere],
        out_shape=[results, scratch],
        compiler_params=pltriton.CompilerParams(num_warps=16 if size > SCAN else 8, num_stages=1),
        cost_estimate=estimate(flops=2 * BITS * scores.size, moved=bytes_of((candidates, results, scratch))),
        interpret=interpret,
        name="select_chunks",
    )(candidates)
    return chosen
