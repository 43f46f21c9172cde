"""Running policies side by side on tasks with known answers. Policies share the prefill of a sample if possible."""

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jshadow.cache import offload
from jshadow.engine.checks import check_piece
from jshadow.engine.prefill.job import prepared_attention
from jshadow.errors import ConfigError
from jshadow.evaluation import results
from jshadow.evaluation.cases import run_case, run_together, runs_together
from jshadow.evaluation.plan import plan_tasks
from jshadow.evaluation.rows import task_rows
from jshadow.evaluation.samples import SampleStore, check_model
from jshadow.evaluation.settings import EvalSettings, Evaluation, Setup, TaskPlan, model_of
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.ruler import among
from jshadow.policies import Full, Policy
from jshadow.weights.digest import tree_digest

Progress = Callable[[int, int], None]
Place = tuple[int, int]  # of a sample: place of the plan, and place of the case in it
MOST_PROGRAMS = 32  # maximum number of cached decode programs; each takes about 100 MB for a deep model


def sample_key(setup: Setup, model: str, plan: TaskPlan, index: int, policy: Policy) -> str:
    """Return a digest of everything that a sample's record depends on. Parts with their default values are left out."""
    case = plan.cases[index]
    tokens = [case.prompt, case.turns, case.forced, [(one.answer, one.max_new_tokens) for one in case.samples]]
    parts: list[Any] = [model, plan.task, tokens, plan.capacity, setup.fetch, repr(policy)]
    parts += [case.questions] if case.questions else []
    if unusual := [(one.scorer, one.choices) for one in case.samples if one.scorer != "number"]:
        parts += [unusual]
    if plan.room is not None or plan.width(case) != len(case.prompt):
        parts += [plan.room, plan.width(case), "room"]  # prompts of different lengths have other windows and padding
    parts += [] if setup.prefill is None else [repr(setup.prefill)]
    learned = setup.arrays_of(policy)
    parts += [] if learned is None else [tree_digest(learned)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def evaluate(
    params: Any,
    tasks: Sequence[str],
    lengths: Sequence[int],
    policies: Sequence[Policy],
    *,
    out: Any = None,
    progress: Progress | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Measure policies against full attention.

    Args:
        params: the model's Params, with a tokenizer.
        tasks: names in TASKS or RULER_TASKS. The list may be empty if there is data.
        lengths: numbers of prompt tokens of the tasks. For RULER's tasks, they include the tokens of an answer.
        policies: the policies. Full attention is also measured. For tasks with questions, each ShadowKV gets a negative
            control: StreamingLLM with the device bytes that ShadowKV takes when its values are offloaded.
        out: directory for finished samples (samples.jsonl). A later call reuses them. None stores nothing.
        progress: called with (number of samples done, number of samples).
        **settings: the fields of `EvalSettings`.

    Returns:
        One row (a dict) for each task, length and policy. Every row has:

        - task, length, policy (in the syntax of `--policies`), name, settings (resolved), samples.
        - score and stderr, in percent.
        - device_bytes, host_bytes and full_bytes (full attention's) of the run.
        - offloaded_device_bytes: the device bytes with fetch "device_put".
        - served_device_bytes and served_full_bytes: the same in bfloat16 with fetch "device_put". served_moved_bytes:
          the bytes that one step then moves from the host.
        - capacity, fetch, prefill, fitted, attended_tokens, hit_rate, truncated (number of truncated contexts).
        - control_of: for a control, its policy. control: the result of the negative control of the task.
        - share, and infeasible: the reason if no setting stays within the share. Then scores and bytes are None.
        - sweeps: the settings whose sweep the row belongs to.

        Rows of tasks with questions also have asked, found, found_by_full and found_by_both (sums of scores from 0 to
        1), recall_of_full (percent), turns (percent by turn), and depths and depth_scores (percent) if the facts have
        depths. Rows of `needle_*_phases` also have phase_asked and phase_found (numbers of answers at each of the 8
        phases). Rows of agreement tasks also have top1 and top1_stderr (percent), kl and kl_stderr (KL(full || policy)
        in nats), ppl and ppl_full (perplexity of the forced tokens under the policy and under full attention).

    Raises:
        ConfigError: a task, policy or setting is unknown or out of range. Or there is a task of RULER, and `out` has
            samples of another model. It is raised before anything runs.
        HostMemoryError: the host has too little memory. It is raised before anything runs.
    """
    if among(tasks):
        check_model(out, model_of(params))
    evaluation = plan_evaluation(params, tasks, lengths, policies, EvalSettings(**settings))
    plans = evaluation.plans
    everything = [(place, index) for place, plan in enumerate(plans) for index in range(len(plan.cases))]
    finished = finish_samples(evaluation, everything, SampleStore(out), progress)
    rows = []
    for place, plan in enumerate(plans):
        table = [finished[place, index] for index in range(len(plan.cases))]
        rows += task_rows(evaluation.setup, plan, table)
    return rows


def plan_evaluation(
    params: Any, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], asked: EvalSettings
) -> Evaluation:
    """Make all samples, and check everything that can be checked before a sample runs.

    The arguments and the errors are those of `evaluate`.
    """
    check_piece("together", asked.together)
    setup = Setup(params, offload.resolve_fetch(asked.fetch), asked.prefill, asked.fitted or {}, asked.together)
    if isinstance(asked.data, str) or (not asked.data and (asked.truncate is not None or asked.limit is not None)):
        raise ConfigError(f"data must be a list of files (truncate and limit are for them), got {asked.data!r}")
    plans = plan_tasks(setup, tasks, lengths if tasks else (), policies, asked)
    for policy in [*policies] or [Full()]:
        prepared_attention([policy], setup.prefill, params.config)  # raises ConfigError if the two do not go together
    return Evaluation(setup, tuple(plans), asked)


def finish_samples(
    evaluation: Evaluation, wanted: Sequence[Place], store: SampleStore, progress: Progress | None
) -> dict[Place, dict[Policy, dict[str, Any]]]:
    """Return the records of some samples by policy. Records in the store are reused, and new ones are put into it.

    Args:
        evaluation: the plans.
        wanted: the samples: place of the plan, and place of the case in it. Those of a plan come one after another.
        store: finished samples.
        progress: called with (number of samples done, number of samples).
    """
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    last, programs = None, 0
    finished: dict[Place, dict[Policy, dict[str, Any]]] = {}
    samples = (Wanted.of(evaluation, one, store) for one in wanted)
    for group in groups_of(samples, evaluation.setup.together):
        plan = group[0].plan
        if plan is not last:
            last, programs = plan, programs + len(plan.entries)
        if programs > MOST_PROGRAMS:
            jax.clear_caches()
            programs = len(plan.entries)
        if group[0].missing:
            finish_group(evaluation, group, store)
        for sample in group:
            finished[sample.place] = {policy: store.records[key] for policy, key in sample.keys.items()}
        if progress is not None:
            progress(len(finished), len(wanted))
    return finished


class Wanted(NamedTuple):
    """A sample that is wanted.

    Attributes:
        place: place of the plan, and place of the case in it.
        plan: the plan.
        keys: the key of each policy's record.
        missing: the policies whose records are not in the store.
    """

    place: Place
    plan: TaskPlan
    keys: dict[Policy, str]
    missing: list[Policy]

    @property
    def case(self) -> Case:
        """The case."""
        return self.plan.cases[self.place[1]]

    @classmethod
    def of(cls, evaluation: Evaluation, place: Place, store: SampleStore) -> "Wanted":
        """Return the sample at a place."""
        plan, setup = evaluation.plans[place[0]], evaluation.setup
        policies = dict.fromkeys(entry.policy for entry in plan.entries if entry.policy is not None)
        keys = {one: sample_key(setup, evaluation.model, plan, place[1], one) for one in policies}
        return cls(place, plan, keys, [policy for policy, key in keys.items() if key not in store.records])


def groups_of(samples: Iterable[Wanted], most: int) -> Iterator[list[Wanted]]:
    """Yield neighboring samples that can run as the rows of one batch, at most `most` of them at once."""

    def alike(sample: Wanted) -> tuple[Any, ...]:
        alone = sample.place if most == 1 or not runs_together(sample.case) else None
        return sample.place[0], sample.plan.width(sample.case), sample.missing, alone

    for _, found in itertools.groupby(samples, alike):
        neighbors = list(found)
        yield from (neighbors[first : first + most] for first in range(0, len(neighbors), most))


def finish_group(evaluation: Evaluation, group: Sequence[Wanted], store: SampleStore) -> None:
    """Run the policies that the samples of a group miss, and put their records into the store."""
    setup, plan, missing = evaluation.setup, group[0].plan, group[0].missing
    indices = [sample.place[1] for sample in group]
    # An agreement case compares with the logits of full attention, so full attention runs again if any policy does.
    first = next(iter(group[0].keys))
    run = [first, *missing] if group[0].case.forced and first not in missing else missing
    if setup.together > 1 and runs_together(group[0].case):
        table = run_together(setup, plan, indices, run)
    else:
        table = ([record] for record in run_case(setup, plan, indices[0], run))
    for policy, records in zip(run, table, strict=True):
        for sample, record in zip(group, records, strict=True):
            if policy in missing:
                store.add(sample.keys[policy], record, context_of(evaluation, sample, policy))


def context_of(evaluation: Evaluation, sample: Wanted, policy: Policy) -> dict[str, Any]:
    """Return what a record in the store says of its sample, for people who read the file."""
    setup, plan, case, index = evaluation.setup, sample.plan, sample.case, sample.place[1]
    depth = plan.depths[index] if plan.depths else None
    context: dict[str, Any] = {"task": plan.task, "length": plan.length, "sample": index, "depth": depth}
    answers = [one.answer for one in case.samples]
    context |= {"answers": answers, "fetch": setup.fetch, "model": evaluation.model}
    context |= {"prefill": setup.prefill.label()} if setup.prefill else {}
    context |= {"truncated": case.truncated} if case.truncated else {}
    return context | {"policy": results.label(policy)}
