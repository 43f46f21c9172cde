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
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.accounting import layer_nbytes
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


Bytes = dict[str, tuple[int, int]]  # for each part, the bytes on the device and those that are moved from the host

Links = dict[str, int]  # for each part, the bytes that a device of a mesh sends along `tp`


class StepCosts(NamedTuple):
    """What a decode step of a layer costs beyond `LayerCache.step_bytes`.

    Attributes:
        flops: operations that `step_flops` does not count by itself.
        passes: the bytes that the GPU kernels move besides: those that one kernel writes to device memory and another
            one reads, which count twice, and those that are read beside a row because memory is read in whole sectors.
        kept: the bytes of `step_bytes` and `passes` that a step saves if all selected units stay selected.
        links: for each part, the bytes that a device of a mesh sends along `tp`, without the model's own sums.
    """

    flops: int
    passes: Bytes
    kept: Bytes
    links: Links


def gathered(size: int, devices: int) -> int:
    """Return the bytes that a device sends to gather, or to reduce and scatter, an array of `size` bytes in all.

    An exchange among n devices is counted as a ring does it: a device sends (n - 1) / n of the whole array.
    """
    return -(-size * (devices - 1) // devices)


def reduced(size: int, devices: int) -> int:
    """Return the bytes that a device sends so that all devices have the sum or the maximum of `size` bytes each."""
    return 2 * gathered(size, devices)


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

        `capacity` is the maximum number of tokens that a row can hold. Raises ConfigError if a setting is out of range.
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
        query_rows: number of query rows T in a decode step of the layer.
        takes_sinks: whether `attend` gives the attention sinks of `StepKV` their part of the softmax. If not, models
            with sinks are refused.
        is_recurrent: whether the layer does not attend, but has a recurrent state.
    """

    name: ClassVar[str] = ""
    emptied: ClassVar[Mapping[str, int]] = {}
    splits_heads: ClassVar[bool] = True
    query_rows: ClassVar[int] = 1
    takes_sinks: ClassVar[bool] = False
    is_recurrent: ClassVar[bool] = False

    @property
    def reads(self) -> HookInputs:
        """The inputs that the hooks need."""
        return HookInputs()

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Return `CacheSpec.window`, the number of slots for exact tokens.

        `shortest` is the number of tokens in the shortest prompt of the batch.
        """
        return capacity

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """Return the layout of the layer's offloaded rows in host memory, or None if nothing is offloaded."""
        return None

    # A prompt

    @abc.abstractmethod
    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """Return the state of a layer that holds no tokens yet, without its host tier.

        `fitted` is this layer's slice of learned arrays, or None.
        """

    @abc.abstractmethod
    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Store a prompt in the state that `init` returned. `fitted` is as in `init`.

        Return the new state, and the rows to write to host memory for the whole prompt, or None if nothing is
        offloaded.
        """

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Return how many more tokens each row can hold, int32 [B]. `lengths`, int32 [B], is how many it holds now."""
        return spec.capacity - lengths

    # Tokens given back (`KVState.rewind`)

    def earliest(self, spec: CacheSpec, state: LayerState, reached: Array) -> Array | None:
        """Return the fewest tokens that each row can hold after it gives back its newest tokens, int32 [B].

        None: the method cannot give tokens back, because it keeps something of them, or loses something for them. This
        is the default. Tokens of the prompt can be given back only if they are stored like those after the prompt.
        `reached` is the most tokens that each row has ever held, int32 [B].
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
        """Compute the attention of the step's queries [B, T, h_q, d], and return it with the new state.

        The state is that after `append`, `select` and `receive`. `fetched` are the units that `select` chose, or None.
        """

    @abc.abstractmethod
    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Count the tokens that a query attends to in each part of the cache ("window", "selected", ...), float32 [B].

        The state is that after the query's step. `lengths`, int32 [B], is the number of tokens that each row holds.
        Both
        include the query's own token. A count is a mean over heads.
        """

    # Costs, for the planner. The defaults are upper bounds. A spec describes the layer, and a state may be abstract.

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Return an upper bound on the temporary device bytes of `compress`, in addition to its result.

        `tokens` is the number of tokens to which the batch of prompts is padded. The default is twice the size of one
        array of keys, for the longer of prompt and capacity.
        """
        row = spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return 2 * spec.batch * max(tokens, spec.capacity) * row

    def compress_work(self, spec: CacheSpec, tokens: int) -> tuple[int, int]:
        """Return estimates of the operations of `compress`, and of the kernels that it launches on a GPU.

        A batch has as many launches as one row. By default nothing is counted.
        """
        return 0, 0

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> Bytes:
        """Return the bytes of each part that one decode step of the layer reads on the device and moves from the host.

        By default every array on the device is read once.
        """
        return {part: (device, 0) for part, (device, _) in layer_nbytes(state).items()}

    def step_costs(self, spec: CacheSpec, state: LayerState) -> StepCosts:
        """Return what one decode step of the layer costs besides. By default nothing is counted."""
        return StepCosts(0, {}, {}, {})

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Return an upper bound on the temporary device bytes of one decode step of the layer.

        The default counts three float32 numbers for each query head and token: scores, masked scores and their softmax.
        """
        return 3 * 4 * spec.batch * self.query_rows * spec.q_heads * spec.capacity


class UniformPolicy(Policy, LayerCache):
    """A policy whose layers are all alike. The same object is the policy and the cache of every layer."""

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        return self


class Wrapper(Policy):
    """A policy that contains another policy and decides the cache of each layer.

    Attributes:
        inner: the policy inside. It must be a dataclass field of the subclass, with a default.
    """

    inner: Policy

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        return dataclasses.replace(self, inner=self.inner.resolve(config, capacity))  # type: ignore[type-var]

    def for_layer(self, layer: int, config: ModelConfig) -> LayerCache:
        return self.inner.for_layer(layer, config)

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        return self.inner.fallback(config, capacity)


def innermost(policy: Policy) -> Policy:
    """Return the policy inside all wrappers, or the policy itself if it is not a wrapper."""
    return innermost(policy.inner) if isinstance(policy, Wrapper) else policy


def full_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the layers that attend to all tokens.

    Under every policy, the other layers keep the model's own window or their recurrent state.
    """
    return tuple(layer for layer, kind in enumerate(config.attention_kinds) if kind.sees_all)


def why_dense(policy: Policy, config: ModelConfig, capacity: int) -> str | None:
    """Return the reason why a policy has no effect on a model at a capacity, or None if it has an effect."""
    if not full_layers(config):
        return f"every layer of the model sees a window of {config.sliding_window} tokens only"
    return policy.fallback(config, capacity)


def step_flops(spec: CacheSpec, state: LayerState) -> int:
    """Return an upper bound on the operations of a layer's attention in one decode step.

    One multiplication and one addition are counted for each number that is read and each query head that uses it.
    """
    policy: LayerCache = spec.policy
    moved = sum(device + host for device, host in policy.step_bytes(spec, state).values())
    numbers = moved // jnp.dtype(spec.dtype).itemsize
    return 2 * spec.group * policy.query_rows * numbers + policy.step_costs(spec, state).flops


def fetched_bytes(spec: CacheSpec, state: LayerState, part: str, tokens: int) -> Bytes:
    """Return the `step_bytes` of a layer that reads all arrays on the device, and fetches some tokens of each KV head.

    `part` is the name of the fetched keys and values.
    """
    parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
    size = 2 * spec.batch * spec.kv_heads * tokens * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    return parts | {part: (size, 0 if spec.fetch == "resident" else size)}
