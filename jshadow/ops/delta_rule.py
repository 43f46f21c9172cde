"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464, section 3), for many tokens in chunks and for few in steps.

Each value head has a state S [d_k, d_v]. A token first decays it, then replaces what S holds for the token's key:

    S = exp(g) S,  u = beta (v - S^T k),  S = S + k u^T,  o = S^T q

Without the correction, u = beta v. That is the rule of Mamba-2 (arXiv 2405.21060, section 6), with C, B and x for q, k
and v, and the time step for beta. It has the same functions, with corrects=False.

A decode step does not add its token to S at once. The newest tokens' k, u and g stay in a ring buffer of R slots. A
token that would fill it lets all but the newest R / 2 tokens be folded into S. So S is written once in R / 2 steps, and
belongs to an earlier length than the row's. A row is set back by its length alone: no array changes, and later tokens
replace the stale slots.

Value head h uses key head h // (n_v / n_k). All arrays are float32, and products are not rounded to a shorter type. No
exponential is taken of a positive number, so strong decays do not overflow.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jshadow.errors import CapacityError
from jshadow.ops.layout import fit_tokens, ring_positions, write_rows

CHUNK = 64
_product = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


class Tokens(NamedTuple):
    """The inputs of the rule for T tokens, float32.

    Attributes:
        q: queries, normalized and scaled, [B, T, n_k, d_k].
        k: keys, normalized, [B, T, n_k, d_k].
        v: values, [B, T, n_v, d_v].
        log_decay: logarithms g of the decays, finite and at most 0, [B, T, n_v].
        beta: how much of the old value a token replaces, [B, T, n_v].
    """

    q: Float[Array, "B T n_k d_k"]
    k: Float[Array, "B T n_k d_k"]
    v: Float[Array, "B T n_v d_v"]
    log_decay: Float[Array, "B T n_v"]
    beta: Float[Array, "B T n_v"]


class Recent(NamedTuple):
    """A ring buffer of the newest tokens of each row, float32. The token at position p is in slot p % R.

    The tokens at positions folded .. lengths - 1 are pending: they are not yet in S. There are fewer than R of them.

    Attributes:
        k: keys, [B, R, n_k, d_k].
        u: what each token adds to S along its key, [B, R, n_v, d_v].
        log_decay: logarithms of the decays, [B, R, n_v].
    """

    k: Float[Array, "B R n_k d_k"]
    u: Float[Array, "B R n_v d_v"]
    log_decay: Float[Array, "B R n_v"]


def normalized(x: Float[Array, "*rest d"]) -> Float[Array, "*rest d"]:
    """Return x / sqrt(|x|^2 + 1e-6) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def masked(tokens: Tokens, valid: Bool[Array, "B T"]) -> Tokens:
    """Return the tokens with a decay and beta that leave S as it is where `valid` is False."""
    log_decay, beta = (jnp.where(valid[:, :, None], x, 0) for x in (tokens.log_decay, tokens.beta))
    return tokens._replace(log_decay=log_decay, beta=beta)


def scan_chunks(
    state: Float[Array, "B n_v d_k d_v"], tokens: Tokens, chunk: int = CHUNK, *, corrects: bool = True
) -> tuple[Float[Array, "B T n_v d_v"], Float[Array, "B n_v d_k d_v"]]:
    """Apply the rule to many tokens, in chunks of matrix products (section 3.3: the extended WY representation).

    Padding must be `masked`. A chunk of a head that has only padding returns S with the same bits. A chunk gives the
    same bits however many chunks a call has.

    Args:
        state: S before the tokens.
        tokens: T tokens.
        chunk: number of tokens in a chunk.
        corrects: whether a token replaces what S holds for its key, instead of adding to it.

    Returns:
        The outputs o, and S after the tokens.
    """
    batch, length, *heads = tokens.v.shape
    chunks = max(2, -(-length // chunk))
    tokens = Tokens(*(fit_tokens(x, chunks * chunk) for x in tokens))
    touched = ((tokens.log_decay != 0) | (tokens.beta != 0)).reshape(batch, chunks, chunk, -1).any(axis=2)

    def of_chunk(index: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        outs, state = carry
        some = Tokens(*(lax.dynamic_slice_in_dim(x, index * chunk, chunk, axis=1) for x in tokens))
        rows, keys = _queries_and_keys(some, corrects), _heads_first(some.k)
        out, u, decay = _within(_read(rows, state), _scores(rows, keys, state), some, corrects)
        to_end = decay[:, :, -1]
        new = to_end[..., :1, None] * state + _outer(keys, to_end[..., 1:, None] * u)
        state = jnp.where(touched[:, index, :, None, None], new, state)
        return lax.dynamic_update_slice_in_dim(outs, out.swapaxes(1, 2), index * chunk, axis=1), state

    # XLA would fuse, and so round, one chunk in another way if it knew that there is only one.
    count = chunks if length > chunk else touched.any().astype(jnp.int32)
    outs, state = lax.fori_loop(0, count, of_chunk, (jnp.zeros((batch, chunks * chunk, *heads)), state))
    return outs[:, :length], state


def kept_from(
    folded: Int[Array, " B"], lengths: Int[Array, " B"], valid: Bool[Array, "B T"], slots: int
) -> Int[Array, " B"]:
    """Return how many tokens of each row S holds after a step, int32 [B]. See `step`."""
    after = lengths + valid.sum(axis=1, dtype=jnp.int32)
    return jnp.where(after - folded < slots, folded, after - slots // 2)


def step(
    state: Float[Array, "B n_v d_k d_v"],
    recent: Recent,
    folded: Int[Array, " B"],
    lengths: Int[Array, " B"],
    tokens: Tokens,
    valid: Bool[Array, "B T"],
    *,
    corrects: bool = True,
) -> tuple[Float[Array, "B T n_v d_v"], Float[Array, "B n_v d_k d_v"], Recent, Int[Array, " B"]]:
    """Apply the rule to few tokens. If they would fill a row's ring, all but the newest R / 2 tokens are folded into S.

    A row without a valid token keeps all its arrays with the same bits. A row that folds nothing keeps S so.

    Args:
        state: S after the first folded[b] tokens of each row.
        recent: the ring of R newest tokens.
        folded: number of tokens of each row that S holds, int32 [B], more than lengths - R and at most lengths.
        lengths: number of tokens of each row before the new ones, int32 [B].
        tokens: T new tokens, T <= R / 2.
        valid: which of them are real. In each row, they come first. The others are not stored.
        corrects: as in `scan_chunks`.

    Returns:
        The outputs o (that of a token that is not stored is as if it were), S, the ring with the new tokens, and the
        new `folded`.

    Raises:
        CapacityError: there are more tokens than half the slots.
    """
    slots, length = recent.k.shape[1], tokens.k.shape[1]
    if length > slots // 2:
        raise CapacityError(f"tokens must be at most {slots // 2}, half the slots of recent, got {length}")
    kept = kept_from(folded, lengths, valid, slots)
    state = _fold(state, recent, folded, kept - folded, slots // 2 + length - 1)

    positions = ring_positions(lengths, slots)
    pending = positions >= kept[:, None]
    later = pending[:, None] & (positions[:, None] > positions[:, :, None])  # of slots: row, this one, a later one
    decays = recent.log_decay.swapaxes(1, 2)
    to_now = jnp.exp(jnp.where(later[:, None], decays[:, :, None], 0).sum(-1))
    u = jnp.where(pending[:, None, :, None], to_now[..., None] * _heads_first(recent.u), 0)
    since_fold = jnp.exp(jnp.where(pending[:, None], decays, 0).sum(-1))

    rows, keys = _queries_and_keys(tokens, corrects), _heads_first(tokens.k)
    before = since_fold[..., None, None] * _read(rows, state)
    before += _read(_scores(rows, _heads_first(recent.k), state), u)
    out, u, _ = _within(before, _scores(rows, keys, state), tokens, corrects)

    place = (lengths[:, None] + jnp.arange(length)) % slots

    def write(ring: Array, new: Array) -> Array:
        flat = (new.reshape(*new.shape[:2], 1, -1), place, valid)
        return write_rows(ring.reshape(*ring.shape[:2], -1)[:, None], *flat)[:, 0].reshape(ring.shape)

    new = Recent(tokens.k, u.swapaxes(1, 2), tokens.log_decay)
    return out.swapaxes(1, 2), state, Recent(*map(write, recent, new)), kept


def folded_all(
    state: Float[Array, "B n_v d_k d_v"], recent: Recent, folded: Int[Array, " B"], lengths: Int[Array, " B"]
) -> Float[Array, "B n_v d_k d_v"]:
    """Return S after all tokens of each row: the pending ones are folded into it. See `step`."""
    return _fold(state, recent, folded, lengths - folded, recent.k.shape[1])


def _fold(state: Array, recent: Recent, folded: Array, count: Array, most: int) -> Array:
    """Add the tokens at positions folded .. folded + count - 1 to S. The counts [B] are at most `most`.

    On a CPU, this takes no time while no row folds. On a GPU, a condition would take a launch.
    """
    slots, token = recent.k.shape[1], jnp.arange(most)
    place, there = (folded[:, None] + token) % slots, token < count[:, None]

    def fold(state: Array) -> Array:
        k, u, log_decay = (
            jnp.take_along_axis(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")
            for x in recent
        )
        decay = _decays(jnp.where(there[:, :, None], log_decay, 0))[:, :, -1]
        u = jnp.where(there[:, None, :, None], decay[..., 1:, None] * _heads_first(u), 0)
        new = decay[..., :1, None] * state + _outer(_heads_first(k), u)
        return jnp.where((count > 0)[:, None, None, None], new, state)

    def fold_if_any(state: Array) -> Array:
        return lax.fori_loop(0, (count > 0).any().astype(jnp.int32), lambda _, state: fold(state), state)

    return lax.platform_dependent(state, cpu=fold_if_any, default=fold)


def _within(before: Array, scores: Array, tokens: Tokens, corrects: bool) -> tuple[Array, Array, Array]:
    """Return the outputs and u [B, n_v, T, d_v] of tokens, and their decays (see `_decays`).

    `before` [B, n_v, 2T, d_v] is what the queries and then the keys read from the tokens before. `scores`
    [B, n_v, 2T, T] are their products with the keys. Without a correction, both have the queries alone.
    """
    v, beta, decay = _heads_first(tokens.v), _heads_first(tokens.beta)[..., None], _decays(tokens.log_decay)
    if not corrects:
        u = beta * v
        return before * decay[..., :1] + _read(scores * decay[..., 1:], u), u, decay
    query_reads, key_reads = jnp.split(before * jnp.tile(decay[..., :1], (2, 1)), 2, axis=2)
    query_scores, key_scores = jnp.split(scores * jnp.tile(decay[..., 1:], (2, 1)), 2, axis=2)
    u = beta * (v - key_reads)
    if v.shape[2] > 1:  # u_t + beta_t sum over s < t of key_scores[t, s] u_s = beta_t (v_t - key_reads_t)
        u = _read(_inverse(beta * key_scores), u)
    return query_reads + _read(query_scores, u), u, decay


def _inverse(lower: Array) -> Array:
    """Return the inverses of unit lower triangular matrices [..., T, T]. Only what is below the diagonals is read.

    Pairs of diagonal blocks of 1, 2, 4, ... rows are joined: the corner of the inverse of [[A, 0], [C, D]] is
    -D^-1 C A^-1. This takes few steps, and each is a matrix product.
    """
    length = lower.shape[-1]

    def join(level: Array, inverse: Array) -> Array:
        block = jnp.arange(length) >> level
        corner = jnp.where((block[:, None] % 2 == 1) & (block[:, None] == block + 1), lower, 0)
        return inverse - _product("...ij,...jk->...ik", _product("...ij,...jk->...ik", inverse, corner), inverse)

    identity = jnp.broadcast_to(jnp.eye(length, dtype=lower.dtype), lower.shape)
    return lax.fori_loop(0, (length - 1).bit_length(), join, identity)


def _decays(log_decay: Array) -> Array:
    """Return the decays [B, h, T, T + 1] of log_decay [B, T, h]: entry [t, s] is exp(g_s + ... + g_t).

    It is 1 for s = t + 1 and 0 for a greater s. Each sum adds its own terms, because the
    difference of two cumulative sums would be imprecise after strong decays.
    """
    length = log_decay.shape[1]
    token, first = jnp.arange(length)[:, None], jnp.arange(length + 1)
    terms = jnp.where(token >= first, _heads_first(log_decay)[..., None], 0)
    sums = _product("tp,bhps->bhts", (token >= token.T).astype(jnp.float32), terms)
    return jnp.where(first <= token + 1, jnp.exp(sums), 0)


def _heads_first(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _queries_and_keys(tokens: Tokens, corrects: bool) -> Array:
    """Return the queries and then the keys, [B, n_k, 2T, d_k]: one product with both reads S once.

    Without a correction, the keys read nothing.
    """
    return _heads_first(jnp.concatenate([tokens.q, tokens.k], axis=1) if corrects else tokens.q)


def _of_value_heads(x: Array, heads: int) -> Array:
    return jnp.repeat(x, heads // x.shape[1], axis=1)


def _scores(rows: Array, keys: Array, state: Array) -> Array:
    """Return the products of rows [B, n_k, m, d_k] and keys [B, n_k, n, d_k] for each value head, [B, n_v, m, n]."""
    return _of_value_heads(_product("bhmd,bhnd->bhmn", rows, keys), state.shape[1])


def _read(rows: Array, state: Array) -> Array:
    """Multiply rows [B, h, m, d] by the states [B, n_v, d, d_v] of their value heads: [B, n_v, m, d_v]."""
    return _product("bhmd,bhde->bhme", _of_value_heads(rows, state.shape[1]), state)


def _outer(keys: Array, u: Array) -> Array:
    """Return the sum of k u^T over keys [B, n_k, n, d_k] and u [B, n_v, n, d_v]: [B, n_v, d_k, d_v]."""
    return _product("bhnd,bhne->bhde", _of_value_heads(keys, u.shape[1]), u)
