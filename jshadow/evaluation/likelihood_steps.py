"""The compiled programs of `likelihood.Scorer`: score given tokens, and draw new ones."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.sampling import Sampler, sample
from jshadow.engine.step import turn_piece
from jshadow.models.config import ModelConfig
from jshadow.ops.buckets import round_up
from jshadow.ops.layout import fit_tokens


def chosen(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Log-probabilities float32 [B, T] of targets [B, T] under logits [B, T, V], and whether each is the likeliest."""
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]
    return scores, logits.argmax(-1) == targets


target_scores = jax.jit(chosen)


@functools.partial(
    jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=decode.COMPILER_OPTIONS
)
def forced_scores(
    weights: dict, tokens: Array, lengths: Array, targets: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """Feed tokens and score the token that should follow each.

    Only as many pieces run as the longest row needs, whatever T is: one program serves short and long continuations.

    Args:
        weights, config: of the model.
        tokens: int32 [B, T], right padded.
        lengths: int32 [B], of each row's tokens.
        targets: int32 [B, T], the token that should follow each of `tokens`.
        reads, writes: the two halves of the state. `writes` is donated.

    Returns:
        Log-probabilities float32 [B, T], whether each target was the likeliest token bool [B, T], and the new `writes`.
    """
    size = turn_piece(reads, tokens.shape[1])
    tokens, targets = (fit_tokens(x, round_up(x.shape[1], size)) for x in (tokens, targets))

    def body(index: Array, carry: tuple[Writes, Array, Array]) -> tuple[Writes, Array, Array]:
        writes, scores, greedy = carry
        piece, following = (lax.dynamic_slice_in_dim(x, index * size, size, axis=1) for x in (tokens, targets))
        (score, top), state = decode.extend_steps(
            weights,
            config,
            piece,
            jnp.clip(lengths - index * size, 0, size),
            KVState.of(reads, writes),
            lambda logits: chosen(logits, following),
        )
        scores = lax.dynamic_update_slice_in_dim(scores, score, index * size, axis=1)
        return state.split()[1], scores, lax.dynamic_update_slice_in_dim(greedy, top, index * size, axis=1)

    start = writes, jnp.zeros(tokens.shape, jnp.float32), jnp.zeros(tokens.shape, bool)
    writes, scores, greedy = lax.fori_loop(0, -(-jnp.max(lengths) // size), body, start)
    return scores, greedy, writes


@functools.partial(jax.jit, static_argnames=("sampler",))
def draw_tokens(logits: Array, keys: Array, index: Array, *, sampler: Sampler) -> Array:
    """The next token of each row, int32 [B], drawn with its own key: no row depends on the others."""

    def one(row: Array, key: Array) -> Array:
        return sample(sampler, row[None], jax.random.fold_in(key, index))[0]

    return jax.vmap(one)(logits, keys)
