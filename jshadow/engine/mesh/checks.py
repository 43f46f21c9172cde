"""Checks of the policies of a mesh, before anything is traced."""

import jax

from jshadow.cache.spec import CacheSpec
from jshadow.policies.checks import check_split


def check_shards(plans: list[tuple[CacheSpec, ...]]) -> None:
    """Raise ConfigError if a layer's cache cannot run on its mesh. Each plan has the spec of every layer."""
    for spec in {spec.policy: spec for plan in plans for spec in plan}.values():
        check_split(spec, gpu=jax.default_backend() == "gpu")
