"""How many requests fit on a GPU, and a predicted time of a decode step. Nothing is allocated or run.

The bytes of weights and state are exact. The bytes of temporaries are an upper bound. The predicted time of a step is
the time to gather rows on the host, to move each byte and to do each operation once, one after the other, at the rates
of the data sheet. Several GPUs also exchange data. A real step is slower, because it also launches kernels and does not
reach these rates.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.accounting import ByteCount, state_nbytes, total
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.partition import undivided_heads
from jshadow.planner.bytes import Workload, abstract_of, on_backend, prefill_parts, step_temporaries
from jshadow.planner.fetch_choice import ModeFigures, choose_fetch, kernel_refusal, offloads
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, Gpu
from jshadow.planner.mesh import device_weights, model_links, share_of
from jshadow.planner.pieces import most_rows, pieces_of
from jshadow.planner.prefill_time import PrefillTime, prefill_time
from jshadow.policies import Full, Policy
from jshadow.policies.base import Links, step_flops, why_dense
from jshadow.policies.capabilities import Streams, rows_of
from jshadow.policies.checks import check_split
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class StepBound:
    """The bytes and operations of one decode step of a batch on one GPU, and the times that follow from them.

    Several GPUs that share a model make the step together, and these are the figures of each.

    The prediction is that the five times follow one another. The bound is that they overlap completely. No step was
    shown to overlap them: a compiled "zero_copy" step runs one kernel after the other, and a compiled "device_put" step
    allows no more than that the fetch overlaps with the rebuilding of keys.

    Attributes:
        hbm_bytes: bytes read from and written to device memory, by part.
        pcie_bytes: bytes moved from the host.
        flops: number of floating-point operations.
        hbm_seconds, pcie_seconds, flop_seconds: the time of each of these at the full rate of the GPU.
        gather_seconds: the time in which the host gathers the rows that "device_put" moves. 0 in other modes.
        tokens_per_second: predicted tokens per second of the whole batch, from the sum of the five times.
        bound_tokens_per_second: an upper bound on the tokens per second, from the largest of the five times.
        link_bytes: bytes that the GPU sends to others, by part.
        link_seconds: the time of these.
    """

    hbm_bytes: dict[str, int]
    pcie_bytes: int
    flops: int
    hbm_seconds: float
    pcie_seconds: float
    flop_seconds: float
    gather_seconds: float
    tokens_per_second: float
    bound_tokens_per_second: float
    link_bytes: Links = dataclasses.field(default_factory=dict)
    link_seconds: float = 0.0

    @property
    def sent(self) -> int:
        """Bytes that the GPU sends to others."""
        return sum(self.link_bytes.values())


def step_bound(
    gpu: Gpu,
    hbm: dict[str, int],
    moved: int,
    flops: int,
    batch: int,
    gather: float | None = None,
    links: Links | None = None,
) -> StepBound:
    """Return the times of a step that moves each byte once and does each operation once.

    Args:
        gpu: the GPU, whose full rates are taken.
        hbm: bytes read from and written to device memory, by part.
        moved: bytes moved from the host.
        flops: number of floating-point operations.
        batch: number of tokens that the step generates.
        gather: bytes per second at which the host gathers `moved`. None: no gathering, because a kernel reads the rows.
        links: what the GPU sends to others. None: nothing.
    """
    links = links or {}
    linked = sum(links.values()) / gpu.nvlink_bytes_per_second
    seconds = (
        sum(hbm.values()) / gpu.hbm_bytes_per_second,
        moved / gpu.pcie_bytes_per_second,
        flops / gpu.flops,
        0.0 if gather is None else moved / gather,
    )
    times = (*seconds, linked)
    return StepBound(hbm, moved, flops, *seconds, batch / sum(times), batch / max(times), links, linked)


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """The plan of one policy on one GPU, or on each of several that share the model.

    Attributes:
        policy: the policy with all settings resolved.
        fetch: the fetch mode.
        fetch_reason: a sentence that says why "auto" chose the mode, or None if the mode was given.
        repeat_share: share of the selected units that are assumed to be on the device already.
        fallback: the reason why full attention runs in place of the policy at this capacity, or None.
        row_parts: bytes (device, host) of one request's state on one GPU, by part.
        largest_batch: maximum number of requests whose decode step fits, or 0.
        prefill_batch: maximum number of requests whose prefill fits in one call (`prefill_peak`). None for several
            GPUs.
        batch: number of requests for the figures below: the requested number, or the largest batch.
        fits: whether `batch` fits and is not 0.
        temporaries: upper bound on the device bytes of a step in addition to weights and state, by part.
        device_bytes: bytes of weights, states, temporaries and reserve on one GPU.
        host_bytes: bytes in host memory for all GPUs together.
        step: the bytes and times of a decode step; None for an empty batch.
        prefill: the times of the prefill of one request, and of its first token after its state was stored.
    """

    policy: Policy
    fetch: str
    fetch_reason: str | None
    repeat_share: float
    fallback: str | None
    row_parts: dict[str, ByteCount]
    largest_batch: int
    prefill_batch: int | None
    batch: int
    fits: bool
    temporaries: dict[str, int]
    device_bytes: int
    host_bytes: int
    step: StepBound | None
    prefill: PrefillTime

    @property
    def row_bytes(self) -> ByteCount:
        """Bytes of one request on one GPU."""
        return total(self.row_parts.values())

    @property
    def figures(self) -> ModeFigures:
        """The figures by which "auto" compares this plan with those of other fetch modes."""
        speed = 0.0 if self.step is None else self.step.tokens_per_second
        return ModeFigures(self.fetch, self.batch, self.device_bytes, self.host_bytes, speed)


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """The plans of a policy, of other policies to compare it with, and of full attention, on the same GPUs.

    Attributes:
        gpu: the figures of each GPU.
        workload: the requests. Its fetch mode may be "auto". Each PolicyPlan has its own mode.
        weights_bytes: bytes of the weights on one GPU.
        reserve_bytes: bytes on one GPU for memory outside of arrays.
        chosen: the plan of the requested policy.
        beside: the plans of the other policies, by name.
        full: the plan of full attention. Its batch is at most the requested one, and not more than fits.
    """

    gpu: Gpu
    workload: Workload
    weights_bytes: int
    reserve_bytes: int
    chosen: PolicyPlan
    beside: dict[str, PolicyPlan]
    full: PolicyPlan

    @property
    def count(self) -> int:
        """Number of GPUs that share the model."""
        return self.workload.tp

    @property
    def ratio(self) -> float | None:
        """The result of `ratio_of` for the requested policy."""
        return self.ratio_of(self.chosen)

    def ratio_of(self, side: PolicyPlan) -> float | None:
        """Return the ratio of a plan's predicted speed to that of full attention, or None if a batch is empty."""
        step, full = side.step, self.full.step
        return step.tokens_per_second / full.tokens_per_second if step and full else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON, with each policy as its name and settings."""
        plain = dataclasses.replace(self.workload, shards=None)  # a mesh has no plain values
        values = dataclasses.asdict(dataclasses.replace(self, workload=plain))
        host = {name: values["gpu"].pop(name) for name in ("gather_bytes_per_second", "host_limit")}
        shards, sizes = self.workload.shards, values.pop("workload")
        values |= {"mesh": {"tp": self.count, "left": "split" if shards is None else shards.left}, **host}
        values |= {"capacity": self.workload.capacity, **{name: sizes[name] for name in ("dtype", "fetch", "context")}}
        sides = [(values, "chosen", self.chosen), (values, "full", self.full)]
        for place, name, side in sides + [(values["beside"], name, side) for name, side in self.beside.items()]:
            device, offloaded = side.row_bytes
            settings = policy_settings(side.policy)
            place[name] |= {
                "policy": {"name": side.policy.name, **settings},
                "row_device_bytes": device,
                "row_host_bytes": offloaded,
                "ratio": self.ratio_of(side),
            }
        return values | {"count": self.count, "ratio": self.ratio}


_PREFILL_CHUNK = 2048  # the default of `prefill`


def _largest_prefill(config: ModelConfig, policy: Policy, workload: Workload, room: int) -> int:
    """Return how many rows can be prefilled in one call on an NVIDIA GPU in `room` device bytes, or 0."""

    def peak(rows: int) -> int:
        return sum(prefill_parts(config, policy, workload.with_batch(rows), backend="gpu").values())

    # Up to `group` rows go through a layer at once. In each of the two ranges, up to `group` rows and above, every
    # further row adds the same number of bytes. So two peaks of a range give all others.
    group = most_rows(pieces_of(workload.context, _PREFILL_CHUNK)[1], _PREFILL_CHUNK)
    for first, last in ((group + 1, None), (1, group)):
        one, two = peak(first), peak(first + 1)
        if one <= room:
            rows = first + (room - one) // (two - one)
            return rows if last is None else min(rows, last)
    return 0


PAPERS_REPEATS = 0.6  # share of chunks that the previous step had also selected (arXiv 2410.21465, section 5.3)


def capacity_plan(
    config: ModelConfig, policy: Policy, gpu: Gpu, workload: Workload, *, beside: Mapping[str, Policy] | None = None
) -> CapacityPlan:
    """Plan decoding on one GPU, or on several GPUs that share one model.

    Args:
        policy: the policy. Settings that are None are resolved for the capacity.
        gpu: the figures of each GPU, such as one of `gpu_specs.GPUS`.
        beside: other policies by name, which are planned in the same way.

    Returns:
        The plan of the policy, of the other policies and of full attention.

    Raises:
        ConfigError: a size, share or setting is out of range, or a policy cannot run on the mesh.
        CapacityError: context and new tokens exceed the model's context.
    """
    workload = checked(config, workload, gpu)
    planner, batch = Planner(share_of(config, workload.tp), config, gpu, workload), workload.batch
    others = {name: planner.plan(other, batch, capped=False) for name, other in (beside or {}).items()}
    return CapacityPlan(
        gpu=gpu,
        workload=workload,
        weights_bytes=planner.weights_bytes,
        reserve_bytes=CONTEXT_RESERVE,
        chosen=planner.plan(policy, batch, capped=False),
        beside=others,
        full=planner.plan(Full(), batch, capped=True),
    )


def checked(config: ModelConfig, workload: Workload, gpu: Gpu) -> Workload:
    """Return the workload with its repeat_share resolved. Raises the errors of `capacity_plan`."""
    for name, value, least in (
        ("context", workload.context, 1),
        ("max_new_tokens", workload.max_new_tokens, 0),
        ("batch", 1 if workload.batch is None else workload.batch, 1),
        ("host_limit", 0 if gpu.host_limit is None else gpu.host_limit, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if heads := undivided_heads(config, workload.tp):
        raise ConfigError(f"tp must divide the {heads}, got tp={workload.tp}")
    if workload.capacity > config.context:
        raise CapacityError(
            f"context + max_new_tokens must be at most the model's context={config.context}, "
            f"got {workload.context} + {workload.max_new_tokens}"
        )
    gather, share = gpu.gather_bytes_per_second, workload.repeat_share
    if not (gather > 0 and math.isfinite(gather)):
        raise ConfigError(f"gather_bytes_per_second must be above 0 and finite, got {gather!r}")
    offload.check_fetch(workload.fetch)
    if share and workload.fetch == "device_put":
        raise ConfigError(f"repeat_share must be 0 with fetch={workload.fetch!r}, which keeps no unit, got {share!r}")
    share = PAPERS_REPEATS if share is None else share
    if not 0 <= share <= 1:
        raise ConfigError(f"repeat_share must lie in [0, 1], got {share!r}")
    return dataclasses.replace(workload, repeat_share=share)


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner of one GPU, which holds the whole model or a part of it.

    Attributes:
        share: the config of the part of the model that this GPU computes.
        whole: the config of the whole model.
        gpu: the figures of the GPU.
        workload: the requests, with repeat_share resolved.
    """

    share: ModelConfig
    whole: ModelConfig
    gpu: Gpu
    workload: Workload

    @property
    def item(self) -> int:
        """Bytes of one number in weights, keys and values."""
        return jnp.dtype(self.workload.dtype).itemsize

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on this GPU."""
        return self._weights().bytes

    def _weights(self) -> Any:
        return device_weights(self.whole, self.workload.shards, self.item, self.workload.quantize)

    def plan(self, policy: Policy, batch: int | None, *, capped: bool) -> PolicyPlan:
        """Return the plan of a policy. With "auto", it is the plan in the fetch mode that `choose_fetch` chooses.

        Args:
            policy: the policy. Settings that are None are resolved.
            batch: number of requests. None: as many as fit.
            capped: whether `batch` is reduced to the number that fits.

        Raises:
            ConfigError: the policy cannot run on the mesh, or the fetch mode is "zero_copy", and there is no kernel for
                the policy's settings.
        """
        policy = policy.resolve(self.whole, self.workload.capacity)
        if self.workload.fetch != "auto":
            return self.plan_mode(policy, batch, capped=capped)
        resident = self.with_fetch("resident")
        specs = resident.specs(policy, 1)
        if not offloads(specs):
            plan = resident.plan_mode(policy, batch, capped=capped)
            return dataclasses.replace(plan, fetch_reason=f"resident: {policy.name} keeps nothing in host memory")
        refusals = {"zero_copy": refusal} if (refusal := kernel_refusal(specs)) else {}
        plans = {
            mode: self.with_fetch(mode).plan_mode(policy, batch, capped=capped)
            for mode in offload.FETCH_MODES
            if mode not in refusals
        }
        figures = [plan.figures for plan in plans.values()]
        figures += [ModeFigures(mode, 0, 0, 0, 0.0, refusal) for mode, refusal in refusals.items()]
        choice = choose_fetch(figures, self.gpu.limits)
        return dataclasses.replace(plans[choice.fetch], fetch_reason=choice.reason)

    def with_fetch(self, fetch: str) -> "Planner":
        """Return this planner with another fetch mode."""
        return dataclasses.replace(self, workload=self.workload.with_fetch(fetch))

    def plan_mode(self, policy: Policy, batch: int | None, *, capped: bool) -> PolicyPlan:
        """Return the plan of a resolved policy in the fetch mode of the workload, which is not "auto".

        The other arguments and the errors are those of `plan`.
        """
        workload = self.workload
        specs = self.specs(policy, 1)
        for spec in specs:
            check_split(spec, gpu=True)
            if workload.fetch == "zero_copy" and (layout := spec.policy.host_layout(spec)) is not None:
                layout.check_kernel(spec.policy.name)
        row = abstract_of(specs, policy)
        parts = state_nbytes(row)
        device, host = total(parts.values())
        limits = self.gpu.limits

        def needed(rows: int) -> ByteCount:
            beside = self.weights_bytes + sum(self.temporaries(policy, rows).values()) + limits.reserve
            return ByteCount(beside + rows * device, rows * host * workload.tp)

        largest = limits.most(needed, max(1, self.gpu.memory_bytes // device))
        rows = largest if batch is None else min(batch, largest) if capped else batch
        return PolicyPlan(
            policy=policy,
            fetch=workload.fetch,
            fetch_reason=None,
            repeat_share=self.repeats(row),
            fallback=why_dense(policy, self.whole, workload.capacity),
            row_parts=parts,
            largest_batch=largest,
            prefill_batch=self.prefill_batch(policy),
            batch=rows,
            fits=0 < rows <= largest,
            temporaries=self.temporaries(policy, rows),
            device_bytes=needed(rows).device,
            host_bytes=needed(rows).host,
            step=self.step(policy, rows) if rows else None,
            prefill=self.prefill(policy, specs, device),
        )

    def prefill(self, policy: Policy, specs: Sequence[CacheSpec], device_bytes: int) -> PrefillTime:
        """Return the times of the prefill of one request, whose state takes `device_bytes` on the GPU."""
        tokens, step = self.workload.context, self.step(policy, 1)
        time = prefill_time(self.share, specs, self.gpu, tokens, device_bytes, 1 / step.tokens_per_second)
        sent = model_links(self.whole, self.workload.shards, tokens, self.item).get("residual stream", 0)
        return dataclasses.replace(time, link_seconds=sent / self.gpu.nvlink_bytes_per_second)

    def specs(self, policy: Policy, batch: int) -> tuple[Any, ...]:
        """Return the specs of the caches of all layers on this GPU, for `batch` rows."""
        return on_backend(self.workload.with_batch(batch).specs(self.whole, policy), "gpu")

    def temporaries(self, policy: Policy, batch: int) -> dict[str, int]:
        """Return `step_temporaries` of a step of `batch` rows. All are 0 for an empty batch."""
        used = step_temporaries(self.whole, policy, self.specs(policy, max(1, batch)))
        return used if batch else dict.fromkeys(used, 0)

    def prefill_batch(self, policy: Policy) -> int | None:
        """Return how many rows can be prefilled in one call, or None for several GPUs."""
        if self.workload.tp > 1:
            return None
        return _largest_prefill(self.whole, policy, self.workload, self.gpu.memory_bytes - CONTEXT_RESERVE)

    def repeats(self, state: KVState) -> float:
        """Return the share of the selected units that are on the device already, in [0, 1]."""
        layers = zip(state.specs, state.layers, strict=True)
        keeps = any(spec.policy.step_costs(spec, layer).kept for spec, layer in layers)
        return self.workload.repeat_share or 0.0 if keeps else 0.0

    def step(self, policy: Policy, batch: int, *, passes: bool = True) -> StepBound:
        """Return the bytes and times of one decode step of `batch` rows.

        Args:
            policy: the resolved policy.
            batch: number of rows.
            passes: whether to count what the GPU kernels move beyond the state (`StepCosts.passes`).
        """
        state = abstract_of(self.specs(policy, batch), policy)
        weights, rows = self._weights(), batch * rows_of(policy)
        # A step reads one row a token of an embedding that is not also the head, so such an embedding is left out.
        unread = 0 if self.share.tie_embeddings else weights.embedding
        read_once = weights.numbers - weights.experts - unread
        chosen, some = _experts_read(self.whole, rows)
        of_experts = round(some * weights.experts) * weights.expert_bytes // max(1, weights.experts)
        read = weights.bytes - weights.expert_bytes - self.item * unread + of_experts
        hbm: dict[str, float] = {"weights": read}
        flops = 2 * rows * (read_once + round(chosen * weights.experts))
        share, moved = self.repeats(state), 0.0
        links = model_links(self.whole, self.workload.shards, rows, self.item)
        for spec, layer in zip(state.specs, state.layers, strict=True):
            costs = spec.policy.step_costs(spec, layer)
            read = [*spec.policy.step_bytes(spec, layer).items(), *(costs.passes.items() if passes else ())]
            for part, (device, host) in read:
                hbm[part] = hbm.get(part, 0) + device
                moved += host
            for part, (device, host) in costs.kept.items():
                if part in hbm:
                    hbm[part] -= share * device
                moved -= share * host if passes or part == "values" else 0.0
            flops += step_flops(spec, layer)
            for part, sent in costs.links.items():
                links[part] = links.get(part, 0) + sent
        by_kernel = self.workload.fetch == "zero_copy" and not kernel_refusal(state.specs)
        whole = any(isinstance(spec.policy, Streams) for spec in state.specs)  # whole blocks need no gathering
        gather = None if by_kernel or whole else self.gpu.gather_bytes_per_second
        read_bytes = {part: round(size) for part, size in hbm.items() if size}
        return step_bound(self.gpu, read_bytes, round(moved), flops, batch, gather, links)


def _experts_read(config: ModelConfig, rows: int) -> tuple[float, float]:
    """Return the share of the experts' weights that a token uses, and the share that a step of `rows` tokens reads.

    The prediction is that the tokens choose independently and evenly.
    """
    if config.experts is None:
        return 1.0, 1.0
    share = config.experts.chosen / config.experts.count
    return share, 1 - (1 - share) ** rows
