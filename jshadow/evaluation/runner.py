"""`jshadow eval`: policies side by side on tasks with known answers, one prefill a sample for all of them."""

import argparse
import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jshadow import decode, offload
from jshadow.config import ModelConfig
from jshadow.errors import ConfigError, Infeasible
from jshadow.evaluation import metrics
from jshadow.evaluation.plots import check_plot, plot_turns
from jshadow.evaluation.tasks import TASK_TURNS, TASKS, Case, make
from jshadow.planning import footprint
from jshadow.policies import Full, Policy, ShadowKV, StreamingLLM, Wrapper, parse_policy
from jshadow.prefill import prepared_attention
from jshadow.prefill_attention import PrefillAttention
from jshadow.progress import SlowProgress
from jshadow.report import row_figures
from jshadow.sparse_prefill import parse_prefill
from jshadow.state import Counters, KVState

Progress = Callable[[int, int], None]
TURN_WIDTH = 32  # questions of later turns are padded to a multiple of this, so that they share a compiled program


# What is measured


@dataclasses.dataclass(frozen=True)
class Entry:
    """A policy in one table.

    Attributes:
        policy: what runs; None: `infeasible` says why nothing does.
        control_of: the policy at whose bytes a negative control runs.
        share: of full attention's device bytes that it was given.
        name: where it has no policy.
    """

    policy: Policy | None
    control_of: str | None = None
    share: float | None = None
    name: str = ""
    infeasible: str | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """One task at one length: the cases, the capacity that they share, and what runs on them."""

    task: str
    length: int
    capacity: int
    cases: tuple[Case, ...]
    entries: tuple[Entry, ...]


def control(params: Any, policy: ShadowKV, capacity: int, length: int) -> StreamingLLM | None:
    """StreamingLLM at the device bytes that ShadowKV takes with its values offloaded; None where none is that small.

    It keeps the newest tokens whatever they say, so what it finds needs no selection.
    """
    sizes = {"capacity": capacity, "prompt": length, "dtype": params.dtype.name, "fetch": "device_put"}
    taken = footprint(params.config, policy, **sizes)
    try:
        return StreamingLLM.nominal(taken["device_bytes"] / taken["full_bytes"], capacity, params.config)
    except Infeasible:
        return None


def at_share(params: Any, policy: Policy, share: float, capacity: int, length: int) -> Entry:
    """A policy at the largest setting that keeps to a share of full attention's device bytes for such a prompt.

    `nominal` counts a prompt that fills the capacity; what a policy keeps of later tokens comes on top here.
    """
    sizes = {"capacity": capacity, "prompt": length, "dtype": params.dtype.name, "fetch": "device_put"}

    def taken(made: Policy) -> float:
        used = footprint(params.config, made, **sizes)
        return float(used["device_bytes"] / used["full_bytes"])

    fraction = share
    try:
        while (used := taken(made := type(policy).nominal(fraction, capacity, params.config))) > share:
            fraction -= max(used - share, share / 200)
        return Entry(made, share=share)
    except (Infeasible, ConfigError):
        least = least_share(policy, capacity, params.config, taken)
    told = f"{policy.name}: the share must be at least {least:.4f} of full attention's bytes, got {share!r}"
    return Entry(None, None, share, policy.name, told)


def least_share(policy: Policy, capacity: int, config: ModelConfig, taken: Callable[[Policy], float]) -> float:
    """What a policy's smallest setting takes."""
    low, high = 0.0, 2.0  # masks and positions may take a little more than full attention itself
    for _ in range(13):
        middle = (low + high) / 2
        try:
            type(policy).nominal(middle, capacity, config)
            high = middle
        except Infeasible:
            low = middle
    return taken(type(policy).nominal(high, capacity, config))


def plan(
    params: Any, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], samples: int, seed: int,
    shares: Sequence[float] = (),
) -> list[Cell]:  # fmt: skip
    """Make every case and check every policy, before anything runs.

    Raises:
        ConfigError: an unknown task, no policy, a number out of range, or a length that the model has no room for.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ConfigError(f"samples must be an integer of at least 1, got {samples!r}")
    for name, given in (("tasks", tasks), ("lengths", lengths), ("policies", policies)):
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise ConfigError(f"{name} must be a non-empty list, got {given!r}")
    if bad := [policy for policy in policies if not isinstance(policy, Policy)]:
        raise ConfigError(f"policies must be Policy values, got {bad[0]!r}")
    if wrong := [share for share in shares if isinstance(share, bool) or not 0 < share <= 1]:
        raise ConfigError(f"shares must be in (0, 1], got {wrong[0]!r}")
    own = list(dict.fromkeys([Full(), *policies]))
    if shares and (given := [policy for policy in own if isinstance(policy, Wrapper) or policy != type(policy)()]):
        raise ConfigError(
            f"shares decide all settings of a policy, so none may be given, got {metrics.label(given[0])}"
        )
    cells = []
    for length in dict.fromkeys(lengths):
        made = {
            task: tuple(
                make(task, params.tokenizer, length, (i + 0.5) / samples, random.Random(f"{seed}:{i}").getrandbits(32))
                for i in range(samples)
            )
            for task in dict.fromkeys(tasks)
        }
        most = max(growth(case) for cases in made.values() for case in cases)
        for task, cases in made.items():
            # shares compare whole tables, so that all tasks of a length have one capacity
            capacity = length + (most if shares else max(map(growth, cases)))
            if capacity > params.config.context:
                room = f"the model's context={params.config.context}"
                raise ConfigError(f"lengths must leave room in {room}, got {length} + {capacity - length} for {task}")
            cells.append(
                Cell(task, length, capacity, cases, entries_of(params, own, cases[0], length, capacity, shares))
            )
    return sorted(cells, key=lambda cell: tasks.index(cell.task)) if not shares else cells


def entries_of(
    params: Any, policies: Sequence[Policy], case: Case, length: int, capacity: int, shares: Sequence[float]
) -> tuple[Entry, ...]:
    """Full attention first, then what runs beside it."""
    if shares:
        full, *others = policies
        return (
            Entry(full),
            *(at_share(params, policy, share, capacity, length) for share in shares for policy in others),
        )
    entries = [Entry(policy) for policy in policies]
    for policy in policies:
        policy.resolve(params.config, capacity)
        if isinstance(policy, ShadowKV) and not case.forced:
            small = control(params, policy, capacity, length)
            entries += [Entry(small, metrics.label(policy))] if small is not None else []
    return tuple(entries)


def growth(case: Case) -> int:
    """Tokens that a state needs beyond the prompt: what is forced, or all answers and later questions."""
    answers = sum(sample.max_new_tokens for sample in case.samples)
    questions = sum(map(len, case.turns))
    return len(case.forced) or answers + -(-questions // TURN_WIDTH) * TURN_WIDTH


# One sample


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Greedy answers to every turn; answers stay in the cache, and later questions are appended to it."""
    stop = tuple(params.config.eos_ids)
    texts = []
    for turn, sample in enumerate(case.samples):
        held = int(np.asarray(state.lengths)[0])
        token = np.asarray(logits).argmax(-1).astype(np.int32)
        said = [] if int(token[0]) in stop else [int(token[0])]
        if said and sample.max_new_tokens > 1:
            new, state = decode.decode_steps(params, token, state, sample.max_new_tokens - 1, stop=stop)
            said += [int(one) for one in np.asarray(new)[0] if one >= 0 and int(one) not in stop]
        texts.append(params.tokenizer.decode(said))
        if turn < len(case.turns):
            unfed = said[int(np.asarray(state.lengths)[0]) - held :]  # the last token was sampled, not fed
            question = [*unfed, *case.turns[turn]]
            width = -(-len(question) // TURN_WIDTH) * TURN_WIDTH
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(question)] = question
            logits, state = decode.extend(params, tokens, np.array([len(question)], np.int32), state)
    return texts, state


def run_case(
    params: Any,
    case: Case,
    policies: Sequence[Policy],
    capacity: int,
    fetch: str,
    prefill: PrefillAttention | None = None,
) -> Iterator[dict[str, Any]]:
    """What each policy makes of one case, in order; an agreement case wants full attention first."""
    reference = None
    for logits, state in prefilled(params, case, policies, capacity, fetch, prefill):
        if case.forced:
            forced = np.array([case.forced], np.int32)
            logits, state = decode.extend(params, forced, np.array([forced.shape[1]], np.int32), state, logits="all")
            mine = np.asarray(logits)[0]
            reference = mine if reference is None else reference
            score = 100 * float(metrics.top1(reference, mine).mean())
            record: dict[str, Any] = {
                "score": score,
                "hits": [],
                "kl": float(metrics.kl(reference, mine).mean()),
                "outputs": [],
            }
        else:
            texts, state = answers(params, case, logits, state)
            hits = [metrics.found(sample.answer, text) for sample, text in zip(case.samples, texts, strict=True)]
            record = {"score": 100 * sum(hits) / len(hits), "hits": hits, "kl": None, "outputs": texts}
        figures = row_figures(Counters.zeros(1), jax.tree.map(np.asarray, state.counters), 0, params.config.num_layers)
        yield record | {name: figures[name] for name in ("attended_tokens", "hit_rate")}


def prefilled(
    params: Any, case: Case, policies: Sequence[Policy], capacity: int, fetch: str, prefill: PrefillAttention | None
) -> Iterator[tuple[Any, KVState]]:
    """Logits and state of each policy, in order; one prefill for all but those that attend in their own way."""
    tokens, length = np.array([case.prompt], np.int32), np.array([len(case.prompt)], np.int32)
    alone = [policy.resolve(params.config, capacity).prefill_attention() is not None for policy in policies]
    sharing = [policy for policy, its in zip(policies, alone, strict=True) if not its]
    together = []
    if sharing:
        together = decode.prefill_many(
            params, tokens, length, sharing, capacity=capacity, fetch=fetch, attention=prefill
        )
    for policy, its in zip(policies, alone, strict=True):
        if its:
            yield decode.prefill(params, tokens, length, policy, capacity=capacity, fetch=fetch)
        else:
            yield together.pop(0)  # each state goes as soon as it is used


# All samples


def sample_key(model: str, cell: Cell, index: int, policy: Policy, fetch: str, prefill: PrefillAttention | None) -> str:
    """A digest of all that decides a sample's record."""
    case = cell.cases[index]
    tokens = [case.prompt, case.turns, case.forced, [(one.answer, one.max_new_tokens) for one in case.samples]]
    what = [model, cell.task, tokens, cell.capacity, fetch, repr(policy)]
    what += [] if prefill is None else [repr(prefill)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def evaluate(
    params: Any, tasks: Sequence[str], lengths: Sequence[int], policies: Sequence[Policy], *, samples: int = 10,
    seed: int = 0, fetch: str = "auto", out: Any = None, progress: Progress | None = None,
    shares: Sequence[float] = (), prefill: PrefillAttention | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure policies against full attention.

    Args:
        params: Params with a tokenizer.
        tasks: names in TASKS.
        lengths: prompt tokens.
        policies: full attention is always measured too. Each ShadowKV brings a negative control to the needle tasks:
            StreamingLLM at the device bytes that ShadowKV takes with its values offloaded, whatever `fetch` is.
        samples: cases of each task and length, their depths spread evenly.
        seed: of the cases.
        fetch: "auto", "resident", "device_put" or "zero_copy".
        out: directory that keeps finished samples (samples.jsonl); a later call goes on from there. None: nowhere.
        progress: called with (samples done, samples).
        shares: run each policy at its `nominal` setting for each of these shares of full attention's device bytes,
            offloaded where it offloads, instead of as given. Then there is no control; all tasks of a length have one
            capacity.
        prefill: how every prompt's tokens attend to each other, full attention's too; None: exactly.

    Returns:
        One row a task, length and policy: task, length, policy (as `--policies` takes it), name, settings, score and
        stderr (percent), samples, device_bytes, host_bytes and full_bytes as it ran, offloaded_device_bytes (under
        "device_put", whatever ran), capacity, fetch, prefill, attended_tokens, hit_rate, control_of and control (what
        the negative control says, in every row of its table); for needles also asked, found, found_by_full,
        found_by_both, recall_of_full (percent) and turns (percent by turn); for agreement top1, top1_stderr, kl and
        kl_stderr (nats, full against this policy). With shares, also share, and infeasible: why nothing ran, where
        score and all that follows from it is None.

    Raises:
        ConfigError, HostMemoryError: before anything runs.
    """
    mode = offload.resolve_fetch(fetch)
    cells = plan(params, tasks, lengths, policies, samples, seed, shares)
    for policy in [*policies] or [Full()]:
        prepared_attention([policy], prefill, params.config)  # one that attends in its own way takes no other
    store, model = metrics.Store(out), f"{params.config} {params.digest}"
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    rows, done = [], 0
    for cell in cells:
        table = []
        for index in range(samples):
            table.append(finish_sample(params, cell, index, mode, store, model, prefill))
            done += 1
            if progress is not None:
                progress(done, len(cells) * samples)
        told = {"prefill": prefill.label(cell.length) if prefill else "exact"}
        rows += [told | row for row in cell_rows(params, cell, mode, table)]
    return rows


def finish_sample(
    params: Any, cell: Cell, index: int, fetch: str, store: metrics.Store, model: str, prefill: PrefillAttention | None
) -> dict[Policy, dict[str, Any]]:
    """The record of every policy on one case; what the store has is not run again."""
    policies = list(dict.fromkeys(entry.policy for entry in cell.entries if entry.policy is not None))
    keys = {policy: sample_key(model, cell, index, policy, fetch, prefill) for policy in policies}
    missing = [policy for policy in policies if keys[policy] not in store.records]
    case = cell.cases[index]
    # the divergence from full attention needs its logits
    run = [policies[0], *missing] if missing and case.forced and policies[0] not in missing else missing
    context = {"task": cell.task, "length": cell.length, "sample": index, "depth": (index + 0.5) / len(cell.cases)}
    context |= {"answers": [sample.answer for sample in case.samples], "fetch": fetch, "model": model}
    context |= {"prefill": prefill.label()} if prefill else {}
    made = run_case(params, case, run, cell.capacity, fetch, prefill) if run else iter(())
    for policy, record in zip(run, made, strict=True):
        if policy in missing:
            store.add(keys[policy], record, context | {"policy": metrics.label(policy)})
    return {policy: store.records[keys[policy]] for policy in policies}


def cell_rows(params: Any, cell: Cell, fetch: str, table: list[dict[Policy, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The result rows of one task at one length."""
    full = [records[Full()] for records in table]
    sizes = {"capacity": cell.capacity, "prompt": cell.length, "dtype": params.dtype.name}
    rows = []
    for entry in cell.entries:
        if entry.policy is None:
            rows.append(metrics.infeasible_row(cell.task, cell.length, entry.name, entry.share, entry.infeasible))
            continue
        resolved = entry.policy.resolve(params.config, cell.capacity)
        used = footprint(params.config, resolved, **sizes, fetch=fetch)
        row: dict[str, Any] = {"task": cell.task, "length": cell.length, "policy": metrics.label(entry.policy)}
        row |= {"share": entry.share, "infeasible": None, "name": resolved.name, "settings": resolved.settings()}
        row |= {"control_of": entry.control_of, "control": None, "capacity": cell.capacity, "fetch": fetch}
        row |= {name: used[name] for name in ("device_bytes", "host_bytes", "full_bytes")}
        offloaded = footprint(params.config, resolved, **sizes, fetch="device_put")
        row |= {"offloaded_device_bytes": offloaded["device_bytes"]}
        if own := resolved.prefill_attention():
            row["prefill"] = own.label(cell.length)
        rows.append(row | metrics.cell([records[entry.policy] for records in table], full))
    said = [metrics.verdict(row["found_by_full"], row["found"]) for row in rows if row["control_of"]]
    worst = max(said, key=lambda text: not text.startswith("ok"), default=None)
    return [row | {"control": worst} for row in rows]  # it speaks of the task, so it stands in every row


# Command line


def split_list(text: str, name: str) -> list[str]:
    """The parts of a comma list. Raises ConfigError where there is none or one is empty."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{name} must be a comma list without empty parts, got {text!r}")
    return parts


def parse_lengths(text: str) -> list[int]:
    """Prompt lengths from a comma list. Raises ConfigError."""
    parts = split_list(text, "lengths")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"lengths must be a comma list of integers, got {text!r}")
    return [int(part) for part in parts]


def parse_shares(text: str | None) -> list[float]:
    """Shares of full attention's bytes from a comma list; none where there is no text. Raises ConfigError."""
    if text is None:
        return []
    try:
        return [float(part) for part in split_list(text, "shares")]
    except ValueError as error:
        raise ConfigError(f"shares must be a comma list of numbers, got {text!r}") from error


def main(args: argparse.Namespace) -> int:
    """`jshadow eval`: parse, load, evaluate, print."""
    from jshadow.params import load

    tasks, lengths = split_list(args.tasks, "tasks"), parse_lengths(args.lengths)
    if unknown := [task for task in tasks if task not in TASKS]:
        raise ConfigError(f"tasks must be among {sorted(TASKS)}, got {unknown[0]!r}")
    parts = [part.split(":") for part in split_list(args.policies, "policies")]
    policies = [parse_policy(name, settings) for name, *settings in parts]
    prefill = parse_prefill(args.prefill or "exact")
    offload.resolve_fetch(args.fetch)
    shares = parse_shares(args.shares)
    if args.plot is not None:
        check_plot(args.plot, tasks, TASK_TURNS)
    progress = SlowProgress("evaluating")
    try:
        rows = evaluate(
            load(args.model, dtype=args.dtype, quantize=args.quantize), tasks, lengths, policies,
            samples=args.samples, seed=args.seed, fetch=args.fetch, out=args.out, progress=progress, shares=shares,
            prefill=prefill,
        )  # fmt: skip
    finally:
        progress.close()
    if args.plot is not None:
        plot_turns(rows, args.plot)
    if args.json:
        print(json.dumps({"results": rows, "pooled": metrics.pooled(rows)}))
    else:
        shown = metrics.show_shares if shares else metrics.show
        shown(rows, Console(width=None if sys.stdout.isatty() else 160))
    return 0
