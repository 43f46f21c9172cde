"""The chosen keys as lists of key blocks and single keys, which the kernel of a GPU reads.

The lists are the key blocks with keys on a chosen diagonal, and the columns outside of these blocks. An A-shape has the
first columns and the nearest diagonals.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jshadow.cache.records import PromptKV
from jshadow.engine.sparse_prefill.lines import Lines, strip_blocks
from jshadow.engine.sparse_prefill.tiles import Chosen, Tiling, attend_tiles, open_columns, tiles_needed
from jshadow.ops.layout import KeyLists, Keys, attend_over, run
from jshadow.policies.prefill_attention import PrefillPiece


def attend_chosen(
    piece: PrefillPiece, prompt: PromptKV, chosen: Chosen, tiling: Tiling
) -> tuple[Float[Array, "B P h_q d"], Chosen]:
    """Compute causal attention of a piece over the chosen keys: by the kernel on a GPU, by `attend_tiles` elsewhere.

    The arguments and results are those of `attend_tiles`. If the kernel does not support the block size, the head width
    or the dtype, a GPU uses `attend_tiles` too.
    """
    assert chosen.lines is not None
    return run(
        tiling.implementation,
        functools.partial(attend_lists, tiling=tiling),
        functools.partial(attend_tiles, tiling=tiling),
        piece,
        prompt,
        chosen,
        piece_lists(piece, prompt, chosen.lines, tiling.block),
    )


def attend_lists(
    piece: PrefillPiece, prompt: PromptKV, chosen: Chosen, lists: KeyLists, tiling: Tiling, interpret: bool
) -> tuple[Float[Array, "B P h_q d"], Chosen]:
    """Compute the result of `attend_tiles` with the kernel. The output of padding is 0.

    Raises:
        NotImplementedError: the kernel does not support the block size, the head width or the dtype.
    """
    keys = Keys(prompt.k_post, prompt.v, prompt.lengths)
    implementation = "interpret" if interpret else "pallas"
    out = attend_over(piece.q_post, keys, lists, piece.first, scale=tiling.scale, implementation=implementation)
    needed = tiles_needed(lists, tiling.block)
    return out, chosen.replace(tiles=chosen.tiles + needed, ran=chosen.ran + needed)


def piece_lists(piece: PrefillPiece, prompt: PromptKV, lines: Lines, block: int) -> KeyLists:
    """Return the lists of a piece's n query blocks. No list names a key twice.

    A list of blocks is as long as the prompt has blocks. A list of columns is as long as `Lines.columns`.
    """
    index = piece.first // block + jnp.arange(piece.q_post.shape[1] // block, dtype=jnp.int32)
    blocks = jax.vmap(lambda one: strip_blocks(lines, one))(index)
    columns = jax.vmap(lambda one: open_columns(lines, one, block))(index)
    ids, counts, listed, more = (x.swapaxes(0, 1).swapaxes(1, 2) for x in (*blocks, *columns))
    shape = (*counts.shape[:2], prompt.k_post.shape[1])
    return KeyLists(ids, counts, listed, more, lines.near[..., block:].reshape(shape), lines.in_column.reshape(shape))
