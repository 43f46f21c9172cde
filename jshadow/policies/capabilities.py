"""Abilities that only some methods have. The engine and the planner ask for them with `capability`.

A method inherits a class of this file in addition to `Policy` or `LayerCache` to declare the ability. `capability`
looks inside wrappers.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from jshadow.cache.prompt_walk import prompts_of
from jshadow.cache.records import Fetched, KeyValues, LayerState, PromptKV, Selection, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import Piece
from jshadow.policies.base import Policy, Wrapper, innermost
from jshadow.policies.prefill_attention import PrefillAttention


def capability[C](policy: Policy, kind: type[C]) -> C | None:
    """Return the policy inside all wrappers if it is an instance of `kind`, or else None."""
    inside = innermost(policy)
    return inside if isinstance(inside, kind) else None


def attention_of(policy: object) -> PrefillAttention | None:
    """Return the prefill attention of a policy or of a layer's cache, or None if the prompt's attention is exact."""
    inside = innermost(policy) if isinstance(policy, Policy) else policy
    return inside.prefill_attention() if isinstance(inside, OwnPrefill) else None


def first_shared(policy: Policy, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
    """Return the initial value of `KVState.shared`, or None if the policy does not inherit `Speculates`."""
    speculation = capability(policy, Speculates)
    return None if speculation is None else speculation.init_shared(specs, fitted)


def rows_of(policy: Policy) -> int:
    """Return the number of query rows T in a decode step of the model: 2 if the policy `Speculates`, else 1."""
    return 1 if capability(policy, Speculates) is None else 2


def with_fitted[P: Policy](policy: P) -> P:
    """Return the policy set to use learned arrays, or the policy itself if it does not inherit `Learns`."""
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
        """Return the attention that is used among the prompt's tokens."""


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
        """Return the shapes of the float32 arrays that `fit` returns, in a nested dict of the same structure."""

    @abc.abstractmethod
    def fit(self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None) -> Any:
        """Learn the arrays from a text.

        Args:
            tokens: token ids of the text, int32 [S] or [B, S], without padding.
            progress: called with (parts done, number of parts).

        Returns:
            A nested dict of float32 arrays with the shapes of `fitted_shapes`.
        """

    def with_fitted(self) -> Self:
        """Return this policy set to use learned arrays. By default it is returned unchanged."""
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
        return dataclasses.replace(self, calibration="offline")  # type: ignore[type-var]

    def fitted_shapes(self, config: ModelConfig) -> Any:
        return {self.basis_name: (config.num_layers, config.kv_heads, config.head_dim, config.head_dim)}

    @abc.abstractmethod
    def basis_of(self, prompt: PromptKV) -> tuple[Array, Array]:
        """Return a basis of orthonormal columns, float32 [B, h_kv, d, d], and which are known, bool [B, h_kv, d].

        A column along which a short prompt does not vary is arbitrary, and not known.
        """

    def fit(
        self, params: Any, tokens: Array, *, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Array]:
        """Return the basis of each layer and KV head, float32 [L, h_kv, d, d]. Only the first row of a text is used.

        A recurrent layer gets zeros, and so does a sliding layer whose heads differ from those of the others.
        """
        shape, prompts = self.fitted_shapes(params.config)[self.basis_name][1:], prompts_of(params, tokens, progress)
        found = [jnp.zeros(shape) if prompt is None else self.basis_of(prompt)[0][0] for prompt in prompts]
        return {self.basis_name: jnp.stack([one if one.shape == shape else jnp.zeros(shape) for one in found])}

    def fitted_basis(self, spec: CacheSpec, fitted: Any) -> Array:
        """Return this layer's learned basis, repeated for every row, float32 [B, h_kv, d, d].

        Raises:
            ConfigError: `fitted` has no such basis.
        """
        if not isinstance(fitted, dict) or self.basis_name not in fitted:
            names = sorted(map(str, fitted)) if isinstance(fitted, dict) else type(fitted).__name__
            raise ConfigError(
                f"fitted must contain {self.basis_name!r}, which {type(self).__name__}.fit returns, "
                f"if calibration='offline', got {names}"
            )
        return jnp.broadcast_to(fitted[self.basis_name], (spec.batch, *fitted[self.basis_name].shape))


class Trains(Learns):
    """The method's `fit` trains by gradient descent, and also takes `steps`, `rate` and `seed`."""


class Speculates(Policy):
    """Each step has a second query row, for a guess of the next token. The guess's keys and values are never stored.

    The guess is part of the shared state, which belongs to all layers together. The shared state is a pytree in which
    axis 0 of each array is the row. Its field `guess` is the guessed token, int32 [B].

    Class attributes:
        trial_step: whether one trial step runs after the prompt, on each row's most likely token. The step is then
            undone. Only the results of `adopt` and `after_step` are kept.
    """

    trial_step: ClassVar[bool] = False
    query_rows: ClassVar[int] = 2

    @abc.abstractmethod
    def init_shared(self, specs: tuple[CacheSpec, ...], fitted: Any = None) -> Any:
        """Return the shared state before any token."""

    @abc.abstractmethod
    def after_step(self, shared: Any, logits: Array, lengths: Array) -> Any:
        """Return the shared state after a step.

        `logits`, float32 [B, 2, V], are those of the current token and of the guess, and `lengths`, int32 [B], is the
        number of tokens that each row holds.
        """

    def before_trial(self, shared: Any, token: Array) -> Any:
        """Return the shared state at the start of the trial step. `token`, int32 [B], is the token of that step."""
        return shared

    def adopt(self, live: Any, after: Any) -> Any:
        """Return a layer's live part after the trial step was undone, from those before it and after it."""
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
        """Return this resolved policy with each budget multiplied by `share`, in whole units, at least one."""
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
        """Return groups of policies with different settings for a capacity of `num_tokens`, the preferred group first.

        Within a group, each policy takes fewer device bytes than the policy before it. `sizing.at_share` takes the
        first policy that fits, from the first group that has one.
        """


# Abilities of a layer's cache


class PlansAhead:
    """The layer selects units for later layers of the same step, or for the next step."""

    @abc.abstractmethod
    def plan(self, spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Selection, ...]:
        """Return the units to fetch for those layers. This is called after the layer's attention."""


class HasAll:
    """The layer has the exact keys and values of all tokens, so another cache can be made from it."""

    @abc.abstractmethod
    def all_tokens(self, spec: CacheSpec, state: LayerState) -> KeyValues:
        """Return keys after RoPE and values [B, h_kv, capacity, d] on the device. Token p is at index p."""


class Streams:
    """The layer itself moves units of the host tier to the device while it attends."""

    @abc.abstractmethod
    def streamed(self, spec: CacheSpec, state: LayerState) -> tuple[int, Array]:
        """Return the bytes of a unit of one head, and how many units a step moves, int32 [B, heads]."""


class SplitsTurns:
    """The attention to exact tokens and that to selected units can be computed apart.

    A long turn is then stored at once (`append`). All its queries attend to the exact tokens in one blockwise pass.
    After that, `select`, the fetch and `receive` take blocks of queries. The attention of each query to its own units
    is merged with its attention to the exact tokens. `select` and `receive` must not depend on the tokens that are
    stored after a query's own.
    """

    @property
    @abc.abstractmethod
    def splits_turns(self) -> bool:
        """Whether these settings permit it. If not, each block goes through all hooks."""

    @abc.abstractmethod
    def exact_pieces(self, spec: CacheSpec, state: LayerState, step: StepKV) -> list[Piece]:
        """Return the exact tokens. Each query sees the first rows of each piece (`Piece.is_prefix`)."""

    @abc.abstractmethod
    def selected_piece(
        self, spec: CacheSpec, state: LayerState, step: StepKV, fetched: Fetched
    ) -> tuple[Piece, LayerState]:
        """Return the fetched units, separate rows for each of several queries, and the new state."""

    @abc.abstractmethod
    def query_temporaries(self, spec: CacheSpec) -> int:
        """Return an upper bound on the temporary device bytes of a query, without its attention to exact tokens."""
