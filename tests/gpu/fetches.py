"""One layer's fetch alone: the kernel that reads pinned host memory, and the host's gathering with its copy."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.room import Room, bus
from gpu.runner import Task
from gpu.sizes import Sizes
from gpu.steered import SHARE
from gpu.synthetic import free, on_device, on_host
from gpu.timing import build, series
from jshadow import offload
from jshadow.rope import inverse_frequencies
from jshadow.state import HostArray
from pallas_kernels import fetch_reconstruct

DRAWS, CALLS = 8, 16  # sets of chunks that take turns; calls dispatched together


class Fetches:
    """The operands of a layer's fetch at the longest context, made when first asked for."""

    def __init__(self, sizes: Sizes, room: Room) -> None:
        self.sizes, self.room = sizes, room
        config, capacity = sizes.layer_config, sizes.capacities[0]
        self.policy = sizes.policy.resolve(config, capacity)
        self.units, self.count = self.policy.max_chunks(capacity), self.policy.max_selected(capacity)
        self.heads, self.dim, self.chunk = config.kv_heads, config.head_dim, self.policy.chunk_size
        self.inverse = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
        self.made: dict[int, tuple[Any, ...]] = {}

    def operands(self, batch: int) -> tuple[Any, ...]:
        """Values in pinned memory, factors, kept rows."""
        if batch not in self.made:
            free(self.made)
            width, rank = self.chunk * self.dim, self.policy.rank or 1
            values = on_host(1, (batch, self.heads, self.units, width))
            left = on_device(2, 1.0, (batch, self.units, self.chunk * rank))
            right = on_device(3, rank**-0.5, (batch, self.heads, rank, self.dim))
            kept = on_device(4, 1.0, (batch, self.heads, self.count, width))
            self.made = {batch: (values, left, right, kept)}
        return self.made[batch]

    def draws(self, batch: int) -> list[jax.Array]:
        """Different chunks without repeats, int32 [B, h_kv, k], each time others: no cache may know them."""
        rng = np.random.default_rng(0)
        lead = (batch, self.heads)
        picks = [
            np.stack([rng.choice(self.units, self.count, replace=False) for _ in range(batch * self.heads)])
            for _ in range(DRAWS)
        ]
        return [jnp.asarray(pick.reshape(*lead, self.count), jnp.int32) for pick in picks]

    def slots(self, batch: int, share: float) -> jax.Array:
        """Where kept rows lie, int32 [B, h_kv, k]: -1, to be fetched, but for a share of them, evenly spread."""
        index = np.arange(self.count)
        kept = np.floor((index + 1) * share) > np.floor(index * share)
        return jnp.broadcast_to(jnp.asarray(np.where(kept, index, -1), jnp.int32), (batch, self.heads, self.count))

    def timed(self, batch: int, function: Callable[..., Any], share: float, *args: Any) -> dict[str, Any]:
        """A row: bytes that must cross the bus, seconds, bytes a second, and their share of the measured bus."""
        ids = self.draws(batch)
        program, compile_seconds = build(function, ids[0], *args)
        turns = itertools.cycle(ids)
        seconds = series(lambda: program(next(turns), *args), CALLS, self.sizes.repeats)
        missed = int((np.asarray(self.slots(batch, share)) < 0).sum())
        size = missed * self.chunk * self.dim * 2
        return {
            "batch": batch, "kept_share": 1 - missed / (batch * self.heads * self.count), "bytes": size,
            "fetch_seconds": seconds.median, "least": seconds.least, "most": seconds.most,
            "bytes_per_second": size / seconds.median,
            "share_of_bus": size / seconds.median / bus(self.room.ceilings()), "compile_seconds": compile_seconds,
        }  # fmt: skip

    def by_kernel(self, batch: int, share: float) -> dict[str, Any]:
        """fetch_reconstruct, with a share of the rows on the device already."""
        values, left, right, kept = self.operands(batch)
        inverse = self.inverse

        def run(ids: Any, values: Any, left: Any, right: Any, kept: Any, slot: Any) -> Any:
            return fetch_reconstruct(values, left, right, ids, inverse, kept=kept, slot=slot)

        return self.timed(batch, run, share, values, left, right, kept, self.slots(batch, share))

    def by_host(self, batch: int) -> dict[str, Any]:
        """The host gathers, a copy brings the rows."""
        values = self.operands(batch)[0]

        def run(ids: Any, values: Any) -> Any:
            return offload.gather(HostArray(values, "pinned_host"), ids, self.units)

        return self.timed(batch, run, 0.0, values)

    def tasks(self) -> Iterator[Task]:
        """Many rows first."""
        try:
            for batch in (self.sizes.layer_batch[0], 1):
                for share, told in ((0.0, "misses only"), (SHARE, "60 % kept")):
                    run = functools.partial(self.by_kernel, batch, share)
                    yield Task(f"zero_copy kernel, {told}, {batch} rows", 10, run)
                yield Task(f"host gather and device_put, {batch} rows", 10, functools.partial(self.by_host, batch))
        finally:
            free(self.made)
