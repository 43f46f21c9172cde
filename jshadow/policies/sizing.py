"""The largest setting within a share of full attention's device bytes, by the bytes that its state really takes."""

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax

from jshadow.cache.spec import CacheSpec
from jshadow.errors import Infeasible
from jshadow.models.config import ModelConfig
from jshadow.policies.base import Policy, check_fraction, leaf_bytes, own_layers, sliding_slots

P = TypeVar("P", bound=Policy)


def device_share(policy: Policy, num_tokens: int, config: ModelConfig) -> float:
    """Device bytes of a prompt that fills the capacity, offloaded where the policy offloads, to full attention's.

    In bfloat16, where masks, positions and bases in wider numbers weigh most. Nothing is allocated.
    """
    policy = policy.resolve(config, num_tokens)
    row = 2 * config.key_columns * 2  # bytes of a token's key and value
    sliding, own = layer_slots(num_tokens, config)
    specs = [layer_spec(policy, layer, num_tokens, config) for layer in own_layers(config)]
    shared = jax.eval_shape(functools.partial(policy.init_shared, tuple(specs))) if specs else None
    small = sum(map(leaf_bytes, jax.tree.leaves(shared)))
    sizes: dict[Policy, int] = {}
    for spec in specs:
        if spec.policy not in sizes:
            state = jax.eval_shape(functools.partial(spec.policy.init, spec))
            sizes[spec.policy] = sum(device for device, _ in spec.policy.nbytes(state).values())
    return (sliding * row + small + sum(sizes[spec.policy] for spec in specs)) / ((sliding + own) * row)


def layer_spec(policy: Policy, layer: int, num_tokens: int, config: ModelConfig) -> CacheSpec:
    """One row's cache of a layer that sees everything, filled by its prompt."""
    own, kind = policy.for_layer(layer, config), config.attention_kind(layer)
    return CacheSpec(
        layer=layer, num_layers=config.num_layers, batch=1, capacity=num_tokens,
        window=own.window_slots(num_tokens, num_tokens), q_heads=config.q_heads, kv_heads=config.kv_heads,
        head_dim=config.head_dim, model_dim=config.model_dim, dtype="bfloat16", scale=config.attention_scale,
        rope=kind.rope, sliding_window=None, fetch="device_put", policy=own,
    )  # fmt: skip


def largest(make: Callable[[int], P], low: int, high: int, fraction: float, num_tokens: int, config: ModelConfig) -> P:
    """make(n) for the largest n in [low, high] that fits; its bytes must grow with n.

    Raises:
        Infeasible: make(low) does not fit.
    """
    least = device_share(make(low), num_tokens, config)
    if least > fraction:
        raise infeasible(make(low).name, fraction, least)
    while low < high:
        middle = (low + high + 1) // 2
        fits = device_share(make(middle), num_tokens, config) <= fraction
        low, high = (middle, high) if fits else (low, middle - 1)
    return make(low)


def first_fitting(choices: Iterable[P], fraction: float, num_tokens: int, config: ModelConfig) -> P:
    """The first of the choices that fits.

    Raises:
        Infeasible: none does.
    """
    shares = []
    for policy in choices:
        shares.append(device_share(policy, num_tokens, config))
        if shares[-1] <= fraction:
            return policy
    raise infeasible(policy.name, fraction, min(shares))


def own_share(policy: str, fraction: float, num_tokens: int, config: ModelConfig) -> float:
    """What of full attention's bytes in its own layers a policy may take, when all layers may take `fraction`.

    Sliding layers keep their windows whatever the policy.

    Raises:
        ConfigError: fraction is not above 0.
        Infeasible: the windows alone take more.
    """
    check_fraction(fraction)
    sliding, own = layer_slots(num_tokens, config)
    left = fraction * (sliding + own) - sliding
    if left <= 0:
        raise infeasible(policy, fraction, sliding / (sliding + own))
    return left / max(own, 1)


def whole_share(own_fraction: float, num_tokens: int, config: ModelConfig) -> float:
    """`own_share` backwards: the share of all layers' bytes."""
    sliding, own = layer_slots(num_tokens, config)
    return (sliding + own_fraction * own) / (sliding + own)


def layer_slots(num_tokens: int, config: ModelConfig) -> tuple[int, int]:
    """Slots of full attention at that many tokens: of all sliding layers, and of all others."""
    windows = [kind.window for kind in config.attention_kinds]
    sliding = sum(sliding_slots(window, num_tokens) for window in windows if window is not None)
    return sliding, num_tokens * windows.count(None)


def infeasible(policy: str, fraction: float, least: float) -> Infeasible:
    """The error of a share of full attention's bytes that a policy cannot reach."""
    return Infeasible(f"{policy}: fraction must be at least {least:.4f} of full attention's bytes, got {fraction!r}")
