"""The hooks of a layer before its attention, in the order that every policy has: append, select, fetch, receive.

B rows, T tokens of a step, h_q query heads, d head width.
"""

from jshadow.cache import offload
from jshadow.cache.records import Fetched, LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.engine.step_work import LayerWork


def append_tokens(spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[LayerState, StepKV]:
    """Store the new tokens, and write the units that leave the device.

    Returns:
        The layer's new state, and the step with the queries after RoPE if `append` has computed them.
    """
    state, rows = spec.policy.append(spec, state, step)
    if state.q_post is not None:
        step = step.replace(q_post=state.q_post)
    return state.replace(host=offload.write(state.host, rows), q_post=None), step


def fetch_units(spec: CacheSpec, state: LayerState, step: StepKV) -> tuple[Fetched | None, LayerState, LayerWork]:
    """Select units, fetch them, and let the policy receive them.

    Returns:
        The fetched units, or None if nothing was selected. The layer's new state, and a record of the fetch.
    """
    policy, work = spec.policy, LayerWork()
    selection, state = policy.select(spec, state, step)
    if selection is None:
        return None, state, work
    layout = policy.host_layout(spec)
    assert layout is not None
    fetched = offload.fetch(spec, state.host, selection, layout)
    state = policy.receive(spec, state, selection, fetched)
    work.add(spec, selection, layout, fetched)
    return fetched, state, work
