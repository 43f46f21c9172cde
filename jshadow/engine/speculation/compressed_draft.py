"""The model itself proposes tokens, over a compressed cache that is made from the exact keys and values of its state.

The target has exact keys and values of all tokens: on the device (`Full`), or in host memory (`Offloaded`). Then the
prompt need not be read twice. The keys and values of accepted tokens in the compressed cache are those of the draft
steps, which attended to a part of the tokens.

Source: VeriCache (arXiv 2605.17613) drafts with a compressed cache and checks with the whole one.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import host_memory, offload
from jshadow.cache.records import HostWrite, LayerState, PromptKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import Counters, KVState, with_room
from jshadow.engine.checks import check_policy
from jshadow.engine.prefill.layer import compress_layer
from jshadow.engine.speculation.checks import check_gives_back
from jshadow.engine.speculation.draft_model import ModelSteps
from jshadow.engine.speculation.drafter import Memory, Proposal, Target, Text
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.rope import inverse_frequencies, rotate, rotation
from jshadow.planner.bytes import cache_specs
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.capabilities import HasAll, Speculates, attention_of, capability
from jshadow.policies.checks import reads_fitted
from jshadow.policies.full import or_full


@dataclasses.dataclass(frozen=True)
class CompressedDraft(ModelSteps):
    """Propose tokens by steps of the model over a compressed cache. The model's policy must be `Offloaded` or `Full`.

    Attributes:
        tokens: the most tokens that are proposed at once.
        policy: the policy of the compressed cache. It must be able to give all new tokens back, and must not read the
            queries of the prompt.
    """

    config: ModelConfig | None = dataclasses.field(default=None, init=False, repr=False)
    policy: Policy = ShadowKV()  # noqa: RUF009, it is frozen

    name = "compressed"
    source = "arXiv 2605.17613"
    cost = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy)

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError unless the compressed cache can be made from the target's, and can give tokens back."""
        specs, policy = self.specs(config, state, 1), self.chosen(config, state)
        if state.shares_prompt:
            raise ConfigError(f"speculate={self.name!r} needs rows with prompts of their own")
        for own, spec in zip(specs, state.specs, strict=True):
            if not isinstance(spec.policy, HasAll) and own.policy != spec.policy:
                raise ConfigError(
                    f"policy must keep all keys and values for speculate={self.name!r}, as full and offloaded do, got "
                    f"{state.policy.name}"
                )
            reads = own.policy.reads
            queries = reads.all_queries or reads.last_queries or reads.second_pass
            if queries or attention_of(own.policy) or reads_fitted(own.policy):
                raise ConfigError(
                    f"{self.name}.policy must be made from keys and values alone, got {policy}, which reads the "
                    "queries of the prompt, has its own attention among them, or was fitted to a text"
                )
        if capability(policy, Speculates) is not None:
            raise ConfigError(f"{self.name}.policy must compute one query for each token, got {policy}")
        check_gives_back(self, specs, policy, state)

    def chosen(self, config: ModelConfig, state: KVState) -> Policy:
        """Return the policy for the capacity of the target: full attention if the policy has no effect there."""
        return or_full(self.policy.resolve(config, state.capacity), config, state.capacity)[0]

    def specs(self, config: ModelConfig, state: KVState, shortest: int) -> tuple[CacheSpec, ...]:
        """Return the specs of the compressed cache, for rows of at least `shortest` tokens."""
        first = state.specs[0]
        return cache_specs(
            config, self.chosen(config, state), state.batch, state.capacity, shortest, first.dtype, first.fetch
        )

    def begin(self, text: Text, state: KVState) -> Memory:
        """Compress the keys and values of the target, layer by layer."""
        shortest, room = max(int(state.lengths.min()), 1), int(np.asarray(state.room()).max())
        specs = self.specs(text.config, state, shortest)
        if room < state.capacity - shortest:  # the window of the target ends before its capacity
            specs = with_room(specs, room)
        host_memory.check_host_memory([specs])
        own = KVState(
            layers=tuple(compressed_layers(specs, state)),
            shared=None,
            lengths=jnp.array(state.lengths),
            last=jnp.array(state.last),
            counters=Counters.zeros(state.batch),
            fitted=None,
            specs=specs,
            policy=self.chosen(text.config, state),
        )
        reads, writes = own.split()
        return Memory((None, reads), writes)

    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Run the steps with the weights of the target."""
        own = memory._replace(fixed=(target.weights, memory.fixed[1]))
        return ModelSteps(target.config, tokens=self.tokens).propose(own, target, width)


def compressed_layers(specs: tuple[CacheSpec, ...], state: KVState) -> Iterator[LayerState]:
    """Yield the layers of the compressed cache. A layer whose cache is that of the target is copied."""
    for own, spec, layer in zip(specs, state.specs, state.layers, strict=True):
        if own.policy == spec.policy and not isinstance(spec.policy, HasAll):
            yield layer.replace(live=jax.tree.map(jnp.copy, layer.live))
            continue
        write: HostWrite | None
        prompt = as_prompt(layer, state.lengths, spec=dataclasses.replace(spec, layer=None))
        made, write = compress_layer(prompt, None, spec=dataclasses.replace(own, layer=None))
        with host_memory.placing([specs]):
            yield made.replace(host=offload.place(own.policy.host_layout(own), own, write))


@functools.partial(jax.jit, static_argnames=("spec",))
def as_prompt(layer: LayerState, lengths: Array, *, spec: CacheSpec) -> PromptKV:
    """Return the tokens of a layer that has all of them as a prompt. Keys before RoPE are rotated back."""
    rows = spec.policy.all_tokens(spec, layer)
    there = (jnp.arange(spec.capacity) < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(there, x.swapaxes(1, 2), 0) for x in (rows.k, rows.v))
    positions = jnp.broadcast_to(jnp.arange(spec.capacity, dtype=jnp.int32), k.shape[:2])
    turn = rotation(spec.rope, jnp.asarray(inverse_frequencies(spec.rope, spec.head_dim, spec.capacity)), positions[:1])
    return PromptKV(k_pre=rotate(k, turn.cos, -turn.sin), k_post=k, v=v, lengths=lengths, positions=positions)
