"""What a layer's cache costs beside its state: bytes read, bytes moved, operations and temporaries.

The planner asks `costs_of`. A method says more than the defaults by inheriting `Costs` and overriding what differs.
"""

import jax.numpy as jnp

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.policies.base import LayerCache, Policy
from jshadow.policies.capabilities import Speculates, capability


class Costs:
    """Upper bounds by default. Inherited beside `LayerCache` by methods that know better."""

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Device bytes that `compress` takes for a while beyond its result, at most, for prompts of that width."""
        row = spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return 2 * spec.batch * max(tokens, spec.capacity) * row

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Bytes (read from device memory, moved from the host) of each part in one decode step of the layer.

        Temporaries that a compiler writes and reads again are not counted. The default reads all that lies on the
        device. Abstract states count too.
        """
        return {part: (device, 0) for part, (device, _) in layer_nbytes(state).items()}

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Operations of the layer's attention in one decode step, at most.

        The default: each number that is read meets each query head of a group in one multiplication and one addition.
        """
        moved = sum(device + host for device, host in self.step_bytes(spec, state).values())
        return 2 * spec.group * query_rows(spec.policy) * (moved // jnp.dtype(spec.dtype).itemsize)

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Device bytes that one decode step of the layer takes for a while, at most.

        The default: three float32 numbers for each query head and token (scores, masked scores, their softmax).
        """
        return 3 * 4 * spec.batch * query_rows(spec.policy) * spec.q_heads * spec.capacity


DEFAULT = Costs()


def costs_of(layer: LayerCache) -> Costs:
    """The costs of a layer's cache: its own, or the defaults."""
    return layer if isinstance(layer, Costs) else DEFAULT


def rows_of(policy: Policy) -> int:
    """Query rows of a decode step of a whole model: 2 where a guessed token runs along."""
    return 1 if capability(policy, Speculates) is None else 2


def query_rows(layer: LayerCache) -> int:
    """Query rows of a decode step: 2 where a guessed token runs along."""
    return 2 if isinstance(layer, Speculates) else 1
