"""Checks of settings and of learned arrays. Each raises ConfigError with the name, the rule and the given value."""

import math
from collections.abc import Iterable
from typing import Any

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.policies.base import LayerCache, Policy, full_layers
from jshadow.policies.capabilities import Learns, capability
from jshadow.policies.prefill_attention import PrefillAttention


def check_range(policy: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is an integer in [low, high]. If `high` is None, there is no upper limit.

    The message begins with `policy.name`.
    """
    good = isinstance(value, int) and not isinstance(value, bool) and low <= value and (high is None or value <= high)
    if not good:
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{policy}.{name} must be an integer {limit}, got {value!r}")


def check_number(policy: str, name: str, value: Any, low: float) -> None:
    """Raise ConfigError unless `value` is a finite number of at least `low`. The message begins with `policy.name`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value < math.inf:
        raise ConfigError(f"{policy}.{name} must be a finite number of at least {low}, got {value!r}")


def check_choice(policy: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise ConfigError unless `value` is one of `choices`. The message begins with `policy.name`."""
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise ConfigError(f"{policy}.{name} must be one of {choices}, got {value!r}")


def check_share(policy: str, name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number in (0, 1]. The message begins with `policy.name`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{policy}.{name} must be a number in (0, 1], got {value!r}")


def shape_problem(shapes: Any, arrays: Any, place: str = "fitted") -> str | None:
    """Return the first difference of a nested dict of arrays from shapes and float32, or None if there is none.

    `place` is the name of the dict in the result, such as "fitted.psi".
    """
    if not isinstance(shapes, dict):
        shape, dtype = getattr(arrays, "shape", None), str(getattr(arrays, "dtype", None))
        return (
            None if (shape, dtype) == (shapes, "float32") else f"{place} must be float32 {shapes}, got {dtype} {shape}"
        )
    if not isinstance(arrays, dict) or arrays.keys() != shapes.keys():
        names = sorted(map(str, arrays)) if isinstance(arrays, dict) else type(arrays).__name__
        return f"{place} must have {sorted(shapes)}, got {names}"
    problems = (shape_problem(shapes[name], arrays[name], f"{place}.{name}") for name in shapes)
    return next((problem for problem in problems if problem), None)


def check_fitted(policy: Policy, config: ModelConfig, fitted: Any) -> None:
    """Raise ConfigError unless `fitted` is None or has the shapes of the policy's learned arrays for this model."""
    if fitted is None:
        return
    learner = capability(policy, Learns)
    if learner is None or not learner.reads_fitted:
        raise ConfigError(f"fitted must be left out: {policy} uses no learned arrays")
    problem = shape_problem(learner.fitted_shapes(config), fitted)
    if problem:
        raise ConfigError(f"fitted must be what the fit of {policy.name} returned for such a model: {problem}")


def reads_fitted(policy: object) -> bool:
    """Return whether a policy, or a layer's cache that is a policy, uses learned arrays."""
    learner = capability(policy, Learns) if isinstance(policy, Policy) else None
    return learner is not None and learner.reads_fitted


def reads_twice(policy: Policy, config: ModelConfig) -> bool:
    """Return whether a resolved policy needs a second pass over the prompt in any layer."""
    return any(policy.for_layer(layer, config).reads.second_pass is not None for layer in full_layers(config))


def check_sinks(config: ModelConfig, policies: Iterable[LayerCache], attention: PrefillAttention | None) -> None:
    """Raise ConfigError if a model has attention sinks that a layer's cache or the prefill's attention leaves out."""
    if not config.sinks:
        return
    for method in (*policies, *(() if attention is None else (attention,))):
        if not method.takes_sinks:
            name = getattr(method, "name", "") or type(method).__name__
            raise ConfigError(
                f"{name} must take the attention sinks of a {config.model_type} model (`takes_sinks`), got a method "
                "whose softmax leaves them out"
            )


def check_split(spec: CacheSpec, *, gpu: bool) -> None:
    """Raise ConfigError if a layer's cache cannot run on its mesh. `spec` describes the part of one device.

    `gpu` tells whether the devices are NVIDIA GPUs, on which "zero_copy" needs a kernel.
    """
    if spec.shards is None:
        return
    policy = spec.policy
    name, learned = policy.name or type(policy).__name__, reads_fitted(policy)
    if learned or not policy.splits_heads:
        why = "reads learned arrays" if learned else "is not split over devices"
        sizes = ", ".join(f"{axis}={size}" for axis, size in spec.shards.mesh.shape.items())
        raise ConfigError(f"mesh must be None for {name}, which {why}, got {sizes}")
    if spec.fetch == "zero_copy" and gpu and (layout := policy.host_layout(spec)) is not None:
        layout.check_kernel(name)
