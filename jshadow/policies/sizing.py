"""Find the largest settings of a policy whose state fits into a share of full attention's device bytes."""

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import overload

import jax

from jshadow.cache.accounting import layer_nbytes, leaf_bytes, total
from jshadow.cache.recurrence import row_bytes
from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError, Infeasible
from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.policies.base import LayerCache, Policy, full_layers
from jshadow.policies.capabilities import Sized, Speculates, capability
from jshadow.policies.sliding_window import sliding_slots


class Falling[P: Policy](Sequence[P]):
    """The sequence make(high), make(high - 1), ..., make(low). An entry is made each time it is read."""

    def __init__(self, make: Callable[[int], P], low: int, high: int) -> None:
        self.make, self.low, self.high = make, low, high

    def __len__(self) -> int:
        return max(0, self.high - self.low + 1)

    @overload
    def __getitem__(self, index: int) -> P: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[P]: ...
    def __getitem__(self, index: int | slice) -> P | Sequence[P]:
        places = range(self.high, self.low - 1, -1)[index]
        return self.make(places) if isinstance(places, int) else [self.make(place) for place in places]


def at_share[P: Policy](policy: P, fraction: float, num_tokens: int, config: ModelConfig) -> P:
    """Return the policy with the largest settings whose device bytes are at most a share of full attention's.

    Args:
        policy: a policy that is `Sized`. Its settings in `Sized.size_free` are kept; the others are replaced.
        fraction: the share, above 0, of the bytes that full attention takes for `num_tokens` tokens, sliding layers
            included.
        num_tokens: the capacity in tokens, which a prompt fills completely.

    Raises:
        ConfigError: fraction is not above 0, or the policy is not `Sized`.
        Infeasible: no setting is small enough. The message names the smallest possible share.
    """
    if not fraction > 0:
        raise ConfigError(f"fraction must be above 0, got {fraction!r}")
    if not isinstance(policy, Sized):
        raise ConfigError(f"policy must be Sized, so that its settings can follow a share of bytes, got {policy.name}")
    share = functools.partial(device_share, num_tokens=num_tokens, config=config)
    least = float("inf")
    for group in policy.candidates(num_tokens, config):
        if not group:
            continue
        smallest = share(group[-1])
        if smallest <= fraction:
            last = len(group) - 1
            return group[bisect.bisect_left(group, True, hi=last, key=lambda setting: share(setting) <= fraction)]
        least = min(least, smallest)
    raise Infeasible(
        f"{policy.name}: fraction must be at least {least:.4f} of full attention's bytes, got {fraction!r}"
    )


def device_share(policy: Policy, num_tokens: int, config: ModelConfig) -> float:
    """Return the device bytes of a policy's state divided by those of full attention.

    A prompt fills the capacity of `num_tokens` tokens. Keys and values are counted in bfloat16, and the policy offloads
    what it can. Nothing is allocated.
    """
    policy = policy.resolve(config, num_tokens)
    others, full = layer_bytes(num_tokens, config)
    specs = [layer_spec(policy, layer, num_tokens, config) for layer in full_layers(config)]
    speculation = capability(policy, Speculates)
    small = 0
    if speculation is not None and specs:
        shared = jax.eval_shape(functools.partial(speculation.init_shared, tuple(specs)))
        small = sum(map(leaf_bytes, jax.tree.leaves(shared)))
    sizes: dict[LayerCache, int] = {}
    for spec in specs:
        if spec.policy not in sizes:
            state = jax.eval_shape(functools.partial(spec.policy.init, spec))
            sizes[spec.policy] = total(layer_nbytes(state).values()).device
    return (others + small + sum(sizes[spec.policy] for spec in specs)) / (others + full)


def layer_spec(policy: Policy, layer: int, num_tokens: int, config: ModelConfig) -> CacheSpec:
    """Return the spec of a layer that attends to all tokens, for one row whose prompt fills the capacity.

    Keys and values are bfloat16, and the layer offloads what it can.
    """
    cache, kind = policy.for_layer(layer, config), config.attention_kind(layer)
    return CacheSpec(
        layer=layer,
        num_layers=config.num_layers,
        batch=1,
        capacity=num_tokens,
        window=cache.window_slots(num_tokens, num_tokens),
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        model_dim=config.model_dim,
        dtype="bfloat16",
        scale=config.attention_scale,
        rope=kind.rope,
        sliding_window=None,
        fetch="device_put",
        policy=cache,
        values_from_keys=config.keys_follow,
    )


def layer_bytes(num_tokens: int, config: ModelConfig) -> tuple[int, int]:
    """Return the bytes that full attention needs for `num_tokens`: those of layers that see all tokens come last.

    The first are those of the sliding and recurrent layers, which are alike under every policy. Keys and values are
    bfloat16.
    """
    others = full = 0
    for layer, kind in enumerate(config.attention_kinds):
        row = 2 * config.at(layer).key_columns * 2
        if kind.recurrent:
            others += row_bytes(recurrent_of(config), 2)
        elif kind.window is None:
            full += num_tokens * row
        else:
            others += sliding_slots(kind.window, num_tokens) * row
    return others, full
