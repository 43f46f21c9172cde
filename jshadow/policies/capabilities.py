"""What some methods can do beyond the contract. The engine and the planner ask for it with `capability`.

A class here is inherited beside `Policy` or `LayerCache` by the methods that have the capability. A policy inside
wrappers keeps its capabilities.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
from jax import Array

from jshadow.cache.records import LayerState, Selection, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import Policy, Wrapper, innermost
from jshadow.policies.prefill_attention import PrefillAttention

C = TypeVar("C")
P = TypeVar("P", bound=Policy)


def capability(policy: Policy, kind: type[C]) -> C | None:
    """The policy inside all wrappers, if it has the capability, or None."""
    inside = innermost(policy)
    return inside if isinstance(inside, kind) else None


def attention_of(policy: object) -> PrefillAttention | None:
    """How a prompt's queries attend where that is part of a policy's or a layer's method; None: exactly."""
    inside = innermost(policy) if isinstance(policy, Policy) else policy
    return inside.prefill_attention() if isinstance(inside, OwnPrefill) else None


def first_shared(policy: Policy, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
    """What travels across layers and steps before any token; None for most policies."""
    speculation = capability(policy, Speculates)
    return None if speculation is None else speculation.init_shared(specs, fitted)


def with_fitted(policy: P) -> P:
    """The policy with the setting that makes it use what it learned; itself where it learns nothing."""
    if isinstance(policy, Wrapper):
        return dataclasses.replace(policy, inner=with_fitted(policy.inner))  # type: ignore[type-var]
    return policy.with_fitted() if isinstance(policy, Learns) else policy


# Of a policy


class Foresees(Policy):
    """Every layer is given, in `StepKV.q_foreseen`, the queries that the layer before predicts for it.

    The prediction applies the layer's query projection to the input of the layer before it (InfiniGen,
    arXiv 2406.19707, section 4).
    """


class CouplesLayers(Policy):
    """What a layer attends to depends on what another layer chooses, so no wrapper may change single layers."""


class OwnPrefill(Policy):
    """The prompt's queries attend to each other in a way that is part of the method."""

    @abc.abstractmethod
    def prefill_attention(self) -> PrefillAttention:
        """How they attend."""


class Learns(Policy):
    """It can attend by arrays that were learned from a text.

    The arrays are a nested dict whose leaves have layers as their first axis. A layer's slice reaches `compress` as an
    argument and the hooks of a step as `StepKV.learned`.
    """

    @property
    @abc.abstractmethod
    def reads_fitted(self) -> bool:
        """Whether these settings use learned arrays."""

    @abc.abstractmethod
    def fitted_shapes(self, config: ModelConfig) -> Any:
        """Shapes of the float32 arrays that `fit` returns, in the same nested dict."""

    @abc.abstractmethod
    def fit(self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None) -> Any:
        """Learn the arrays from a text.

        Args:
            params: Params.
            tokens: int32 [S] or [B, S], no padding.
            progress: called with (parts done, parts).
        """

    def with_fitted(self) -> Self:
        """These settings, with the one set that makes them use what `fit` learned."""
        return self


class LearnsBasis(Learns):
    """It scores in a basis of each head: of each prompt, or of a text.

    Class attributes:
        basis_name: the name of the array in `fitted`, float32 [layers, h_kv, d, d].

    Attributes:
        calibration: "online": the basis of each prompt; "offline": the one in `fitted`.
    """

    basis_name: ClassVar[str]
    calibration: str

    @property
    def reads_fitted(self) -> bool:
        """Only an offline calibration uses learned arrays."""
        return self.calibration == "offline"

    def with_fitted(self) -> Self:
        """The same settings with the offline calibration."""
        return dataclasses.replace(self, calibration="offline")  # type: ignore[type-var]

    def fitted_shapes(self, config: ModelConfig) -> Any:
        """One square basis for each key and value head."""
        return {self.basis_name: (config.num_layers, config.kv_heads, config.head_dim, config.head_dim)}

    def fitted_basis(self, spec: CacheSpec, fitted: Any) -> Array:
        """This layer's basis for every row, float32 [B, h_kv, d, d]. Raises ConfigError where `fitted` has none."""
        if not isinstance(fitted, dict) or self.basis_name not in fitted:
            raise ConfigError(
                f"fitted must hold {self.basis_name!r}, which {type(self).__name__}.fit returns, "
                "where calibration='offline'"
            )
        return jnp.broadcast_to(fitted[self.basis_name], (spec.batch, *fitted[self.basis_name].shape))


class Trains(Learns):
    """`fit` is a training: it also takes `steps`, `rate` and `seed`."""


class Speculates(Policy):
    """Each step carries a second query row, of the token that is guessed to follow. Its keys are never kept.

    The shared state is a pytree whose leaves have rows first. Its field `guess` is the guessed token, int32 [B].

    Class attributes:
        trial_step: after the prompt one step runs on each row's most likely token and is rolled back; only `adopt` and
            `after_step` keep something of it.
    """

    trial_step: ClassVar[bool] = False

    @abc.abstractmethod
    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
        """The shared state before any token."""

    @abc.abstractmethod
    def after_step(self, shared: Any, logits: Array, lengths: Array) -> Any:
        """The new shared state from the float32 logits [B, 2, V] of both rows of a step."""

    def before_trial(self, shared: Any, token: Array) -> Any:
        """The shared state with which the trial step on `token`, int32 [B], begins."""
        return shared

    def adopt(self, live: Any, after: Any) -> Any:
        """What a layer's live half keeps of the trial step: `live` before it, `after` behind it."""
        return live


class Budgeted(Policy):
    """It has a budget a layer, which `Pyramid` scales.

    Class attributes:
        budget_fields: the settings, in tokens, that say how much a layer keeps or attends to.
    """

    budget_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def budget_unit(self) -> int:
        """Tokens that budgets are whole multiples of."""
        return 1

    def scaled(self, share: float) -> Self:
        """This policy, resolved, with that share of each of its budgets, in whole units and at least one."""
        unit, budgets = self.budget_unit, {}
        for name in self.budget_fields:
            whole = getattr(self, name)
            budgets[name] = max(min(whole, unit), round(share * whole / unit) * unit)
        return dataclasses.replace(self, **budgets)  # type: ignore[type-var]


class Sized(Policy):
    """It can be brought to a share of full attention's device bytes (`sizing.at_share`).

    Class attributes:
        size_free: settings that say how things are kept; they stay as given when a share decides the sizes.
    """

    size_free: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Groups of settings in the order of preference; in a group the device bytes fall.

        The largest setting that fits is taken from the first group in which one does.
        """


# Of a layer's cache


class PlansAhead:
    """It has units fetched for later layers of the step, or for the next step."""

    @abc.abstractmethod
    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """The fetches, after the layer has attended."""
