"""A second round of selection: landmarks name twice the chunks, and of those the rebuilt keys choose.

Not the paper's: a landmark blurs its tokens, and what a mean hides the keys show. It costs the rebuilding of three
times the chunks, and moves nothing more from the host.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jshadow.ops.attention import MASKED, group_queries, grouped_product
from jshadow.policies.shadowkv.landmarks import EXACT, chunk_scores

WIDER = 2  # chunks of the first round to those of the second


def scores_by_keys(
    q: Float[Array, "B T h_q d"], keys: Float[Array, "B h_kv tokens d"], there: Bool[Array, "B h_kv Q m"],
    valid: Bool[Array, "B T"], scale: float, shared: bool, dtype: str = "float32",
) -> Float[Array, "B h_kv Q m"]:  # fmt: skip
    """`chunk_scores` of m chunks by all of their keys.

    Args:
        q: after RoPE [B, T, h_q, d].
        keys: after RoPE [B, h_kv, Q * m * c, d], a chunk's c side by side; Q sets, one a query or one for all.
        there: bool [B, h_kv, Q, m], chunks that may be chosen.
        valid: bool [B, T], queries that count.
        scale: factor on the products.
        shared: the queries choose together (Q = 1).
        dtype: to which the softmax is rounded.

    Returns:
        float32 [B, h_kv, Q, m]; -1 where not there.
    """
    batch, heads, sets, count = there.shape
    grouped, size = group_queries(q, heads), keys.shape[2] // (sets * count)
    keys = keys.reshape(batch, heads, sets, count * size, keys.shape[3])
    if sets == 1:
        logits = grouped_product("bhgtd,bhnd->bhgtn", grouped, keys[:, :, 0], EXACT)
    else:
        logits = jnp.einsum("bhgtd,bhtnd->bhgtn", grouped, keys, precision=EXACT, preferred_element_type=jnp.float32)
    mask = jnp.repeat(there, size, axis=3)[:, :, None]  # one for all query heads, and for all queries if Q = 1
    return chunk_scores(jnp.where(mask, logits * scale, MASKED), valid, shared, dtype, parts=size)
