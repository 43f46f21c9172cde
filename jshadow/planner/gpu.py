"""What a GPU can hold and how fast a decode step can be at best, from published figures: allocates and runs nothing.

A bound, not a promise. Bytes of weights and state are exact, temporaries an upper formula. The step time is that of
moving each byte once at the data sheet's bandwidth; what it leaves out (launches, copies that a compiler adds, the
host's own gathering, traffic between GPUs) only makes a real step slower.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.errors import CapacityError, ConfigError
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.bytes import abstract_of, cache_specs, prefill_peak
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, Gpu
from jshadow.planner.roofline import StepBound, step_bound
from jshadow.policies import Full, Policy
from jshadow.policies.base import state_nbytes, why_dense

# Fetch modes in which a unit that the step before had fetched stays on the device; the others move every unit.
KEEPING_MODES = ("zero_copy",)
PAPERS_REPEATS = 0.6  # share of selected chunks that the step before had selected too (arXiv 2410.21465, section 5.3)


@dataclasses.dataclass(frozen=True)
class PolicyPlan:
    """A policy on one GPU, or on one of several that share the model's heads.

    Attributes:
        policy: resolved.
        fallback: why a cache of this capacity gives the policy nothing to do, or None.
        row_parts: bytes (device, host) of one request's state on one GPU, by part.
        largest_batch: most requests whose decode step fits; 0: none does.
        prefill_batch: most requests whose prefill fits in one call (`planning.prefill_peak`); None for several GPUs.
        batch: requests of the figures below: what was asked, or the largest; 0 where nothing fits.
        fits: whether that batch does.
        temporaries: device bytes of a step beside weights and state, at most, by part.
        device_bytes: weights, states, temporaries and reserve of one GPU.
        host_bytes: of all GPUs together.
        step: None for an empty batch.
    """

    policy: Policy
    fallback: str | None
    row_parts: dict[str, tuple[int, int]]
    largest_batch: int
    prefill_batch: int | None
    batch: int
    fits: bool
    temporaries: dict[str, int]
    device_bytes: int
    host_bytes: int
    step: StepBound | None

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes (device, host) of one request on one GPU."""
        return sum(device for device, _ in self.row_parts.values()), sum(host for _, host in self.row_parts.values())


@dataclasses.dataclass(frozen=True)
class CapacityPlan:
    """A policy, what it is compared with, and full attention on the same GPUs.

    Attributes:
        gpu: its figures.
        count: GPUs that share weights and KV heads.
        dtype: of weights, keys and values.
        fetch: fetch mode.
        context: tokens of each prompt.
        capacity: tokens that each request may ever hold.
        repeat_share: share of the selected units that was taken not to move.
        weights_bytes: on one GPU.
        reserve_bytes: on one GPU, for what is no array.
        host_limit: bytes of host memory that requests may take; None: as many as they need.
        chosen: the policy that was asked for.
        beside: other policies by name, as `chosen`.
        full: full attention, its batch no larger than was asked for.
    """

    gpu: Gpu
    count: int
    dtype: str
    fetch: str
    context: int
    capacity: int
    repeat_share: float
    weights_bytes: int
    reserve_bytes: int
    host_limit: int | None
    chosen: PolicyPlan
    beside: dict[str, PolicyPlan]
    full: PolicyPlan

    @property
    def ratio(self) -> float | None:
        """`ratio_of` the policy that was asked for."""
        return self.ratio_of(self.chosen)

    def ratio_of(self, side: PolicyPlan) -> float | None:
        """Overlapped tokens a second, a policy's to full attention's; None where one of them does not fit."""
        mine, theirs = side.step, self.full.step
        return mine.tokens_per_second / theirs.tokens_per_second if mine and theirs else None

    def to_json(self) -> dict[str, Any]:
        """Plain values; policies as their names and settings."""
        values = dataclasses.asdict(self)
        told = [(values, "chosen", self.chosen), (values, "full", self.full)]
        for place, name, side in told + [(values["beside"], name, side) for name, side in self.beside.items()]:
            device, host = side.row_bytes
            settings = side.policy.settings()
            place[name] |= {
                "policy": {"name": side.policy.name, **settings},
                "row_device_bytes": device,
                "row_host_bytes": host,
                "ratio": self.ratio_of(side),
            }
        return values | {"ratio": self.ratio}


def capacity_plan(
    config: ModelConfig,
    policy: Policy,
    gpu: Gpu,
    *,
    context: int,
    max_new_tokens: int = 64,
    count: int = 1,
    batch: int | None = None,
    dtype: str = "bfloat16",
    fetch: str = "device_put",
    repeat_share: float | None = None,
    host_limit: int | None = None,
    beside: Mapping[str, Policy] | None = None,
) -> CapacityPlan:
    """Plan decoding on one GPU, or on several that share weights and KV heads (each then holds an equal part).

    Args:
        config: the model.
        policy: its settings; None in them is resolved for the capacity.
        gpu: one of `gpus.GPUS`.
        context: tokens of each prompt.
        max_new_tokens: what each request may hold beyond it.
        count: GPUs.
        batch: requests; None: as many as fit.
        dtype: of weights, keys and values.
        fetch: fetch mode; "auto" is what it means on a GPU.
        repeat_share: share of the selected units that the step before had fetched already; None: the paper's where
            the mode keeps them, else 0.
        host_limit: bytes of host memory that all requests together may take; None: as many as they need.
        beside: other policies by a name, planned likewise.

    Raises:
        ConfigError: a count, share or setting out of range, or KV heads that do not split.
        CapacityError: more tokens than the model's context.
    """
    for name, value, least in (
        ("context", context, 1),
        ("max_new_tokens", max_new_tokens, 0),
        ("count", count, 1),
        ("batch", 1 if batch is None else batch, 1),
        ("host_limit", 0 if host_limit is None else host_limit, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    capacity = context + max_new_tokens
    if capacity > config.context:
        raise CapacityError(
            f"context + max_new_tokens must be at most the model's context={config.context}, "
            f"got {context} + {max_new_tokens}"
        )
    # A CPU plans for a GPU here: "auto" is what it would be there.
    fetch = offload.resolve_fetch("device_put" if fetch == "auto" else fetch)
    share = repeats(fetch, repeat_share)
    planner = Planner(share_of(config, count), config, gpu, count, context, capacity, dtype, fetch, share, host_limit)
    others = {name: planner.plan(other, batch, capped=False) for name, other in (beside or {}).items()}
    return CapacityPlan(
        gpu,
        count,
        dtype,
        fetch,
        context,
        capacity,
        share,
        planner.weights_bytes,
        CONTEXT_RESERVE,
        host_limit,
        planner.plan(policy, batch, capped=False),
        others,
        planner.plan(Full(), batch, capped=True),
    )


def repeats(fetch: str, repeat_share: float | None) -> float:
    """The share of selected units that a fetch mode does not move. Raises ConfigError where it cannot be that."""
    if fetch not in KEEPING_MODES:
        if repeat_share:
            raise ConfigError(f"repeat_share must be 0 with fetch={fetch!r}, which keeps no unit, got {repeat_share!r}")
        return 0.0
    share = PAPERS_REPEATS if repeat_share is None else repeat_share
    if not 0 <= share <= 1:
        raise ConfigError(f"repeat_share must lie in [0, 1], got {repeat_share!r}")
    return share


def share_of(config: ModelConfig, count: int) -> ModelConfig:
    """The part of a model that one of `count` GPUs holds: heads, MLP and vocabulary are split, the stream is not."""
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
    """One GPU's part of a model. Attributes: as in `capacity_plan`; `share` is the part, `whole` the model."""

    share: ModelConfig
    whole: ModelConfig
    gpu: Gpu
    count: int
    context: int
    capacity: int
    dtype: str
    fetch: str
    repeat_share: float
    host_limit: int | None = None

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def weights_bytes(self) -> int:
        """Of this GPU."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_weights(self.share))) * self.item

    def plan(self, policy: Policy, batch: int | None, *, capped: bool) -> PolicyPlan:
        """A policy with that batch, or with the largest (`capped`: with what fits of it)."""
        policy = policy.resolve(self.whole, self.capacity)
        row = abstract_of(self.specs(policy, 1), policy)
        parts = state_nbytes(row)
        device, host = sum(size for size, _ in parts.values()), sum(size for _, size in parts.values())

        def needed(rows: int) -> int:
            return self.weights_bytes + rows * device + sum(self.temporaries(policy, rows).values()) + CONTEXT_RESERVE

        largest, above = 0, max(1, self.gpu.memory_bytes // device) + 1
        if self.host_limit is not None and host:
            above = min(above, self.host_limit // (host * self.count) + 1)
        while largest + 1 < above:
            middle = (largest + above) // 2
            largest, above = (middle, above) if needed(middle) <= self.gpu.memory_bytes else (largest, middle)
        rows = largest if batch is None else min(batch, largest) if capped else batch
        return PolicyPlan(
            policy,
            why_dense(policy, self.whole, self.capacity),
            parts,
            largest,
            self.prefill_batch(policy),
            rows,
            0 < rows <= largest,
            self.temporaries(policy, rows),
            needed(rows),
            rows * host * self.count,
            self.step(policy, rows) if rows else None,
        )

    def specs(self, policy: Policy, batch: int) -> tuple[Any, ...]:
        """Of all layers."""
        return cache_specs(self.share, policy, batch, self.capacity, self.context, self.dtype, self.fetch)

    def temporaries(self, policy: Policy, batch: int) -> dict[str, int]:
        """Device bytes that a step takes for a while, at most; layers follow each other, so one layer's count.

        Logits twice (a bad row's become NaN); residual stream, projections and the MLP's halves as float32 copies too.
        """
        c, rows = self.share, batch * policy.step_rows
        token = 6 * c.model_dim + 3 * c.ffn_dim + 3 * (c.q_heads + 2 * c.kv_heads) * c.head_dim
        return {
            "logits": 2 * 4 * rows * c.vocab_size,
            "activations": 4 * rows * token,
            "attention": max(spec.policy.step_temporaries(spec) for spec in self.specs(policy, batch)) if batch else 0,
        }

    def prefill_batch(self, policy: Policy) -> int | None:
        """Rows whose prefill fits in one call. Its bytes grow evenly with the rows."""
        if self.count > 1:
            return None
        one, two = (
            sum(
                prefill_peak(
                    self.whole,
                    policy,
                    batch=batch,
                    tokens=self.context,
                    capacity=self.capacity,
                    dtype=self.dtype,
                    fetch=self.fetch,
                ).values()
            )
            for batch in (1, 2)
        )
        return max(0, (self.gpu.memory_bytes - CONTEXT_RESERVE - one) // (two - one) + 1)

    def step(self, policy: Policy, batch: int) -> StepBound:
        """The bound of one step of that many rows."""
        state = abstract_of(self.specs(policy, batch), policy)
        table = self.share.vocab_size * self.share.model_dim * self.item
        # Of an embedding that is not the head as well, a step reads a row a token.
        hbm = {"weights": self.weights_bytes - (0 if self.share.tie_embeddings else table)}
        moved, flops = 0, 2 * batch * policy.step_rows * hbm["weights"] // self.item
        for spec, layer in zip(state.specs, state.layers, strict=True):
            for part, (read, fetched) in spec.policy.step_bytes(spec, layer).items():
                hbm[part] = hbm.get(part, 0) + read
                moved += fetched
            flops += spec.policy.step_flops(spec, layer)
        return step_bound(
            self.gpu, {part: size for part, size in hbm.items() if size}, moved, flops, batch, self.repeat_share
        )
