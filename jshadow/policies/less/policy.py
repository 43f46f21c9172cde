"""LESS: what H2O evicts is summed up in a small state (Dong et al. 2024, arXiv 2402.09398, section 3).

Each evicted token (k, v) of a KV head goes into a state of R rows, H += psi(k)^T v and z += psi(k). A query q then
sees the tokens that are held with the weights exp(q k), and the evicted ones with phi(q) psi(k) in their place, all
under one normaliser. phi and psi are learned (`fit`): two layers with GELU and an absolute value, so that no weight is
negative.

    phi(q) = |GELU(GELU(q A1) A2)|        psi(k) = |(s * GELU(GELU(k B1) B2)) (I + M)|

The published code has a state for each attention head of models without grouped queries. Here a KV head has one state
and one pair of kernels, which all query heads of its group share: that is what the cache has too. Without learned
arrays, or where s = 0, nothing is added, and LESS is H2O bit for bit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, group_queries, masked_scores
from jshadow.policies.capabilities import Trains
from jshadow.policies.checks import check_range, shape_problem
from jshadow.policies.h2o import H2O, H2OLive
from jshadow.policies.less.kernels import KernelSizes, combine, key_features, query_features
from jshadow.policies.registry import register

MOST_RANK, MOST_HIDDEN = 1024, 65536
PIECE = 512  # tokens of a prompt whose features exist at once


class LESSLive(H2OLive):
    """What H2O holds, and the sums over what it evicted.

    Attributes:
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
    """H2O with a low-rank state of what it evicts. `heavy`, `recent` and `normalise` are H2O's.

    Attributes:
        state_rank: rows R of the state of a KV head.
        hidden: width between the two layers of a kernel.
    """

    state_rank: int = 8
    hidden: int = 512

    name = "less"
    source = "arXiv 2402.09398, section 3"

    @property
    def reads_fitted(self) -> bool:
        """Always, where arrays are given."""
        return True

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """As H2O's."""
        check_range(self.name, "state_rank", self.state_rank, 1, MOST_RANK)
        check_range(self.name, "hidden", self.hidden, 1, MOST_HIDDEN)
        return super().resolve(config, capacity)

    def fitted_shapes(self, config: ModelConfig) -> Any:
        """Those of all layers."""
        layer = self.layer_shapes(config.kv_heads, config.head_dim)
        return {
            kernel: {name: (config.num_layers, *shape) for name, shape in parts.items()}
            for kernel, parts in layer.items()
        }

    def layer_shapes(self, kv_heads: int, head_dim: int) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of one layer's arrays: A1, A2 of phi; B1, B2, s, M of psi."""
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
        """Learn the kernels of each layer by itself: with them, its attention's output is to be full attention's.

        H2O itself decodes the text from its first token on, on the exact queries, keys and values of the layer; what
        it holds and has evicted at each query makes the examples (`training.py`, which says how that differs from
        a prompt taken in at once). Settings that are None are resolved for a capacity of the text's length.

        Args:
            params: Params.
            tokens: int32 [S] or [B, S], no padding; more than the budget.
            progress: called with (training steps done, steps of all layers).
            steps: of Adam, each on a draw of queries.
            rate: its first learning rate, which falls to 0 along a cosine.
            seed: of the first weights and of the draws: the same seed gives the same arrays.

        Returns:
            Float32 arrays as `fitted_shapes` has them; zeros for layers that see a window only.

        Raises:
            PromptError: tokens of a wrong shape, out of range, or so few that nothing is evicted.
            ConfigError: a setting, `steps` or `rate` out of range.
        """
        from jshadow.policies.less.training import Training, train_all  # optax, which nothing else needs

        sizes = KernelSizes(self.state_rank, self.hidden)
        return train_all(self, sizes, params, tokens, Training(steps, rate, seed), progress)

    def kernels(self, spec: CacheSpec, learned: Any) -> dict[str, Any] | None:
        """A layer's arrays, or None without any. Raises ConfigError where they are not those that `fit` returns."""
        if learned is None:
            return None
        problem = shape_problem(self.layer_shapes(spec.kv_heads, spec.head_dim), learned)
        if problem:
            raise ConfigError(f"fitted must be what LESS.fit returned with these settings: {problem}")
        return dict(learned)

    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """All slots free, nothing evicted."""
        live: H2OLive = super().init(spec, fitted).live
        shape = (spec.batch, spec.kv_heads, self.state_rank)
        numerator, denominator = jnp.zeros((*shape, spec.head_dim)), jnp.zeros(shape)
        return LayerState(live=LESSLive(live.cache, live.positions, live.mass, numerator, denominator))

    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Keep what H2O keeps, sum up the rest of the prompt."""
        state, write = super().compress(spec, state, prompt, fitted)
        kernels = self.kernels(spec, fitted)
        if kernels is None:
            return state, write
        live: LESSLive = state.live
        tokens = prompt.k_post.shape[1]
        batch, head = jnp.ogrid[: spec.batch, : spec.kv_heads]
        held = jnp.where(live.positions >= 0, live.positions, tokens)  # a free slot holds nothing
        kept = jnp.zeros((spec.batch, spec.kv_heads, tokens), bool)
        kept = kept.at[batch[..., None], head[..., None], held].set(True, mode="drop")
        size = min(PIECE, tokens)

        def one(index: Array, live: LESSLive) -> LESSLive:
            # The last piece overlaps the one before: what is counted there already is masked.
            start = jnp.minimum(index * size, tokens - size)
            k, v = (lax.dynamic_slice_in_dim(x, start, size, axis=1) for x in (prompt.k_post, prompt.v))
            k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
            at = start + jnp.arange(size)
            gone = (at >= index * size) & (at < prompt.lengths[:, None, None])
            return absorb(live, kernels, k, v, gone & ~lax.dynamic_slice_in_dim(kept, start, size, axis=2))

        return state.replace(live=lax.fori_loop(0, -(-tokens // size), one, live)), write

    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """H2O's attention, and what was evicted before this step beside it."""
        live: LESSLive = state.live
        out, state = super().attend(spec, state, step, fetched)
        kernels = self.kernels(spec, step.learned)
        if kernels is None:
            return out, state
        queries = group_queries(step.q_post, spec.kv_heads)  # [B, h_kv, group, T, d]
        piece = Piece(live.cache.k, live.cache.v, (live.positions >= 0)[:, :, None])
        lse = jax.nn.logsumexp(masked_scores(queries, piece, spec.scale), axis=-1)
        batch, heads, group, count, dim = queries.shape
        phi = query_features(kernels, queries.reshape(batch, heads, group * count, dim))
        top = jnp.einsum("bhnr,bhrd->bhnd", phi, live.numerator).reshape(queries.shape)
        bottom = jnp.einsum("bhnr,bhr->bhn", phi, live.denominator).reshape(lse.shape)
        both = combine(group_queries(out, spec.kv_heads).astype(jnp.float32), lse, top, bottom)
        return both.transpose(0, 3, 1, 2, 4).reshape(out.shape).astype(out.dtype), state

    def evict(self, spec: CacheSpec, live: H2OLive, step: StepKV) -> H2OLive:
        """Evict as H2O does, and sum up what goes."""
        after = super().evict(spec, live, step)
        kernels = self.kernels(spec, step.learned)
        if kernels is None:
            return after
        assert isinstance(after, LESSLive)
        gone = (live.positions >= 0) & (after.positions < 0)
        at = jnp.argmax(gone, axis=2)[..., None, None]
        k, v = (jnp.take_along_axis(x, at, axis=2) for x in (live.cache.k, live.cache.v))
        return absorb(after, kernels, k, v, gone.any(axis=2, keepdims=True))

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """H2O's, and the features of a piece, twice between the layers; which tokens are kept."""
        piece = min(PIECE, tokens) * (2 * self.hidden + 3 * spec.head_dim + 4 * self.state_rank)
        return super().compress_bytes(spec, tokens) + spec.batch * spec.kv_heads * (4 * piece + 2 * tokens)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """H2O's, the scores once more, and the features of a step's queries and key."""
        slots = self.budget(spec.capacity) + 1
        query = slots + 2 * self.hidden + 3 * spec.head_dim + 4 * self.state_rank
        return super().step_temporaries(spec) + 2 * 4 * spec.batch * (spec.q_heads + spec.kv_heads) * query


def absorb(live: LESSLive, kernels: dict[str, Any], k: Array, v: Array, there: Array) -> LESSLive:
    """The state with tokens k, v [B, h_kv, n, d] summed up, those that are `there` [B, h_kv, n]."""
    psi = jnp.where(there[..., None], key_features(kernels, k), 0)
    return live.replace(
        numerator=live.numerator + jnp.einsum("bhnr,bhnd->bhrd", psi, v.astype(jnp.float32)),
        denominator=live.denominator + psi.sum(axis=2),
    )
