"""Self-drafting: the model itself proposes tokens, over a sparse view of its own exact cache.

The target has full attention. A draft step reads the same keys and values: those of the units that a retrieval policy
selects by small summaries, and those of the newest tokens. So a second cache is not needed. The keys and values of
drafted tokens lie behind the row's tokens, where the check of these tokens overwrites them.

Sources: MagicDec (Sachdeva et al. 2024, arXiv 2408.11049) drafts with a sparse cache, TriForce (Sun et al. 2024, arXiv
2404.11912, section 4) retrieves chunks of the full cache for it.

B rows, n units of `policy.unit` tokens, h_kv KV heads, d head width, w proposed tokens.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jshadow.cache.records import LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState
from jshadow.engine.layer_hooks import append_tokens
from jshadow.engine.sampling import sample_numbered
from jshadow.engine.speculation.drafter import Drafter, Memory, Proposal, Target, Text
from jshadow.engine.step import step_state
from jshadow.engine.step_work import LayerWork
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece, attend, group_queries
from jshadow.ops.layout import top_k
from jshadow.policies import Full, Quest
from jshadow.policies.retrieval import RetrievalPolicy, put_units


@dataclasses.dataclass(frozen=True)
class SelfDraft(Drafter):
    """Propose tokens by steps of the model that attend to a part of its own cache. The model's policy must be `Full`.

    Attributes:
        tokens: the most tokens that are proposed at once.
        policy: how a draft step selects: by its `budget`, `unit`, `recent` and summaries. Its first `dense_layers`
            layers attend to all tokens.
    """

    policy: RetrievalPolicy = Quest(budget=512, unit=16, recent=64, dense_layers=0)  # noqa: RUF009, it is frozen

    name = "self"
    cost = 0.2
    source = "arXiv 2408.11049, arXiv 2404.11912"

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the target has full attention on one device, and the policy reads no basis."""
        if state.policy != Full():
            raise ConfigError(f"policy must be full for speculate={self.name!r}, got {state.policy.name}")
        if state.shares_prompt:
            raise ConfigError(f"speculate={self.name!r} needs rows with prompts of their own")
        if not isinstance(self.policy, RetrievalPolicy) or self.policy.no_basis(state.specs[0]) is not None:
            raise ConfigError(
                f"self.policy must be a retrieval policy without a basis, such as Quest, got {self.policy}"
            )
        self.policy.resolve(config, state.capacity)

    def is_sparse(self, spec: CacheSpec, config: ModelConfig) -> bool:
        """Return whether a draft step selects units in a layer. Layers with a window of the model do not."""
        assert spec.layer is not None
        return spec.sliding_window is None and not isinstance(self.policy.for_layer(spec.layer, config), Full)

    def begin(self, text: Text, state: KVState) -> Memory:
        """Return the summaries of all units of each layer, or None for a layer with full attention or a window."""
        layers = tuple(self.is_sparse(spec, text.config) for spec in state.specs)
        return Memory(None, all_summaries(state, drafter=self, layers=layers))

    def ready(self, memory: Memory) -> Array:
        """Return `tokens` for every row."""
        return jnp.full(jax.tree.leaves(memory.live)[0].shape[0], self.tokens, jnp.int32)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Run `width` steps. Each draws with the key of its token, so that a good guess is also a good draw."""
        config, held, summaries = target.config, target.state.lengths, memory.live

        def run_layer(
            spec: CacheSpec, state: LayerState, step: StepKV, everyone: Any
        ) -> tuple[Array, LayerState, LayerWork]:
            assert spec.layer is not None
            state, step = append_tokens(spec, state, step)
            if summaries[spec.layer] is None:
                out, state = spec.policy.attend(spec, state, step, None)
            else:
                out = self.attend(spec, state, step, summaries[spec.layer], held)
            return out, state, LayerWork()

        def body(carry: tuple[KVState, Array], place: Array) -> tuple[tuple[KVState, Array], Array]:
            state, token = carry
            active = (place < target.wanted).astype(jnp.int32)
            logits, state = step_state(target.weights, config, token[:, None], active, state, run_layer=run_layer)
            drawn = sample_numbered(target.sampler, logits[:, None], target.key, target.progress.number + place)[:, 0]
            token = jnp.maximum(drawn, 0)  # NO_TOKEN would give logits that are not numbers
            return (state, token), token

        (drafted, _), tokens = lax.scan(body, (target.state, target.progress.token), jnp.arange(width))
        return Proposal(tokens.T, target.state.replace(layers=drafted.layers), summaries)

    def attend(self, spec: CacheSpec, state: LayerState, step: StepKV, summaries: Any, held: Array) -> Array:
        """Return the attention of a draft step's query [B, 1, h_q, d]. The arguments are those of `pieces`."""
        return attend(step.q_post, self.pieces(spec, state, step, summaries, held), spec.scale)

    def pieces(self, spec: CacheSpec, state: LayerState, step: StepKV, summaries: Any, held: Array) -> list[Piece]:
        """Return the newest tokens and the selected units as pieces for attention.

        Args:
            spec: the layer.
            state: its state, which holds the draft's tokens too.
            step: the query of a draft step.
            summaries: those of all units.
            held: number of tokens before the drafts, int32 [B]. Units after them have no valid summary.
        """
        cache, unit = state.live.cache, self.policy.unit
        count = jax.tree.leaves(summaries)[0].shape[2]
        first = jnp.maximum(held + 1 - self.policy.recent, 0) // unit * unit
        index = first[:, None] + jnp.arange(self.policy.recent + unit + self.tokens)
        seen = index <= step.positions
        pieces = [Piece(*taken(cache, index[:, None]), seen[:, None, None])]
        most = min(self.policy.budget // unit, count)
        if most:
            scores = self.policy.score(spec, summaries, group_queries(step.q_post, spec.kv_heads), None)[:, :, 0]
            old = (jnp.arange(count) + 1) * unit <= first[:, None]
            ids = top_k(jnp.where(old[:, None], scores, -jnp.inf), most)
            there = ids * unit < first[:, None, None]
            tokens = (ids[..., None] * unit + jnp.arange(unit)).reshape(*ids.shape[:2], -1)
            pieces.append(Piece(*taken(cache, tokens), there[:, :, None]))
        return pieces

    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> tuple[Any, ...]:
        """Summarize the units of the newest tokens again."""
        unit = self.policy.unit
        touched = (tokens.shape[1] - 1) // unit + 2
        units = (state.lengths - counts)[:, None] // unit + jnp.arange(touched)
        index = (units[..., None] * unit + jnp.arange(unit)).reshape(len(counts), -1)
        there = (index < state.lengths[:, None]).reshape(*units.shape, unit)
        fresh = []
        for summaries, layer, spec in zip(memory.live, state.layers, state.specs, strict=True):
            if summaries is not None:
                rows = taken(layer.live.cache, index[:, None])[0]
                keys = rows.reshape(*rows.shape[:2], touched, unit, spec.head_dim)
                new = self.policy.summarize(spec, keys, there, None)
                put = functools.partial(put_units, place=units, valid=there.any(axis=2))
                summaries = jax.tree.map(put, summaries, new)
            fresh.append(summaries)
        return tuple(fresh)


def taken(cache: Any, index: Array) -> tuple[Array, Array]:
    """Gather keys and values [B, h_kv, m, d] of a `KeyValues` at the positions `index`, int32 [B, h_kv or 1, m].

    Positions past the end give the last token.
    """
    at = jnp.broadcast_to(index, (*cache.k.shape[:2], index.shape[2]))[..., None]
    k, v = (jnp.take_along_axis(x, at, axis=2, mode="clip") for x in (cache.k, cache.v))
    return k, v


@functools.partial(jax.jit, static_argnames=("drafter", "layers"))
def all_summaries(state: KVState, *, drafter: SelfDraft, layers: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the summaries of all units of each layer, or None where `layers` is False."""
    unit: int = drafter.policy.unit
    found: list[Any] = []
    for spec, layer, is_sparse in zip(state.specs, state.layers, layers, strict=True):
        if not is_sparse:
            found.append(None)
            continue
        count = spec.capacity // unit
        keys = layer.live.cache.k[:, :, : count * unit].reshape(spec.batch, spec.kv_heads, count, unit, spec.head_dim)
        there = (jnp.arange(count * unit) < state.lengths[:, None]).reshape(-1, count, unit)
        found.append(drafter.policy.summarize(spec, keys, there, None))
    return tuple(found)
