"""The predicted speed of exact attention with speculation on one GPU. Nothing is allocated or run.

A cycle drafts n tokens, and checks them in one turn. The check reads weights, keys and values once, as a step does, and
computes n + 1 times as much. If they lie in host memory (`Offloaded`), it also moves them over the link once. The
prediction adds the times of all of this, as for a step (`gpu.py`).
"""

import dataclasses
from typing import Any, NamedTuple

from jshadow.errors import ConfigError, check_integer
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import Planner, PolicyPlan, checked
from jshadow.planner.gpu_specs import Gpu
from jshadow.planner.mesh import share_of
from jshadow.policies import Full, Policy
from jshadow.policies.capabilities import HasAll
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class _SpeculationPlan:
    """The prediction for one GPU.

    Attributes:
        gpu: name of the GPU.
        target: the policy of the model, which is exact.
        fetch: the fetch mode.
        policy: the sparse policy of the draft steps, or None if drafts take no time.
        drafts: number of proposed tokens of a cycle.
        acceptance: probability that a proposed token is accepted if those before it were.
        batch: number of requests.
        tokens_a_cycle: mean number of tokens that a request gets in a cycle.
        draft_seconds: time of all draft steps of a cycle.
        check_seconds: time of the check.
        step_seconds: time of a plain step.
        draft_bytes: bytes (device, host) that drafting takes for all requests, beside the state of the model.
        target_bytes: bytes (device, host) of the keys and values of all requests.
    """

    gpu: str
    target: Policy
    fetch: str
    policy: Policy | None
    drafts: int
    acceptance: float
    batch: int
    tokens_a_cycle: float
    draft_seconds: float
    check_seconds: float
    step_seconds: float
    draft_bytes: tuple[int, int]
    target_bytes: tuple[int, int]

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens per second of the whole batch."""
        return self.batch * self.tokens_a_cycle / (self.draft_seconds + self.check_seconds)

    @property
    def ratio(self) -> float:
        """The ratio of this speed to that of plain decoding."""
        return self.tokens_per_second * self.step_seconds / self.batch

    def to_json(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        policy = None if self.policy is None else {"name": self.policy.name, **policy_settings(self.policy)}
        values = dataclasses.asdict(self) | {"policy": policy, "target": self.target.name}
        return values | {"tokens_per_second": self.tokens_per_second, "ratio": self.ratio}


class Drafting(NamedTuple):
    """How tokens are drafted.

    Attributes:
        drafts: number of proposed tokens of a cycle.
        acceptance: probability that a proposed token is accepted if those before it were.
        policy: the sparse policy of the draft steps (`SelfDraft.policy`, `CompressedDraft.policy`). None: drafts take
            no time, as with prompt lookup.
        own_cache: whether the draft steps have a cache of their own, as with `CompressedDraft`. If not, they read that
            of the model, and only the summaries of the policy are kept beside it.
    """

    drafts: int
    acceptance: float
    policy: Policy | None = None
    own_cache: bool = False

    def check(self) -> None:
        """Raise ConfigError if a number is out of range."""
        check_integer("drafts", self.drafts, least=1)
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance must lie in [0, 1], got {self.acceptance!r}")

    @property
    def tokens_a_cycle(self) -> float:
        """The mean number of tokens that a cycle gives."""
        return sum(self.acceptance**place for place in range(self.drafts + 1))

    def row_bytes(self, plan: PolicyPlan | None) -> tuple[int, int]:
        """Return the bytes (device, host) of a request, from the plan of `policy`."""
        if plan is None:
            return 0, 0
        if self.own_cache:
            return plan.row_bytes
        return sum(device for name, (device, _) in plan.row_parts.items() if "summaries" in name), 0


def speculation_plan(
    config: ModelConfig, gpu: Gpu, workload: Workload, drafting: Drafting, target: Policy | None = None
) -> _SpeculationPlan:
    """Predict the speed of exact attention with speculation.

    Args:
        gpu: the figures of the GPU.
        workload: the requests. With "auto", keys and values of `Offloaded()` are in host memory.
        drafting: how tokens are drafted.
        target: the policy of the model: `Full()`, the default, or `Offloaded()`.

    Raises:
        ConfigError: a number is out of range, the target is another policy, the batch does not fit, or the requests
            need several GPUs.
    """
    target = Full() if target is None else target
    if not isinstance(target, HasAll):
        raise ConfigError(f"policy must be full or offloaded to plan a speculation, got {target.name}")
    workload = checked(config, workload, gpu)
    drafting.check()
    if workload.shards is not None:
        raise ConfigError(f"a speculation is planned for one GPU, got {workload.tp}")
    planner = Planner(share_of(config, 1), config, gpu, workload)
    if workload.fetch == "auto" or (isinstance(target, Full) and not drafting.own_cache):
        planner = planner.with_fetch("resident" if isinstance(target, Full) else "device_put")
    exact = planner.plan(target, 1, capped=False)
    sparse = None if drafting.policy is None else planner.plan(drafting.policy, 1, capped=False)
    device, host = drafting.row_bytes(sparse)

    def needed(rows: int) -> tuple[int, int]:
        on_device = planner.plan(target, rows, capped=False).device_bytes + rows * device
        return on_device, rows * (exact.row_bytes.host + host)

    largest = gpu.limits.most(needed, exact.largest_batch)
    batch = largest if workload.batch is None else workload.batch
    if not 0 < batch <= largest:
        raise ConfigError(f"batch must be at least 1 and at most {largest} on {gpu.name}, got {batch}")
    step, draft_seconds = planner.step(exact.policy, batch), 0.0
    if sparse is not None:
        steps = drafting.drafts + drafting.own_cache  # the last step only stores the last draft
        draft_seconds = steps * batch / planner.step(sparse.policy, batch).tokens_per_second
    return _SpeculationPlan(
        gpu=gpu.name,
        target=target,
        fetch=exact.fetch,
        policy=drafting.policy,
        drafts=drafting.drafts,
        acceptance=drafting.acceptance,
        batch=batch,
        tokens_a_cycle=drafting.tokens_a_cycle,
        draft_seconds=draft_seconds,
        check_seconds=step.hbm_seconds + step.pcie_seconds + (drafting.drafts + 1) * step.flop_seconds,
        step_seconds=batch / step.tokens_per_second,
        draft_bytes=(batch * device, batch * host),
        target_bytes=(batch * exact.row_bytes[0], batch * exact.row_bytes[1]),
    )
