"""The contract of a drafter: it proposes the tokens that may come next, and learns which ones came.

B is the number of rows, S the tokens of the longest text, and w the number of tokens that are proposed at once.
"""

import abc
import collections
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.accounting import ByteCount
from jshadow.cache.recurrence import RECENT
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState
from jshadow.engine.placement import shards_of
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of
from jshadow.planner.machine import abstract_state
from jshadow.policies import POLICIES, Policy
from jshadow.weights.params import Params

_MOST_TOKENS = 64


class Progress(NamedTuple):
    """How far each row is.

    Attributes:
        token: the newest token, which the model has not read yet, int32 [B].
        number: how many tokens were drawn so far, `token` included, int32 [B].
        left: how many more tokens may be drawn, int32 [B]. 0: the row is not active.
    """

    token: Array
    number: Array
    left: Array


class Target(NamedTuple):
    """The model whose tokens are to be guessed, where a cycle begins.

    Attributes:
        weights, config: the model.
        state: its state, which has not read `progress.token`.
        progress: how far each row is.
        wanted: how many tokens are needed for each row, int32 [B], at most the width that is asked for.
        draw: how the model draws. It maps logits [B, V] and the number of draws before it in this cycle to tokens,
            int32 [B].
    """

    weights: dict
    config: ModelConfig
    state: KVState
    progress: Progress
    wanted: Array
    draw: Callable[[Array, Array], Array]


class Text(NamedTuple):
    """The texts before the first new token.

    Attributes:
        tokens: token ids, int32 [B, S], right padded.
        lengths: number of real tokens of each row, int [B].
        config: the model.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    config: ModelConfig

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], config: ModelConfig) -> "Text":
        """Return the texts of rows of token ids, which may be empty."""
        lengths = np.array(list(map(len, rows)))
        tokens = np.zeros((len(rows), max(int(lengths.max()), 1)), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return cls(tokens, lengths, config)


class Memory(NamedTuple):
    """The arrays that a drafter keeps between cycles.

    Attributes:
        fixed: a pytree of arrays that stay as they are, such as weights. They are not copied.
        live: a pytree of arrays that each cycle replaces.
    """

    fixed: Any
    live: Any


class Proposal(NamedTuple):
    """The result of `Drafter.propose`.

    Attributes:
        tokens: int32 [B, w]. Those after the first `Target.wanted` of a row have no meaning.
        state: the target's state. Its arrays may differ from before only where tokens after `lengths` are stored.
        live: what the drafter then remembers.
    """

    tokens: Array
    state: KVState
    live: Any


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """A way to propose tokens: a frozen, hashable dataclass of settings. Its methods can be traced by jit.

    Attributes:
        tokens: the most tokens that are proposed at once. Fewer are proposed while few are accepted.

    Class attributes:
        name: the name on the command line.
        source: the paper, or the program.
        on_meshes: whether it can serve a model on several devices.
        in_engines: whether it can propose tokens for rows that come and go (`jshadow.serving.Engine`).
        cost: what a proposed token costs, its check included, in plain steps. It decides how many tokens pay.
    """

    tokens: int = dataclasses.field(default=8, kw_only=True)

    on_meshes: ClassVar[bool] = False
    in_engines: ClassVar[bool] = False
    cost: ClassVar[float] = 0.08

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check_numbers(tokens=self.tokens)

    def check_numbers(self, **values: Any) -> None:
        """Raise ConfigError unless these settings are integers in [1, MOST_TOKENS]."""
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
                raise ConfigError(f"{self.name}.{name} must be an integer in [1, {_MOST_TOKENS}], got {value!r}")

    @property
    def traced(self) -> "Drafter":
        """The drafter that programs are traced with: one without arrays, and equal to others that trace the same."""
        return self

    @property
    def reader(self) -> tuple[Params, Policy] | None:
        """The draft model, which reads each prompt into a state of its own, and the policy of this state.

        None: the drafter has no such model.
        """
        return None

    def check_target(self, config: ModelConfig, state: KVState) -> None:
        """Raise ConfigError if the drafter cannot serve a model with such a state, which may be abstract."""
        return

    def check_model(self, params: Params) -> None:
        """Raise ConfigError if the drafter's token ids are not those of a model."""
        return

    @abc.abstractmethod
    def begin(self, text: Text, state: KVState) -> Memory:
        """Return the memory before the first new token, which `heard` gets. The state has read the text.

        The shapes of its arrays should depend on the state and not on the text, or each text compiles programs anew.
        """

    def begun(self, own: KVState) -> Memory:
        """Return the memory after the model of `reader` has read the texts. `own` is its state."""
        raise NotImplementedError

    @abc.abstractmethod
    def ready(self, memory: Memory) -> Array:
        """Return how many tokens can be proposed for each row, int32 [B]: 0, or at least 1."""

    @abc.abstractmethod
    def propose(self, memory: Memory, target: Target, width: int) -> Proposal:
        """Propose `width` tokens for each row."""

    @abc.abstractmethod
    def heard(self, memory: Memory, tokens: Array, counts: Array, state: KVState) -> Any:
        """Return `Memory.live` after new tokens.

        Args:
            memory: the memory before them.
            tokens: the tokens, int32 [B, n]. The first `counts` [B] of them are real.
            counts: number of new tokens of each row, int32 [B].
            state: the target's state, which has read all but the newest token.
        """

    def row_bytes(self, config: ModelConfig, state: KVState) -> ByteCount:
        """Return the bytes of the memory of one row, without weights. `state` is the target's, and may be abstract."""
        raise NotImplementedError

    def repeated(self, memory: Memory, rows: int) -> Memory:
        """Return the memory of `rows` rows, each as the only row of `memory`."""
        return memory._replace(live=_repeated(memory.live, rows))

    def inserted(self, memory: Memory, row: int, one: Memory) -> Memory:
        """Return a memory in which row `row` is the only row of `one`. This consumes `memory`."""
        return memory._replace(live=_inserted(memory.live, np.int32(row), one.live))


@functools.partial(jax.jit, static_argnums=1)
def _repeated(live: Any, rows: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows, axis=0), live)


@functools.partial(jax.jit, donate_argnums=0)
def _inserted(live: Any, row: Array, one: Any) -> Any:
    return jax.tree.map(lambda held, given: held.at[row].set(given[0]), live, one)


_SHARE = 0.8  # of the proposed tokens that is taken to be accepted before the first cycle
_NEWEST = 0.3  # weight of the newest cycle in the share of accepted tokens
_TRY_AGAIN = 32  # after so many cycles without a proposal, a few tokens are proposed to see whether they are accepted
_TIMES = 5  # of each width, the median of so many times counts


class Pace:
    """Chooses the number of proposed tokens of each cycle, which all rows have in common.

    A number is one of `widths`, so that few programs are compiled.

    Attributes:
        most: the most tokens that may be proposed.
        cost: a cycle with w proposed tokens is taken to cost 1 + cost * w plain steps, until its time is known.
        share: the share of each row's proposed tokens that is accepted, with lower weights for older cycles, float [B].
        idle: number of cycles since the last proposal in which tokens could have been proposed.
        seconds: the last times of cycles, by width, if they are told.
    """

    def __init__(self, most: int, cost: float, rows: int) -> None:
        self.most, self.cost, self.idle = most, cost, 0
        self.share = np.full(rows, _SHARE)
        self.seconds: dict[int, collections.deque[float]] = {}
        self._known: set[int] = set()

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers to choose from: 0, a quarter of the largest, and the largest."""
        return tuple(sorted({0, max(1, self.most // 4), self.most}))

    def begin(self, row: int) -> None:
        """Forget what a row accepted. Another text has its place."""
        self.share[row] = _SHARE

    def choose(self, ready: np.ndarray, active: np.ndarray) -> int:
        """Return the number of tokens to propose.

        Args:
            ready: how many tokens can be proposed for each row, int [B].
            active: which rows go on, bool [B].
        """
        if not ready[active].any():
            return 0
        self.idle += 1
        if self.idle > _TRY_AGAIN:
            self.idle = 0
            self.seconds.clear()
            return self.widths[1]
        share, gains = self.share[active], []
        for width in self.widths:
            tokens = 1 + sum((share**place * (ready[active] >= place)).mean() for place in range(1, width + 1))
            gains.append(tokens / self._time(width))
        best = self.widths[int(np.argmax(gains))]
        self.idle = 0 if best else self.idle
        return best

    def heard(self, proposed: np.ndarray, accepted: np.ndarray) -> None:
        """Take in the numbers of proposed and of accepted tokens of each row in a cycle, int [B]."""
        # The first refused token tells that the share is below 1, and those behind it tell nothing.
        share = accepted / np.maximum(accepted + (accepted < proposed), 1)
        self.share = np.where(proposed > 0, (1 - _NEWEST) * self.share + _NEWEST * share, self.share)

    def timed(self, width: int, seconds: float) -> None:
        """Take in the time of a cycle that ran alone. The first one of a width may have compiled its program."""
        if width in self._known:
            self.seconds.setdefault(width, collections.deque(maxlen=_TIMES)).append(seconds)
        self._known.add(width)

    def _time(self, width: int) -> float:
        """Return the time of a cycle, in any unit."""
        known = {other: statistics.median(times) for other, times in self.seconds.items()}
        if width in known:
            return known[width]
        steps = [time / (1 + self.cost * other) for other, time in known.items()]
        return (1 + self.cost * width) * (statistics.fmean(steps) if steps else 1.0)


_TOKENS = 4096  # the capacity at which `rewinding` looks at the policies


def check_drafter(drafter: Any, params: Params, state: KVState, prompts: Sequence[int], new: int) -> None:
    """Raise ConfigError unless a drafter suits a model, and a state can give back as many tokens as it proposes.

    Args:
        drafter: any value. An error is raised if it is not a Drafter.
        state: the state that the prompts are fed to, which may be abstract.
        prompts: number of tokens of the prompt of each row.
        new: the most tokens that a row can get.
    """
    check_suits(drafter, params, state.batch)
    check_state(drafter, params.config, state)
    check_gives(drafter, state, prompts, new)


def check_suits(drafter: Any, params: Params, batch: int) -> None:
    """Raise ConfigError unless a value is a Drafter that suits a model, with `batch` rows."""
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"speculate must be a drafter, such as PromptLookup(), got {drafter!r:.80}")
    if shards_of(params, batch) is not None and not drafter.on_meshes:
        raise ConfigError(f"speculate={drafter.name!r} needs a model on one device, got one on a mesh")
    drafter.check_model(params)


def check_state(drafter: Drafter, config: ModelConfig, state: KVState) -> None:
    """Raise ConfigError unless a state, which may be abstract, can give tokens back, and the drafter suits it."""
    if not _can_rewind(state):
        raise ConfigError(
            f"policy must be able to give tokens back to speculate, as {', '.join(_rewinding(config))} are, got "
            f"{state.policy.name}"
        )
    if drafter.tokens >= RECENT and config.recurrent is not None:
        raise ConfigError(
            f"speculate.tokens must be at most {RECENT - 1}, because a recurrent layer can give back tokens of a turn "
            f"of at most {RECENT} tokens, the newest one included, got {drafter.tokens}"
        )
    drafter.check_target(config, state)


def check_gives(drafter: Drafter, state: KVState, prompts: Sequence[int], new: int) -> None:
    """Raise ConfigError unless a state can give back as many tokens as are proposed. See `check_drafter`."""
    is_abstract = isinstance(state.lengths, jax.ShapeDtypeStruct)
    held, reached = (np.zeros((2, len(prompts)), np.int64)) if is_abstract else (state.lengths, state.reached())
    first = np.asarray(held) + np.asarray(prompts)
    for start in (first, np.minimum(first + max(new - 2, 0), state.capacity - 1)):
        fed = np.minimum(start + 1 + drafter.tokens, state.capacity)
        limit = np.asarray(_limits(state, jnp.asarray(np.maximum(reached, fed), jnp.int32)))
        missing = limit - (start + 1)
        if (row := int(np.argmax(missing))) >= 0 and missing[row] > 0:
            most = max(drafter.tokens - int(missing[row]), 0)
            raise ConfigError(
                f"speculate.tokens must be at most {most}, because {state.policy} "
                f"cannot give back more when row {row} holds {int(fed[row])} tokens, got {drafter.tokens}"
            )


def check_gives_back(drafter: Drafter, specs: tuple[CacheSpec, ...], policy: Policy, state: KVState) -> None:
    """Raise ConfigError unless the own cache of a drafter can give back all tokens of a proposal at any time.

    Args:
        state: the state of the target, which may be abstract.
    """
    own = abstract_of(specs, policy)
    if not _can_rewind(own):
        raise ConfigError(f"{drafter.name}.policy must be able to give tokens back, got {policy}")
    reached = jnp.full(state.batch, state.capacity, jnp.int32)
    kept = max(state.capacity - drafter.tokens, 1)  # a proposal stores `tokens` + 1 tokens, and one of them is kept
    if (least := int(_limits(own, reached).max())) > kept:
        raise ConfigError(
            f"{drafter.name}.tokens must be at most {max(state.capacity - least, 0)}, because {policy} cannot give "
            f"back more, got {drafter.tokens}"
        )


def _limits(state: KVState, reached: Array) -> Array:
    """Return `earliest` of a state, or of an abstract state as if all its arrays were zero, int32 [B]."""
    if not isinstance(state.lengths, jax.ShapeDtypeStruct):
        return state.earliest(reached)

    leaves, tree = jax.tree.flatten(state)
    return _limits_of_zeros((tree, tuple(leaves)), reached)


@functools.partial(jax.jit, static_argnums=0)
def _limits_of_zeros(abstract: tuple[Any, tuple[Any, ...]], reached: Array) -> Array:
    """Return `earliest` of a state of zeros. `abstract` is the tree of the state and its ShapeDtypeStructs."""
    tree, leaves = abstract
    # The compiler removes the arrays that `earliest` does not read, so the caches are not allocated.
    zeros: KVState = jax.tree.unflatten(tree, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
    return zeros.earliest(reached)


def _can_rewind(state: KVState) -> bool:
    """Return whether the policy of a state, which may be abstract, can give tokens back."""
    try:
        jax.eval_shape(KVState.earliest, state, state.lengths)
    except ConfigError:
        return False
    return True


def _rewinding(config: ModelConfig) -> Iterator[str]:
    """Yield the names of the registered policies whose usual settings can give tokens back."""
    for name, policy in POLICIES.items():
        try:
            if _can_rewind(empty(config, policy().resolve(config, _TOKENS), _TOKENS)):
                yield name
        except ConfigError:
            continue


def empty(config: ModelConfig, policy: Policy, capacity: int, batch: int = 1) -> KVState:
    """Return the abstract state of a resolved policy, in one memory."""
    return abstract_state(config, policy, batch=batch, capacity=capacity, prompt=1, fetch="resident", dtype="float32")
