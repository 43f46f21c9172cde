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
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.spec import CacheSpec, local_spec
from jshadow.cache.state import with_room
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.planner.fetch_choice import ModeFigures, choose_fetch, kernel_refusal, offloads
from jshadow.planner.gpu_plan import CapacityPlan, PolicyPlan, Serving, StepBound, step_bound
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, Gpu
from jshadow.planner.mesh import device_weights, model_links, share_of
from jshadow.planner.prefill_batch import largest_prefill
from jshadow.planner.prefill_time import PrefillTime, prefill_time
from jshadow.planner.step_temporaries import step_temporaries
from jshadow.policies import Full, Policy
from jshadow.policies.base import why_dense
from jshadow.policies.capabilities import Streams
from jshadow.policies.costs import costs_of, rows_of
from jshadow.policies.mesh_checks import check_split

PAPERS_REPEATS = 0.6  # share of chunks that the previous step had also selected (arXiv 2410.21465, section 5.3)


def capacity_plan(
    config: ModelConfig, policy: Policy, gpu: Gpu, serving: Serving, *, beside: Mapping[str, Policy] | None = None
) -> CapacityPlan:
    """Plan decoding on one GPU, or on several GPUs that share one model.

    Args:
        config: the model.
        policy: the policy. Settings that are None are resolved for the capacity.
        gpu: the figures of each GPU, such as one of `gpu_specs.GPUS`.
        serving: prompts, requests, mesh, dtype and fetch mode.
        beside: other policies by name, which are planned in the same way.

    Returns:
        The plan of the policy, of the other policies and of full attention.

    Raises:
        ConfigError: a size, share or setting is out of range, or a policy cannot run on the mesh.
        CapacityError: context and new tokens exceed the model's context.
    """
    serving = checked(config, serving)
    planner, batch = Planner(share_of(config, serving.mesh.tp), config, gpu, serving), serving.batch
    others = {name: planner.plan(other, batch, capped=False) for name, other in (beside or {}).items()}
    return CapacityPlan(
        gpu=gpu,
        mesh=serving.mesh,
        dtype=serving.dtype,
        fetch=serving.fetch,
        context=serving.context,
        capacity=serving.capacity,
        gather_bytes_per_second=serving.gather_bytes_per_second,
        weights_bytes=planner.weights_bytes,
        reserve_bytes=CONTEXT_RESERVE,
        host_limit=serving.host_limit,
        chosen=planner.plan(policy, batch, capped=False),
        beside=others,
        full=planner.plan(Full(), batch, capped=True),
    )


def checked(config: ModelConfig, serving: Serving) -> Serving:
    """Return `serving` with its repeat_share resolved. Raises the errors of `capacity_plan`."""
    for name, value, least in (
        ("context", serving.context, 1),
        ("max_new_tokens", serving.max_new_tokens, 0),
        ("batch", 1 if serving.batch is None else serving.batch, 1),
        ("host_limit", 0 if serving.host_limit is None else serving.host_limit, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    serving.mesh.check(config)
    if serving.capacity > config.context:
        raise CapacityError(
            f"context + max_new_tokens must be at most the model's context={config.context}, "
            f"got {serving.context} + {serving.max_new_tokens}"
        )
    gather, share = serving.gather_bytes_per_second, serving.repeat_share
    if not (gather > 0 and math.isfinite(gather)):
        raise ConfigError(f"gather_bytes_per_second must be above 0 and finite, got {gather!r}")
    offload.check_fetch(serving.fetch)
    if share and serving.fetch == "device_put":
        raise ConfigError(f"repeat_share must be 0 with fetch={serving.fetch!r}, which keeps no unit, got {share!r}")
    share = PAPERS_REPEATS if share is None else share
    if not 0 <= share <= 1:
        raise ConfigError(f"repeat_share must lie in [0, 1], got {share!r}")
    return dataclasses.replace(serving, repeat_share=share)


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner of one GPU, which holds the whole model or a part of it.

    Attributes:
        share: the config of the part of the model that this GPU computes.
        whole: the config of the whole model.
        gpu: the figures of the GPU.
        serving: the requests, with repeat_share resolved.
    """

    share: ModelConfig
    whole: ModelConfig
    gpu: Gpu
    serving: Serving

    @property
    def item(self) -> int:
        """Bytes of one number in weights, keys and values."""
        return jnp.dtype(self.serving.dtype).itemsize

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on this GPU."""
        return device_weights(self.whole, self.serving.mesh.shards).numbers * self.item

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
        policy = policy.resolve(self.whole, self.serving.capacity)
        if self.serving.fetch != "auto":
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
        choice = choose_fetch(figures, self.gpu.memory_bytes, self.serving.host_limit)
        return dataclasses.replace(plans[choice.fetch], fetch_reason=choice.reason)

    def with_fetch(self, fetch: str) -> "Planner":
        """Return this planner with another fetch mode."""
        return dataclasses.replace(self, serving=dataclasses.replace(self.serving, fetch=fetch))

    def plan_mode(self, policy: Policy, batch: int | None, *, capped: bool) -> PolicyPlan:
        """Return the plan of a resolved policy in the fetch mode of `serving`, which is not "auto".

        The other arguments and the errors are those of `plan`.
        """
        serving = self.serving
        specs = self.specs(policy, 1)
        for spec in specs:
            check_split(spec, gpu=True)
            if serving.fetch == "zero_copy" and (layout := spec.policy.host_layout(spec)) is not None:
                layout.check_kernel(spec.policy.name)
        row = abstract_of(specs, policy)
        parts = state_nbytes(row)
        device, host = sum(size for size, _ in parts.values()), sum(size for _, size in parts.values())

        def needed(rows: int) -> int:
            return self.weights_bytes + rows * device + sum(self.temporaries(policy, rows).values()) + CONTEXT_RESERVE

        largest, above = 0, max(1, self.gpu.memory_bytes // device) + 1
        if serving.host_limit is not None and host:
            above = min(above, serving.host_limit // (host * serving.mesh.tp) + 1)
        while largest + 1 < above:
            middle = (largest + above) // 2
            largest, above = (middle, above) if needed(middle) <= self.gpu.memory_bytes else (largest, middle)
        rows = largest if batch is None else min(batch, largest) if capped else batch
        return PolicyPlan(
            policy=policy,
            fetch=serving.fetch,
            fetch_reason=None,
            repeat_share=self.repeats(specs),
            fallback=why_dense(policy, self.whole, serving.capacity),
            row_parts=parts,
            largest_batch=largest,
            prefill_batch=self.prefill_batch(policy),
            batch=rows,
            fits=0 < rows <= largest,
            temporaries=self.temporaries(policy, rows),
            device_bytes=needed(rows),
            host_bytes=rows * host * serving.mesh.tp,
            step=self.step(policy, rows) if rows else None,
            prefill=self.prefill(policy, specs, device),
        )

    def prefill(self, policy: Policy, specs: Sequence[CacheSpec], device_bytes: int) -> PrefillTime:
        """Return the times of the prefill of one request, whose state takes `device_bytes` on the GPU."""
        tokens, mesh, step = self.serving.context, self.serving.mesh, self.step(policy, 1)
        time = prefill_time(self.share, specs, self.gpu, tokens, device_bytes, 1 / step.tokens_per_second)
        sent = model_links(self.whole, mesh.shards, tokens, self.item).get("residual stream", 0)
        return dataclasses.replace(time, link_seconds=sent / self.gpu.nvlink_bytes_per_second)

    def specs(self, policy: Policy, batch: int) -> tuple[Any, ...]:
        """Return the specs of the caches of all layers on this GPU, for `batch` rows."""
        serving = self.serving
        sizes = (serving.capacity, serving.context, serving.dtype, serving.fetch)
        specs = with_room(cache_specs(self.whole, policy, batch, *sizes), serving.room)
        return on_backend(tuple(local_spec(spec, serving.mesh.shards) for spec in specs), "gpu")

    def temporaries(self, policy: Policy, batch: int) -> dict[str, int]:
        """Return `step_temporaries` of a step of `batch` rows. All are 0 for an empty batch."""
        used = step_temporaries(self.whole, policy, self.specs(policy, max(1, batch)))
        return used if batch else dict.fromkeys(used, 0)

    def prefill_batch(self, policy: Policy) -> int | None:
        """Return how many rows can be prefilled in one call, or None for several GPUs."""
        if self.serving.mesh.tp > 1:
            return None
        return largest_prefill(self.whole, policy, self.serving, self.gpu.memory_bytes - CONTEXT_RESERVE)

    def repeats(self, specs: Sequence[CacheSpec]) -> float:
        """Return the share of the selected units that are on the device already, in [0, 1]."""
        keeps = any(costs_of(spec.policy).step_kept(spec) for spec in specs)
        return self.serving.repeat_share or 0.0 if keeps else 0.0

    def step(self, policy: Policy, batch: int, *, passes: bool = True) -> StepBound:
        """Return the bytes and times of one decode step of `batch` rows.

        Args:
            policy: the resolved policy.
            batch: number of rows.
            passes: whether to count what the GPU kernels move beyond the state (`Costs.step_passes`).
        """
        state = abstract_of(self.specs(policy, batch), policy)
        table = device_weights(self.whole, self.serving.mesh.shards).embedding * self.item
        # A step reads one row a token of an embedding that is not also the head, so such an embedding is left out.
        hbm: dict[str, float] = {"weights": self.weights_bytes - (0 if self.share.tie_embeddings else table)}
        flops = 2 * batch * rows_of(policy) * int(hbm["weights"]) // self.item
        share, moved = self.repeats(state.specs), 0.0
        links = model_links(self.whole, self.serving.mesh.shards, batch * rows_of(policy), self.item)
        for spec, layer in zip(state.specs, state.layers, strict=True):
            costs = costs_of(spec.policy)
            read = [*costs.step_bytes(spec, layer).items(), *(costs.step_passes(spec).items() if passes else ())]
            for part, (device, host) in read:
                hbm[part] = hbm.get(part, 0) + device
                moved += host
            for part, (device, host) in costs.step_kept(spec).items():
                if part in hbm:
                    hbm[part] -= share * device
                moved -= share * host if passes or part == "values" else 0.0
            flops += costs.step_flops(spec, layer)
            for part, sent in costs.step_links(spec).items():
                links[part] = links.get(part, 0) + sent
        by_kernel = self.serving.fetch == "zero_copy" and not kernel_refusal(state.specs)
        whole = any(isinstance(spec.policy, Streams) for spec in state.specs)  # whole blocks need no gathering
        gather = None if by_kernel or whole else self.serving.gather_bytes_per_second
        read_bytes = {part: round(size) for part, size in hbm.items() if size}
        return step_bound(self.gpu, read_bytes, round(moved), flops, batch, gather, links)
