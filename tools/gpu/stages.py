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
from gpu.synthetic import free, in_mode, relaid, sharding, state, steered
from gpu.timing import Seconds, build, series
from jshadow.cache import offload
from jshadow.cache.records import Fetched, HostTier, LayerState, Selection, StepKV
from jshadow.engine.step import AllLayers, step_layer
from jshadow.evaluation.speed import Shape, random_step
from jshadow.ops.attention import attend
from jshadow.policies.shadowkv.selection import own_piece

CALLS = 8
# The codes, and the fetch modes in which their stages are measured.
FETCHES = {
    "paper": ("zero_copy", "device_put"),
    "packed": ("zero_copy", "device_put"),
    "packed small": ("resident",),
}


@dataclasses.dataclass(frozen=True)
class Stages:
    """A layer after prompts that fill all but 64 tokens of the capacity.

    Attributes:
        sizes: all sizes.
        capacity: maximum tokens of a row.
        batch: number of rows.
        code: settings of ShadowKV by name, a key of FETCHES.
    """

    sizes: Sizes
    capacity: int
    batch: int
    code: str

    def timed(self, function: Any, *args: Any, unused: bool = False) -> Any:
        """Return the milliseconds of a stage, or its error."""

        def run() -> float:
            program = build(function, *args, unused=unused).program
            return 1e3 * series(lambda: program(*args), CALLS, self.sizes.repeats).median

        return attempt(run)

    def measured(self) -> dict[str, Any]:
        """Measure the milliseconds of each stage, and of the whole step with each fetch mode of the code."""
        sizes, prompt = self.sizes, self.sizes.prompt(self.capacity)
        config, policy = sizes.layer_config, steered(sizes.policies[self.code], prompt, self.capacity)
        fetches = FETCHES[self.code]
        held = state(config, policy, self.batch, self.capacity, prompt, fetches[0])
        try:
            shape = Shape(prompt, self.batch, config.q_heads, config.kv_heads, config.head_dim)
            step = jax.device_put(random_step(shape, 1), sharding("device"))
            spec, layer = held.specs[0], held.layers[0]
            found = {"empty program": self.timed(lambda layer, step: jnp.int32(0), layer, step, unused=True)}
            try:
                found |= self.stages(spec, layer, step)
            except Exception as error:  # the error stands for the remaining stages
                found["stages"] = {"error": brief(error)}
            for fetch in reversed(fetches):
                run = functools.partial(self.whole, in_mode(spec, fetch), layer, step)
                found[f"whole, {fetch}"] = attempt(lambda run=run: 1e3 * run().median)
            return {"code": self.code, "capacity": self.capacity, "batch": self.batch, "milliseconds": found}
        finally:
            free(held)

    def stages(self, spec: Any, layer: LayerState, step: StepKV) -> dict[str, Any]:
        """Measure all stages except the whole step."""
        policy, layout = spec.policy, spec.policy.host_layout(spec)
        select = jax.jit(functools.partial(self.selected, spec))
        selection: Selection = select(layer, step)
        ids = jnp.broadcast_to(selection.ids, (self.batch, layout.heads, selection.ids.shape[2]))
        plain = selection.replace(kept=None)
        modes = {fetch: functools.partial(self.fetched, in_mode(spec, fetch)) for fetch in FETCHES[self.code]}
        fetched: Fetched = jax.jit(modes[spec.fetch])(layer.host, selection)

        def gather(tier: HostTier, ids: Any) -> Any:
            return offload.gather(tier, ids, (layout.units, layout.tail_units))

        def attention(layer: LayerState, step: StepKV, fetched: Fetched) -> Any:
            pieces = [*policy.exact_pieces(spec, layer, step), own_piece(fetched, 1, spec.head_dim)]
            return attend(step.q_post, pieces, spec.scale)

        return {
            "scores": self.timed(functools.partial(policy.scores, spec), layer, step),
            "select": self.timed(functools.partial(self.selected, spec), layer, step),
            "gather V": self.timed(gather, layer.host, ids),
            "rebuild K": self.timed(lambda rebuild, ids: rebuild.keys(ids), selection.rebuild, ids),
            "attention": self.timed(attention, layer, step, fetched),
        } | {f"fetch V and rebuild K ({fetch})": self.timed(run, layer.host, plain) for fetch, run in modes.items()}

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
        live = relaid(layer, spec).live

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


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Yield one task for each code at the longest context, and one for the paper's codes at each shorter one."""
    first, *shorter = zip(sizes.capacities, sizes.layer_batch, strict=True)
    for code, (capacity, batch) in [*((code, first) for code in FETCHES), *(("paper", size) for size in shorter)]:
        stages = Stages(sizes, capacity, batch, code)
        yield Task(f"stages, {code}, {batch} x {capacity:,}", 0 if sizes.dry else 30, stages.measured)
