"""LESS: the tokens that H2O evicts are summed up in a small state (Dong et al. 2024, arXiv 2402.09398, section 3).

Each evicted token (k, v) of a KV head is added to a state of R rows: H += psi(k)^T v and z += psi(k). A query q attends
to the tokens that are held with the weights exp(q k), and to the evicted ones with the weights phi(q) psi(k), under one
normalizer. phi and psi are learned (`fit`). Each has two layers with GELU and an absolute value, so that no weight is
negative.

    phi(q) = |GELU(GELU(q A1) A2)|        psi(k) = |(s * GELU(GELU(k B1) B2)) (I + M)|

The published code has a state for each attention head, for models without grouped queries. Here each KV head has one
state and one pair of kernels, which all query heads of its group share, as they share the cache. The attention sink of
a model counts with the tokens that are held. Without learned arrays, or with s = 0, nothing is added, and LESS equals
H2O bit for bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, group_queries, lse_with, masked_scores
from jshadow.policies.capabilities import Trains
from jshadow.policies.checks import check_range, shape_problem
from jshadow.policies.h2o import H2O, H2OLive
from jshadow.policies.less.kernels import KernelSizes, combine, key_features, query_features
from jshadow.policies.registry import register

MOST_RANK, MOST_HIDDEN = 1024, 65536
PIECE = 512  # number of prompt tokens whose features are in memory at once


class LESSLive(H2OLive):
    """H2O's state, and sums over the tokens that were evicted.

    Attributes:
        cache, positions, mass: as in `H2OLive`.
        numerator: H, the sum of psi(k)^T v, float32 [B, h_kv, R, d].
        denominator: z, the sum of psi(k), float32 [B, h_kv, R].
    """

    numerator: Array
    denominator: Array


@register(
    small={"heavy": 6, "recent": 8, "state_rank": 4, "hidden": 16},
    lossless=lambda tokens, config: {"heavy": 0, "recent": tokens},
)
@dataclasses.dataclass(frozen=True)
class LESS(H2O, Trains):
    """H2O with a low-rank state of the evicted tokens. The settings `heavy`, `recent` and `normalize` are H2O's.

    Attributes:
        state_rank: number of rows R of a KV head's state.
        hidden: width between the two layers of a kernel.
    """

    splits_heads = False

    state_rank: int = 8
    hidden: int = 512

    name = "less"
    source = "arXiv 2402.09398, section 3"

    @property
    def reads_fitted(self) -> bool:
        """True: learned arrays are used whenever they are given."""
        return True

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        check_range(self.name, "state_rank", self.state_rank, 1, MOST_RANK)
        check_range(self.name, "hidden", self.hidden, 1, MOST_HIDDEN)
        return super().resolve(config, capacity)

    def fitted_shapes(self, config: ModelConfig) -> Any:
        layer = self.layer_shapes(config.kv_heads, config.head_dim)
        return {
            kernel: {name: (config.num_layers, *shape) for name, shape in parts.items()}
            for kernel, parts in layer.items()
        }

    def layer_shapes(self, kv_heads: int, head_dim: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of one layer's arrays; see `KernelSizes.shapes`."""
        return KernelSizes(self.state_rank, self.hidden).shapes(kv_heads, head_dim)

    def fit(
        self,
        params: Any,
        tokens: Array,
        *,
        progress: Callable[[int, int], None] | None = None,
        steps: int = 400,
        rate: float = 1e-3,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Train the kernels of each layer separately, so that the layer's output is close to that of full attention.

        The training examples come from H2O decoding the text from its first token, with the layer's exact queries, keys
        and values. training.py states how this differs from a prompt that is compressed at once. Settings that are None
        are resolved for a capacity of the text's length.

        Args:
            params: the model's Params.
            tokens: token ids, int32 [S] or [B, S], without padding, more than heavy + recent + 1 in a row.
            progress: called with (training steps done, training steps of all layers).
            steps: number of Adam steps for each layer. Each step draws some queries.
            rate: first learning rate. It falls to 0 along a cosine.
            seed: seed of the initial weights and of the draws. The same seed gives the same arrays.

        Returns:
            Float32 arrays with the shapes of `fitted_shapes`; zeros for layers with the model's own window.

        Raises:
            PromptError: tokens have a wrong shape, are out of range, or are so few that nothing is evicted.
            ConfigError: a setting, `steps` or `rate` is out of range.
        """
        from jshadow.policies.less.training import Training, train_all  # imports optax, which only training needs

        sizes = KernelSizes(self.state_rank, self.hidden)
        return train_all(self, sizes, params, tokens, Training(steps, rate, seed), progress)

    def kernels(self, spec: CacheSpec, learned: Any) -> dict[str, Any] | None:
        """Return the layer's learned arrays, or None if there are none.

        Raises:
            ConfigError: the arrays do not have the shapes and the dtype of those that `fit` returns.
        """
        if learned is None:
            return None
        problem = shape_problem(self.layer_shapes(spec.kv_heads, spec.head_dim), learned)
        if problem:
            raise ConfigError(f"fitted must be what LESS.fit returned with these settings: {problem}")
        return dict(learned)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        live: H2OLive = super().init(spec, fitted).live
        shape = (spec.batch, spec.kv_heads, self.state_rank)
        numerator, denominator = jnp.zeros((*shape, spec.head_dim)), jnp.zeros(shape)
        return LayerState(live=LESSLive(live.cache, live.positions, live.mass, numerator, denominator))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep the tokens that H2O keeps, and add the prompt's other tokens to the state."""
        state, write = super().compress(spec, state, prompt, fitted)
        kernels = self.kernels(spec, fitted)
        if kernels is None:
            return state, write
        live: LESSLive = state.live
        tokens = prompt.k_post.shape[1]
        batch, head = jnp.ogrid[: spec.batch, : spec.kv_heads]
        held = jnp.where(live.positions >= 0, live.positions, tokens)  # an index past the end for a free slot
        kept = jnp.zeros((spec.batch, spec.kv_heads, tokens), bool)
        kept = kept.at[batch[..., None], head[..., None], held].set(True, mode="drop")
        size = min(PIECE, tokens)

        def one(index: Array, live: LESSLive) -> LESSLive:
            # The last piece overlaps the previous one. Tokens that were already added are masked.
            start = jnp.minimum(index * size, tokens - size)
            k, v = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (prompt.k_post, prompt.v))
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
            at = start + jnp.arange(size)
            gone = (at >= index * size) & (at < prompt.lengths[:, None, None])
            return _absorb(live, kernels, k, v, gone & ~lax.dynamic_slice_in_dim(kept, start, size, axis=2))

        return state.replace(live=lax.fori_loop(0, -(-tokens // size), one, live)), write

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Combine H2O's attention with attention to the tokens that were evicted before this step."""
        live: LESSLive = state.live
        out, state = super().attend(spec, state, step, fetched)
        kernels = self.kernels(spec, step.learned)
        if kernels is None:
            return out, state
        queries = group_queries(step.q_post, spec.kv_heads)  # [B, h_kv, group, T, d]
        piece = Piece(live.cache.k, live.cache.v, (live.positions >= 0)[:, :, None])
        lse = lse_with(masked_scores(queries, piece, spec.scale), step.sinks)
        batch, heads, group, count, dim = queries.shape
        phi = query_features(kernels, queries.reshape(batch, heads, group * count, dim))
        top = jnp.einsum("bhnr,bhrd->bhnd", phi, live.numerator).reshape(queries.shape)
        bottom = jnp.einsum("bhnr,bhr->bhn", phi, live.denominator).reshape(lse.shape)
        both = combine(group_queries(out, spec.kv_heads).astype(jnp.float32), lse, top, bottom)
        return both.transpose(0, 3, 1, 2, 4).reshape(out.shape).astype(out.dtype), state

    def evict(self, spec: CacheSpec, live: H2OLive, step: StepKV) -> H2OLive:
        """Evict as H2O does, and add the evicted tokens to the state."""
        after = super().evict(spec, live, step)
        kernels = self.kernels(spec, step.learned)
        if kernels is None:
            return after
        assert isinstance(after, LESSLive)
        gone = (live.positions >= 0) & (after.positions < 0)
        at = jnp.argmax(gone, axis=2)[..., None, None]
        k, v = (jnp.take_along_axis(x, at, axis=2) for x in (live.cache.k, live.cache.v))
        return _absorb(after, kernels, k, v, gone.any(axis=2, keepdims=True))

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Count H2O's bytes, a mask of the kept tokens, and the features of a piece.

        The features come with two copies of the hidden layer.
        """
        piece = min(PIECE, tokens) * (2 * self.hidden + 3 * spec.head_dim + 4 * self.state_rank)
        return super().compress_bytes(spec, tokens) + spec.batch * spec.kv_heads * (4 * piece + 2 * tokens)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count H2O's bytes, another copy of the scores, and the features of the step's queries and key."""
        slots = self.budget(spec.capacity) + 1
        query = slots + 2 * self.hidden + 3 * spec.head_dim + 4 * self.state_rank
        return super().step_temporaries(spec) + 2 * 4 * spec.batch * (spec.q_heads + spec.kv_heads) * query


def _absorb(live: LESSLive, kernels: dict[str, Any], k: Array, v: Array, there: Array) -> LESSLive:
    """Add tokens to the sums of the state: keys after RoPE and values [B, h_kv, n, d], where `there` [B, h_kv, n] is
    True.
    """
    psi = jnp.where(there[..., None], key_features(kernels, k), 0)
    return live.replace(
        numerator=live.numerator + jnp.einsum("bhnr,bhnd->bhrd", psi, v.astype(jnp.float32)),
        denominator=live.denominator + psi.sum(axis=2),
    )
