"""The inputs of all laws: a tiny random model, one ragged batch of prompts, and the tokens that follow them."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import Array

from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.evaluation.laws.law import Case, Subject, paths_of
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_state, cache_specs
from jshadow.policies.base import Policy
from jshadow.policies.registry import LAW_SETTINGS
from jshadow.policies.settings import with_settings
from jshadow.weights.params import Params, init_params

# There are three layers, because a policy may treat the first and the last one differently. The size of the vocabulary
# is a prime number, so that a wrong reshape fails.
TINY = ModelConfig(
    model_type="llama",
    vocab_size=101,
    num_layers=3,
    model_dim=32,
    ffn_dim=48,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context=256,
)
# 61 and 27 are not multiples of any chunk size, and 5 tokens are too few for any chunk to be selected.
LENGTHS = (61, 27, 5)
BATCH = len(LENGTHS)
CAPACITY = 96
FETCH_MODES = ("resident", "device_put", "zero_copy")


@functools.cache
def model(config: ModelConfig = TINY, dtype: str = "float32") -> Params:
    """Return a model with random weights, see `init_params`. Its attention is neither uniform nor one-hot."""
    return init_params(config, seed=0, dtype=dtype)


def random_tokens(*shape: int, seed: int = 0, config: ModelConfig = TINY) -> np.ndarray:
    """Return random token ids, int32 of the given shape."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


PROMPT = random_tokens(BATCH, max(LENGTHS), seed=1)
STEPS = random_tokens(BATCH, 12, seed=2)


@functools.cache
def _prefilled(policy: Policy, fetch: str, dtype: str) -> tuple[Array, KVState]:
    params = model(TINY, dtype)
    return decode.prefill(params, PROMPT, np.asarray(LENGTHS), policy, capacity=CAPACITY, fetch=fetch)


def prefilled(policy: Policy, fetch: str = "resident", dtype: str = "float32") -> tuple[Array, KVState]:
    """Prefill the batch. The prefill itself runs once in a process.

    Returns:
        The logits [B, V] of the last tokens, and a new fork of the state.
    """
    logits, state = _prefilled(policy, fetch, dtype)
    return logits, state.fork()


def state_of(case: Case) -> KVState:
    """Return a new fork of the state after the prompts, for a case."""
    return prefilled(case.policy, case.fetch)[1]


def run_steps(
    params: Params, state: KVState, tokens: np.ndarray, active: np.ndarray | None = None
) -> tuple[np.ndarray, KVState]:
    """Feed given tokens [B, T] step by step. `active` [B, T] says which rows take part in each step.

    Returns:
        The float32 logits [B, T, V], and the state after the last step.
    """
    logits = []
    for i in range(tokens.shape[1]):
        out, state = decode.decode_step(params, tokens[:, i], state, active=None if active is None else active[:, i])
        logits.append(np.asarray(out))
    return np.stack(logits, axis=1), state


@functools.cache
def teacher_forced(policy: Policy, fetch: str, dtype: str = "float32") -> np.ndarray:
    """Return the logits [B, 6, V] of six steps on given tokens after the prompt."""
    return run_steps(model(TINY, dtype), prefilled(policy, fetch, dtype)[1], STEPS[:, :6])[0]


def abstract(case: Case, fetch: str, room: int | None = None) -> KVState:
    """Return the abstract state (shapes and dtypes) of a case's batch in a fetch mode, with a room for new tokens."""
    sizes: dict[str, Any] = {"batch": BATCH, "capacity": CAPACITY, "prompt": min(LENGTHS), "dtype": "float32"}
    return abstract_state(TINY, case.policy, **sizes, fetch=fetch, room=room)


# Leaves of a state


CACHE = ("resident", "ages", "values", "keys")  # leaves of a layer that are a cache of units, see shadowkv/state.py


def changing(state: KVState) -> dict[str, np.ndarray]:
    """Return the leaves that a step may change, by path."""
    return {path: np.asarray(leaf) for path, leaf in paths_of(state.split()[1]).items()}


def meaningful(state: KVState) -> dict[str, np.ndarray]:
    """Return `changing` without the last unit of each host tail. Skipped writes go to that unit, so it is undefined."""
    return {path: leaf[:, :, :-1] if path.endswith(".array") else leaf for path, leaf in changing(state).items()}


def remembered(state: KVState) -> dict[str, np.ndarray]:
    """Return `meaningful` without the count of moved bytes, and with caches of units in one order.

    The count is left out because a turn also moves units for the padding of its last piece. The places of a cache are
    sorted by the units in them. A cache with ages is left out, because a turn leaves only its last units in it.
    """
    leaves = {path: leaf for path, leaf in meaningful(state).items() if not path.endswith(".fetched")}
    for layer in [path.removesuffix("resident") for path in leaves if path.endswith(".resident")]:
        parts = {path: leaves.pop(path) for path in (f"{layer}{name}" for name in CACHE) if path in leaves}
        if f"{layer}ages" in parts:
            continue
        units = parts[f"{layer}resident"]
        order = np.argsort(units, axis=2, kind="stable")
        for path, leaf in parts.items():
            index = order.reshape(*order.shape, *[1] * (leaf.ndim - 3))
            there = units.reshape(index.shape) >= 0
            leaves[path] = np.take_along_axis(np.where(there, leaf, -1), index, axis=2)
    return leaves


# Subjects


def subject_of(policy: type[Policy], settings: Mapping[str, object] | None = None) -> Subject:
    """Return a policy with the small and lossless settings that it is registered with.

    Args:
        policy: a registered class, or a subclass of one.
        settings: values by dotted name that replace registered small settings.

    Raises:
        ConfigError: a setting is unknown, or out of range for the model of the laws.
    """
    names = (getattr(kind, "name", "") for kind in policy.__mro__)
    registered = LAW_SETTINGS[next(name for name in names if name in LAW_SETTINGS)]
    small = checked(policy, "small", {**registered.small, **(settings or {})})
    lossless = None
    if registered.lossless is not None:
        lossless = checked(policy, "lossless", registered.lossless(CAPACITY, TINY))
    return Subject(policy.name, small, lossless)


def checked(policy: type[Policy], kind: str, settings: Mapping[str, object]) -> Policy:
    """Create the policy with settings by dotted name. Raises ConfigError if they do not suit the tiny model."""
    chosen = with_settings(policy(), settings, f"the {kind} settings of {policy.name}")
    chosen.resolve(TINY, CAPACITY)
    return chosen


@functools.cache
def offloads(policy: Policy) -> bool:
    """Return whether the policy keeps rows in host memory in at least one layer of the tiny model."""
    resolved = policy.resolve(TINY, CAPACITY)
    specs = cache_specs(TINY, resolved, BATCH, CAPACITY, min(LENGTHS), "float32", "device_put")
    return any(spec.policy.host_layout(spec) is not None for spec in specs)


def modes_of(subject: Subject) -> tuple[str, ...]:
    """Return the default fetch modes of a subject. One is enough, because a law checks that all modes agree."""
    return FETCH_MODES[1:2] if offloads(subject.small) else FETCH_MODES[:1]


def same_settings(subject: Subject) -> bool:
    """Return whether the small settings equal the lossless ones, as they do for a policy without settings."""
    return subject.lossless is not None and subject.small.resolve(TINY, CAPACITY) == subject.lossless.resolve(
        TINY, CAPACITY
    )
