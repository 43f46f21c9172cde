"""The contract of a KV-cache method, in two halves.

A `Policy` is the user's choice for a whole model: settings that are checked once and static under jit. A `LayerCache`
defines how one layer stores, selects and attends to keys and values. A method whose layers are all alike is both at
once (`UniformPolicy`). The arrays of a layer are in a `LayerState`, which the hooks take and return. The hooks are pure
functions. They see a batch whose rows have different lengths: the sizes of arrays are maxima that follow from the
capacity, and masks mark the part that each row uses.

A decode step calls the hooks of each layer in this order:

    append -> select -> fetch (cache/offload.py) -> receive -> attend

Abilities that only some methods have (learning from a text, guessing the next token, ...) are not part of the contract.
`capabilities.py` declares them, and the engine asks for them.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jax import Array

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig
from jshadow.policies.prefill_attention import SecondPass


@dataclasses.dataclass(frozen=True)
class HookInputs:
    """The inputs that a layer's hooks need.

    Attributes:
        all_queries: whether `compress` needs all queries of the prompt and their log-sum-exps.
        last_queries: how many of the prompt's last queries `compress` needs.
        second_pass: the second pass over the prompt whose scores `compress` needs, or None.
        piece: number of new tokens of a turn that the hooks of a step process at once. A turn is a text that is added
            after the prompt (`jshadow.extend`). The result must equal that of processing the tokens one by one, in
            single steps.
        whole_turns: whether the hooks also process any larger number of tokens at once. Their memory must not grow with
            the product of these tokens and the tokens of the cache.
    """

    all_queries: bool = False
    last_queries: int = 0
    second_pass: SecondPass | None = None
    piece: int = 1
    whole_turns: bool = False


class Policy(abc.ABC):
    """A user's choice for a whole model: a frozen, hashable dataclass of settings that all have defaults.

    Class attributes:
        name: the name on the command line and in POLICIES.
        source: the paper, with the section.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Return this policy with every setting that is None replaced by a number.

        Args:
            config: the model.
            capacity: maximum number of tokens that a row can hold.

        Raises:
            ConfigError: a setting is out of range.
        """
        return self

    @abc.abstractmethod
    def for_layer(self, layer: int, config: ModelConfig) -> "LayerCache":
        """Return the cache of a layer.

        This is called on a resolved policy, and only for layers that attend to all tokens.
        """

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Return the reason why the policy has no effect at this capacity, or None if it has an effect."""
        return None


class LayerCache(abc.ABC):
    """How one layer stores, selects and attends to keys and values: a frozen, hashable dataclass.

    All its settings are resolved.

    Attributes:
        name: the name of the method.
        emptied: the fields of the live record that are only a cache, on which no result depends. They are not saved.
            Each field has the number that fills its arrays in an empty cache.
        splits_heads: whether each KV head stores, selects and attends without the other heads. Only then can the axis
            `tp` of a mesh split them.
    """

    name: ClassVar[str] = ""
    emptied: ClassVar[Mapping[str, int]] = {}
    splits_heads: ClassVar[bool] = True

    def splits_left(self, spec: CacheSpec) -> bool:
        """Return whether the devices of the axis `tp` of a mesh each have a part of rows that serve all heads."""
        return False

    @property
    def reads(self) -> HookInputs:
        """The inputs that the hooks need."""
        return HookInputs()

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return `CacheSpec.window`, the number of slots for exact tokens.

        Args:
            capacity: maximum number of tokens that a row can hold.
            shortest: number of tokens in the shortest prompt of the batch.
        """
        return capacity

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the layer's offloaded rows in host memory, or None if nothing is offloaded."""
        return None

    # A prompt

    @abc.abstractmethod
    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return the state of a layer that holds no tokens yet, without its host tier.

        Args:
            spec: the layer.
            fitted: this layer's slice of learned arrays, or None.
        """

    @abc.abstractmethod
    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Store a prompt.

        Args:
            spec: the layer.
            state: the state that `init` returned.
            prompt: the prompt's keys, values and queries.
            fitted: this layer's slice of learned arrays, or None.

        Returns:
            The new state, and the rows to write to host memory for the whole prompt, or None if nothing is offloaded.
        """

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Return how many more tokens each row can hold, int32 [B]. `lengths`, int32 [B], is how many it holds now."""
        return spec.capacity - lengths

    # Tokens given back (`KVState.rewind`)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the fewest tokens that each row can hold after it gives back its newest tokens, int32 [B].

        None: the method cannot give tokens back, because it keeps something of them, or loses something for them. This
        is the default. Tokens of the prompt can be given back only if they are stored like those after the prompt.

        Args:
            spec: the layer.
            state: its state.
            reached: the most tokens that each row has ever held, int32 [B].
        """
        return None

    def rewound(self, spec: CacheSpec, state: LayerState, lengths: Array) -> LayerState:
        """Return the layer's state after each row went back to `lengths` tokens, int32 [B].

        By default the state does not change: the tokens given back stay in slots that no query reads, until new tokens
        are written there.
        """
        return state

    # One step

    @abc.abstractmethod
    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Store the new keys and values of the tokens for which `step.valid` is True.

        Returns:
            The new state, and the units to write to the tail of the host tier, or None if nothing is written.
        """

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Choose the units of the host tier to fetch for this layer in this step.

        Returns:
            The selection, or None if nothing is fetched, and the new state.
        """
        return None, state

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Store fetched units that a later step needs again. By default nothing is stored."""
        return state

    @abc.abstractmethod
    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """Compute the attention of the step's queries.

        Args:
            spec: the layer.
            state: the state after `append`, `select` and `receive`.
            step: the step's queries, keys and values.
            fetched: the units that `select` chose, or None.

        Returns:
            The output [B, T, h_q, d], and the new state.
        """

    @abc.abstractmethod
    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count the tokens that a query attends to in each part of the cache ("window", "selected", ...).

        Args:
            spec: the layer.
            state: its state after the query's step.
            lengths: number of tokens that each row holds, with the query's own token, int32 [B].

        Returns:
            The name of each part with its count, float32 [B]. The count includes the query's own token. It is a mean
            over heads.
        """


class UniformPolicy(Policy, LayerCache):
    """A policy whose layers are all alike. The same object is the policy and the cache of every layer."""

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Return this object, for every layer."""
        return self


class Wrapper(Policy):
    """A policy that contains another policy and decides the cache of each layer.

    Attributes:
        inner: the policy inside. It must be a dataclass field of the subclass, with a default.
    """

    inner: Policy

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Return this wrapper with its inner policy resolved."""
        return dataclasses.replace(self, inner=self.inner.resolve(config, capacity))  # type: ignore[type-var]

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """Return the cache that the inner policy has for the layer."""
        return self.inner.for_layer(layer, config)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Return the reason that the inner policy gives, or None."""
        return self.inner.fallback(config, capacity)


def innermost(policy: Policy) -> Policy:
    """Return the policy inside all wrappers, or the policy itself if it is not a wrapper."""
    return innermost(policy.inner) if isinstance(policy, Wrapper) else policy


def full_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers that attend to all tokens. Under every policy, the other layers keep the model's own window."""
    return tuple(layer for layer, kind in enumerate(config.attention_kinds) if kind.window is None)


def why_dense(policy: Policy, config: ModelConfig, capacity: int) -> str | None:
    """Return the reason why a policy has no effect on a model at a capacity, or None if it has an effect."""
    if all(kind.window is not None for kind in config.attention_kinds):
        return f"every layer of the model sees a window of {config.sliding_window} tokens only"
    return policy.fallback(config, capacity)
