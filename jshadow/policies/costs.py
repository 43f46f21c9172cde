"""The costs of a layer's cache beyond its state: bytes read, bytes moved, operations, and temporary memory.

The planner calls `costs_of`. A method inherits `Costs` and overrides the estimates for which it has better bounds.
"""

import jax.numpy as jnp

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.policies.base import LayerCache, Policy
from jshadow.policies.capabilities import Speculates, capability
from jshadow.policies.links import Links


class Costs:
    """Estimates of costs. The defaults are upper bounds. A layer's cache inherits this class to override them."""

    def compress_bytes(self, spec: CacheSpec, tokens: int) -> int:
        """Return an upper bound on the temporary device bytes of `compress`, in addition to its result.

        The default is twice the size of one array of keys, for the longer of prompt and capacity.

        Args:
            spec: the layer.
            tokens: number of tokens S to which the batch of prompts is padded.
        """
        row = spec.kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
        return 2 * spec.batch * max(tokens, spec.capacity) * row

    def compress_flops(self, spec: CacheSpec, tokens: int) -> int:
        """Return an estimate of the operations of `compress`. By default nothing is counted.

        Args:
            spec: the layer.
            tokens: number of tokens S to which the batch of prompts is padded.
        """
        return 0

    def compress_launches(self, spec: CacheSpec, tokens: int) -> int:
        """Return about how many kernels `compress` launches on a GPU. By default nothing is counted.

        A batch has as many as one row. The arguments are those of `compress_flops`.
        """
        return 0

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Return the bytes of each part that one decode step of the layer reads.

        For each part, the result is (bytes read from device memory, bytes moved from the host). Temporaries are in
        `step_passes`. By default every array on the device is read once. The state may be abstract.
        """
        return {part: (device, 0) for part, (device, _) in layer_nbytes(state).items()}

    def step_passes(self, spec: CacheSpec) -> dict[str, tuple[int, int]]:
        """Return the bytes that the GPU kernels of one decode step of the layer move beyond those of `step_bytes`.

        These are the bytes that one kernel writes to device memory and another one reads, which count twice, and those
        that are read beside a row because memory is read in whole sectors. By default nothing is counted. The form of
        the result is that of `step_bytes`.
        """
        return {}

    def step_kept(self, spec: CacheSpec) -> dict[str, tuple[int, int]]:
        """Return the bytes of `step_bytes` and `step_passes` that a step saves if all selected units stay selected.

        By default nothing is saved. The form of the result is that of `step_bytes`.
        """
        return {}

    def step_flops(self, spec: CacheSpec, state: LayerState) -> int:
        """Return an upper bound on the operations of the layer's attention in one decode step.

        The default counts one multiplication and one addition for each number read and each query head that uses it.
        """
        moved = sum(device + host for device, host in self.step_bytes(spec, state).values())
        return 2 * spec.group * query_rows(spec.policy) * (moved // jnp.dtype(spec.dtype).itemsize)

    def step_links(self, spec: CacheSpec) -> Links:
        """Return the bytes that a device of a mesh sends over links in one decode step of the layer.

        The model's own sums are left out. By default nothing travels.
        """
        return {}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Return an upper bound on the temporary device bytes of one decode step of the layer.

        The default counts three float32 numbers for each query head and token: scores, masked scores and their softmax.
        """
        return 3 * 4 * spec.batch * query_rows(spec.policy) * spec.q_heads * spec.capacity


DEFAULT = Costs()


def costs_of(layer: LayerCache) -> Costs:
    """Return the costs of a layer's cache: the cache itself if it inherits `Costs`, or else the defaults."""
    return layer if isinstance(layer, Costs) else DEFAULT


def rows_of(policy: Policy) -> int:
    """Return the number of query rows T in a decode step of the model: 2 if the policy `Speculates`, else 1."""
    return 1 if capability(policy, Speculates) is None else 2


def query_rows(layer: LayerCache) -> int:
    """Return the number of query rows T in a decode step of the layer: 2 if its cache `Speculates`, else 1."""
    return 2 if isinstance(layer, Speculates) else 1
