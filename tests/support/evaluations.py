"""Evaluations of a tiny random model, and records without one: each policy answers a part of the questions."""

import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jshadow.evaluation.plan import Setup, TaskPlan, label
from jshadow.evaluation.runner import judged
from jshadow.evaluation.runner import run_cases as run_cases  # made_up_cases takes its place
from jshadow.evaluation.tasks import Case
from jshadow.models.config import ModelConfig
from jshadow.policies import Full, Policy
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 1, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))


def tiny(tokenizer: Any, seed: int = 1, **sizes: Any) -> Params:
    config = dataclasses.replace(CONFIG, **sizes)
    return Params(init_params(config, seed).weights, config, tokenizer)


def records_of(out: Path) -> list[dict[str, Any]]:
    """The records of the finished samples of a directory."""
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def made_up_cases(
    setup: Setup, plan: TaskPlan, indices: Sequence[int], policies: Sequence[Policy]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records that `run_cases` yields, with figures that follow from sample and policy."""
    for policy in policies:
        yield [_made_up(setup, plan.cases[index], policy) for index in indices]


def _made_up(setup: Setup, case: Case, policy: Policy) -> dict[str, Any]:
    number = zlib.crc32(f"{setup.params.digest} {case.prompt} {label(policy)}".encode())
    figures = {"attended_tokens": 10 + number % 89 / 8, "hit_rate": None if number % 3 else 0.5}
    if case.forced:
        kl = 0.0 if policy == Full() else number % 997 / 1000
        record: dict[str, Any] = {"hits": [], "outputs": [], "score": 100 - 50 * kl, "kl": kl, "ppl": 2 + kl}
    else:
        # The answer after every second bit that is set, and a wrong number for the others.
        texts = [
            f"It is {' and '.join(sample.answers)}." if number >> place & 1 else "It is 1 or 2."
            for place, sample in enumerate(case.samples)
        ]
        record = judged(case, texts) | ({"apart": True} if case.questions else {})
    return record | figures
