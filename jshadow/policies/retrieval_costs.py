"""The costs of the retrieval policies."""

import abc

import jax.numpy as jnp

from jshadow.cache.accounting import layer_nbytes
from jshadow.cache.records import LayerState
from jshadow.cache.spec import CacheSpec
from jshadow.policies.base import LayerCache
from jshadow.policies.costs import Costs


class RetrievalCosts(LayerCache, Costs):
    """The costs of a layer."""

    unit: int

    @abc.abstractmethod
    def ring_slots(self, spec: CacheSpec) -> int:
        """Return the number of slots R of the ring."""

    @abc.abstractmethod
    def count(self, spec: CacheSpec) -> int:
        """Return the maximum number of units that a query selects."""

    def step_bytes(self, spec: CacheSpec, state: LayerState) -> dict[str, tuple[int, int]]:
        """Count all summaries and the ring as read, and the selected units as moved from the host and read."""
        parts = {name: (device, 0) for name, (device, _) in layer_nbytes(state).items() if not name.startswith("host")}
        moved = 2 * spec.batch * spec.kv_heads * self.count(spec) * self.unit * spec.head_dim
        size = moved * jnp.dtype(spec.dtype).itemsize
        return parts | {"selected": (size, 0 if spec.fetch == "resident" else size)}

    def step_temporaries(self, spec: CacheSpec) -> int:
        """Count the scores of all units, the attended rows twice and once in float32, and their scores."""
        layout = self.host_layout(spec)
        assert layout is not None
        units, rows = layout.units + layout.tail_units, self.count(spec) * self.unit + self.ring_slots(spec)
        wide = spec.batch * spec.kv_heads * rows * spec.head_dim * (2 * 2 * jnp.dtype(spec.dtype).itemsize + 2 * 4)
        return 4 * 4 * spec.batch * spec.q_heads * (units + rows) + wide
