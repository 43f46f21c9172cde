"""The time of one layer's fetch: by the kernel that reads pinned host memory, and by a host gather and a copy."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gpu.room import Room, bus
from gpu.runner import Task, attempt
from gpu.sizes import Sizes
from gpu.steered import SHARE
from gpu.synthetic import free, sharding, state, steered
from gpu.timing import build, series
from jshadow.cache import offload
from jshadow.cache.records import HostTier, Kept, LayerState, Selection, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.evaluation.speed import Shape, random_step
from pallas_kernels import places_of

DRAWS, CALLS = 8, 16  # minimum number of sets of chunks that alternate; calls that are dispatched together
CACHED = 512e6  # minimum bytes of all sets together, far more than the L2 cache holds


class Way(NamedTuple):
    """One way to fetch.

    Attributes:
        code: settings of ShadowKV by name, a key of `Sizes.policies`.
        batch: number of rows.
        kernel: whether the kernel reads the rows where they lie. Otherwise the host gathers them, and they are copied.
        share: share of the chunks that are on the device and need no fetch.
        sequential: whether the chunks of a head are neighbors. Otherwise they are random.
    """

    code: str
    batch: int
    kernel: bool = True
    share: float = 0.0
    sequential: bool = False

    def __str__(self) -> str:
        how = f"zero_copy kernel, {100 * self.share:.0f} % kept" if self.kernel else "host gather and device_put"
        return f"{self.code}, {how}, {'sequential' if self.sequential else 'random'} chunks, {self.batch} rows"


def ways(batch: int) -> Iterator[Way]:
    """Yield the ways for a large batch, and then those for one row."""
    for code in ("paper", "packed"):
        yield Way(code, batch)
        yield Way(code, batch, sequential=True)
        yield Way(code, batch, share=SHARE)
        yield Way(code, batch, kernel=False)
    yield Way("paper", 1)
    yield Way("paper", 1, kernel=False)


class Fetches:
    """Measures the fetch of one layer at the longest context. A state is created on first use.

    Args:
        sizes: all sizes.
        room: the memory of the machine.
    """

    def __init__(self, sizes: Sizes, room: Room) -> None:
        self.sizes, self.room = sizes, room
        self.made: dict[tuple[str, int], tuple[CacheSpec, LayerState]] = {}

    def layer(self, way: Way) -> tuple[CacheSpec, LayerState]:
        """Return the only layer of a state with the code and the batch of `way`. The last one is kept."""
        key = (way.code, way.batch)
        if key not in self.made:
            free([layer for _, layer in self.made.values()])
            sizes, capacity = self.sizes, self.sizes.capacities[0]
            prompt = sizes.prompt(capacity)
            policy = steered(sizes.policies[way.code], prompt, capacity)
            held = state(sizes.layer_config, policy, way.batch, capacity, prompt, "zero_copy")
            self.made = {key: (held.specs[0], held.layers[0])}
        return self.made[key]

    def draws(self, way: Way, places: tuple[int, ...], units: int, size: int) -> list[jax.Array]:
        """Return sets of chunks below `units`, int32 [B, h_kv, k]. Fetching one set moves `size` bytes over the bus."""
        rng, count = np.random.default_rng(0), places[2]

        def head() -> np.ndarray:
            if way.sequential:
                return rng.integers(units) + np.arange(count)
            return rng.choice(units, count, replace=False)

        sets = DRAWS if self.sizes.dry else max(DRAWS, math.ceil(CACHED / size))
        picks = [np.stack([head() for _ in range(places[0] * places[1])]) % units for _ in range(sets)]
        return [jnp.asarray(pick.reshape(places), jnp.int32) for pick in picks]

    def measured(self, way: Way) -> dict[str, Any]:
        """Return a row with bytes, seconds, bytes per second, and the share of the measured rate of the bus."""
        limit = bus(self.room.ceilings())  # first, so that an error of the measured rates comes before the timing
        spec, layer = self.layer(way)
        layout, places = spec.policy.host_layout(spec), layer.live.resident.shape
        stay = np.broadcast_to(kept_places(places[2], way.share), places)
        size = int((~stay).sum()) * offload.unit_bytes(spec, layout)
        function = functools.partial(by_kernel if way.kernel else by_host, spec)
        ids = self.draws(way, places, layout.units, size)
        config = self.sizes.layer_config
        shape = Shape(spec.policy.prompt, way.batch, config.q_heads, config.kv_heads, config.head_dim)
        step = jax.device_put(random_step(shape, 1), sharding("device"))
        args = (layer.frozen, layer.host, step, places_of(jnp.asarray(~stay)))
        held = [(jnp.array(layer.live.values), jnp.array(layer.live.keys))]  # donated to each call, which returns them
        program, compile_seconds = build(function, ids[0], held[0], *args, donate=(1,))
        turns = itertools.cycle(ids)
        seconds = self.timed(program, lambda: next(turns), held, args)
        reached = size / seconds.median / limit
        row = way._asdict() | {
            "kept_share": float(stay.mean()),
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

    def timed(self, program: Any, ids: Callable[[], Any], held: list[Any], args: tuple[Any, ...]) -> Any:
        """Time a program that returns the donated `held` for the next call, and what it fetched."""

        def call() -> Any:
            held[0], brought = program(ids(), held[0], *args)
            return held[0], brought

        return series(call, CALLS, self.sizes.repeats)

    def empty(self, ids: Any, held: list[Any], args: tuple[Any, ...]) -> float:
        """Return the seconds of a program that has the same arguments and does nothing."""

        def nothing(ids: Any, held: Any, *args: Any) -> Any:
            return held, ids[0, 0, 0]

        program = build(nothing, ids, held[0], *args, donate=(1,), unused=True).program
        found: float = self.timed(program, lambda: ids, held, args).median
        return found

    def tasks(self) -> Iterator[Task]:
        """Yield the tasks, the largest batch first."""
        try:
            for way in ways(self.sizes.layer_batch[0]):
                yield Task(str(way), 0 if self.sizes.dry else 10, functools.partial(self.measured, way))
        finally:
            free([layer for _, layer in self.made.values()])


def kept_places(count: int, share: float) -> np.ndarray:
    """Return which of `count` places need no fetch, bool [count]. They are evenly spread."""
    index = np.arange(count)
    return np.floor((index + 1) * share) > np.floor(index * share)


def by_kernel(spec: CacheSpec, ids: Any, rows: Any, frozen: Any, host: HostTier, step: StepKV, missed: Any) -> Any:
    """Fetch chunks and rebuild their keys as a decode step does. Returns new `rows`, and one of the numbers in them.

    Args:
        spec: the layer.
        ids: the selected chunks, int32 [B, h_kv, k].
        rows: a cache of values and keys on the device, each [B, h_kv, k, c * d].
        frozen: the compressed prompt.
        host: the rows in host memory.
        step: its angles are used.
        missed: the indices of the chunks that must be fetched, int32 [B, h_kv, k], as in `Kept`.
    """
    rebuild = spec.policy.rebuild(spec, LayerState(frozen, None, host), step)
    places = jnp.broadcast_to(jnp.arange(ids.shape[2], dtype=jnp.int32), ids.shape)
    selection = Selection(ids, ids >= 0, rebuild=rebuild, kept=Kept(*rows, places, missed, missed[..., 0]))
    fetched = offload.fetch(spec, host, selection, spec.policy.host_layout(spec))
    return (fetched.v, fetched.k), fetched.k[0, 0, 0, 0]


def by_host(spec: CacheSpec, ids: Any, rows: Any, frozen: Any, host: HostTier, step: StepKV, missed: Any) -> Any:
    """Gather chunks on the host and copy them. The arguments are those of `by_kernel`."""
    layout = spec.policy.host_layout(spec)
    return rows, offload.gather(host, ids, (layout.units, layout.tail_units))
