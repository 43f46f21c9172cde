"""The predicted speed of full attention with speculation on one GPU. Nothing is allocated or run.

A cycle drafts n tokens, and checks them in one turn. The check reads weights, keys and values once, as a step does, and
computes n + 1 times as much. The prediction adds the times of all of this, as for a step (`gpu.py`).
"""

import dataclasses
from typing import Any

from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.gpu import Planner, checked
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.gpu_specs import Gpu
from jshadow.planner.mesh import ONE_GPU, share_of
from jshadow.policies import Full, Policy
from jshadow.policies.settings import policy_settings


@dataclasses.dataclass(frozen=True)
class SpeculationPlan:
    """The prediction for one GPU.

    Attributes:
        gpu: name of the GPU.
        policy: the sparse policy of the draft steps, or None if drafts take no time.
        drafts: number of proposed tokens of a cycle.
        acceptance: probability that a proposed token is accepted if those before it were.
        batch: number of requests.
        tokens_a_cycle: mean number of tokens that a request gets in a cycle.
        draft_seconds: time of all draft steps of a cycle.
        check_seconds: time of the check.
        step_seconds: time of a plain step.
        summary_bytes: device bytes of the summaries of all requests, beside keys and values.
    """

    gpu: str
    policy: Policy | None
    drafts: int
    acceptance: float
    batch: int
    tokens_a_cycle: float
    draft_seconds: float
    check_seconds: float
    step_seconds: float
    summary_bytes: int

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
        values = dataclasses.asdict(self) | {"policy": policy}
        return values | {"tokens_per_second": self.tokens_per_second, "ratio": self.ratio}


def speculation_plan(
    config: ModelConfig, gpu: Gpu, serving: Serving, policy: Policy | None, drafts: int, acceptance: float
) -> SpeculationPlan:
    """Predict the speed of full attention with speculation.

    Args:
        config: the model.
        gpu: the figures of the GPU.
        serving: the requests. `fetch` is not used: keys and values are on the GPU.
        policy: the sparse policy by which the model drafts for itself (`SelfDraft.policy`). None: drafts take no time,
            as with prompt lookup.
        drafts: number of proposed tokens of a cycle.
        acceptance: probability that a proposed token is accepted if those before it were.

    Raises:
        ConfigError: drafts is below 1, acceptance is not in [0, 1], the batch does not fit, or the requests need
            several GPUs.
    """
    serving = checked(config, dataclasses.replace(serving, fetch="resident"))
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 1:
        raise ConfigError(f"drafts must be an integer of at least 1, got {drafts!r}")
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance must lie in [0, 1], got {acceptance!r}")
    if serving.mesh != ONE_GPU:
        raise ConfigError(f"a speculation is planned for one GPU, got {serving.mesh.devices}")
    planner = Planner(share_of(config, 1), config, gpu, serving)
    sparse, one = None if policy is None else planner.plan(policy, 1, capped=False), 0
    if sparse is not None:
        one = sum(device for name, (device, _) in sparse.row_parts.items() if "summaries" in name)
    largest = planner.plan(Full(), None, capped=False).largest_batch
    while largest and planner.plan(Full(), largest, capped=False).device_bytes + largest * one > gpu.memory_bytes:
        largest -= 1
    batch = largest if serving.batch is None else serving.batch
    if not 0 < batch <= largest:
        raise ConfigError(f"batch must be at least 1 and at most {largest} on {gpu.name}, got {batch}")
    step = planner.step(Full(), batch)
    draft_seconds = 0.0
    if sparse is not None:
        draft_seconds = drafts * batch / planner.step(sparse.policy, batch).tokens_per_second
    return SpeculationPlan(
        gpu=gpu.name,
        policy=policy,
        drafts=drafts,
        acceptance=acceptance,
        batch=batch,
        tokens_a_cycle=sum(acceptance**place for place in range(drafts + 1)),
        draft_seconds=draft_seconds,
        check_seconds=step.hbm_seconds + (drafts + 1) * step.flop_seconds,
        step_seconds=batch / step.tokens_per_second,
        summary_bytes=batch * one,
    )
