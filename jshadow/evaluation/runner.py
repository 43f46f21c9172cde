"""Policies side by side on tasks with known answers, one prefill a sample for all of them."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jshadow.cache import offload
from jshadow.cache.state import Counters, KVState
from jshadow.engine import decode
from jshadow.engine.prefill import prepared_attention
from jshadow.engine.report import row_figures
from jshadow.errors import ConfigError
from jshadow.evaluation import results as metrics
from jshadow.evaluation.plan import SERVED, Cell, Data, Entry, Setup, plan
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.framing import padded
from jshadow.evaluation.text_metrics import score
from jshadow.planner.bytes import footprint, step_footprint
from jshadow.policies import Full, Policy
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.weights.digest import tree_digest

Progress = Callable[[int, int], None]
MOST_TOGETHER = 12  # states of one prompt that exist at once
MOST_PROGRAMS = 32  # decode programs that are kept: of a deep model, each takes some 100 MB


# One sample


def say(params: Any, logits: Any, state: KVState, count: int) -> tuple[list[int], KVState]:
    """Greedy token ids of at most `count`, without what stops them. Consumes the state."""
    stop = tuple(params.config.eos_ids)
    token = np.asarray(logits).argmax(-1).astype(np.int32)
    said = [] if int(token[0]) in stop else [int(token[0])]
    if said and count > 1:
        new, state = decode.decode_steps(params, token, state, count - 1, stop=stop)
        said += [int(one) for one in np.asarray(new)[0] if one >= 0 and int(one) not in stop]
    return said, state


def feed(params: Any, question: Sequence[int], state: KVState) -> tuple[Any, KVState]:
    """Logits after a question of any length, by one of few compiled programs. Consumes the state."""
    tokens = np.zeros((1, padded(len(question))), np.int32)
    tokens[0, : len(question)] = question
    return decode.extend(params, tokens, np.array([len(question)], np.int32), state)


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Greedy answers to every turn; answers stay in the cache, and later questions are appended to it."""
    texts = []
    for turn, sample in enumerate(case.samples):
        held = int(np.asarray(state.lengths)[0])
        said, state = say(params, logits, state, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(said))
        if turn < len(case.turns):
            unfed = said[int(np.asarray(state.lengths)[0]) - held :]  # the last token was sampled, not fed
            logits, state = feed(params, [*unfed, *case.turns[turn]], state)
    return texts, state


def answers_apart(params: Any, case: Case, state: KVState) -> tuple[list[str], Counters]:
    """Greedy answers to independent questions, each asked of a fork of the prompt, and what all forks did."""
    texts, did = [], []
    for question, sample in zip(case.questions, case.samples, strict=True):
        logits, fork = feed(params, question, state.fork())
        said, fork = say(params, logits, fork, sample.max_new_tokens)
        texts.append(params.tokenizer.decode(said))
        did.append(jax.tree.map(np.asarray, fork.counters))
    return texts, jax.tree.map(lambda *counts: sum(counts), *did)


def run_case(setup: Setup, cell: Cell, index: int, policies: Sequence[Policy]) -> Iterator[dict[str, Any]]:
    """What each policy makes of one case, in order; an agreement case wants full attention first."""
    params, reference, case = setup.params, None, cell.cases[index]
    for logits, state in prefilled(setup, cell, case, policies):
        record: dict[str, Any]
        if case.forced:
            first = np.asarray(logits)  # of the last token of the prompt, which says the first forced one
            forced = np.array([case.forced], np.int32)
            logits, state = decode.extend(params, forced, np.array([forced.shape[1]], np.int32), state, logits="all")
            mine = np.asarray(logits)[0]
            reference = mine if reference is None else reference
            record = {"score": 100 * float(metrics.top1(reference, mine).mean()), "hits": []}
            record |= {"kl": float(metrics.kl(reference, mine).mean()), "outputs": []}
            record |= {"ppl": metrics.perplexity(np.concatenate([first, mine[:-1]]), forced[0])}
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


def prefilled(
    setup: Setup, cell: Cell, case: Case, policies: Sequence[Policy]
) -> Iterator[tuple[Any, KVState]]:  # fmt: skip
    """Logits and state of each policy, in order; one prefill for many, but for those that attend in their own way.

    Those with learned arrays have one each as well: a shared prefill takes arrays of one policy.
    """
    params = setup.params
    tokens, length = np.zeros((1, cell.width(case)), np.int32), np.array([len(case.prompt)], np.int32)
    tokens[0, : len(case.prompt)] = case.prompt
    options: dict[str, Any] = {"capacity": cell.capacity, "fetch": setup.fetch, "shortest": cell.shortest}
    own = [policy.resolve(params.config, cell.capacity).prefill_attention() is not None for policy in policies]
    learned = [setup.arrays_of(policy) for policy in policies]
    sharing = [p for p, its, arrays in zip(policies, own, learned, strict=True) if not its and arrays is None]
    together: list[tuple[Any, KVState]] = []
    for policy, its, arrays in zip(policies, own, learned, strict=True):
        if not its and arrays is None:
            if not together:
                some, sharing = sharing[:MOST_TOGETHER], sharing[MOST_TOGETHER:]
                together = decode.prefill_many(params, tokens, length, some, **options, attention=setup.prefill)
            yield together.pop(0)  # each state goes as soon as it is used
        else:
            attention = None if its else setup.prefill
            own_options = options | {"attention": attention, "fitted": arrays}
            yield decode.prefill_many(params, tokens, length, [policy], **own_options)[0]


# All samples


def sample_key(setup: Setup, model: str, cell: Cell, index: int, policy: Policy) -> str:
    """A digest of all that decides a sample's record."""
    case = cell.cases[index]
    tokens = [case.prompt, case.turns, case.forced, [(one.answer, one.max_new_tokens) for one in case.samples]]
    what: list[Any] = [model, cell.task, tokens, cell.capacity, setup.fetch, repr(policy)]
    what += [case.questions] if case.questions else []
    if usual := [(one.scorer, one.choices) for one in case.samples if one.scorer != "number"]:
        what += [usual]
    if cell.shortest != len(case.prompt) or cell.width(case) != len(case.prompt):
        what += [cell.shortest, cell.width(case)]  # windows and padding of prompts of several lengths
    what += [] if setup.prefill is None else [repr(setup.prefill)]
    learned = setup.arrays_of(policy)
    what += [] if learned is None else [tree_digest(learned)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def evaluate(
    params: Any, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], *, samples: int = 10,
    seed: int = 0, fetch: str = "auto", out: Any = None, progress: Progress | None = None,
    shares: Sequence[float] = (), prefill: PrefillAttention | None = None, fitted: Mapping[str, Any] | None = None,
    sweeps: Mapping[str, Sequence[Policy]] | None = None, data: Sequence[Any] = (), truncate: str | None = None,
    limit: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure policies against full attention.

    Args:
        params: Params with a tokenizer.
        tasks: names in TASKS; may be empty beside data.
        lengths: prompt tokens of the tasks.
        policies: full attention is always measured too. Each ShadowKV brings a negative control to the needle tasks:
            StreamingLLM at the device bytes that ShadowKV takes with its values offloaded, whatever `fetch` is.
        samples: cases of each task and length, their depths spread evenly.
        seed: of the cases.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        out: directory that keeps finished samples (samples.jsonl); a later call goes on from there. None: nowhere.
        progress: called with (samples done, samples).
        shares: run each policy at its `nominal` setting for each of these shares of full attention's device bytes in
            bfloat16, offloaded where it offloads. Of the settings given, those hold that take no memory
            (`quest:budget=256`). Then there is no control; all tasks of a length have one capacity.
        prefill: how every prompt's tokens attend to each other, full attention's too; None: exactly.
        fitted: arrays that a policy learned (`policy.fit`, `load_fitted`), by the policy's name, for all its settings.
        sweeps: policies by the setting in which they differ, run as they are beside those at shares. No controls then.
        data: local files (.jsonl, .json, .parquet) whose rows are evaluated too (`evaluation.data`).
        truncate: "middle": cut a context that does not fit the model, and tell it; None: that is an error.
        limit: rows of each file; None: all.

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
    setup = Setup(params, offload.resolve_fetch(fetch), prefill, fitted or {})
    if isinstance(data, str) or (not data and (truncate is not None or limit is not None)):
        raise ConfigError(f"data must be a list of files (truncate and limit are for them), got {data!r}")
    files = Data(tuple(data), truncate, limit) if data else None
    cells = plan(setup, tasks, lengths if tasks else (), policies, samples, seed, shares, files, sweeps)
    for policy in [*policies] or [Full()]:
        prepared_attention([policy], prefill, params.config)  # one that attends in its own way takes no other
    store, model = metrics.Store(out), f"{params.config} {params.digest}"
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    rows, done, programs = [], 0, 0
    for cell in cells:
        programs += len(cell.entries)
        if programs > MOST_PROGRAMS:
            jax.clear_caches()
            programs = len(cell.entries)
        table = []
        for index in range(len(cell.cases)):
            table.append(finish_sample(setup, cell, index, store, model))
            done += 1
            if progress is not None:
                progress(done, sum(len(one.cases) for one in cells))
        told = {"prefill": prefill.label(cell.length) if prefill else "exact"}
        rows += [told | row for row in cell_rows(setup, cell, table)]
    return rows


def finish_sample(
    setup: Setup, cell: Cell, index: int, store: metrics.Store, model: str
) -> dict[Policy, dict[str, Any]]:
    """The record of every policy on one case; what the store has is not run again."""
    policies = list(dict.fromkeys(entry.policy for entry in cell.entries if entry.policy is not None))
    keys = {policy: sample_key(setup, model, cell, index, policy) for policy in policies}
    missing = [policy for policy in policies if keys[policy] not in store.records]
    case = cell.cases[index]
    # the divergence from full attention needs its logits
    run = [policies[0], *missing] if missing and case.forced and policies[0] not in missing else missing
    depth = cell.depths[index] if cell.depths else None
    context: dict[str, Any] = {"task": cell.task, "length": cell.length, "sample": index, "depth": depth}
    context |= {"answers": [sample.answer for sample in case.samples], "fetch": setup.fetch, "model": model}
    context |= {"prefill": setup.prefill.label()} if setup.prefill else {}
    context |= {"truncated": case.truncated} if case.truncated else {}
    made = run_case(setup, cell, index, run) if run else iter(())
    for policy, record in zip(run, made, strict=True):
        if policy in missing:
            store.add(keys[policy], record, context | {"policy": metrics.label(policy)})
    return {policy: store.records[keys[policy]] for policy in policies}


def settings_of(entry: Entry, resolved: Policy) -> dict[str, Any]:
    """What the policy resolved to; a swept setting that another one stands for then (keys.bits) as it was given."""
    assert entry.policy is not None
    given, settings = entry.policy.settings(), resolved.settings()
    return settings | {name: given[name] for name in entry.sweeps if settings[name] is None}


def cell_rows(setup: Setup, cell: Cell, table: list[dict[Policy, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The result rows of one task at one length."""
    params, fetch = setup.params, setup.fetch
    full = [records[Full()] for records in table]
    sizes = {"capacity": cell.capacity, "prompt": cell.shortest, "dtype": params.dtype.name}
    rows = []
    for entry in cell.entries:
        if entry.policy is None:
            rows.append(metrics.infeasible_row(cell.task, cell.length, entry.name, entry.share, entry.infeasible))
            continue
        resolved = entry.policy.resolve(params.config, cell.capacity)
        used = footprint(params.config, resolved, **sizes, fetch=fetch)
        row: dict[str, Any] = {"task": cell.task, "length": cell.length, "policy": metrics.label(entry.policy)}
        row |= {"share": entry.share, "infeasible": None, "name": resolved.name}
        row |= {"settings": settings_of(entry, resolved)}
        row |= {"control_of": entry.control_of, "control": None, "capacity": cell.capacity, "fetch": fetch}
        row |= {"fitted": setup.arrays_of(resolved) is not None, "sweeps": list(entry.sweeps)}
        row |= {"truncated": sum(case.truncated > 0 for case in cell.cases)}
        row |= {name: used[name] for name in ("device_bytes", "host_bytes", "full_bytes")}
        offloaded = footprint(params.config, resolved, **sizes, fetch="device_put")
        row |= {"offloaded_device_bytes": offloaded["device_bytes"]}
        served = footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
        row |= {"served_device_bytes": served["device_bytes"], "served_full_bytes": served["full_bytes"]}
        step = step_footprint(params.config, resolved, **sizes | {"dtype": SERVED}, fetch="device_put")
        row |= {"served_moved_bytes": step["bytes_moved"]}
        if own := resolved.prefill_attention():
            row["prefill"] = own.label(cell.length)
        rows.append(row | metrics.cell([records[entry.policy] for records in table], full, cell.depths))
    said = [metrics.verdict(row["found_by_full"], row["found"]) for row in rows if row["control_of"]]
    worst = max(said, key=lambda text: not text.startswith("ok"), default=None)
    return [row | {"control": worst} for row in rows]  # it speaks of the task, so it stands in every row
