"""How many sessions a serving engine can hold: the bytes of its groups of rows, counted without allocating anything.

A session is one row of a group. One program steps the rows of a group, and the groups are stepped one after another. So
temporaries count once, for the largest group. Sessions on one document share its prompt half, which is held once on the
device and once in host memory (`KVState.share`).
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.accounting import leaf_bytes, state_nbytes
from jshadow.cache.records import HostTier
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, with_room
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend, prefill_peak
from jshadow.planner.fetch_choice import kernel_refusal
from jshadow.planner.session_records import ClassPlan, MemoryLimits, Parts, SessionClass, SessionPlan, added, total
from jshadow.planner.step_temporaries import step_temporaries
from jshadow.policies.base import Policy
from jshadow.policies.prefill_attention import PrefillAttention


def session_plan(
    config: ModelConfig,
    policy: Policy,
    classes: Sequence[SessionClass],
    limits: MemoryLimits,
    *,
    dtype: str = "bfloat16",
    fetch: str = "auto",
    backend: str = "gpu",
) -> SessionPlan:
    """Plan the sessions of a serving engine on one device.

    Args:
        config: the model.
        policy: the policy of the classes that have none. Settings that are None are resolved for each class.
        classes: the sizes of sessions. In at most one class, the number of groups may be None.
        limits: the memory that the engine may take.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode. "auto": the mode with the most sessions. If modes are equal, it is the first of "resident",
            "zero_copy" and "device_put". If no mode fits, it is the one that needs the least device memory.
        backend: "gpu" for an NVIDIA GPU, or the name of another backend.

    Raises:
        CapacityError: a class has a prompt without tokens, a room below 0, or more tokens than the model's context.
        ConfigError: a count or setting is out of range, two classes leave out their groups, or no kernel serves the
            settings with "zero_copy".
    """
    for sizes in classes:
        check_class(config, sizes)
    if not classes or sum(sizes.groups is None for sizes in classes) > 1:
        raise ConfigError(f"classes must be at least one, with groups=None in at most one, got {tuple(classes)!r:.200}")
    offload.check_fetch(fetch)
    plans = []
    for mode in ("resident", "zero_copy", "device_put") if fetch == "auto" else (fetch,):
        specs = [class_specs(config, sizes.policy or policy, sizes, dtype, mode, backend) for sizes in classes]
        if mode == "zero_copy" and backend == "gpu":
            if fetch == "auto" and any(map(kernel_refusal, specs)):
                continue
            for spec in (spec for group in specs for spec in group):
                if (layout := spec.policy.host_layout(spec)) is not None:
                    layout.check_kernel(spec.policy.name)
        made = [
            class_plan(config, sizes.policy or policy, sizes, rows) for sizes, rows in zip(classes, specs, strict=True)
        ]
        plans.append(filled(config, made, limits, dtype))
    # The first of equal ones. If no mode fits, it is the one that needs the least device memory.
    return max(plans, key=lambda plan: (not plan.excess(), plan.sessions, -plan.device_bytes if plan.excess() else 0))


def check_class(config: ModelConfig, sizes: SessionClass) -> None:
    """Raise ConfigError or CapacityError for a class that is out of range."""
    if sizes.prompt < 1 or sizes.room < 0 or sizes.capacity > config.context:
        raise CapacityError(
            f"prompt must be at least 1, room at least 0, and both together at most the model's "
            f"context={config.context}, got {sizes.prompt} + {sizes.room}"
        )
    groups = 0 if sizes.groups is None else sizes.groups
    for name, value, least in (("group_rows", sizes.group_rows, 1), ("groups", groups, 0)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if sizes.documents < 0:
        raise ConfigError(f"documents must be at least 0, got {sizes.documents}")


def class_specs(
    config: ModelConfig, policy: Policy, sizes: SessionClass, dtype: str, fetch: str, backend: str
) -> tuple[CacheSpec, ...]:
    """Return the spec of each layer for one session of a class, whose room is that of the class."""
    policy = policy.resolve(config, sizes.capacity)
    specs = cache_specs(config, policy, 1, sizes.capacity, sizes.prompt, dtype, fetch)
    return on_backend(with_room(specs, sizes.room), backend)


def class_plan(
    config: ModelConfig,
    policy: Policy,
    sizes: SessionClass,
    specs: tuple[CacheSpec, ...],
    *,
    prefill_chunk: int = 2048,
    attention: PrefillAttention | None = None,
) -> ClassPlan:
    """Return the plan of a class, from the specs of one session. The number of groups is that of `sizes`.

    `prefill_chunk` and `attention` are as in `prefill_peak`.
    """
    policy = policy.resolve(config, sizes.capacity)
    prompt, live = halves(abstract_of(specs, policy))
    document = total(halves(abstract_of(with_room(specs, 0), policy))[1])
    group = tuple(dataclasses.replace(spec, batch=sizes.group_rows) for spec in specs)
    peak = prefill_peak(
        config,
        policy,
        batch=1,
        tokens=sizes.prompt,
        capacity=sizes.capacity,
        prefill_chunk=prefill_chunk,
        dtype=specs[0].dtype,
        fetch=specs[0].fetch,
        attention=attention,
        backend="gpu" if specs[0].keep == "gpu" else None,
        room=0 if sizes.documents else sizes.room,
    )
    held = added(total(prompt), document if sizes.documents else total(live))
    reading = sum(peak.values()) - peak["weights"] - peak["state"] + held[0]
    return ClassPlan(
        sizes=sizes,
        policy=policy,
        fetch=specs[0].fetch,
        prompt_parts=prompt,
        live_parts=live,
        document_live=document,
        temporaries=step_temporaries(config, policy, group),
        prefill=(reading, held[1]),
    )


def filled(config: ModelConfig, classes: Sequence[ClassPlan], limits: MemoryLimits, dtype: str) -> SessionPlan:
    """Return the plan with as many groups as fit in the class that leaves their number out."""
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(config)))
    plan = SessionPlan(tuple(classes), weights * jnp.dtype(dtype).itemsize, limits)
    for place, free in enumerate(classes):
        if free.sizes.groups is not None:
            continue
        rest = [
            (limit - used) // size
            for limit, used, size in zip(
                (limits.device, limits.host), (plan.device_bytes, plan.host_bytes), free.group_bytes, strict=True
            )
            if limit is not None and size
        ]
        if not rest:
            raise ConfigError("groups must be given where no memory has a limit, got None")
        sizes = dataclasses.replace(free.sizes, groups=0 if plan.excess() else min(rest))
        done = (*classes[:place], dataclasses.replace(free, sizes=sizes), *classes[place + 1 :])
        plan = dataclasses.replace(plan, classes=done)
    return plan


def halves(state: KVState) -> tuple[Parts, Parts]:
    """Return the bytes (device, host) of the prompt half and of the live half of a state, by part.

    The lengths, the last tokens and the counters are "counts". Arrays that the policy learned are left out.
    """
    layers = state.layers
    prompt = tuple(layer.replace(live=None, host=HostTier(layer.host.prompt)) for layer in layers)
    live = tuple(layer.replace(frozen=None, host=HostTier(None, layer.host.tail)) for layer in layers)
    counts = jax.tree.leaves((state.lengths, state.last, state.counters))
    return (
        state_nbytes(state.replace(layers=prompt, shared=None, fitted=None)),
        state_nbytes(state.replace(layers=live, fitted=None)) | {"counts": (sum(map(leaf_bytes, counts)), 0)},
    )
