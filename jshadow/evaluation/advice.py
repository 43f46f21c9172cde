"""Which policy suits a user's own documents: the cheapest of some that answers as full attention does.

A policy "keeps" exp(-KL) of full attention, where KL is the mean Kullback-Leibler divergence of its predictions from
those of full attention, in nats. It is the geometric mean of the shares that the tokens that full attention would draw
keep of their probability. Half of the probes choose the setting, and the other half judge it.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jshadow.errors import ConfigError
from jshadow.evaluation.plan import SERVED, EvalSettings, Evaluation, TaskPlan, label
from jshadow.evaluation.runner import Progress, SampleStore, check_model, finish_samples, plan_evaluation
from jshadow.planner.machine import footprint
from jshadow.policies import Full, Policy, ShadowKV, parse_policy

TARGET = 0.99
_BUDGETS = (256, 512, 1024, 2048)
_AT_ONCE = 4  # policies that read the documents together
_DRAWS = 2000  # of the bootstrap
_CONFIDENCE = 95  # percent of the interval


def candidates(tokens: int) -> list[Policy]:
    """Return the policies that are tried on documents of so many tokens, the longest of them.

    They are ShadowKV's packed codes with several budgets, its paper's settings, SnapKV (Li et al. 2024, arXiv
    2404.14469), and full attention with keys and values in 8 and 4 bits.
    """
    budgets = [budget for budget in _BUDGETS if 2 * budget <= tokens] or [_BUDGETS[0]]
    packed = [ShadowKV.packed(small=small) for small in (True, False)]
    tried: list[Policy] = [
        dataclasses.replace(one, budget=budget) for one, budget in itertools.product(packed, budgets)
    ]
    tried += [ShadowKV(), parse_policy("snapkv", [f"max_capacity_prompt={max(32, tokens // 4)}"])]
    return [*tried, *(parse_policy("quantized", [f"dtype={dtype}"]) for dtype in ("int4", "fp8"))]


@dataclasses.dataclass(frozen=True)
class Kept:
    """How much of full attention a policy keeps on some probes, with the 95 % interval of a bootstrap over the probes.

    Attributes:
        share: exp(-KL), from 0 to 1.
        low, high: the ends of the interval.
        same: number of probes on which it predicts all tokens that full attention does.
        probes: number of probes.
    """

    share: float
    low: float
    high: float
    same: int
    probes: int

    @classmethod
    def of(cls, probes: Sequence[Sequence[float]]) -> "Kept":
        """Return the figures of probes, each a KL in nats and whether all tokens are the same."""
        losses = np.array([loss for loss, _ in probes])
        rng = np.random.default_rng(0)
        means = losses[rng.integers(0, len(losses), (_DRAWS, len(losses)))].mean(axis=1)
        outside = (100 - _CONFIDENCE) / 2
        low, high = np.percentile(means, [outside, 100 - outside])
        share, least, most = (math.exp(-float(loss)) for loss in (losses.mean(), high, low))
        return cls(share, least, most, sum(int(same) for _, same in probes), len(probes))


@dataclasses.dataclass(frozen=True)
class Judged:
    """A policy on all documents.

    Attributes:
        policy: the policy.
        device_bytes, full_bytes: bytes of the longest document's state and of full attention's, in bfloat16 with
            offloaded values.
        chosen_by: what it keeps on the probes that choose a setting.
        held_out: what it keeps on the others.
        documents: what it keeps on all probes of each document, by name.
    """

    policy: Policy
    device_bytes: int
    full_bytes: int
    chosen_by: Kept
    held_out: Kept
    documents: Mapping[str, Kept]

    @classmethod
    def of(cls, policy: Policy, sizes: tuple[int, int], probes: Mapping[str, Sequence[Sequence[float]]]) -> "Judged":
        """Return the figures of a policy, from its bytes and full attention's and from its probes by document."""
        every = list(itertools.chain(*probes.values()))
        each = {name: Kept.of(some) for name, some in probes.items()}
        return cls(policy, *sizes, Kept.of(every[::2]), Kept.of(every[1::2]), each)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, with the policy in the syntax of `jshadow eval --policies`."""
        return {**dataclasses.asdict(self), "policy": label(self.policy), "name": self.policy.name}


@dataclasses.dataclass(frozen=True)
class Advice:
    """What `advise` found.

    Attributes:
        target: the share of full attention that is wanted.
        tokens: number of tokens of the longest document.
        judged: all policies, from the fewest device bytes to the most.
        best: the cheapest of them that keeps the target (`cheapest`).
        untried: number of policies with more device bytes that were not run, because `best` was found before.
    """

    target: float
    tokens: int
    judged: tuple[Judged, ...]
    best: Judged
    untried: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        judged = [one.to_json() for one in self.judged]
        best = self.judged.index(self.best)
        told = {"target": self.target, "tokens": self.tokens, "untried": self.untried}
        return told | {"best": judged[best], "judged": judged}


def advise(
    params: Any,
    documents: Mapping[str, str],
    *,
    questions: Sequence[str] = (),
    target: float = TARGET,
    policies: Sequence[Policy] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Advice:
    """Run full attention and other policies over documents, and choose the cheapest that keeps a share of the former.

    Args:
        params: the model's Params, with a tokenizer.
        documents: texts by name, each of at least `tasks.documents.LEAST` tokens.
        questions: questions about each document. None: passages of the documents are continued.
        target: share of full attention to keep, in (0, 1].
        policies: the policies, all of which run. None: `candidates`, a few at a time from the fewest device bytes on,
            until one keeps the target.
        out: directory for finished documents, which a later call reuses. None stores nothing.
        progress: called with (number of documents done, number of documents).

    Raises:
        ConfigError: there is no document, the target is out of range, or `out` belongs to another model.
        CapacityError: a document exceeds the model's context.
    """
    check_target("target", target)
    if not documents:
        raise ConfigError("documents must have at least one text, got none")
    if len(questions) * len(documents) == 1:
        raise ConfigError("questions must be at least 2 for one document: one half of them judges, got 1")
    settings = EvalSettings(documents=documents, questions=tuple(questions))
    evaluation = plan_evaluation(params, (), (), policies or [Full()], settings)
    [plan] = evaluation.plans
    tried = candidates(plan.length) if policies is None else policies
    sizes = {policy: _bytes_of(params, policy, plan) for policy in tried}
    if policies is None:  # full attention takes fewer bytes of a short document than some codes
        sizes = {policy: (size, full) for policy, (size, full) in sizes.items() if size < full}
    ordered = sorted(sizes, key=lambda policy: sizes[policy][0])
    sizes[Full()] = _bytes_of(params, Full(), plan)  # every evaluation measures it
    step = _AT_ONCE if policies is None else max(1, len(ordered))
    groups = [ordered[first : first + step] for first in range(0, len(ordered), step)] or [[Full()]]
    store, judged, best = SampleStore(out), dict[Policy, Judged](), None
    check_model(out, evaluation.model)
    for number, group in enumerate(groups):
        each = _probes_of(evaluation.with_policies(group), store, _share_of(progress, number, len(groups)))
        judged |= {policy: Judged.of(policy, sizes[policy], of_one) for policy, of_one in each.items()}
        best = cheapest(judged.values(), target)
        if policies is None and not isinstance(best.policy, Full):
            break
    assert best is not None
    rows = sorted(judged.values(), key=lambda one: one.device_bytes)
    return Advice(target, plan.length, tuple(rows), best, len(sizes) - len(rows))


def check_target(name: str, target: float) -> None:
    """Raise ConfigError unless a target of `advise` is a share."""
    if isinstance(target, bool) or not 0 < target <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {target!r}")


def _bytes_of(params: Any, policy: Policy, plan: TaskPlan) -> tuple[int, int]:
    sizes: dict[str, Any] = {"capacity": plan.capacity, "prompt": plan.length, "dtype": SERVED, "fetch": "device_put"}
    used = footprint(params.config, policy.resolve(params.config, plan.capacity), **sizes)
    return used["device_bytes"], used["full_bytes"]


def _share_of(progress: Progress | None, number: int, count: int) -> Progress | None:
    """Return the progress of the group `number` of `count` groups of policies, each of which reads all documents."""
    return None if progress is None else lambda done, total: progress(number * total + done, count * total)


def _probes_of(
    evaluation: Evaluation, store: SampleStore, progress: Progress | None
) -> dict[Policy, dict[str, list[Sequence[float]]]]:
    """Return the KL of each probe, and whether all its tokens are the same, by policy and document."""
    names = list(evaluation.settings.documents or {})
    records = finish_samples(evaluation, [(0, index) for index in range(len(names))], store, progress)
    return {
        policy: {name: records[0, index][policy]["probes"] for index, name in enumerate(names)}
        for policy in records[0, 0]
    }


def cheapest(judged: Iterable[Judged], target: float) -> Judged:
    """Return the policy with the fewest device bytes that keeps the target, even at the low end of its interval.

    One of the policies is full attention, which keeps any target.
    """
    keeping = [one for one in judged if one.chosen_by.low >= target or isinstance(one.policy, Full)]
    return min(keeping, key=lambda one: one.device_bytes)
