"""The contract of a KV-cache policy.

A policy is numbers: a frozen, hashable dataclass of settings, static under jit. What it remembers is a LayerState, a
value that its methods take and return. Methods are pure, per layer, and see a ragged batch: sizes are maxima that
follow from the capacity, each row masks its own share. In a decode step, layer by layer:

    append -> select -> fetch (offload.py) -> receive -> attend -> plan

To write one: a state type or two, `resolve`, `init`, `compress`, `append`, `attend`, and `select` where not everything
is attended. Then list it in policies/__init__.py and in tests/cases.py; the laws do the rest.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import Fetched, HostArray, HostWrite, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec, HostLayout
from jshadow.cache.state import KVState
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.prefill_attention import PrefillAttention

SLIDING_PIECE = 16  # tokens of a turn that a sliding layer takes at once


class Policy(abc.ABC):
    """How one layer's keys and values are kept, chosen and attended.

    Class attributes:
        name: as on the command line and in POLICIES.
        source: paper, with the section.
        needs: what `compress` reads beyond keys and values: "q_all" for all queries and their log-sum-exps.
        q_tail: trailing queries that `compress` reads.
        step_rows: query rows of a decode step (2 where a guessed token runs along).
        foresees: every layer hands the next one what its queries will be; sliding layers do too.
        couples_layers: what a layer attends to depends on what another one chooses.
        budget_fields: settings, in tokens, that say how much a layer keeps or attends to; a Pyramid scales them.
        kept_fields: settings that say how things are kept, which `at_share` leaves as they are.
        predecode: a prompt ends with a step that is taken back but for what `adopt` keeps and `after_step` shares.
        reads_fitted: it attends by arrays that `fit` learned, where it is given them.
        trains: `fit` is a training that takes `steps`, `rate` and `seed`.
        extend_piece: new tokens of a turn that the hooks of a step take at once, with the result of as many single
            steps. 1: a turn is a loop over steps.
    """

    name = ""
    source = ""
    needs: frozenset[str] = frozenset()
    q_tail = 0
    step_rows = 1
    couples_layers = False
    budget_fields: tuple[str, ...] = ()
    kept_fields: tuple[str, ...] = ()
    predecode = False
    foresees = False
    reads_fitted: bool = False
    trains = False
    extend_piece: int = 1

    # Settings

    def settings(self) -> dict[str, Any]:
        """The settings by name; a policy among them as {"name", ...}."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {
            name: {"name": value.name, **value.settings()} if isinstance(value, Policy) else value
            for name, value in values.items()
        }

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """This policy with every None replaced by a number. Raises ConfigError where a setting is out of range."""
        return self

    def for_layer(self, layer: int, config: ModelConfig) -> "Policy":
        """The policy of one layer, where layers differ."""
        return self

    def fallback(self, config: ModelConfig, capacity: int) -> str | None:
        """Why a cache of this capacity is too small for the policy to do anything, or None."""
        return None

    def scaled(self, share: float) -> "Policy":
        """This policy, resolved, with that share of each of its budgets, in whole units and at least one."""
        unit, changed = int(getattr(self, "chunk_size", getattr(self, "unit", 1))), {}
        for name in self.budget_fields:
            whole = getattr(self, name)
            changed[name] = max(min(whole, unit), round(share * whole / unit) * unit)
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def window_slots(self, capacity: int, shortest: int) -> int:
        """Slots for exactly kept tokens in a batch whose shortest prompt has `shortest` tokens."""
        return capacity

    def fitted_shapes(self, config: ModelConfig) -> Any:
        """Shapes of the float32 arrays that `fit` returns, in the same nested dict; None: it learns nothing."""
        return None

    def fit(self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None) -> Any:
        """Arrays learned from a calibration text, to be passed as `fitted=`; None for most policies.

        A nested dict of arrays whose first axis are the layers. Hooks are given that of their layer: `compress` as an
        argument, those of a step in `StepKV.learned`.

        Args:
            params: Params.
            tokens: int32 [S] or [B, S], no padding.
            progress: called with (parts done, parts).
        """
        return None

    def with_fitted(self) -> Self:
        """These settings, where need be with the switch set that makes them use what `fit` learned."""
        return self

    # State

    def host_layout(self, spec: CacheSpec) -> HostLayout | None:
        """What of this layer lives in the host tier."""
        return None

    @abc.abstractmethod
    def init(self, spec: CacheSpec, fitted: Any = None) -> LayerState:
        """An empty state, without its host tier."""

    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
        """What travels across layers and steps; its leaves have rows first. None for most policies."""
        return None

    @abc.abstractmethod
    def compress(
        self, spec: CacheSpec, state: LayerState, prompt: PromptKV, fitted: Any = None
    ) -> tuple[LayerState, HostWrite | None]:
        """Take in a prompt. The write, if any, is the whole prompt part of the host tier."""

    def prefill_attention(self) -> PrefillAttention | None:
        """How a prompt's queries attend where that is part of the method; None: exactly."""
        return None

    def room(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """Tokens that each row can still take, int32 [B]."""
        return spec.capacity - lengths

    # One step

    @abc.abstractmethod
    def append(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, HostWrite | None]:
        """Take in the step's new keys and values (the valid ones)."""

    def select(
        self, spec: CacheSpec, state: LayerState, step: StepKV, carry: Any
    ) -> tuple[Selection | None, LayerState, Any]:
        """Choose units to fetch for this layer now."""
        return None, state, carry

    def receive(self, spec: CacheSpec, state: LayerState, selection: Selection, fetched: Fetched) -> LayerState:
        """Keep what a fetch brought, where a policy keeps it."""
        return state

    @abc.abstractmethod
    def attend(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched | None, carry: Any
    ) -> tuple[Array, LayerState, Any]:
        """The attention's output [B, T, h_q, d]."""

    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV, carry: Any) -> tuple[Selection, ...]:
        """Fetches for later layers of this step, or for the next step."""
        return ()

    def after_step(self, shared: Any, logits: Array, lengths: Array) -> Any:
        """New shared state from the float32 logits [B, T, V] of all rows of the step."""
        return shared

    def before_guess(self, shared: Any, token: Array) -> Any:
        """Shared state before the step of `predecode` on each row's most likely token, int32 [B]."""
        return shared

    def adopt(self, live: Any, after: Any) -> Any:
        """What a layer's live half keeps of that step."""
        return live

    @abc.abstractmethod
    def attended_parts(self, spec: CacheSpec, state: LayerState, lengths: Array) -> dict[str, Array]:
        """Tokens that a query attends to, itself included, mean over heads: float32 [B] by part ("window", ...).

        Args:
            spec: the layer.
            state: its state, after the query's step.
            lengths: tokens held when the query attends, its own included.
        """

    def attended(self, spec: CacheSpec, state: LayerState, lengths: Array) -> Array:
        """All parts together, float32 [B]."""
        return functools.reduce(jnp.add, self.attended_parts(spec, state, lengths).values())

    # Accounting and comparison

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Device bytes that `compress` takes for a while beyond its result, at most, for prompts of that width."""
        return (
            2 * spec.batch * max(tokens, spec.capacity) * spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        )

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Bytes (read from device memory, moved from the host) of each part in one decode step of a layer.

        What any program must move: temporaries that a compiler writes and reads again are not in it. The default
        reads all that lies on the device. Like `nbytes`, for abstract states too.
        """
        return {part: (device, 0) for part, (device, _) in self.nbytes(state).items()}

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Operations of a layer's attention in one decode step, at most: each number read meets each query head of a
        group in one multiplication and one addition."""
        moved = sum(device + host for device, host in self.step_bytes(spec, state).values())
        return 2 * spec.group * self.step_rows * (moved // jnp.dtype(spec.dtype).itemsize)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Device bytes that one decode step of a layer takes for a while, at most; the default: three float32 numbers
        for each query head and token (scores, masked scores, their softmax)."""
        return 3 * 4 * spec.batch * self.step_rows * spec.q_heads * spec.capacity

    def nbytes(self, state: LayerState) -> dict[str, tuple[int, int]]:
        """Bytes (device, host) of each part of a layer's state; abstract states count too."""
        parts: dict[str, tuple[int, int]] = {}
        for half in (state.frozen, state.live):
            for field in dataclasses.fields(half) if half is not None else ():
                leaves = jax.tree.leaves(getattr(half, field.name))
                if not leaves:
                    continue  # a part that these settings do without
                size = sum(map(leaf_bytes, leaves))
                # both halves may have a field of that name
                parts[field.name] = (parts.get(field.name, (0, 0))[0] + size, 0)
        for label, tier in (("host rows", state.host.prompt), ("host tail", state.host.tail)):
            if isinstance(tier, HostArray):
                size = leaf_bytes(tier.array)
                parts[label] = (0, size) if tier.memory == "pinned_host" else (size, 0)
        return parts

    @classmethod
    @abc.abstractmethod
    def lossless(cls, num_tokens: int, config: ModelConfig) -> Self:
        """The setting that must equal full attention up to that many tokens."""

    @classmethod
    @abc.abstractmethod
    def nominal(cls, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """The largest setting at or under that share of full attention's device bytes.

        Raises:
            Infeasible: no setting is that small; the message names the least share.
        """

    def at_share(self, fraction: float, num_tokens: int, config: ModelConfig) -> Self:
        """`nominal`, but that `kept_fields` stay as they are.

        Raises:
            Infeasible: as `nominal`.
        """
        return type(self).nominal(fraction, num_tokens, config)


def foreseen(step: StepKV) -> Array | None:
    """The next layer's queries after RoPE [B, T, h_q, d], from this layer's input; None behind the last one."""
    return None if step.q_next is None else step.q_next(step.x_in)


def leaf_bytes(leaf: Any) -> int:
    """Bytes of an array or of its abstract stand-in."""
    return int(leaf.size) * jnp.dtype(leaf.dtype).itemsize


def state_nbytes(state: KVState) -> dict[str, tuple[int, int]]:
    """Bytes (device, host) of each part of a whole state, layers summed; lengths and counters are left out."""
    total: dict[str, tuple[int, int]] = {}
    for spec, layer in zip(state.specs, state.layers, strict=True):
        for part, (device, host) in spec.policy.nbytes(layer).items():
            before = total.get(part, (0, 0))
            total[part] = (before[0] + device, before[1] + host)
    for part, tree in (("shared", state.shared), ("fitted", state.fitted)):
        if jax.tree.leaves(tree):
            total[part] = (sum(map(leaf_bytes, jax.tree.leaves(tree))), 0)
    return total


def check_range(policy: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless value is an integer in [low, high]."""
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    if not good:
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{policy}.{name} must be an integer {limit}, got {value!r}")


def check_choice(policy: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless value is one of the choices."""
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise ConfigError(f"{policy}.{name} must be one of {choices}, got {value!r}")


def check_share(policy: str, name: str, value: Any) -> None:
    """Raise ConfigError unless value is a number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{policy}.{name} must be a number in (0, 1], got {value!r}")


def within_share(weights: Array, share: float) -> Array:
    """The fewest leading entries that make up a share of all: bool mask of float32 weights [..., k], falling.

    The budget of Twilight (arXiv 2502.02770, section 4): as many as it takes, not a fixed number.
    """
    if share >= 1:
        return jnp.ones(weights.shape, bool)
    before = jnp.cumsum(weights, axis=-1) - weights
    return before < share * weights.sum(axis=-1, keepdims=True)


def check_fraction(fraction: float) -> None:
    """Raise ConfigError unless fraction is above 0."""
    if not fraction > 0:
        raise ConfigError(f"fraction must be above 0, got {fraction!r}")


def shape_problem(wanted: Any, got: Any, place: str = "fitted") -> str | None:
    """What keeps nested dicts of arrays from having the wanted shapes and float32 numbers, told by place, or None."""
    if not isinstance(wanted, dict):
        told = (getattr(got, "shape", None), str(getattr(got, "dtype", None)))
        return None if told == (wanted, "float32") else f"{place} must be float32 {wanted}, got {told[1]} {told[0]}"
    if not isinstance(got, dict) or got.keys() != wanted.keys():
        came = sorted(map(str, got)) if isinstance(got, dict) else type(got).__name__
        return f"{place} must have {sorted(wanted)}, got {came}"
    problems = (shape_problem(wanted[name], got[name], f"{place}.{name}") for name in wanted)
    return next((problem for problem in problems if problem), None)


def check_fitted(policy: Policy, config: ModelConfig, fitted: Any) -> None:
    """Raise ConfigError unless fitted is None, or what the policy learned for such a model and can use."""
    if fitted is None:
        return
    if not policy.reads_fitted:
        raise ConfigError(f"fitted must be left out: {policy} uses no learned arrays")
    problem = shape_problem(policy.fitted_shapes(config), fitted)
    if problem:
        raise ConfigError(f"fitted must be what the fit of {policy.name} returned for such a model: {problem}")


def sliding_slots(window: int, capacity: int) -> int:
    """Slots of a layer that sees a window only: the last token of a piece may not push out what its first one sees."""
    return min(window + SLIDING_PIECE - 1, capacity)


def own_layers(config: ModelConfig) -> tuple[int, ...]:
    """Layers that see everything; the others keep the model's own window whatever the policy."""
    return tuple(layer for layer, kind in enumerate(config.attention_kinds) if kind.window is None)


def why_dense(policy: Policy, config: ModelConfig, capacity: int) -> str | None:
    """Why a policy can do nothing with a model at a capacity, or None."""
    if all(kind.window is not None for kind in config.attention_kinds):
        return f"every layer of the model sees a window of {config.sliding_window} tokens only"
    return policy.fallback(config, capacity)
