"""The forms of the kernels that rebuild keys, timed against each other at real sizes: `python3 -m gpu.variants`.

The most important comparison comes first. Each row has the times of one call, and whether the results are those of the
reference in XLA. A form with wrong results is a failed check and has no times. The results are in variants.json of the
folder, which is written after each row.

The sections:

- "rebuild": `fetch_reconstruct` with everything on the device, for `packed(small=True)`, and a program that does
  nothing.
- "attend": `attend_chunks`, which writes no keys, beside `fetch_reconstruct` and `sparse_attention`.
- "fetch": `fetch_reconstruct` with values in host memory, for `packed()`, with nothing and with 60 % kept; and a
  kernel that fetches the values alone.
- "factors": the same as "rebuild" with low-rank keys.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from gpu import environment
from gpu.fetches import kept_places
from gpu.runner import GRACE, Runner, Task, brief
from gpu.timing import build, series, side_by_side
from pallas_kernels import ChosenKeys, HostRows, KeptRows, places_of, sparse_attention
from pallas_kernels.attend_chunks import kernel as attend
from pallas_kernels.bits import packed_width, row_words
from pallas_kernels.choose import Space, on_device
from pallas_kernels.fetch_reconstruct import kernel as fetch
from pallas_kernels.fetch_reconstruct import reference
from pallas_kernels.reconstruct_keys.kernel import Form, tokens_of
from pallas_kernels.tiles import blocks

KEPT = 0.6  # share of the chunks that a step finds on the device
NEAR = 1e-2  # relative error of results in bfloat16, by the norm
ROTATED = 500_000.0
SMALL, PACKED = (16, 224, 192), (144, 224, 0)  # profiles of 4/3 and of 2 bits a column


class World(NamedTuple):
    """The sizes of one layer.

    Attributes:
        resident: requests with everything on the device.
        host: numbers of requests with values in host memory.
        heads: KV heads.
        group: query heads of each.
        dim: width of a head.
        units: chunks of a prompt.
        chosen: selected chunks of a head.
        calls: calls that are dispatched together.
        repeats: how often they are timed.
        workers: programs that are compiled at once.
        dry: whether JAX's interpreter runs the kernels.
    """

    resident: int
    host: tuple[int, ...]
    heads: int
    group: int
    dim: int
    units: int
    chosen: int
    calls: int
    repeats: int
    workers: int
    dry: bool


REAL = World(17, (11, 22), 8, 4, 128, 15_356, 239, 16, 9, 16, False)
DRY = World(2, (1, 2), 1, 2, 64, 24, 20, 1, 1, 2, True)
CHUNK = 8


class Case(NamedTuple):
    """What is measured.

    Attributes:
        name: name of the row.
        rows: number of requests.
        profile: the profile of the keys, or None for low-rank keys.
        form: the form of the kernel, or None for its default.
        share: share of the chunks that are kept.
        host: whether the values lie in host memory.
        kind: "fetch", "values" (no keys), "attend", "both" (fetch, then attention), or "empty" (a program with the
            arguments of "fetch" that does nothing).
    """

    name: str
    rows: int
    profile: tuple[int, int, int] | None
    form: Form | None = None
    share: float = 0.0
    host: bool = False
    kind: str = "fetch"


def told(form: Form) -> str:
    """Return a short name of a form."""
    return f"{form.tokens} tokens, {form.warps} warps, width {form.width}, {form.stages} stages"


def rebuild_cases(world: World) -> list[Case]:
    """Return the cases of "rebuild", the most important first."""
    rows = world.resident
    cases = [
        Case("the default", rows, SMALL),
        Case("nothing at all", rows, SMALL, kind="empty"),
        Case("the default, 60 % kept", rows, SMALL, share=KEPT),
    ]
    forms = [Form(128, 4), Form(128, 8), Form(32, 4), Form(64, 4, 32), Form(64, 4, stages=2), Form(64, 4, stages=4)]
    return cases + [Case(told(form), rows, SMALL, form) for form in forms]


def attend_cases(world: World) -> list[Case]:
    """Return the cases of "attend"."""
    rows = world.resident
    cases = [Case("fetch and attention", rows, SMALL, kind="both"), Case("the default", rows, SMALL, kind="attend")]
    cases.append(Case("fetch and attention, 60 % kept", rows, SMALL, None, KEPT, kind="both"))
    return cases + [Case(told(form), rows, SMALL, form, kind="attend") for form in (Form(64, 4), Form(128, 8))]


def fetch_cases(world: World) -> list[Case]:
    """Return the cases of "fetch". Cases with the same arrays follow each other."""
    cases = []
    for rows in world.host:
        for share in (0.0, KEPT):
            where = f"{rows} rows, {100 * share:.0f} % kept"
            forms = (("the default", None), *((told(form), form) for form in (Form(32, 4), Form(128, 8))))
            cases += [Case(f"{where}, {name}", rows, PACKED, form, share, True) for name, form in forms]
            for form in (Form(64, 4), Form(32, 4), Form(16, 1)):
                name = f"{where}, no keys, {form.tokens} tokens, {form.warps} warps"
                cases.append(Case(name, rows, PACKED, form, share, True, "values"))
    return cases


def factor_cases(world: World) -> list[Case]:
    """Return the cases of "factors"."""
    forms = (Form(32, 4), Form(128, 4))
    cases = [Case(told(form), world.resident, None, form) for form in forms]
    return [Case("the default", world.resident, None), *cases]


SECTIONS: dict[str, Callable[[World], list[Case]]] = {
    "rebuild": rebuild_cases,
    "attend": attend_cases,
    "fetch": fetch_cases,
    "factors": factor_cases,
}


class Layer(NamedTuple):
    """The arrays of one layer.

    Attributes:
        q: queries [B, 1, h_q, d].
        values: the values of all chunks.
        keys: the codes of the keys, and the selected chunks.
        missed: the indices of the chunks that are not kept, int32 [B, h_kv, k].
    """

    q: jax.Array
    values: HostRows
    keys: ChosenKeys
    missed: jax.Array


@functools.partial(jax.jit, static_argnums=0)
def value_rows(world: World, seed: jax.Array) -> jax.Array:
    """Return random packed values of one request in four bits, with scales between 1/2 and 1, [h_kv, U, words]."""
    codes = CHUNK * world.dim // 4
    rows = jax.random.bits(seed, (world.heads, world.units, row_words(CHUNK, world.dim, 4, jnp.bfloat16)), jnp.uint16)
    scales = rows[..., codes : codes + CHUNK] % jnp.uint16(1024) + jnp.uint16(0x3800)
    return rows.at[..., codes : codes + CHUNK].set(scales)


def layer(world: World, case: Case, values: jax.Array | None = None) -> Layer:
    """Return the arrays of a case. Cases with equal sizes have equal arrays. `values` are those of another case."""
    seeds = jax.random.split(jax.random.key(0), 8)
    batch, profile, dtype = case.rows, case.profile, jnp.bfloat16
    lead, place = (batch, world.heads), Space.Host if case.host else Space.Device
    if values is None:
        one = value_rows(world, seeds[0])
        values = jax.device_put(jnp.broadcast_to(one[None], (batch, *one.shape)), place)
    rng = np.random.default_rng(0)
    ids = [rng.choice(world.units, world.chosen, replace=False) for _ in range(batch * world.heads)]
    half, rank = world.dim // 2, sum(profile) if profile else world.dim * 5 // 4
    right = jax.random.normal(seeds[1], (*lead, rank, world.dim)) * rank**-0.5
    if profile:
        right *= (4.0 / 2.0 ** np.repeat((8, 4, 2), profile))[:, None]
        left = jax.random.bits(seeds[2], (batch, world.units, CHUNK * packed_width(profile)), jnp.uint8)
        mean = jax.random.normal(seeds[3], (*lead, world.dim), dtype)
    else:
        left, mean = jax.random.normal(seeds[2], (batch, world.units, CHUNK * rank), dtype), None
    keys = ChosenKeys(
        left,
        right.astype(dtype),
        jnp.asarray(np.stack(ids).reshape(*lead, world.chosen), jnp.int32),
        jnp.asarray(ROTATED ** -(np.arange(half) / half), jnp.float32),
        mean=mean,
        profile=profile,
    )
    q = jax.random.normal(seeds[4], (batch, 1, world.heads * world.group, world.dim), dtype)
    missed = jnp.broadcast_to(jnp.arange(world.chosen, dtype=jnp.int32), (*lead, world.chosen))
    return Layer(q, HostRows(values, bits=4, dtype=dtype), keys, missed)


class Variants:
    """Times the cases. The arrays of the last sizes are kept.

    Args:
        world: the sizes.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.made: dict[Any, Layer] = {}
        self.wanted: dict[Any, Any] = {}

    def layer(self, case: Case) -> Layer:
        """Return the arrays of a case."""
        key = case.rows, case.profile, case.host
        if key not in self.made:
            old = {(rows, host): arrays.values.prompt for (rows, _, host), arrays in self.made.items()}
            self.made.clear()
            self.wanted.clear()
            self.made[key] = layer(self.world, case, old.get((case.rows, case.host)))
        stay = np.broadcast_to(kept_places(self.world.chosen, case.share), self.made[key].missed.shape)
        return self.made[key]._replace(missed=places_of(jnp.asarray(~stay)))

    def caches(self, case: Case) -> tuple[Any, Any]:
        """Return empty caches of values and keys."""
        world = self.world
        shape = (case.rows, world.heads, world.chosen, CHUNK * world.dim)
        return jnp.zeros(shape, jnp.bfloat16), jnp.zeros(shape, jnp.bfloat16)

    def function(self, case: Case) -> Callable[..., Any]:
        """Return the function of a case. It takes the donated caches and a Layer, and returns the caches first."""
        interpret, scale = self.world.dry, self.world.dim**-0.5

        def run(caches: Any, layer: Layer) -> Any:
            if interpret:
                layer = jax.tree.map(on_device, layer)
            if case.kind == "empty":
                return caches, layer.q[0, 0, 0, 0]
            if case.kind == "attend":
                return caches, attend.attend_chunks(layer.q, layer.values, layer.keys, scale, interpret, case.form)
            places = jnp.broadcast_to(jnp.arange(layer.missed.shape[2], dtype=jnp.int32), layer.missed.shape)
            kept = KeptRows(caches[0], caches[1], places, layer.missed)
            if case.kind == "values":
                assert case.form is not None
                fetched = fetch_values(layer.values, kept, layer.keys, case.form, interpret)
                return (fetched, caches[1]), fetched[0, 0, 0, 0]
            keys, values = fetch.fetch_reconstruct(layer.values, kept, layer.keys, interpret, case.form)
            if case.kind == "fetch":
                return (values, keys), keys[0, 0, 0, 0]
            k, v = (x.reshape(layer.keys.out_shape) for x in (keys, values))
            out = sparse_attention(layer.q, [(k, v, jnp.ones((1, 1, 1, k.shape[2]), bool))], scale=scale)
            return (values, keys), out

        return run

    def compiled(self, case: Case) -> Any:
        """Compile a case for its arrays, which are not made for that."""
        shapes = jax.eval_shape(lambda: (self.caches(case), layer(self.world, case._replace(host=False))))
        caches, arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on("device")), shapes)
        if case.host:
            prompt = arrays.values.prompt
            there: Any = jax.ShapeDtypeStruct(prompt.shape, prompt.dtype, sharding=on("pinned_host"))
            arrays = arrays._replace(values=HostRows(there, bits=4, dtype=jnp.bfloat16))
        return build(self.function(case), caches, arrays, donate=(0,), unused=True)

    def truth(self, case: Case, arrays: Layer) -> Any:
        """Return what the reference makes of the arrays: keys and values, or the attention to them."""
        kind = "attend" if case.kind in ("attend", "both") and not case.share else "fetch"
        if kind not in self.wanted:

            def want(layer: Layer) -> Any:
                keys, values = reference.fetch_reconstruct(layer.values, None, layer.keys)
                if kind == "fetch":
                    return keys, values
                mask = jnp.ones((1, 1, 1, keys.shape[2]), bool)
                scale = self.world.dim**-0.5
                return sparse_attention(layer.q, [(keys, values, mask)], scale=scale, implementation="xla")

            self.wanted[kind] = jax.jit(want)(jax.tree.map(on_device, arrays))
        return self.wanted[kind]

    def wrong(self, case: Case, made: Any, arrays: Layer) -> list[str]:
        """Return what is wrong with the results of a case."""
        if case.kind == "empty":
            return []
        want = self.truth(case, arrays)
        if case.kind in ("fetch", "values"):
            (values, keys), _ = made
            taken = jnp.zeros((case.rows, self.world.heads, self.world.chosen), bool)
            at = jnp.indices(arrays.missed.shape)[:2]
            taken = taken.at[at[0], at[1], arrays.missed].set(True, mode="drop")
            keys, values, *want = (
                jnp.where(taken[..., None], x.reshape(*taken.shape, -1), 0).astype(jnp.float32)
                for x in (keys, values, *want)
            )
            off = float(jnp.abs(values - want[1]).max())
            found = [] if off == 0 else [f"values differ by up to {off:.3g}"]
            if case.kind == "values":
                return found
            error = float(jnp.linalg.norm(keys - want[0]) / jnp.linalg.norm(want[0]))
        elif case.share:  # the rows that are kept are zeros
            return []
        else:
            found = []
            got, want = (x.astype(jnp.float32) for x in (made[1], want))
            error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        return found + ([] if error < NEAR else [f"relative error {error:.3g}"])

    def measured(self, case: Case, program: Any) -> dict[str, Any]:
        """Check and time a compiled case."""
        try:
            built = program.result()
        except Exception as error:
            return {"error": brief(error)}
        arrays = self.layer(case)
        held = [self.caches(case)]
        made = built.program(held[0], arrays)
        wrong = self.wrong(case, made, arrays)
        about: dict[str, Any] = {
            "rows": case.rows,
            "profile": case.profile,
            "kept_share": case.share,
            "kind": case.kind,
        }
        about |= {"form": case.form._asdict() if case.form else None, "compile_seconds": built.seconds}
        if wrong:
            return {"ok": False, "wrong": wrong} | about
        held[0] = made[0]
        del made

        def call() -> Any:
            held[0], out = built.program(held[0], arrays)
            return held[0], out

        seconds = series(call, self.world.calls, self.world.repeats)
        missed = int((np.asarray(arrays.missed) < self.world.chosen).sum())
        row: dict[str, Any] = {
            "ok": True,
            "us": 1e6 * seconds.median,
            "least_us": 1e6 * seconds.least,
            "most_us": 1e6 * seconds.most,
        }
        if case.host:
            row["host_gbs"] = missed * arrays.values.prompt.shape[3] * 2 / seconds.median / 1e9
        return row | about

    def tasks(self, cases: list[Case]) -> Iterator[Task]:
        """Compile all cases of a section at once, and yield their tasks."""
        if self.world.dry:
            cases = cases[:4] + cases[4::4]
        # Cases that differ only in what is kept have the same program.
        same = {case.name: case._replace(name="", share=0.0) for case in cases}
        programs = side_by_side(
            {case: functools.partial(self.compiled, case) for case in same.values()}, self.world.workers
        )
        for case in cases:
            yield Task(case.name, 1, functools.partial(self.measured, case, programs[same[case.name]]))


def fetch_values(values: HostRows, kept: KeptRows, keys: ChosenKeys, form: Form, interpret: bool) -> jax.Array:
    """Fetch the values of the missed chunks, and rebuild no keys. Returns the cache of values [B, h_kv, P, c * d]."""
    batch, heads, tokens, dim = keys.out_shape
    shape, count = (batch, heads, kept.values.shape[2] * CHUNK, dim), form.tokens
    kept = kept._replace(values=kept.values.reshape(shape), keys=kept.keys.reshape(shape))

    def kernel(values, kept, keys, out):  # type: ignore[no-untyped-def]
        j, h, b = (pl.program_id(axis) for axis in range(3))

        @pl.when(pltriton.load(kept.missed.at[b, h, lax.div(j * count, CHUNK)]) < keys.ids.shape[2])
        def _() -> None:
            found = tokens_of(keys, b, h, j * count, count, kept, by_chunks=True)
            loaded = fetch.load_values(values, keys, found, b, h)
            fetch.store_values((values, keys, None, out), loaded, found, b, h, interpret)

    anywhere, operands = pl.BlockSpec(memory_space=pl.ANY), (values, kept, keys)
    fetched = pl.pallas_call(
        kernel,
        grid=(blocks(tokens, count), heads, batch),
        in_specs=list(jax.tree.map(lambda _: anywhere, operands)),
        out_specs=anywhere,
        out_shape=jax.ShapeDtypeStruct(shape, values.value_dtype),
        compiler_params=pltriton.CompilerParams(num_warps=form.warps, num_stages=form.stages),
        input_output_aliases={len(jax.tree.leaves(values)): 0},
        interpret=interpret,
        name="fetch_values",
    )(*operands)
    return fetched.reshape(batch, heads, -1, CHUNK * dim)


def on(memory: str) -> jax.sharding.Sharding:
    """Return the sharding of an array on the first device in a kind of memory."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=memory)


def main(given: list[str] | None = None) -> int:
    """Run the sections. Returns the exit status: 1 if a check failed or a task raised, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        prog="gpu.variants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes and the interpreter; figures mean nothing")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of variants.json")
    parser.add_argument("--seconds", type=float, default=150, help="time of all sections (default: %(default)s)")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="a comma list (default: %(default)s)")
    args = parser.parse_args(given)
    os.environ.setdefault(environment.POOL_VARIABLE, "16")  # before JAX starts its backend
    if not args.dry_run and jax.default_backend() != "gpu":
        print("no GPU here; --dry-run runs tiny sizes on any backend", file=sys.stderr)
        return 2
    world = DRY if args.dry_run else REAL
    about = {"dry_run": args.dry_run, "machine": environment.machine(environment.pool())}
    copied = 2**20 if args.dry_run else 2**30
    machine = Task("bus and clocks", 5, functools.partial(environment.bus_and_clocks, copied))
    runner = Runner(args.out / "variants.json", about, args.seconds)
    variants = Variants(world)
    timer = runner.watch(GRACE)
    sections = {name: lambda make=SECTIONS[name]: variants.tasks(make(world)) for name in args.sections.split(",")}
    status = runner.run({"machine": lambda: iter([machine])} | sections)
    timer.cancel()
    return status


if __name__ == "__main__":
    sys.exit(main())
