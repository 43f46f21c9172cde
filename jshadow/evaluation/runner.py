"""Policies side by side on tasks with known answers. Policies share the prefill of a sample where they can."""

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
from jshadow.engine.prefill_job import prepared_attention
from jshadow.engine.report import row_figures
from jshadow.errors import ConfigError
from jshadow.evaluation import metrics, results
from jshadow.evaluation.plan import SERVED, plan_tasks
from jshadow.evaluation.replies import generate_rows, greedy
from jshadow.evaluation.samples import SampleStore
from jshadow.evaluation.settings import Entry, EvalSettings, Setup, TaskPlan
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.framing import padded
from jshadow.evaluation.text_metrics import score
from jshadow.planner.bytes import footprint, step_footprint
from jshadow.policies import Full, Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.settings import policy_settings
from jshadow.weights.digest import tree_digest

Progress = Callable[[int, int], None]
MOST_TOGETHER = 12  # states of one prompt that exist at once
MOST_PROGRAMS = 32  # decode programs that are kept: of a deep model, each takes some 100 MB


# One sample


def say(params: Any, logits: Any, state: KVState, count: int) -> tuple[list[int], KVState]:
    """Greedy token ids of at most `count`, without the end token. Consumes the state; the last id is not fed to it."""
    stop, reply = frozenset(params.config.eos_ids), []

    def take(row: int, token: int) -> bool:
        if token in stop:
            return False
        reply.append(token)
        return True

    state = generate_rows(params, logits, state, count, greedy, take)
    return reply, state


def feed(params: Any, question: Sequence[int], state: KVState) -> tuple[Any, KVState]:
    """Logits after a question of any length, by one of few compiled programs. Consumes the state."""
    tokens = np.zeros((1, padded(len(question))), np.int32)
    tokens[0, : len(question)] = question
    return decode.extend(params, tokens, np.array([len(question)], np.int32), state)


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Greedy answers to every turn; answers stay in the cache, and later questions are appended to it."""
    texts = []
    for turn, sample in enumerate(case.samples):
        length = int(np.asarray(state.lengths)[0])
        reply, state = say(params, logits, state, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(reply))
        if turn < len(case.turns):
            unfed = reply[int(np.asarray(state.lengths)[0]) - length :]  # the last token was sampled, not fed
            logits, state = feed(params, [*unfed, *case.turns[turn]], state)
    return texts, state


def answers_apart(params: Any, case: Case, state: KVState) -> tuple[list[str], Counters]:
    """Greedy answers to independent questions, each asked of a fork of the prompt, and the counters of all forks."""
    texts, counters = [], []
    for question, sample in zip(case.questions, case.samples, strict=True):
        logits, fork = feed(params, question, state.fork())
        reply, fork = say(params, logits, fork, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(reply))
        counters.append(jax.tree.map(np.asarray, fork.counters))
    return texts, jax.tree.map(lambda *counts: sum(counts), *counters)


def run_case(setup: Setup, plan: TaskPlan, index: int, policies: Sequence[Policy]) -> Iterator[dict[str, Any]]:
    """The record of each policy on one case, in order; an agreement case needs full attention first."""
    params, reference, case = setup.params, None, plan.cases[index]
    for logits, state in prefilled(setup, plan, case, policies):
        record: dict[str, Any]
        if case.forced:
            first = np.asarray(logits)  # of the prompt's last token: they score the first forced token
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
    """The scores of the answers to a case."""
    pairs = zip(case.samples, texts, strict=True)
    scores = [score(sample.scorer, sample.answers, text, sample.choices) for sample, text in pairs]
    hits = [one == 1 for one in scores]
    record = {"score": 100 * sum(scores) / len(scores), "hits": hits, "kl": None, "outputs": list(texts)}
    return record if scores == hits else record | {"scores": scores}


def prefilled(setup: Setup, plan: TaskPlan, case: Case, policies: Sequence[Policy]) -> Iterator[tuple[Any, KVState]]:
    """Logits and state of each policy, in order.

    Most policies share one prefill. A policy that attends in its own way has a prefill of its own, and so has one with
    learned arrays: a shared prefill takes the arrays of one policy.
    """
    params = setup.params
    tokens, length = np.zeros((1, plan.width(case)), np.int32), np.array([len(case.prompt)], np.int32)
    tokens[0, : len(case.prompt)] = case.prompt
    options: dict[str, Any] = {"capacity": plan.capacity, "fetch": setup.fetch, "shortest": plan.shortest}
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
    """A digest of all that decides a sample's record. Parts that are as usual are left out: old files stay valid."""
    case = plan.cases[index]
    tokens = [case.prompt, case.turns, case.forced, [(one.answer, one.max_new_tokens) for one in case.samples]]
    parts: list[Any] = [model, plan.task, tokens, plan.capacity, setup.fetch, repr(policy)]
    parts += [case.questions] if case.questions else []
    if unusual := [(one.scorer, one.choices) for one in case.samples if one.scorer != "number"]:
        parts += [unusual]
    if plan.shortest != len(case.prompt) or plan.width(case) != len(case.prompt):
        parts += [plan.shortest, plan.width(case)]  # windows and padding of prompts of several lengths
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
        params: Params with a tokenizer.
        tasks: names in TASKS; may be empty beside data.
        lengths: prompt tokens of the tasks.
        policies: full attention is always measured too. Each ShadowKV brings a negative control to the needle tasks:
            StreamingLLM at the device bytes that ShadowKV takes with its values offloaded, whatever `fetch` is.
        out: directory that keeps finished samples (samples.jsonl); a later call goes on from there. None: nowhere.
        progress: called with (samples done, samples).
        **settings: the fields of `EvalSettings`: samples, seed, fetch, shares, sweeps, prefill, fitted, data, truncate
            and limit.

    Returns:
        One row a task, length and policy: task, length, policy (as `--policies` takes it), name, settings, score and
        stderr (percent), samples, device_bytes, host_bytes and full_bytes as it ran, offloaded_device_bytes (under
        "device_put", whatever ran), served_device_bytes, served_full_bytes and served_moved_bytes (from host in one
        step; likewise, in bfloat16), capacity, fetch, prefill, fitted, attended_tokens, hit_rate, truncated (contexts
        that were cut), control_of and control (what the negative control says, in every row of its table).
        For questions also asked, found, found_by_full, found_by_both (sums of scores from 0 to 1), recall_of_full
        (percent), turns (percent by turn), depths and depth_scores (percent at each depth of the fact, where there is
        one). For agreement top1, top1_stderr, kl and kl_stderr (nats, full against this policy), ppl and ppl_full
        (perplexity of the forced tokens, this policy's and full's). With shares, also share, and infeasible: why
        nothing ran, where score and all that follows from it is None. With sweeps, also sweeps: the settings in whose
        sweep the row is.

    Raises:
        ConfigError, HostMemoryError: before anything runs.
    """
    asked = EvalSettings(**settings)
    setup = Setup(params, offload.resolve_fetch(asked.fetch), asked.prefill, asked.fitted or {})
    if isinstance(asked.data, str) or (not asked.data and (asked.truncate is not None or asked.limit is not None)):
        raise ConfigError(f"data must be a list of files (truncate and limit are for them), got {asked.data!r}")
    plans = plan_tasks(setup, tasks, lengths if tasks else (), policies, asked)
    for policy in [*policies] or [Full()]:
        prepared_attention([policy], setup.prefill, params.config)  # one that attends in its own way takes no other
    store, model = SampleStore(out), f"{params.config} {params.digest}"
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    total = sum(len(plan.cases) for plan in plans)
    rows, done, programs = [], 0, 0
    for plan in plans:
        programs += len(plan.entries)
        if programs > MOST_PROGRAMS:
            jax.clear_caches()
            programs = len(plan.entries)
        table = []
        for index in range(len(plan.cases)):
            table.append(finish_sample(setup, plan, index, store, model))
            done += 1
            if progress is not None:
                progress(done, total)
        prefill = {"prefill": setup.prefill.label(plan.length) if setup.prefill else "exact"}
        rows += [prefill | row for row in task_rows(setup, plan, table)]
    return rows


def finish_sample(
    setup: Setup, plan: TaskPlan, index: int, store: SampleStore, model: str
) -> dict[Policy, dict[str, Any]]:
    """The record of every policy on one case; a record that the store has is not made again."""
    policies = list(dict.fromkeys(entry.policy for entry in plan.entries if entry.policy is not None))
    keys = {policy: sample_key(setup, model, plan, index, policy) for policy in policies}
    missing = [policy for policy in policies if keys[policy] not in store.records]
    case = plan.cases[index]
    # the divergence from full attention needs its logits
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


def settings_of(entry: Entry, resolved: Policy) -> dict[str, Any]:
    """What the policy resolved to. A swept setting that another one replaces (keys.bits) is shown as it was given."""
    assert entry.policy is not None
    asked, settings = policy_settings(entry.policy), policy_settings(resolved)
    return settings | {name: asked[name] for name in entry.sweeps if settings[name] is None}


def task_rows(setup: Setup, plan: TaskPlan, table: list[dict[Policy, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The result rows of one task at one length."""
    params, fetch = setup.params, setup.fetch
    full = [records[Full()] for records in table]
    sizes = {"capacity": plan.capacity, "prompt": plan.shortest, "dtype": params.dtype.name}
    rows = []
    for entry in plan.entries:
        if entry.policy is None:
            rows.append(results.infeasible_row(plan.task, plan.length, entry.name, entry.share, entry.infeasible))
            continue
        resolved = entry.policy.resolve(params.config, plan.capacity)
        used = footprint(params.config, resolved, **sizes, fetch=fetch)
        row: dict[str, Any] = {"task": plan.task, "length": plan.length, "policy": results.label(entry.policy)}
        row |= {"share": entry.share, "infeasible": None, "name": resolved.name}
        row |= {"settings": settings_of(entry, resolved)}
        row |= {"control_of": entry.control_of, "control": None, "capacity": plan.capacity, "fetch": fetch}
        row |= {"fitted": setup.arrays_of(resolved) is not None, "sweeps": list(entry.sweeps)}
        row |= {"truncated": sum(case.truncated > 0 for case in plan.cases)}
        row |= {name: used[name] for name in ("device_bytes", "host_bytes", "full_bytes")}
        offloaded = footprint(params.config, resolved, **sizes, fetch="device_put")
        row |= {"offloaded_device_bytes": offloaded["device_bytes"]}
        served = footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
        row |= {"served_device_bytes": served["device_bytes"], "served_full_bytes": served["full_bytes"]}
        step = step_footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
        row |= {"served_moved_bytes": step["bytes_moved"]}
        if attention := attention_of(resolved):
            row["prefill"] = attention.label(plan.length)
        rows.append(row | results.score_row([records[entry.policy] for records in table], full, plan.depths))
    verdicts = [results.verdict(row["found_by_full"], row["found"]) for row in rows if row["control_of"]]
    worst = max(verdicts, key=lambda text: not text.startswith("ok"), default=None)
    return [row | {"control": worst} for row in rows]  # it is about the task, so every row has it
