"""Abilities that only some methods have. The engine and the planner ask for them with `capability`.

A method inherits a class of this file in addition to `Policy` or `LayerCache` to declare the ability. `capability`
looks inside wrappers.
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
    """The policy inside all wrappers if it inherits `kind`, or None."""
    inside = innermost(policy)
    return inside if isinstance(inside, kind) else None


def attention_of(policy: object) -> PrefillAttention | None:
    """The prefill attention of a policy or of a layer's cache, or None if the prompt's attention is exact."""
    inside = innermost(policy) if isinstance(policy, Policy) else policy
    return inside.prefill_attention() if isinstance(inside, OwnPrefill) else None


def first_shared(policy: Policy, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
    """The first value of `KVState.shared`; None unless the policy `Speculates`."""
    speculation = capability(policy, Speculates)
    return None if speculation is None else speculation.init_shared(specs, fitted)


def with_fitted(policy: P) -> P:
    """The policy set to use learned arrays; the policy itself if it is not one that `Learns`."""
    if isinstance(policy, Wrapper):
        return dataclasses.replace(policy, inner=with_fitted(policy.inner))  # type: ignore[type-var]
    return policy.with_fitted() if isinstance(policy, Learns) else policy


# Abilities of a policy


class Foresees(Policy):
    """Each layer gets a prediction of its queries while the previous layer computes, in `StepKV.q_foreseen`.

    The prediction applies the layer's query projection to the input of the previous layer (InfiniGen, arXiv 2406.19707,
    section 4).
    """


class CouplesLayers(Policy):
    """A layer attends to tokens that another layer chooses. Therefore no wrapper may change single layers."""


class OwnPrefill(Policy):
    """The method replaces exact attention among the prompt's tokens."""

    @abc.abstractmethod
    def prefill_attention(self) -> PrefillAttention:
        """The attention that replaces it."""


class Learns(Policy):
    """The method can use arrays that were learned from a text.

    The arrays are a nested dict. Axis 0 of each array is the layer. `compress` gets a layer's slice as an argument, and
    the hooks of a step get it as `StepKV.learned`.
    """

    @property
    @abc.abstractmethod
    def reads_fitted(self) -> bool:
        """Whether these settings use learned arrays."""

    @abc.abstractmethod
    def fitted_shapes(self, config: ModelConfig) -> Any:
        """The shapes of the float32 arrays that `fit` returns, in a nested dict of the same structure."""

    @abc.abstractmethod
    def fit(self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None) -> Any:
        """Learn the arrays from a text.

        Args:
            params: the model's Params.
            tokens: int32 [S] or [B, S], without padding.
            progress: called with (parts done, number of parts).
        """

    def with_fitted(self) -> Self:
        """This policy with the setting that makes it use learned arrays. By default no setting is needed."""
        return self


class LearnsBasis(Learns):
    """The method scores tokens in a basis for each head, computed from each prompt or learned from a text.

    Class attributes:
        basis_name: the name of the array in `fitted`, float32 [layers, h_kv, d, d].

    Attributes:
        calibration: "online": the basis is computed from each prompt. "offline": it is read from `fitted`.
    """

    basis_name: ClassVar[str]
    calibration: str

    @property
    def reads_fitted(self) -> bool:
        """Whether the calibration is offline; the online calibration uses no learned arrays."""
        return self.calibration == "offline"

    def with_fitted(self) -> Self:
        """This policy with the offline calibration."""
        return dataclasses.replace(self, calibration="offline")  # type: ignore[type-var]

    def fitted_shapes(self, config: ModelConfig) -> Any:
        """One square basis for each layer and KV head."""
        return {self.basis_name: (config.num_layers, config.kv_heads, config.head_dim, config.head_dim)}

    def fitted_basis(self, spec: CacheSpec, fitted: Any) -> Array:
        """This layer's learned basis for every row, float32 [B, h_kv, d, d].

        Raises:
            ConfigError: `fitted` has no such basis.
        """
        if not isinstance(fitted, dict) or self.basis_name not in fitted:
            raise ConfigError(
                f"fitted must hold {self.basis_name!r}, which {type(self).__name__}.fit returns, "
                "where calibration='offline'"
            )
        return jnp.broadcast_to(fitted[self.basis_name], (spec.batch, *fitted[self.basis_name].shape))


class Trains(Learns):
    """The method's `fit` trains by gradient descent, and also takes `steps`, `rate` and `seed`."""


class Speculates(Policy):
    """Each step has a second query row, for a guess of the next token. The guess's keys and values are never stored.

    The shared state is a pytree. Axis 0 of each array is the row. Its field `guess` is the guessed token, int32 [B].

    Class attributes:
        trial_step: whether one trial step runs after the prompt, on each row's most likely token. The step is then
            undone: only the results of `adopt` and `after_step` are kept.
    """

    trial_step: ClassVar[bool] = False

    @abc.abstractmethod
    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
        """The shared state before any token."""

    @abc.abstractmethod
    def after_step(self, shared: Any, logits: Array, lengths: Array) -> Any:
        """The shared state after a step.

        Args:
            shared: the shared state before the step.
            logits: of the current token and of the guess, float32 [B, 2, V].
            lengths: tokens held by each row, int32 [B].
        """

    def before_trial(self, shared: Any, token: Array) -> Any:
        """The shared state at the start of the trial step on `token`, int32 [B]."""
        return shared

    def adopt(self, live: Any, after: Any) -> Any:
        """A layer's live part once the trial step is undone, from `live` before the step and `after` it."""
        return live


class Budgeted(Policy):
    """The method has a budget of tokens for each layer, which the wrapper `Pyramid` scales.

    Class attributes:
        budget_fields: names of the settings that are budgets, in tokens that a layer keeps or attends to.
    """

    budget_fields: ClassVar[tuple[str, ...]] = ()

    @property
    def budget_unit(self) -> int:
        """Budgets are rounded to multiples of this many tokens."""
        return 1

    def scaled(self, share: float) -> Self:
        """This resolved policy with each budget multiplied by `share` and rounded to whole units, at least one."""
        unit, budgets = self.budget_unit, {}
        for name in self.budget_fields:
            whole = getattr(self, name)
            budgets[name] = max(min(whole, unit), round(share * whole / unit) * unit)
        return dataclasses.replace(self, **budgets)  # type: ignore[type-var]


class Sized(Policy):
    """The method's settings can be chosen to meet a share of full attention's device bytes (`sizing.at_share`).

    Class attributes:
        size_free: names of settings that `sizing.at_share` leaves as given, because they define how entries are stored
            and not how many.
    """

    size_free: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def candidates(self, num_tokens: int, config: ModelConfig) -> Sequence[Sequence[Self]]:
        """Groups of settings, the preferred group first. Within a group, device bytes fall from setting to setting.

        `sizing.at_share` takes the first setting that fits, from the first group that has one.
        """


# Abilities of a layer's cache


class PlansAhead:
    """The layer selects units for later layers of the same step, or for the next step."""

    @abc.abstractmethod
    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """The units to fetch. It is called after the layer's attention."""
