"""The contract of a KV-cache method, in two halves.

A `Policy` is what a user chooses for a whole model: numbers, checked once and static under jit. A `LayerCache` is how
one layer keeps, chooses and attends to keys and values. A method whose layers are all alike is both at once
(`UniformPolicy`). What a layer remembers is a `LayerState`, a value that the hooks take and return. The hooks are pure
and see a ragged batch: array sizes are maxima that follow from the capacity, and each row masks its own share.

In a decode step, layer by layer:

    append -> select -> fetch (cache/offload.py) -> receive -> attend

What only some methods can do (learn from a text, guess the next token, ...) is not part of the contract. It stands in
`capabilities.py`, and the engine asks for it.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Self

from jax import Array

from jshadow.cache.records import Fetched, HostWrite, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class HookInputs:
    """What a layer's hooks are given to read.

    Attributes:
        all_queries: `compress` reads all queries of the prompt and their log-sum-exps.
        last_queries: how many of the prompt's last queries `compress` reads.
        piece: new tokens of a turn that the hooks of a step take at once, with the result of as many single steps;
            1: a turn is a loop over steps.
    """

    all_queries: bool = False
    last_queries: int = 0
    piece: int = 1


class Policy(abc.ABC):
    """A user's choice for a whole model: a frozen, hashable dataclass of settings that can be made without arguments.

    Class attributes:
        name: as the command line and POLICIES have it.
        source: the paper, with the section.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """This policy with every None replaced by a number. Raises ConfigError where a setting is out of range."""
        return self

    @abc.abstractmethod
    def for_layer(self, layer: int, config: ModelConfig) -> "LayerCache":
        """The cache of a layer that sees all tokens. Only asked of a resolved policy."""

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Why a cache of this capacity is too small for the policy to do anything, or None."""
        return None


class LayerCache(abc.ABC):
    """How one layer keeps, chooses and attends to keys and values: a frozen, hashable dataclass, resolved."""

    @property
    def reads(self) -> HookInputs:
        """What the hooks are given to read."""
        return HookInputs()

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Slots for tokens that are kept exactly, in a batch whose shortest prompt has `shortest` tokens."""
        return capacity

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """How the layer's offloaded rows lie in host memory; None: nothing is offloaded."""
        return None

    # A prompt

    @abc.abstractmethod
    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """An empty state, without its host tier."""

    @abc.abstractmethod
    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Take in a prompt. The write, if there is one, is the whole prompt part of the host tier."""

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Tokens that each row can still take, int32 [B], when it holds `lengths`."""
        return spec.capacity - lengths

    # One step

    @abc.abstractmethod
    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Take in the step's new keys and values, where `step.valid`."""

    def select(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection | None, LayerState]:
        """Choose units of the host tier to fetch for this layer now; None: everything attended is at hand."""
        return None, state

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Keep what a fetch brought, where it is needed again."""
        return state

    @abc.abstractmethod
    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None
    ) -> tuple[Array, LayerState]:
        """The attention's output [B, T, h_q, d]."""

    @abc.abstractmethod
    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Tokens that a query attends to, itself included, mean over heads: float32 [B] by part ("window", ...).

        Args:
            spec: the layer.
            state: its state after the query's step.
            lengths: tokens held when the query attends, its own included, int32 [B].
        """


class UniformPolicy(Policy, LayerCache):
    """A policy whose layers are all alike: it is the cache of each."""

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """The policy itself."""
        return self


class Wrapper(Policy):
    """A policy around another one, for which it decides the layers' caches.

    Attributes:
        inner: the policy inside. It must be a dataclass field of the subclass, with a default.
    """

    inner: Policy

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Resolve the inner policy."""
        return dataclasses.replace(self, inner=self.inner.resolve(config, capacity))  # type: ignore[type-var]

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        """The inner policy's."""
        return self.inner.for_layer(layer, config)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """The inner policy's."""
        return self.inner.fallback(config, capacity)


def innermost(policy: Policy) -> Policy:
    """The policy that all wrappers are around."""
    return innermost(policy.inner) if isinstance(policy, Wrapper) else policy


def full_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers that see all tokens. The others keep the model's own window whatever the policy."""
    return tuple(layer for layer, kind in enumerate(config.attention_kinds) if kind.window is None)


def why_dense(policy: Policy, config: ModelConfig, capacity: int) -> str | None:
    """Why a policy can do nothing with a model at a capacity, or None."""
    if all(kind.window is not None for kind in config.attention_kinds):
        return f"every layer of the model sees a window of {config.sliding_window} tokens only"
    return policy.fallback(config, capacity)
