"""The time of one layer's fetch: by the kernel that reads pinned host memory, and by a host gather and a copy."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.room import Room, bus
from gpu.runner import Task, attempt
from gpu.sizes import Sizes
from gpu.steered import SHARE
from gpu.synthetic import free, on_device, on_host
from gpu.timing import build, series
from jshadow.cache import offload
from jshadow.cache.records import HostArray, HostTier
from jshadow.ops.rope import inverse_frequencies
from pallas_kernels import ChosenKeys, HostRows, KeptRows, fetch_reconstruct

DRAWS, CALLS = 8, 16  # minimum number of sets of chunks that alternate; calls that are dispatched together
CACHED = 512e6  # minimum bytes of all sets together, far more than the L2 cache holds


class Fetches:
    """The operands of a layer's fetch at the longest context. They are created on first use."""

    def __init__(self, sizes: Sizes, room: Room) -> None:
        self.sizes, self.room = sizes, room
        config, capacity = sizes.layer_config, sizes.capacities[0]
        self.policy = sizes.policy.resolve(config, capacity)
        self.units, self.count = self.policy.max_chunks(capacity), self.policy.max_selected(capacity)
        self.heads, self.dim, self.chunk = config.kv_heads, config.head_dim, self.policy.chunk_size
        self.inverse = jnp.asarray(inverse_frequencies(config.rope, config.head_dim))
        self.made: dict[int, tuple[Any, ...]] = {}

    def operands(self, batch: int) -> tuple[Any, ...]:
        """Return the values in pinned memory, the left and right factor, and the kept rows."""
        if batch not in self.made:
            free(self.made)
            width, rank = self.chunk * self.dim, self.policy.rank or 1
            values = on_host(1, (batch, self.heads, self.units, width))
            left = on_device(2, 1.0, (batch, self.units, self.chunk * rank))
            right = on_device(3, rank**-0.5, (batch, self.heads, rank, self.dim))
            kept = on_device(4, 1.0, (batch, self.heads, self.count, width))
            self.made = {batch: (values, left, right, kept)}
        return self.made[batch]

    def draws(self, batch: int, size: int) -> list[jax.Array]:
        """Return sets of random chunks, int32 [B, h_kv, k]. Fetching one set moves `size` bytes over the bus."""
        rng = np.random.default_rng(0)
        lead = (batch, self.heads)
        count = DRAWS if self.sizes.dry else max(DRAWS, math.ceil(CACHED / size))
        picks = [
            np.stack([rng.choice(self.units, self.count, replace=False) for _ in range(batch * self.heads)])
            for _ in range(count)
        ]
        return [jnp.asarray(pick.reshape(*lead, self.count), jnp.int32) for pick in picks]

    def stay(self, batch: int, share: float) -> np.ndarray:
        """Return which rows are not fetched, bool [B, h_kv, k]. They are evenly spread."""
        index = np.arange(self.count)
        kept = np.floor((index + 1) * share) > np.floor(index * share)
        return np.broadcast_to(kept, (batch, self.heads, self.count))

    def timed(self, batch: int, function: Callable[..., Any], share: float, *args: Any) -> dict[str, Any]:
        """Time a fetch, and return a row with bytes, seconds, bytes per second, and the share of the measured bus rate.

        function(ids, held, *args) returns `held` for the next call and the fetched rows. `held` is donated.
        """
        limit = bus(self.room.ceilings())  # first, so that an error of the measured rates comes before the timing
        missed = int((~self.stay(batch, share)).sum())
        size = missed * self.chunk * self.dim * 2
        ids, held = self.draws(batch, size), [jnp.array(self.operands(batch)[3])]
        program, compile_seconds = build(function, ids[0], held[0], *args, donate=(1,))
        turns = itertools.cycle(ids)

        def call() -> Any:
            held[0], brought = program(next(turns), held[0], *args)
            return held[0], brought

        seconds = series(call, CALLS, self.sizes.repeats)
        reached = size / seconds.median / limit
        row = {
            "batch": batch,
            "kept_share": 1 - missed / (batch * self.heads * self.count),
            "bytes": size,
            "fetch_seconds": seconds.median,
            "least": seconds.least,
            "most": seconds.most,
            "bytes_per_second": size / seconds.median,
            "share_of_bus": reached,
            "compile_seconds": compile_seconds,
            "empty_seconds": attempt(lambda: self.empty(ids[0], held, args)),
        }
        if reached > 1 and not self.sizes.dry:
            row["error"] = f"{reached:.2f} of the bus: not all of it can have crossed the bus"
        return row

    def empty(self, ids: Any, held: list[Any], args: tuple[Any, ...]) -> float:
        """Return the seconds of a program that has the same arguments and does nothing."""

        def nothing(ids: Any, held: Any, *args: Any) -> Any:
            return held, ids[0, 0, 0]

        program = build(nothing, ids, held[0], *args, donate=(1,), unused=True).program

        def call() -> Any:
            held[0], brought = program(ids, held[0], *args)
            return held[0], brought

        return series(call, CALLS, self.sizes.repeats).median

    def by_kernel(self, batch: int, share: float) -> dict[str, Any]:
        """Time fetch_reconstruct with a share of the rows kept on the device."""
        values, left, right, _ = self.operands(batch)
        inverse = self.inverse

        def run(ids: Any, kept: Any, values: Any, left: Any, right: Any, stay: Any) -> Any:
            keys = ChosenKeys(left, right, ids, inverse)
            rebuilt, rows = fetch_reconstruct(HostRows(values), keys, KeptRows(kept, stay))
            return rows.reshape(kept.shape), rebuilt

        return self.timed(batch, run, share, values, left, right, jnp.asarray(self.stay(batch, share)))

    def by_host(self, batch: int) -> dict[str, Any]:
        """Time a gather on the host and the copy of its rows."""
        values = self.operands(batch)[0]

        def run(ids: Any, held: Any, values: Any) -> Any:
            return offload.gather(HostTier(HostArray(values, "pinned_host")), ids, (self.units,)), held[0, 0, 0, 0]

        return self.timed(batch, run, 0.0, values)

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks, the largest batch first."""
        try:
            for batch in (self.sizes.layer_batch[0], 1):
                for share, told in ((0.0, "misses only"), (SHARE, "60 % kept")):
                    run = functools.partial(self.by_kernel, batch, share)
                    yield Task(f"zero_copy kernel, {told}, {batch} rows", 10, run)
                yield Task(f"host gather and device_put, {batch} rows", 10, functools.partial(self.by_host, batch))
        finally:
            free(self.made)
