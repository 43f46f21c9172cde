"""Checks of the policies of a mesh, before anything is traced."""

import jax

from jshadow.cache.spec import CacheSpec
from jshadow.errors import ConfigError
from jshadow.policies.capabilities import Learns


def check_shards(plans: list[tuple[CacheSpec, ...]]) -> None:
    """Raise ConfigError if a layer's cache cannot run on its mesh. Each plan has the spec of every layer."""
    for spec in {spec.policy: spec for plan in plans for spec in plan}.values():
        shards, policy = spec.shards, spec.policy
        if shards is None:
            continue
        name = getattr(policy, "name", "") or type(policy).__name__
        learned = isinstance(policy, Learns) and policy.reads_fitted
        if learned or not policy.splits_heads:
            why = "reads learned arrays" if learned else "is not split over devices"
            raise ConfigError(f"mesh must be None for {name}, which {why}, got {shape(spec)}")
        if shards.sp > 1 and not policy.splits_tokens:
            raise ConfigError(f"mesh must have sp=1 for {name}, which cannot split a prompt, got {shape(spec)}")
        if spec.fetch == "zero_copy" and jax.default_backend() == "gpu" and (shards.sp > 1 or policy.splits_left(spec)):
            raise ConfigError(
                f"fetch must be 'device_put' or 'resident' for {name} on this mesh, as no kernel serves a device that "
                f"has a part of the left rows or of the tokens (left='everywhere' and sp=1 have one), got 'zero_copy' "
                f"with {shape(spec)}"
            )


def shape(spec: CacheSpec) -> str:
    """Return the sizes of a mesh as text: "data=1, sp=1, tp=2"."""
    assert spec.shards is not None
    return ", ".join(f"{axis}={size}" for axis, size in spec.shards.mesh.shape.items())
