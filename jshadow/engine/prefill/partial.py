"""A prefill as a value that advances by one unit a call, so that a server can decode between two units.

`begin_prefill` makes the value, `advance_prefill` returns the next value, and `finish_prefill` runs the rest. `prefill`
runs the same programs, so a paused prefill gives the same state, bit for bit.
"""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache import host_memory, offload
from jshadow.cache.records import LayerState, PromptKV
from jshadow.cache.state import KVState, is_deleted, of_layer
from jshadow.engine.blas_threads import one_blas_thread
from jshadow.engine.checks import check_policy
from jshadow.engine.mesh.agree import run_together
from jshadow.engine.prefill.end import embed_prompt, end_prefill
from jshadow.engine.prefill.job import PrefillJob, PrefillOptions, check_job
from jshadow.engine.prefill.layer import Given, compress_layer, needed
from jshadow.engine.prefill.progress import PrefillProgress
from jshadow.engine.prefill.schedule import Schedule
from jshadow.engine.prefill.second_pass import SecondWork
from jshadow.engine.prefill.units import LayerWork, prompt_read, run_unit
from jshadow.engine.types import PrefillKeywords, Tokens, WholeLogits
from jshadow.errors import StateMismatch
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.prefill_pieces import pieces_of
from jshadow.policies import Policy
from jshadow.policies.checks import reads_fitted
from jshadow.policies.costs import costs_of
from jshadow.weights.params import Params

CONSUMED = "the prefill was advanced before; use the value that advance_prefill returned"


@dataclasses.dataclass(frozen=True, eq=False)
class PartialPrefill:
    """A prefill that has read some layers, and some pieces of the next layer.

    It is immutable. `advance_prefill` reuses the memory of its arrays, so a value can be advanced only once.

    Attributes:
        job: the checked arguments.
        schedule: the units of all layers.
        work: the hidden states, and the arrays of the layer that is being read.
        unit: number of finished units of this layer.
        layers: the finished layers. For each layer, the state of each policy.
    """

    job: PrefillJob = dataclasses.field(repr=False)
    schedule: Schedule = dataclasses.field(repr=False)
    work: LayerWork = dataclasses.field(repr=False)
    unit: int = 0
    layers: tuple[tuple[LayerState, ...], ...] = dataclasses.field(default=(), repr=False)

    @property
    def done(self) -> bool:
        """Whether all layers are finished."""
        return len(self.layers) == len(self.schedule.plans)

    @property
    def progress(self) -> PrefillProgress:
        """How far the prefill is, without a rate."""
        layer, schedule = len(self.layers), self.schedule
        share = 1.0 if self.done else schedule.done[layer][self.unit]
        units = 0 if self.done else len(schedule.units[layer])
        return PrefillProgress(layer, len(schedule.plans), self.unit, units, share, int(self.job.lengths.sum()))


def begin(job: PrefillJob) -> PartialPrefill:
    """Embed the prompts, and return the prefill before its first unit."""
    options, config, width = job.options, job.params.config, job.tokens.shape[1]
    count, size = pieces_of(width, options.prefill_chunk, job.attention.multiple if job.attention else 1)
    pieces = -(-int(job.lengths.max()) // size)
    plans = tuple(job.layer_plan(index, count, size) for index in range(config.num_layers))
    compressions = tuple(
        sum(costs_of(plan[index].policy).compress_flops(plan[index], count * size) for plan in job.plans)
        for index in range(config.num_layers)
    )
    requests = job.requests
    schedule = Schedule(plans, compressions, len(job.lengths), pieces, (0, 0) if requests is None else requests.sizes)
    # NumPy pads the tokens, so that this compiles no program for each length.
    padded = np.zeros((len(job.tokens), count * size), job.tokens.dtype)
    padded[:, :width] = job.tokens
    ids = jnp.asarray(padded)
    x = run_together(embed_prompt, job.params.weights, ids, config=config)
    second = None
    if requests is not None:
        ids = jnp.asarray(requests.tokens.swapaxes(0, 1))
        counts = jnp.asarray(requests.counts.swapaxes(0, 1))
        second = SecondWork(run_together(embed_prompt, job.params.weights, ids, config=config), counts)
    return PartialPrefill(job, schedule, first_work(job, x, second))


def first_work(job: PrefillJob, x: Array, second: SecondWork | None) -> LayerWork:
    """Return the arrays before the first unit of a layer. The lengths are a copy, because the layer donates them."""
    return LayerWork(x, jnp.array(job.lengths), second=second)


def advance(partial: PartialPrefill) -> PartialPrefill:
    """Run the next unit, and return the prefill after it. It may still be running on the device."""
    job, schedule, index = partial.job, partial.schedule, len(partial.layers)
    plan, unit = schedule.plans[index], schedule.units[index][partial.unit]
    if unit.work != "compress":
        # NumPy computes the angles, so that they take no device memory between layers.
        inverse = inverse_frequencies(plan.kind.rope, plan.config.head_dim, job.options.capacity)
        given = Given(job.params.weights[f"layer_{index}"], inverse, of_layer(job.learned, index))
        work = run_unit(plan, unit, given, partial.work)
        return dataclasses.replace(partial, work=work, unit=partial.unit + 1)
    with one_blas_thread() as results:
        # The rows of at most one layer are on their way to the host: wait for those of the layer before.
        host_memory.settle(partial.layers[-1] if partial.layers else [], job.plans)
        states = compress_all(job, index, prompt_read(plan, partial.work))
        results.append(states)
    work = first_work(job, partial.work.x, partial.work.second)
    return dataclasses.replace(partial, work=work, unit=0, layers=(*partial.layers, states))


def compress_all(job: PrefillJob, index: int, prompt: PromptKV) -> tuple[LayerState, ...]:
    """Compress the prompt in layer `index`, and return the layer's state for each policy.

    The host rows may not have been copied completely yet.
    """
    states = []
    for plan in job.plans:
        spec = plan[index]
        fitted = of_layer(job.options.fitted, index) if reads_fitted(spec.policy) else None
        state, write = run_together(
            compress_layer, needed(prompt, spec), fitted, spec=dataclasses.replace(spec, layer=None)
        )
        with host_memory.placing(job.plans):
            states.append(state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write)))
    return tuple(states)


def end(partial: PartialPrefill) -> list[tuple[Any, KVState]]:
    """Return (logits, state) for each policy after the last unit."""
    host_memory.settle(partial.layers[-1], partial.job.plans)
    return end_prefill(partial.job, partial.work.x, partial.layers)


def check_partial(params: Params, partial: PartialPrefill, policy: Policy | None) -> None:
    """Raise StateMismatch unless the prefill was begun with these parameters and this policy, and can be advanced.

    Args:
        params: the model.
        partial: any value. An error is raised if it is not a PartialPrefill.
        policy: the policy that the caller passed, or None.
    """
    if not isinstance(partial, PartialPrefill):
        raise StateMismatch(f"partial must be a PartialPrefill, as begin_prefill returns it, got {partial!r:.80}")
    job = partial.job
    if params.weights is not job.params.weights:
        want, got = (
            f"{one.config.num_layers} layers of {one.config.model_dim} columns" for one in (job.params, params)
        )
        raise StateMismatch(f"params must be those with which the prefill was begun ({want}), got others ({got})")
    if policy is not None:
        check_policy(policy)
        resolved = policy.resolve(job.params.config, job.options.capacity)
        if resolved not in job.policies:
            raise StateMismatch(f"policy must be the prefill's own {job.policies[0]}, got {resolved}")
    if any(is_deleted(leaf) for leaf in jax.tree.leaves(partial.work)):
        raise StateMismatch(CONSUMED)


def begin_prefill(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policy: Policy | None = None,
    *,
    capacity: int,
    logits: WholeLogits = "last",
    **options: Unpack[PrefillKeywords],
) -> PartialPrefill:
    """Begin a prefill that can be paused. The arguments are those of `prefill`, but `logits` is "last" or "all".

    All lengths up to the width S of `tokens` share the compiled programs. Pieces without real tokens are not computed.
    So a server pads its prompts to a few widths.

    Raises:
        PromptError, CapacityError, ConfigError, HostMemoryError: as in `prefill`.
    """
    defaults = {"fetch": "auto", "fitted": None, "prefill_chunk": 2048, "attention": None, "room": None}
    settings: dict[str, Any] = {**defaults, **options}
    fetch = settings.pop("fetch")
    chosen = PrefillOptions(capacity=capacity, logits=logits, shortest=None, progress=None, **settings)
    return begin(check_job(params, tokens, lengths, [policy], fetch, chosen))


def advance_prefill(params: Params, partial: PartialPrefill, policy: Policy | None = None) -> PartialPrefill:
    """Run one unit of a prefill: one piece of one layer, one call of attention, or the compression of one layer.

    The result may still be computing on the device. `PartialPrefill.done` tells whether the prefill has units left.

    Args:
        params: the model with which the prefill was begun.
        partial: the prefill. Its arrays are consumed.
        policy: if given, it must be the policy with which the prefill was begun.

    Returns:
        The prefill after the unit, or `partial` itself if it is done.

    Raises:
        StateMismatch: the prefill was begun with other parameters or another policy, or was advanced before.
        HostMemoryError: the host lacks the memory for the offloaded rows.
    """
    check_partial(params, partial, policy)
    return partial if partial.done else advance(partial)


def finish_prefill(params: Params, partial: PartialPrefill, policy: Policy | None = None) -> tuple[Array, KVState]:
    """Run all units that are left. Return the logits and the KV state, as `prefill` does.

    The arguments and errors are those of `advance_prefill`.
    """
    check_partial(params, partial, policy)
    while not partial.done:
        partial = advance(partial)
    result = end(partial)[0]
    partial.work.x.delete()  # the state has the arrays of the layers, so the value cannot be finished again
    return result
