"""The compiled programs of `likelihood.Scorer`: scoring given tokens, and drawing new ones."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine import decode
from jshadow.engine.sampling import Sampler, sample
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import fit_tokens, round_up
from jshadow.planner.pieces import turn_piece


def chosen(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Score targets [B, T] by logits [B, T, V].

    Returns:
        Log-probabilities float32 [B, T], and whether each target is the most likely token, bool [B, T].
    """
    scores = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)[..., 0]
    return scores, logits.argmax(-1) == targets


target_scores = jax.jit(chosen)


@functools.partial(
    jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=decode.COMPILER_OPTIONS
)
def forced_scores(
    weights: dict, tokens: Array, lengths: Array, targets: Array, reads: Reads, writes: Writes, *, config: ModelConfig
) -> tuple[Array, Array, Writes]:
    """Feed tokens, and score the target that follows each of them.

    The loop runs only as many pieces as the longest row needs. So one program is efficient for short and long
    continuations.

    Args:
        weights: weights of the model.
        tokens: int32 [B, T], padded on the right.
        lengths: int32 [B], the number of real tokens of each row.
        targets: int32 [B, T], the token that follows each of `tokens`.
        reads: the half of the state that does not change.
        writes: the half of the state that changes. It is donated.
        config: config of the model.

    Returns:
        Log-probabilities float32 [B, T], whether each target is the most likely token, bool [B, T], and the new
        `writes`.
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
    """Draw the next token of each row with the row's key, so that no row depends on another: int32 [B]."""

    def one(row: Array, key: Array) -> Array:
        return sample(sampler, row[None], jax.random.fold_in(key, index))[0]

    return jax.vmap(one)(logits, keys)


@jax.jit
def row_keys(key: Array, names: Array) -> Array:
    """Return the random key of each row, by the number that names it: int32 [B]."""
    return jax.vmap(functools.partial(jax.random.fold_in, key))(names)
