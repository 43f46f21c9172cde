"""Running policies side by side on tasks with known answers. Policies share the prefill of a sample if possible."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jshadow.cache import offload
from jshadow.cache.state import Counters, KVState
from jshadow.engine import decode
from jshadow.engine.prefill.job import prepared_attention
from jshadow.engine.report import row_figures
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics, results
from jshadow.evaluation.plan import plan_tasks
from jshadow.evaluation.replies import generate_rows, greedy
from jshadow.evaluation.rows import task_rows
from jshadow.evaluation.samples import SampleStore, check_model
from jshadow.evaluation.settings import EvalSettings, Evaluation, Setup, TaskPlan, model_of
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.framing import padded
from jshadow.evaluation.tasks.ruler import among
from jshadow.evaluation.text_metrics import score
from jshadow.policies import Full, Policy
from jshadow.policies.capabilities import attention_of
from jshadow.weights.digest import tree_digest

Progress = Callable[[int, int], None]
MOST_TOGETHER = 12  # maximum number of states of one prompt that exist at the same time
MOST_PROGRAMS = 32  # maximum number of cached decode programs; each takes about 100 MB for a deep model


# One sample


def say(params: Any, logits: Any, state: KVState, count: int) -> tuple[list[int], KVState]:
    """Generate at most `count` token ids greedily, without the end token. The last id is not fed to the model."""
    stop, reply = frozenset(params.config.eos_ids), []

    def take(row: int, token: int) -> bool:
        if token in stop:
            return False
        reply.append(token)
        return True

    state = generate_rows(params, logits, state, count, greedy, take)
    return reply, state


def feed(params: Any, question: Sequence[int], state: KVState) -> tuple[Any, KVState]:
    """Feed a question, padded so that few programs are compiled. Returns its last logits and the new state."""
    tokens = np.zeros((1, padded(len(question))), np.int32)
    tokens[0, : len(question)] = question
    return decode.extend(params, tokens, np.array([len(question)], np.int32), state)


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Answer every turn greedily. Answers stay in the cache, and the next question is appended to it."""
    texts = []
    for turn, sample in enumerate(case.samples):
        length = int(np.asarray(state.lengths)[0])
        reply, state = say(params, logits, state, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(reply))
        if turn < len(case.turns):
            unfed = reply[int(np.asarray(state.lengths)[0]) - length :]  # the last token was drawn, but not fed
            logits, state = feed(params, [*unfed, *case.turns[turn]], state)
    return texts, state


def answers_apart(params: Any, case: Case, state: KVState) -> tuple[list[str], Counters]:
    """Answer independent questions greedily, each on a fork of the state. Returns the texts and summed counters."""
    texts, counters = [], []
    for question, sample in zip(case.questions, case.samples, strict=True):
        logits, fork = feed(params, question, state.fork())
        reply, fork = say(params, logits, fork, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(reply))
        counters.append(jax.tree.map(np.asarray, fork.counters))
    return texts, jax.tree.map(lambda *counts: sum(counts), *counters)


def run_case(setup: Setup, plan: TaskPlan, index: int, policies: Sequence[Policy]) -> Iterator[dict[str, Any]]:
    """Yield the record of each policy on one case, in order. For an agreement case, full attention must come first."""
    params, reference, case = setup.params, None, plan.cases[index]
    for logits, state in prefilled(setup, plan, case, policies):
        record: dict[str, Any]
        if case.forced:
            first = np.asarray(logits)  # logits of the prompt's last token, which predict the first forced token
            forced = np.array([case.forced], np.int32)
            logits, state = decode.extend(params, forced, np.array([forced.shape[1]], np.int32), state, logits="all")
            this = np.asarray(logits)[0]
            reference = this if reference is None else reference
            record = {"score": 100 * float(metrics.top1(reference, this).mean()), "hits": []}
            record |= {"kl": float(metrics.kl(reference, this).mean()), "outputs": []}
            record |= {"ppl": metrics.perplexity(np.concatenate([first, this[:-1]]), forced[0])}
            counters = jax.tree.map(np.asarray, state.counters)
        elif case.questions:
            texts, counters = answers_apart(params, case, state)
            record = judged(case, texts) | {"apart": True}
        else:
            texts, state = answers(params, case, logits, state)
            record, counters = judged(case, texts), jax.tree.map(np.asarray, state.counters)
        figures = row_figures(Counters.zeros(1), counters, 0, params.config.num_layers)
        yield record | {name: figures[name] for name in ("attended_tokens", "hit_rate")}


def judged(case: Case, texts: Sequence[str]) -> dict[str, Any]:
    """Score the answers to a case, and return its record."""
    pairs = zip(case.samples, texts, strict=True)
    scores = [score(sample.scorer, sample.answers, text, sample.choices) for sample, text in pairs]
    hits = [one == 1 for one in scores]
    record = {"score": 100 * sum(scores) / len(scores), "hits": hits, "kl": None, "outputs": list(texts)}
    return record if scores == hits else record | {"scores": scores}


def prefilled(setup: Setup, plan: TaskPlan, case: Case, policies: Sequence[Policy]) -> Iterator[tuple[Any, KVState]]:
    """Yield the logits and the state of each policy, in order.

    Most policies share one prefill. A policy with its own prefill attention has a separate prefill. So has a policy
    with learned arrays, because a prefill takes the arrays of only one policy.
    """
    params = setup.params
    tokens, length = np.zeros((1, plan.width(case)), np.int32), np.array([len(case.prompt)], np.int32)
    tokens[0, : len(case.prompt)] = case.prompt
    options: dict[str, Any] = {"capacity": plan.capacity, "fetch": setup.fetch, "room": plan.room}
    attends = [attention_of(policy.resolve(params.config, plan.capacity)) is not None for policy in policies]
    learned = [setup.arrays_of(policy) for policy in policies]
    apart = [attention or arrays is not None for attention, arrays in zip(attends, learned, strict=True)]
    sharing = [policy for policy, alone in zip(policies, apart, strict=True) if not alone]
    together: list[tuple[Any, KVState]] = []
    for policy, alone, attention, arrays in zip(policies, apart, attends, learned, strict=True):
        if alone:
            own_options = options | {"attention": None if attention else setup.prefill, "fitted": arrays}
            yield decode.prefill_many(params, tokens, length, [policy], **own_options)[0]
            continue
        if not together:
            some, sharing = sharing[:MOST_TOGETHER], sharing[MOST_TOGETHER:]
            together = decode.prefill_many(params, tokens, length, some, **options, attention=setup.prefill)
        yield together.pop(0)  # each state is freed as soon as it is used


# All samples


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
    setup = Setup(params, offload.resolve_fetch(asked.fetch), asked.prefill, asked.fitted or {})
    if isinstance(asked.data, str) or (not asked.data and (asked.truncate is not None or asked.limit is not None)):
        raise ConfigError(f"data must be a list of files (truncate and limit are for them), got {asked.data!r}")
    plans = plan_tasks(setup, tasks, lengths if tasks else (), policies, asked)
    for policy in [*policies] or [Full()]:
        prepared_attention([policy], setup.prefill, params.config)  # raises ConfigError if the two do not go together
    return Evaluation(setup, tuple(plans), asked)


def finish_samples(
    evaluation: Evaluation, wanted: Sequence[tuple[int, int]], store: SampleStore, progress: Progress | None
) -> dict[tuple[int, int], dict[Policy, dict[str, Any]]]:
    """Return the records of some samples by policy. Records in the store are reused, and new ones are put into it.

    Args:
        evaluation: the plans.
        wanted: the samples: place of the plan, and place of the case in it. Those of a plan come one after another.
        store: finished samples.
        progress: called with (number of samples done, number of samples).
    """
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    model, last, programs = evaluation.model, None, 0
    finished = {}
    for place, index in wanted:
        plan = evaluation.plans[place]
        if place != last:
            last, programs = place, programs + len(plan.entries)
        if programs > MOST_PROGRAMS:
            jax.clear_caches()
            programs = len(plan.entries)
        finished[place, index] = finish_sample(evaluation.setup, plan, index, store, model)
        if progress is not None:
            progress(len(finished), len(wanted))
    return finished


def finish_sample(
    setup: Setup, plan: TaskPlan, index: int, store: SampleStore, model: str
) -> dict[Policy, dict[str, Any]]:
    """Return the record of every policy on one case. Records in the store are reused."""
    policies = list(dict.fromkeys(entry.policy for entry in plan.entries if entry.policy is not None))
    keys = {policy: sample_key(setup, model, plan, index, policy) for policy in policies}
    missing = [policy for policy in policies if keys[policy] not in store.records]
    case = plan.cases[index]
    # An agreement case compares with the logits of full attention, so full attention runs again if any policy does.
    run = [policies[0], *missing] if missing and case.forced and policies[0] not in missing else missing
    depth = plan.depths[index] if plan.depths else None
    context: dict[str, Any] = {"task": plan.task, "length": plan.length, "sample": index, "depth": depth}
    context |= {"answers": [sample.answer for sample in case.samples], "fetch": setup.fetch, "model": model}
    context |= {"prefill": setup.prefill.label()} if setup.prefill else {}
    context |= {"truncated": case.truncated} if case.truncated else {}
    records = run_case(setup, plan, index, run) if run else iter(())
    for policy, record in zip(run, records, strict=True):
        if policy in missing:
            store.add(keys[policy], record, context | {"policy": results.label(policy)})
    return {policy: store.records[keys[policy]] for policy in policies}
