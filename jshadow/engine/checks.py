"""Checks of the arguments of public functions, before anything is traced, and notes on a state that only the host has.

The checks are needed because JAX clamps an index that is out of range without an error. The notes are entries in the
`__dict__` of the state and not fields: a lower bound on the room of its rows, and whether a thread consumes it. So they
are not part of the pytree, and cause no compilation. A fork, a taken row, a loaded state and the result of a user's own
jit begin without notes.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from jshadow.cache.state import CONSUMED, KVState, is_deleted
from jshadow.engine.sampling import Sampler
from jshadow.engine.types import Tokens
from jshadow.errors import CapacityError, ConfigError, PromptError, StateMismatch
from jshadow.models.config import AttentionKind, ModelConfig
from jshadow.policies import Full, Policy
from jshadow.policies.base import why_dense
from jshadow.weights.params import Params

ROOM, USER = "_known_room", "_user"  # keys in the `__dict__` of a state


def known_room(state: KVState) -> np.ndarray | None:
    """Return the noted lower bound on the tokens that each row can still take, int64 [B], or None without a note."""
    room: np.ndarray | None = vars(state).get(ROOM)
    return room


def note_room(state: KVState, room: np.ndarray | None) -> KVState:
    """Note a lower bound on the tokens that each row can still take, int64 [B]. Return the same state."""
    vars(state)[ROOM] = room
    return state


def read_room(state: KVState) -> np.ndarray:
    """Return the number of tokens that each row can still take, int64 [B]. This waits for the device."""
    return np.asarray(state.room()).astype(np.int64)


@contextlib.contextmanager
def consuming(state: KVState) -> Iterator[None]:
    """A context manager in which one thread consumes a state. If the step fails, the state can be used again."""
    user = object()
    # setdefault is atomic, so only one of two threads finds its own object there.
    if vars(state).setdefault(USER, user) is not user:
        raise StateMismatch("state is being consumed by another thread; give each thread a fork() of its own")
    try:
        if is_deleted(vars(state)["lengths"]):
            raise StateMismatch(CONSUMED)
        yield
    finally:
        del vars(state)[USER]


def as_array(values: Any, name: str) -> np.ndarray:
    """Return token ids or lengths as a NumPy array. Raises PromptError for ragged lists, and for True and False.

    Without this check, NumPy would turn True in a list of integers into 1.
    """
    if (truth := _first_bool(values)) is not None:
        raise PromptError(f"{name} must be integers, got {truth}")
    try:
        return np.asarray(values)
    except ValueError as error:
        raise PromptError(f"{name} must be an array of integers, got {values!r:.80}: {error}") from error


def _first_bool(values: Any) -> bool | None:
    """Return the first bool in lists of any depth, or None if there is none."""
    if isinstance(values, bool):
        return values
    found = map(_first_bool, values) if isinstance(values, list | tuple) else ()
    return next((one for one in found if one is not None), None)


def check_ids(config: ModelConfig, tokens: Tokens, shape: tuple[int | None, ...], name: str) -> np.ndarray:
    """Check token ids, and return them as int32. In `shape`, None stands for any size.

    Raises:
        PromptError: the shape is different, the values are not integers, or an id is out of range. The message names
            the argument as `name`, and the first id that is out of range.
    """
    array = as_array(tokens, name)
    if array.dtype.kind not in "iu" or array.ndim != len(shape):
        raise PromptError(f"{name} must be integers with {len(shape)} axes, got {array.dtype} {array.shape}")
    if any(want is not None and want != got for want, got in zip(shape, array.shape, strict=True)):
        raise PromptError(f"{name} must have shape {shape}, got {array.shape}")
    bad = array[(array < 0) | (array >= config.vocab_size)]
    if bad.size:
        raise PromptError(f"{name} must lie in [0, vocab_size={config.vocab_size}), got {int(bad.flat[0])}")
    return array.astype(np.int32)


def check_tokens(
    config: ModelConfig, tokens: Tokens, lengths: Tokens, *, least: int, batch: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Check right-padded tokens and their lengths. Return int32 [B, T], with padding set to 0, and int32 [B].

    Args:
        tokens: token ids, int [B, T].
        lengths: number of real tokens of each row, int [B].
        batch: the required number of rows. None: any number.
    """
    array, counts = as_array(tokens, "tokens"), as_array(lengths, "lengths")
    if array.ndim != 2 or array.size == 0:
        raise PromptError(f"tokens must be a non-empty array [B, T], got shape {array.shape}")
    if counts.shape != array.shape[:1] or counts.dtype.kind not in "iu":
        raise PromptError(f"lengths must be integers of shape ({array.shape[0]},), got {counts.dtype} {counts.shape}")
    if batch is not None and array.shape[0] != batch:
        raise PromptError(f"tokens must have {batch} rows, like the state, got {array.shape[0]}")
    if counts.min() < least or counts.max() > array.shape[1]:
        raise PromptError(f"lengths must lie in [{least}, {array.shape[1]}], got {counts.tolist()}")
    real = np.arange(array.shape[1]) < counts[:, None]
    return check_ids(config, np.where(real, array, 0), (None, None), "tokens"), counts.astype(np.int32)


def check_capacity(config: ModelConfig, capacity: Any, longest: int) -> None:
    """Raise CapacityError unless longest <= capacity <= the model's context."""
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise CapacityError(f"capacity must be an integer of at least 1, got {capacity!r}")
    if capacity > config.context:
        raise CapacityError(f"capacity must be at most the model's context={config.context} tokens, got {capacity}")
    if longest > capacity:
        raise CapacityError(f"prompt must have at most capacity={capacity} tokens, got {longest}")


def check_room(state: KVState, new: np.ndarray) -> np.ndarray | None:
    """Raise CapacityError if a row has no room for its new tokens. This is called before any of them is fed.

    The room is read from the device only if the lower bound that the host has noted is too small or missing.

    Args:
        new: number of new tokens of each row, int64 [B].

    Returns:
        A lower bound on the tokens that each row can still take after the step, int64 [B], or None if it is not known.
    """
    room = known_room(state)
    if new.any() and (room is None or (new > room).any()):
        room = read_room(state)
        row = int(np.argmin(room - new))
        if new[row] > room[row]:
            held = int(np.asarray(state.lengths)[row])
            window = min(spec.window for spec in state.specs)
            raise CapacityError(
                f"row {row} holds {held} tokens of capacity={state.capacity} (window={window}) and has room for "
                f"{int(room[row])} more, got {int(new[row])}"
            )
    return None if room is None else room - new


def check_stop(stop: Any) -> tuple[int, ...]:
    """Return stop tokens as a tuple, which is empty for None. Raises ConfigError for anything but token ids."""
    ids = () if stop is None else tuple(stop) if np.iterable(stop) else (stop,)
    if any(isinstance(item, bool) or not isinstance(item, int | np.integer) for item in ids):
        raise ConfigError(f"stop must be token ids, got {stop!r}")
    return tuple(map(int, ids))


def check_sampling(sampler: Any, seed: Any) -> None:
    """Raise ConfigError unless sampler is a Sampler or None, and seed is an integer of 64 bits."""
    if sampler is not None and not isinstance(sampler, Sampler):
        raise ConfigError(f"sampler must be a Sampler, got {sampler!r}")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed must be an integer in [-2**63, 2**63), got {seed!r}")


def check_logits(want: Any) -> None:
    """Raise ConfigError unless want is "last", "all" or a callable."""
    if want not in ("last", "all") and not callable(want):
        raise ConfigError(f"logits must be 'last', 'all' or a callable, got {want!r}")


def check_policy(policy: Any) -> None:
    """Raise ConfigError unless policy is an instance of Policy. A name or a class is refused."""
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy must be a Policy, such as ShadowKV() or parse_policy('quest'), got {policy!r:.80}")


def check_state(params: Params, state: KVState, policy: Policy | None) -> None:
    """Raise StateMismatch unless the state fits the model and the policy, and was not consumed.

    Args:
        state: any value. An error is raised if it is not a KVState.
        policy: the policy that the caller passed, or None.
    """
    if not isinstance(state, KVState):
        raise StateMismatch(f"state must be a KVState, as prefill and generate return it, got {state!r:.80}")
    state.check_alive()
    spec, config = state.specs[0], params.config
    kinds = tuple(map(config.at, range(config.num_layers)))
    want = (
        config.num_layers,
        tuple((kind.q_heads, kind.kv_heads, kind.head_dim) for kind in kinds),
        config.model_dim,
        config.attention_kinds,
        config.recurrent,
    )
    tp = spec.shards.tp if spec.shards else 1  # a spec has the heads of one device
    got = (
        spec.num_layers,
        tuple((spec.q_heads * tp, spec.kv_heads * tp, spec.head_dim) for spec in state.specs),
        spec.model_dim,
        tuple(AttentionKind(spec.rope, spec.sliding_window, spec.policy.is_recurrent) for spec in state.specs),
        next((spec.policy.sizes for spec in state.specs if spec.policy.is_recurrent), None),
    )
    if want != got or str(params.dtype) != spec.dtype:
        raise StateMismatch(f"state must come from a model like params {want} {params.dtype}, got {got} {spec.dtype}")
    if policy is None:
        return
    check_policy(policy)
    policy = policy.resolve(config, state.capacity)
    if state.policy == Full() and why_dense(policy, config, state.capacity):
        return  # `generate` falls back to Full if the policy has no effect at this capacity
    if policy != state.policy:
        raise StateMismatch(f"policy must be the state's own {state.policy}, got {policy}")
