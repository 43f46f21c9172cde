"""The Triton kernel that rebuilds keys and reads the values directly from pinned host memory (zero copy).

XLA passes an operand in pinned host memory to a kernel without a copy. With unified addressing, the kernel's loads from
it cross the bus. There are two orders of work:

- If all programs run at once, each program first issues the loads of its values. The loads run while the program
  gathers, multiplies and rotates the keys. Then it stores the values.
- If there are more programs, some are loading values while others work on keys, so the bus stays busy. Each program
  stores its values before it starts with the keys. So the keys can use all registers.

Packed rows cross the bus as they are, and are unpacked just before they are stored.

The grid is (blocks of tokens, KV heads, batch), where the tokens are the k * c tokens of the selected chunks. If some
chunks are kept on the device, the tokens of the others come first, and the programs after them return at once.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.choose import in_host_memory
from pallas_kernels.costs import bytes_of, estimate
from pallas_kernels.fetch_reconstruct.operands import HostRows, KeptRows
from pallas_kernels.reconstruct_keys.kernel import Form, Tokens, cost_of, form_of, store_keys, tokens_of
from pallas_kernels.reconstruct_keys.operands import ChosenKeys
from pallas_kernels.tiles import blocks, can_do, iota, spans
from pallas_kernels.unpack import scaled_numbers

AT_ONCE = 512  # about as many programs run at once on a large GPU
Loaded = tuple[list[jax.Array], jax.Array | None]  # tiles of value rows, and the scales if they are packed


def fetch_reconstruct_kernel(values, kept, keys, keys_out, values_out, *, form, move):  # type: ignore[no-untyped-def]
    """One program: rebuild the keys and fetch the values of `form.tokens` tokens of one KV head.

    If `kept` is None, the results hold the tokens of all chunks in turn. Otherwise they are the same buffers as the
    cache in `kept`, here [B, h_kv, P * c, d], and the tokens are those of the chunks in the list kept.missed. A program
    past the end of the list has nothing to do. `move` is `move_tokens` without its last three arguments.
    """
    j, h, b = (pl.program_id(axis) for axis in range(3))
    refs = (values, keys, keys_out, values_out)
    tokens = functools.partial(tokens_of, keys, b, h, j * form.tokens, form.tokens, kept)
    if kept is None:
        move(refs, tokens, b, h)
        return

    @pl.when(pltriton.load(kept.missed.at[b, h, lax.div(j * form.tokens, keys.chunk)]) < keys.ids.shape[2])
    def _() -> None:
        move(refs, tokens, b, h)


def move_tokens(
    refs: tuple[Any, ...],
    tokens: Callable[..., Tokens],
    b: jax.Array,
    h: jax.Array,
    form: Form,
    early: bool,
    interpret: bool,
) -> None:
    """Rebuild the keys of the tokens and fetch their values. `refs` are values, keys, keys_out and values_out.

    `tokens` is `tokens_of` without its last argument. If `early`, only the loads of the values come before the keys.
    Otherwise all work on the values does.
    """
    values, keys, keys_out, _ = refs
    fetched = tokens(by_chunks=True)
    loaded = load_values(values, keys, fetched, b, h)
    if not early:
        store_values(refs, loaded, fetched, b, h, interpret)
    store_keys(keys, keys_out, tokens(), b, h, form, interpret)
    if early:
        store_values(refs, loaded, fetched, b, h, interpret)


def load_values(values: Any, keys: Any, tokens: Tokens, b: jax.Array, h: jax.Array) -> Loaded:
    """Load the value rows of the tokens, one tile for each block of columns, and the scales if values are packed."""
    width, tiles = values.token_width(keys.dim), []
    for start, block in spans(width):
        column = iota(start, block)[None, None]
        tiles.append(load_rows(values, tokens, b, h, tokens.within[..., None] * width + column, column < width))
    if values.bits is None:
        return tiles, None
    words = scale_words(values, tokens.within, keys.chunk, keys.dim)
    return tiles, scales_of(values, [load_rows(values, tokens, b, h, at, at >= 0) for at in words])


def store_values(
    refs: tuple[Any, ...], loaded: Loaded, tokens: Tokens, b: jax.Array, h: jax.Array, interpret: bool
) -> None:
    """Unpack the loaded values of the tokens and write them. `refs` are those of `move_tokens`."""
    (tiles, scales), (values, keys, _, out) = loaded, refs
    dim = keys.dim
    width = values.token_width(dim)
    for (start, block), tile in zip(spans(width), tiles, strict=True):
        column = iota(start, block)[None, None]
        for place in range(values.places):
            value = tile
            if scales is not None:
                value = scaled_numbers(tile, place, values.bits, scales, values.dtype, interpret)
            inside = column < min(width, dim - place * width)
            at = out.at[b, h, tokens.place[..., None], place * width + column]
            pltriton.store(at, value, mask=tokens.there[..., None] & inside)


def load_rows(values: Any, tokens: Tokens, b: jax.Array, h: jax.Array, at: jax.Array, inside: jax.Array) -> jax.Array:
    """Load elements of the value rows of the tokens, from the prompt or from the tail.

    Masked lanes do not access memory, so a program loads only from the rows of its tokens.

    Args:
        values: the kernel's refs, as HostRows.
        tokens: the tokens of the program.
        b: index in the batch.
        h: index of the KV head.
        at: indices in the row of a chunk, int32 [tokens, n].
        inside: which of these indices are valid, bool, broadcastable to [tokens, n].
    """
    inside = tokens.there[..., None] & inside
    other = 0.0 if jnp.issubdtype(values.prompt.dtype, jnp.floating) else 0
    if values.tail is None:
        return pltriton.load(values.prompt.at[b, h, tokens.unit[..., None], at], mask=inside, other=other)
    later = tokens.later[..., None]
    early = pltriton.load(values.prompt.at[b, h, tokens.unit[..., None], at], mask=inside & ~later, other=other)
    late = pltriton.load(values.tail.at[b, h, tokens.tail_row[..., None], at], mask=inside & later, other=other)
    return jnp.where(later, late, early)


def scale_words(values: Any, within: jax.Array, chunk: int, dim: int) -> list[jax.Array]:
    """Return the index of each word of each token's scale in the row of its chunk, int32 [tokens, 1] each."""
    size = jnp.dtype(values.scale_dtype).itemsize // 2
    first = chunk * values.token_width(dim) + within[..., None] * size
    return [first + word for word in range(size)]


def scales_of(values: Any, parts: list[jax.Array]) -> jax.Array:
    """Join the words of the scales, the lower half first, and return the float32 scales, [tokens, 1]."""
    if values.scale_dtype == jnp.float16:
        return lax.bitcast_convert_type(parts[0], jnp.float16).astype(jnp.float32)
    low, high = (lax.convert_element_type(part, jnp.int32) for part in parts)
    return lax.bitcast_convert_type(high << 16 | low, jnp.float32)


def cost_of_fetch(values: HostRows, kept: KeptRows | None, keys: ChosenKeys) -> pl.CostEstimate:
    """Return the cost estimate of the kernel if no row is kept."""
    cost = cost_of(keys)
    rows = keys.ids.size * values.row_width(keys.chunk, keys.dim) * values.prompt.dtype.itemsize
    cost["moved"] += math.prod(keys.out_shape) * values.value_dtype.itemsize + bytes_of(kept[2:] if kept else None)
    place = "host" if in_host_memory(values.prompt) else "moved"
    return estimate(**(cost | {place: cost.get(place, 0) + rows}))


@functools.partial(jax.jit, static_argnames=("interpret", "form"))
def fetch_reconstruct(
    values: HostRows, kept: KeptRows | None, keys: ChosenKeys, interpret: bool, form: Form | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.fetch_reconstruct`. If `form` is None, it is chosen.

    Raises:
        NotImplementedError: heads are wider than 256, an array is empty, or a dtype is not float32, bfloat16 or
            float16.
    """
    sources = tuple(x for x in (values.prompt, values.tail) if x is not None)
    kept_rows = () if kept is None else (kept.values, kept.keys)
    if values.bits is None:
        can_do("fetch_reconstruct", keys.dim, *keys.multiplied, *sources, *kept_rows, packed=keys.packed)
    else:
        can_do("fetch_reconstruct", keys.dim, *keys.multiplied, *kept_rows, packed=(*keys.packed, *sources))
    batch, heads, tokens, _ = keys.out_shape  # only missed chunks have work, at most all k
    on_host = in_host_memory(values.prompt)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    form = form or form_of(keys)
    grid = blocks(tokens, form.tokens), heads, batch
    early = on_host and math.prod(grid) <= AT_ONCE
    move = functools.partial(move_tokens, form=form, early=early, interpret=interpret)
    shape, aliases = keys.out_shape, {}
    rows: tuple[int, ...] = shape
    if kept is not None:
        first, rows = len(jax.tree.leaves(values)), kept.keys.shape
        shape, aliases = (batch, heads, rows[2] * keys.chunk, keys.dim), {first: 1, first + 1: 0}
        # An aliased result must have the shape of its operand.
        kept = kept._replace(values=kept.values.reshape(shape), keys=kept.keys.reshape(shape))
    operands = (values, kept, keys)
    rebuilt, fetched = pl.pallas_call(
        functools.partial(fetch_reconstruct_kernel, form=form, move=move),
        grid=grid,
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=[anywhere] * 2,
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for kind in (keys.dtype, values.value_dtype)],
        compiler_params=pltriton.CompilerParams(num_warps=form.warps, num_stages=form.stages),
        cost_estimate=cost_of_fetch(values, kept, keys),
        input_output_aliases=aliases,
        interpret=interpret,
        name="fetch_reconstruct",
    )(*operands)
    return rebuilt.reshape(rows), fetched.reshape(rows)
