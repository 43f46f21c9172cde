"""How many requests fit on a GPU, and a lower bound on the time of a decode step. Nothing is allocated or run.

The bytes of weights and state are exact. The bytes of temporaries are an upper bound. The time of a step is the time to
move each byte and to do each operation once at the rates of the data sheet. A real step is slower, because the bound
has no kernel launches, no copies that the compiler adds, no gathering of rows on the host and no traffic between GPUs.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.accounting import state_nbytes
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend, prefill_peak
from jshadow.planner.gpu_plan import CapacityPlan, PolicyPlan, Serving, StepBound, step_bound
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, Gpu
from jshadow.policies import Full, Policy
from jshadow.policies.base import why_dense
from jshadow.policies.costs import costs_of, rows_of

# Fetch modes in which a unit that the previous step fetched stays on the device. The other modes move every unit.
KEEPING_MODES = ("zero_copy",)
PAPERS_REPEATS = 0.6  # share of chunks that the previous step had also selected (arXiv 2410.21465, section 5.3)


def capacity_plan(
    config: ModelConfig, policy: Policy, gpu: Gpu, serving: Serving, *, beside: Mapping[str, Policy] | None = None
) -> CapacityPlan:
    """Plan decoding on one GPU, or on several GPUs that each hold an equal part of the weights and KV heads.

    Args:
        config: the model.
        policy: the policy. Settings that are None are resolved for the capacity.
        gpu: the figures of each GPU, such as one of `gpu_specs.GPUS`.
        serving: prompts, requests, number of GPUs, dtype and fetch mode.
        beside: other policies by name, which are planned in the same way.

    Returns:
        The plan of the policy, of the other policies and of full attention.

    Raises:
        ConfigError: a count, share or setting is out of range, or the GPUs cannot share the KV heads equally.
        CapacityError: context and new tokens exceed the model's context.
    """
    serving = checked(config, serving)
    planner, batch = Planner(share_of(config, serving.count), config, gpu, serving), serving.batch
    others = {name: planner.plan(other, batch, capped=False) for name, other in (beside or {}).items()}
    return CapacityPlan(
        gpu=gpu,
        count=serving.count,
        dtype=serving.dtype,
        fetch=serving.fetch,
        context=serving.context,
        capacity=serving.capacity,
        repeat_share=planner.repeat_share,
        weights_bytes=planner.weights_bytes,
        reserve_bytes=CONTEXT_RESERVE,
        host_limit=serving.host_limit,
        chosen=planner.plan(policy, batch, capped=False),
        beside=others,
        full=planner.plan(Full(), batch, capped=True),
    )


def checked(config: ModelConfig, serving: Serving) -> Serving:
    """Return `serving` with its fetch mode and its repeat_share resolved. Raises the errors of `capacity_plan`."""
    for name, value, least in (
        ("context", serving.context, 1),
        ("max_new_tokens", serving.max_new_tokens, 0),
        ("count", serving.count, 1),
        ("batch", 1 if serving.batch is None else serving.batch, 1),
        ("host_limit", 0 if serving.host_limit is None else serving.host_limit, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    if serving.capacity > config.context:
        raise CapacityError(
            f"context + max_new_tokens must be at most the model's context={config.context}, "
            f"got {serving.context} + {serving.max_new_tokens}"
        )
    # "auto" is resolved as on a GPU, even if this process runs on a CPU.
    fetch = offload.resolve_fetch("device_put" if serving.fetch == "auto" else serving.fetch)
    return dataclasses.replace(serving, fetch=fetch, repeat_share=repeats(fetch, serving.repeat_share))


def repeats(fetch: str, repeat_share: float | None) -> float:
    """Return the share of the selected units that a fetch mode does not move.

    Raises:
        ConfigError: the share is out of range, or is not 0 in a fetch mode that moves all units.
    """
    if fetch not in KEEPING_MODES:
        if repeat_share:
            raise ConfigError(f"repeat_share must be 0 with fetch={fetch!r}, which keeps no unit, got {repeat_share!r}")
        return 0.0
    share = PAPERS_REPEATS if repeat_share is None else repeat_share
    if not 0 <= share <= 1:
        raise ConfigError(f"repeat_share must lie in [0, 1], got {repeat_share!r}")
    return share


def share_of(config: ModelConfig, count: int) -> ModelConfig:
    """Return the config of the part of a model that one of `count` GPUs holds.

    Heads, MLP and vocabulary are split. The residual stream is not. Raises ConfigError unless count divides kv_heads.
    """
    if config.kv_heads % count:
        raise ConfigError(f"count must divide kv_heads={config.kv_heads}, got {count}")
    return dataclasses.replace(
        config,
        q_heads=config.q_heads // count,
        kv_heads=config.kv_heads // count,
        ffn_dim=-(-config.ffn_dim // count),
        vocab_size=-(-config.vocab_size // count),
        eos_ids=(),
    )


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner of one GPU, which holds the whole model or an equal part of it.

    Attributes:
        share: the config of the part of the model that this GPU holds.
        whole: the config of the whole model.
        gpu: the figures of the GPU.
        serving: the requests, with fetch mode and repeat_share resolved.
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
    def repeat_share(self) -> float:
        """Share of the selected units that are already on the device, in [0, 1]."""
        return self.serving.repeat_share or 0.0

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on this GPU."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(self.share))) * self.item

    def plan(self, policy: Policy, batch: int | None, *, capped: bool) -> PolicyPlan:
        """Return the plan of a policy.

        Args:
            policy: the policy. Settings that are None are resolved.
            batch: number of requests. None: as many as fit.
            capped: whether `batch` is reduced to the number that fits.
        """
        serving = self.serving
        policy = policy.resolve(self.whole, serving.capacity)
        row = abstract_of(self.specs(policy, 1), policy)
        parts = state_nbytes(row)
        device, host = sum(size for size, _ in parts.values()), sum(size for _, size in parts.values())

        def needed(rows: int) -> int:
            return self.weights_bytes + rows * device + sum(self.temporaries(policy, rows).values()) + CONTEXT_RESERVE

        largest, above = 0, max(1, self.gpu.memory_bytes // device) + 1
        if serving.host_limit is not None and host:
            above = min(above, serving.host_limit // (host * serving.count) + 1)
        while largest + 1 < above:
            middle = (largest + above) // 2
            largest, above = (middle, above) if needed(middle) <= self.gpu.memory_bytes else (largest, middle)
        rows = largest if batch is None else min(batch, largest) if capped else batch
        return PolicyPlan(
            policy=policy,
            fallback=why_dense(policy, self.whole, serving.capacity),
            row_parts=parts,
            largest_batch=largest,
            prefill_batch=self.prefill_batch(policy),
            batch=rows,
            fits=0 < rows <= largest,
            temporaries=self.temporaries(policy, rows),
            device_bytes=needed(rows),
            host_bytes=rows * host * serving.count,
            step=self.step(policy, rows) if rows else None,
        )

    def specs(self, policy: Policy, batch: int) -> tuple[Any, ...]:
        """Return the specs of the caches of all layers, for `batch` rows."""
        serving = self.serving
        sizes = (serving.capacity, serving.context, serving.dtype, serving.fetch)
        return on_backend(cache_specs(self.share, policy, batch, *sizes), "gpu")

    def temporaries(self, policy: Policy, batch: int) -> dict[str, int]:
        """Return an upper bound, by part, on the device bytes of a step of `batch` rows without weights and state.

        Layers run one after the other, so only the largest layer counts. Logits count twice, because a copy is made in
        which the logits of a bad row are NaN. The residual stream, the projections and the two halves of the MLP count
        with their float32 copies.
        """
        c, rows = self.share, batch * rows_of(policy)
        token = 6 * c.model_dim + 3 * c.ffn_dim + 3 * (c.q_heads + 2 * c.kv_heads) * c.head_dim
        return {
            "logits": 2 * 4 * rows * c.vocab_size,
            "activations": 4 * rows * token,
            "attention": max(costs_of(spec.policy).step_temporaries(spec) for spec in self.specs(policy, batch))
            if batch
            else 0,
        }

    def prefill_batch(self, policy: Policy) -> int | None:
        """Return how many rows can be prefilled in one call, or None for several GPUs.

        It is extrapolated from the bytes of a prefill of one row and of two rows.
        """
        serving = self.serving
        if serving.count > 1:
            return None
        sizes: dict[str, Any] = {"tokens": serving.context, "capacity": serving.capacity}
        kinds: dict[str, Any] = {"dtype": serving.dtype, "fetch": serving.fetch}
        one, two = (sum(prefill_peak(self.whole, policy, batch=rows, **sizes, **kinds).values()) for rows in (1, 2))
        return max(0, (self.gpu.memory_bytes - CONTEXT_RESERVE - one) // (two - one) + 1)

    def step(self, policy: Policy, batch: int) -> StepBound:
        """Return the bound on one decode step of `batch` rows."""
        state = abstract_of(self.specs(policy, batch), policy)
        table = self.share.vocab_size * self.share.model_dim * self.item
        # A step reads one row a token of an embedding that is not also the head, so such an embedding is left out.
        hbm = {"weights": self.weights_bytes - (0 if self.share.tie_embeddings else table)}
        moved, flops = 0, 2 * batch * rows_of(policy) * hbm["weights"] // self.item
        for spec, layer in zip(state.specs, state.layers, strict=True):
            for part, (read, fetched) in costs_of(spec.policy).step_bytes(spec, layer).items():
                hbm[part] = hbm.get(part, 0) + read
                moved += fetched
            flops += costs_of(spec.policy).step_flops(spec, layer)
        return step_bound(
            self.gpu, {part: size for part, size in hbm.items() if size}, moved, flops, batch, self.repeat_share
        )
