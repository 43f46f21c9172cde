"""What the laws run on: a tiny random model, one ragged batch of prompts, and the tokens that follow them."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp
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

# Three layers, so that a policy may treat the first and the last in other ways. The vocabulary is a prime number, so
# that a wrong reshape cannot hide.
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
# 61 and 27 are no multiple of any chunk, and 5 tokens leave no chunk at all.
LENGTHS = (61, 27, 5)
BATCH = len(LENGTHS)
CAPACITY = 96
FETCH_MODES = ("resident", "device_put", "zero_copy")


@functools.cache
def model(config: ModelConfig = TINY, dtype: str = "float32") -> Params:
    """Random weights of variance 1 / fan_in: attention is neither flat nor one-hot."""
    return init_params(config, seed=0, dtype=dtype)


def random_tokens(*shape: int, seed: int = 0, config: ModelConfig = TINY) -> np.ndarray:
    """Token ids, int32 of the shape."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


PROMPT = random_tokens(BATCH, max(LENGTHS), seed=1)
STEPS = random_tokens(BATCH, 12, seed=2)


@functools.cache
def _prefilled(policy: Policy, fetch: str, dtype: str) -> tuple[Array, KVState]:
    params = model(TINY, dtype)
    return decode.prefill(params, PROMPT, np.asarray(LENGTHS), policy, capacity=CAPACITY, fetch=fetch)


def prefilled(policy: Policy, fetch: str = "resident", dtype: str = "float32") -> tuple[Array, KVState]:
    """Logits [B, V] and a fresh fork of the batch's state. The prefill itself runs once a process."""
    logits, state = _prefilled(policy, fetch, dtype)
    return logits, state.fork()


def state_of(case: Case) -> KVState:
    """A fresh fork of the state of a case's batch."""
    return prefilled(case.policy, case.fetch)[1]


def run_steps(
    params: Params, state: KVState, tokens: np.ndarray, active: np.ndarray | None = None
) -> tuple[Array, KVState]:
    """Decode steps on given tokens [B, T]: float32 logits [B, T, V], and the state after them."""
    logits = []
    for i in range(tokens.shape[1]):
        out, state = decode.decode_step(params, tokens[:, i], state, active=None if active is None else active[:, i])
        logits.append(out)
    return jnp.stack(logits, axis=1), state


@functools.cache
def teacher_forced(policy: Policy, fetch: str, dtype: str = "float32") -> np.ndarray:
    """Logits [B, 6, V] of six steps after the prompt."""
    return np.asarray(run_steps(model(TINY, dtype), prefilled(policy, fetch, dtype)[1], STEPS[:, :6])[0])


def forget() -> None:
    """Drop all prefilled states and logits that are kept for the next law."""
    _prefilled.cache_clear()
    teacher_forced.cache_clear()


def abstract(case: Case, fetch: str) -> KVState:
    """Shapes of the state of a case's batch, in a fetch mode."""
    return abstract_state(
        TINY, case.policy, batch=BATCH, capacity=CAPACITY, prompt=min(LENGTHS), dtype="float32", fetch=fetch
    )


# Leaves of a state


def changing(state: KVState) -> dict[str, np.ndarray]:
    """The leaves that a step changes, by path."""
    return {path: np.asarray(leaf) for path, leaf in paths_of(state.split()[1]).items()}


def meaningful(state: KVState) -> dict[str, np.ndarray]:
    """`changing` without the last unit of a host tail: writes that must not happen go there."""
    return {path: leaf[:, :, :-1] if path.endswith(".array") else leaf for path, leaf in changing(state).items()}


def remembered(state: KVState) -> dict[str, np.ndarray]:
    """`meaningful` without the count of bytes moved: a turn moves units for the padding of its last piece too."""
    return {path: leaf for path, leaf in meaningful(state).items() if not path.endswith(".fetched")}


# Subjects


def subject_of(policy: type[Policy], settings: Mapping[str, object] | None = None) -> Subject:
    """A policy's registered settings.

    Args:
        policy: a registered class, or a subclass of one.
        settings: in place of the registered small ones, by dotted name.

    Raises:
        ConfigError: a setting is unknown, or out of range on the laws' model.
    """
    names = (getattr(kind, "name", "") for kind in policy.__mro__)
    registered = LAW_SETTINGS[next(name for name in names if name in LAW_SETTINGS)]
    small = checked(policy, "small", {**registered.small, **(settings or {})})
    lossless = None
    if registered.lossless is not None:
        lossless = checked(policy, "lossless", registered.lossless(CAPACITY, TINY))
    return Subject(policy.name, small, lossless)


def checked(policy: type[Policy], kind: str, settings: Mapping[str, object]) -> Policy:
    """The policy with settings, by dotted name, that the tiny model takes. Raises ConfigError where it does not."""
    chosen = with_settings(policy(), settings, f"the {kind} settings of {policy.name}")
    chosen.resolve(TINY, CAPACITY)
    return chosen


@functools.cache
def offloads(policy: Policy) -> bool:
    """Whether some layer of the tiny model keeps rows in host memory."""
    resolved = policy.resolve(TINY, CAPACITY)
    specs = cache_specs(TINY, resolved, BATCH, CAPACITY, min(LENGTHS), "float32", "device_put")
    return any(spec.policy.host_layout(spec) is not None for spec in specs)


def modes_of(subject: Subject) -> tuple[str, ...]:
    """The fetch modes in which the laws run, unless the caller says otherwise: the others must agree by law."""
    return FETCH_MODES[1:2] if offloads(subject.small) else FETCH_MODES[:1]


def same_settings(subject: Subject) -> bool:
    """Whether the small settings are the lossless ones, as they are for a policy without settings."""
    return subject.lossless is not None and subject.small.resolve(TINY, CAPACITY) == subject.lossless.resolve(
        TINY, CAPACITY
    )
