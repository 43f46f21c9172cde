"""interim"""
import jax
import jax.numpy as jnp
from jax import lax
from typing import NamedTuple
MOST_AGE=255
MOST_PLACES=2048
class Chosen(NamedTuple):
    ids: jax.Array
    places: jax.Array
    missed: jax.Array
    held: jax.Array
    ages: jax.Array
    total: jax.Array
    hits: jax.Array
def places_of(mask):
    size = mask.shape[-1]
    return jnp.sort(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), size))
def select_chunks(scores, asked, resident, *, count, ages=None, numbers=None, implementation="auto"):
    n, P = scores.shape[2], resident.shape[2]
    best, at = lax.top_k(scores, min(count, n))
    there = asked[:, None, None] & (best >= 0)
    at = jnp.sort(jnp.where(there, at.astype(jnp.int32), n))
    at = jnp.pad(at, ((0,0),(0,0),(0,count-at.shape[2])), constant_values=n)
    valid = at < n
    ids = at if numbers is None else jnp.take_along_axis(numbers, jnp.minimum(at, n-1), axis=2)
    same = valid[..., None] & (ids[..., None] == resident[..., None, :])  # [B,h,k,P]
    hit, stays = same.any(-1), same.any(-2)
    place = same.argmax(-1)
    miss = valid & ~hit
    nm = miss.sum(-1, keepdims=True)
    old = jnp.full_like(resident, 255) if ages is None else ages
    key = jnp.where(stays, -1, old)
    order = jnp.argsort(-key, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    freed = ~stays if ages is None else ~stays & (rank < nm)
    spots = places_of(freed)
    turn = jnp.cumsum(miss, -1) - 1
    newplace = jnp.take_along_axis(spots, jnp.clip(turn, 0, P-1), axis=2)
    places = jnp.where(valid, jnp.where(hit, place, newplace), P).astype(jnp.int32)
    b,h = jnp.arange(scores.shape[0])[:,None,None], jnp.arange(scores.shape[1])[:,None]
    base = jnp.where(stays, resident, -1) if ages is None else resident
    held = base.at[b,h,places].set(ids, mode="drop")
    held = jnp.where(asked[:,None,None], held, resident)
    if ages is not None:
        new = jnp.minimum(ages+1, 255).at[b,h,places].set(0, mode="drop")
        ages = jnp.where(asked[:,None,None], new, ages)
    return Chosen(jnp.where(valid, ids, 0), places, places_of(miss), held, ages, valid.sum(-1,dtype=jnp.int32), (valid&hit).sum(-1,dtype=jnp.int32))
