"""Times of the stages of one layer's decode step, each compiled separately, and of the whole step."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gpu.runner import Task, attempt, brief
from gpu.sizes import Sizes
from gpu.steered import PHASE
from gpu.synthetic import free, on_device, sharding, state, steered
from gpu.timing import Seconds, build, series
from jshadow.cache import offload
from jshadow.cache.records import Fetched, HostTier, LayerState, Selection, StepKV
from jshadow.engine.step import AllLayers, step_layer
from jshadow.evaluation.speed.layer import Shape, random_step
from jshadow.ops.attention import Piece, attend
from jshadow.ops.layout import top_k
from jshadow.policies.shadowkv.policy import own_piece

CALLS = 8


@dataclasses.dataclass(frozen=True)
class Stages:
    """A layer after prompts that fill all but 64 tokens of the capacity.

    Attributes:
        sizes: all sizes.
        capacity: maximum tokens of a row.
        batch: number of rows.
        packed: whether keys, landmarks and values are packed.
    """

    sizes: Sizes
    capacity: int
    batch: int
    packed: bool = False

    def timed(self, function: Any, *args: Any, unused: bool = False) -> Any:
        """Return the milliseconds of a stage, or its error."""

        def run() -> float:
            program = build(function, *args, unused=unused).program
            return 1e3 * series(lambda: program(*args), CALLS, self.sizes.repeats).median

        return attempt(run)

    def measured(self) -> dict[str, Any]:
        """Measure the milliseconds of each stage, and of the whole step with both offloading fetch modes."""
        sizes, prompt = self.sizes, self.sizes.prompt(self.capacity)
        config, policy = sizes.layer_config, steered(sizes.packed if self.packed else sizes.policy, prompt)
        held = state(config, policy, self.batch, self.capacity, prompt, "zero_copy")
        try:
            shape = Shape(prompt, self.batch, config.q_heads, config.kv_heads, config.head_dim)
            step = jax.device_put(random_step(shape, 1), sharding("device"))
            spec, layer = held.specs[0], held.layers[0]
            found = {"empty program": self.timed(lambda layer, step: jnp.int32(0), layer, step, unused=True)}
            try:
                found |= self.stages(spec, layer, step)
            except Exception as error:  # the error stands for the remaining stages
                found["stages"] = {"error": brief(error)}
            for fetch in ("device_put", "zero_copy"):
                run = functools.partial(self.whole, dataclasses.replace(spec, fetch=fetch), layer, step)
                found[f"whole, {fetch}"] = attempt(lambda run=run: 1e3 * run().median)
            told = {"packed": True} if self.packed else {}
            return {"capacity": self.capacity, "batch": self.batch, "milliseconds": found} | told
        finally:
            free(held)

    def stages(self, spec: Any, layer: LayerState, step: StepKV) -> dict[str, Any]:
        """Measure all stages except the whole step."""
        policy, layout = spec.policy, spec.policy.host_layout(spec)
        scores = jax.jit(policy.scores, static_argnums=0)(spec, layer, step)
        select = jax.jit(functools.partial(self.selected, spec))
        selection: Selection = select(layer, step)
        ids = jnp.broadcast_to(selection.ids, (self.batch, layout.heads, selection.ids.shape[2]))
        plain, put = selection.replace(kept=None), dataclasses.replace(spec, fetch="device_put")
        fetched: Fetched = jax.jit(functools.partial(self.fetched, put))(layer.host, plain)

        def gather(tier: HostTier, ids: Any) -> Any:
            return offload.gather(tier, ids, (layout.units, layout.tail_units))

        def attention(layer: LayerState, step: StepKV, fetched: Fetched) -> Any:
            assert fetched.k is not None
            pieces = [*policy.exact_pieces(spec, layer, step), own_piece(fetched.k, fetched, 1)]
            return attend(step.q_post, pieces, spec.scale)

        count = policy.max_selected(spec.capacity)
        return {
            "scores": self.timed(functools.partial(policy.scores, spec), layer, step),
            "top_k": self.timed(functools.partial(top_k, count=count), scores),
            "fetch V (host gather, device_put)": self.timed(gather, layer.host, ids),
            "rebuild K": self.timed(lambda rebuild, ids: rebuild.keys(ids), selection.rebuild, ids),
            "fetch V and rebuild K (device_put)": self.timed(functools.partial(self.fetched, put), layer.host, plain),
            "fetch V and rebuild K (zero_copy)": self.timed(functools.partial(self.fetched, spec), layer.host, plain),
            "attention": self.timed(attention, layer, step, fetched),
        }

    @staticmethod
    def selected(spec: Any, layer: LayerState, step: StepKV) -> Selection:
        """Return the selection of the step."""
        selection, _ = spec.policy.select(spec, layer, step)
        assert selection is not None
        return selection

    @staticmethod
    def fetched(spec: Any, tier: HostTier, selection: Selection) -> Fetched:
        """Fetch a selection with the fetch mode of the spec."""
        return offload.fetch(spec, tier, selection, spec.policy.host_layout(spec))

    def whole(self, spec: Any, layer: LayerState, step: StepKV) -> Seconds:
        """Time the layer's step. Its position advances, so that each step selects different chunks."""
        live = layer.live if spec.fetch == "zero_copy" else layer.live.replace(values=None)

        def run(frozen: Any, tier: Any, live: Any, step: StepKV) -> tuple[Any, Any, Any]:
            given = LayerState(frozen, live, HostTier(tier))
            out, after, _ = step_layer(spec, given, step, AllLayers((spec,), [given.host]))
            # The position stays in the phase in which consecutive steps select no common chunk.
            position = spec.policy.prompt + (step.positions - spec.policy.prompt + 1) % PHASE
            return out, after.live, step.replace(positions=position, lengths=position[:, 0])

        # Each step consumes its state, so copies are used.
        box = [jax.tree.map(jnp.copy, live), jax.tree.map(jnp.copy, step)]
        program = build(run, layer.frozen, layer.host.prompt, *box, donate=(2, 3)).program

        def once() -> Any:
            out, *box[:] = program(layer.frozen, layer.host.prompt, *box)
            return out

        found = series(once, CALLS, self.sizes.repeats)
        free(box)
        return found


def dense(sizes: Sizes, capacity: int, batch: int) -> dict[str, Any]:
    """Time full attention of one token with our kernel and with JAX's own.

    This shows whether full attention is a fair baseline in the decode part.
    """
    config = sizes.layer_config
    shape = Shape(capacity, batch, config.q_heads, config.kv_heads, config.head_dim)
    q = random_step(shape, 1).q_post

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attend(q, [Piece(k, v, jnp.ones((1, 1, 1, capacity), bool))], config.head_dim**-0.5)

    found = {}
    for name, function, order in (
        ("full attention, sparse_attention", ours, (batch, config.kv_heads, capacity)),
        ("full attention, jax.nn", jax.nn.dot_product_attention, (batch, capacity, config.kv_heads)),
    ):
        found[name] = attempt(functools.partial(attended, sizes, function, q, (*order, config.head_dim)))
    size = 2 * 2 * batch * config.kv_heads * capacity * config.head_dim
    return {"capacity": capacity, "batch": batch, "bytes": size, "milliseconds": found}


def attended(sizes: Sizes, function: Any, q: Any, shape: tuple[int, ...]) -> float:
    """Return the milliseconds of one attention function with keys and values of a shape."""
    k, v = (on_device(seed, 1.0, shape) for seed in (1, 2))
    try:
        program = build(function, q, k, v).program
        return 1e3 * series(lambda: program(q, k, v), CALLS, sizes.repeats).median
    finally:
        free(k, v)


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Yield three tasks for each context."""
    for capacity, batch in zip(sizes.capacities, sizes.layer_batch, strict=True):
        needs, few = 0 if sizes.dry else 30, max(1, batch // 4)
        yield Task(f"stages, {batch} x {capacity:,}", needs, Stages(sizes, capacity, batch).measured)
        yield Task(f"stages, packed, {batch} x {capacity:,}", needs, Stages(sizes, capacity, batch, True).measured)
        yield Task(f"full attention, {few} x {capacity:,}", needs / 3, functools.partial(dense, sizes, capacity, few))
