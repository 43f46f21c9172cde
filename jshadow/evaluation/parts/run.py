"""Running one part of an evaluation."""

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.parts.dealing import Part, deal
from jshadow.evaluation.parts.record import PartRecord, SampleKeys, Table
from jshadow.evaluation.results import label
from jshadow.evaluation.rows import row_heads
from jshadow.evaluation.runner import Progress, finish_samples, sample_key
from jshadow.evaluation.samples import SampleStore, check_model
from jshadow.evaluation.settings import Evaluation
from jshadow.evaluation.tasks.ruler import among
from jshadow.policies import Full
from jshadow.weights.digest import sha256, tree_digest


def part_folder(out: str | os.PathLike[str], part: Part) -> Path:
    """Return the folder of a part: `out`/part-2-of-3."""
    return Path(out) / f"part-{part.index}-of-{part.count}"


def evaluate_part(
    evaluation: Evaluation,
    part: Part,
    out: str | os.PathLike[str],
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> PartRecord:
    """Run one part of an evaluation.

    The samples of all tasks and lengths are dealt to the parts as `deal` says, by their tokens. A sample runs as it
    does in one run: its capacity and its padding are those of the whole evaluation. If the part was killed, it goes on
    where it stopped.

    Args:
        evaluation: the whole evaluation, as `plan_evaluation` returns it. It is the same for all parts.
        part: which part to run.
        out: directory of the evaluation. The part writes only to its folder in it, `part_folder(out, part)`: the
            file part.json, which says what there is to do, and the finished samples (samples.jsonl).
        command: the words of the command line, for the messages of `merge_parts`.
        progress: called with (number of this part's samples done, number of this part's samples).

    Returns:
        The record of the part. All of its samples are finished.

    Raises:
        ConfigError: there are more parts than samples, or the folder cannot be written. Or there is a task of RULER,
            and the folder has samples of another model.
    """
    plans = evaluation.plans
    places = [(place, index) for place, plan in enumerate(plans) for index in range(len(plan.cases))]
    if part.count > len(places):
        raise ConfigError(f"part must be I/N with N at most the number of samples={len(places)}, got {part}")
    cases = [plans[place].cases[index] for place, index in places]
    mine = [places[one] for one in deal([len(case.prompt) + case.growth for case in cases], part)]
    tables = [Table(row_heads(evaluation.setup, plan), list(plan.depths), len(plan.cases)) for plan in plans]
    own = [SampleKeys(place, index, keys_of(evaluation, place, index)) for place, index in mine]
    folder = part_folder(out, part)
    if among([plan.task for plan in plans]):
        check_model(folder, evaluation.model)
    store = SampleStore(folder)
    record = PartRecord(part, asked_of(evaluation, tables, places), tables, own, list(command))
    record.write(folder)
    finish_samples(evaluation, mine, store, progress)
    return record


def keys_of(evaluation: Evaluation, place: int, index: int) -> list[str]:
    """Return the keys of a sample's records, one for each entry of its plan that runs."""
    plan = evaluation.plans[place]
    policies = [entry.policy for entry in plan.entries if entry.policy is not None]
    return [sample_key(evaluation.setup, evaluation.model, plan, index, policy) for policy in policies]


def asked_of(evaluation: Evaluation, tables: Sequence[Table], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return what all parts of an evaluation have in common, by name. JSON can hold it.

    The last entry, "plan", is a digest of all prompts and of all rows without their figures.
    """
    setup, plans, settings = evaluation.setup, evaluation.plans, evaluation.settings
    heads = [head for table in tables for head in table.heads]
    asked: dict[str, Any] = {"model": setup.params.digest, "dtype": setup.params.dtype.name}
    asked |= {"seed": settings.seed, "samples": settings.samples}
    asked |= {"tasks": list(dict.fromkeys(plan.task for plan in plans))}
    asked |= {"lengths": list(dict.fromkeys(plan.length for plan in plans))}
    asked |= {"data": [Path(path).name for path in settings.data]}
    asked |= {"truncate": settings.truncate, "limit": settings.limit}
    asked |= {"policies": list(dict.fromkeys(head["policy"] for head in heads)), "shares": list(settings.shares)}
    sweeps = settings.sweeps or {}
    asked |= {"sweeps": {name: [label(policy) for policy in policies] for name, policies in sweeps.items()}}
    asked |= {"prefill": setup.prefill.label() if setup.prefill else "exact", "fetch": setup.fetch}
    asked |= {"fitted": {name: tree_digest(arrays) for name, arrays in setup.fitted.items()}}
    asked |= {"Python": ".".join(platform.python_version_tuple()[:2])}  # its texts are in the prompts
    prompts = [sample_key(setup, evaluation.model, plans[place], index, Full()) for place, index in places]
    rows = [dataclasses.asdict(table) for table in tables]
    return asked | {"plan": sha256(json.dumps([rows, prompts], sort_keys=True).encode())}
