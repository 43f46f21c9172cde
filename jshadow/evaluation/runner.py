"""Running policies side by side on tasks with known answers. Policies share the prefill of a sample if possible."""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jshadow.cache import offload
from jshadow.cache.state import Counters, KVState
from jshadow.engine import decode
from jshadow.engine.prefill.job import prepared_attention
from jshadow.engine.report import row_figures
from jshadow.errors import ConfigError, check_integer
from jshadow.evaluation import metrics
from jshadow.evaluation.likelihood import generate_rows, greedy, padded_rows
from jshadow.evaluation.plan import EvalSettings, Evaluation, Setup, TaskPlan, label, model_of, plan_tasks
from jshadow.evaluation.results import task_rows
from jshadow.evaluation.scorers import score
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.framing import padded
from jshadow.evaluation.tasks.ruler import among
from jshadow.policies import Full, Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.checks import reads_twice
from jshadow.weights.digest import tree_digest
from jshadow.weights.tokenizer import decode as text_of

SAMPLES_FILE = "samples.jsonl"
_FIELDS = frozenset({"key", "score", "hits", "kl", "outputs", "attended_tokens", "hit_rate"})


def parse_samples(data: bytes) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the records of a file of samples by key, and the number of lines that are damaged."""
    records, damaged = {}, 0
    for line in filter(bytes.strip, data.split(b"\n")):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and record.keys() >= _FIELDS:
            records[record["key"]] = record
        else:
            damaged += 1
    return records, damaged


def check_model(out: str | os.PathLike[str] | None, model: str) -> None:
    """Raise ConfigError if a directory, which need not exist, has samples of another model (`model_of`)."""
    path = None if out is None else Path(out) / SAMPLES_FILE
    if path is None or not path.is_file():
        return
    try:
        records, _ = parse_samples(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"out must be a directory that can be read, got {str(out)!r}: {error}") from error
    others = sorted({record["model"] for record in records.values() if record.get("model", model) != model})
    if others:
        digests = " instead of ".join(name.rpartition(" ")[2] for name in (others[0], model))
        raise ConfigError(f"out must be a directory of this model, but {path} has samples of {digests}")


class SampleStore:
    """The `records` of finished samples by key, stored in a JSONL file, or only in memory if `out` is None.

    A key is a digest of the model's weights, the prompt's token ids, the capacity, the fetch mode and the policy's
    settings. A damaged line is counted and skipped, so that its sample runs again.
    """

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.path: Path | None = None
        self.damaged = 0
        if out is None:
            return
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            self.path = Path(out) / SAMPLES_FILE
            data = self.path.read_bytes() if self.path.exists() else b""
            if data and not data.endswith(b"\n"):
                self._write(b"\n")
        except OSError as error:
            raise ConfigError(f"out must be a directory that can be written, got {str(out)!r}: {error}") from error
        self.records, self.damaged = parse_samples(data)

    def add(self, key: str, record: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        """Store the record of one sample. It is synced to disk before this returns."""
        self.records[key] = {"key": key, **context, **record}
        if self.path is not None:
            self._write(json.dumps(self.records[key]).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Append data in one write, so that only the last line of the file can be incomplete."""
        assert self.path is not None
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)


MOST_TOGETHER = 12  # maximum number of states of one prompt that exist at the same time


def _say(params: Any, logits: Any, state: KVState, counts: Sequence[int]) -> tuple[list[list[int]], KVState]:
    """Generate token ids greedily in the first rows of a batch, at most as many in each as `counts` says."""
    stop = frozenset(params.config.eos_ids)
    replies: list[list[int]] = [[] for _ in counts]

    def take(row: int, token: int) -> bool:
        if token in stop:
            return False
        replies[row].append(token)
        return len(replies[row]) < counts[row]

    state = generate_rows(params, logits, state, max(counts), greedy, take, rows=len(counts))
    return replies, state


def _feed(params: Any, question: Sequence[int], state: KVState) -> tuple[Any, KVState]:
    """Feed a question, padded so that few programs are compiled. Returns its last logits and the new state."""
    return decode.extend(params, *padded_rows([question], padded(len(question))), state)


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Answer every turn greedily. Answers stay in the cache, and the next question is appended to it."""
    texts = []
    for turn, sample in enumerate(case.samples):
        length = int(np.asarray(state.lengths)[0])
        [reply], state = _say(params, logits, state, [sample.max_new_tokens])
        texts.append(text_of(params.tokenizer, reply))
        if turn < len(case.turns):
            unfed = reply[int(np.asarray(state.lengths)[0]) - length :]  # the last token was drawn, but not fed
            logits, state = _feed(params, [*unfed, *case.turns[turn]], state)
    return texts, state


def _answers_apart(params: Any, case: Case, state: KVState) -> tuple[list[str], Counters]:
    """Answer independent questions greedily, each on a fork of the state. Returns the texts and summed counters."""
    texts, counters = [], []
    for question, sample in zip(case.questions, case.samples, strict=True):
        logits, fork = _feed(params, question, state.fork())
        [reply], fork = _say(params, logits, fork, [sample.max_new_tokens])
        texts.append(text_of(params.tokenizer, reply))
        counters.append(jax.tree.map(np.asarray, fork.counters))
    return texts, jax.tree.map(lambda *counts: sum(counts), *counters)


class _Agreement:
    """Compares policies with full attention on the forced tokens of some cases, which are the rows of a batch."""

    def __init__(self, params: Any, cases: Sequence[Case]) -> None:
        self.params = params
        self.forced = [case.forced for case in cases]
        self.full: np.ndarray | None = None

    def records(self, logits: Any, state: KVState) -> tuple[list[dict[str, Any]], Counters]:
        """Feed the forced tokens. Return the record of each row, and the counters. The first call is full attention's.

        The logits [B, V] of each prompt's last token predict the first forced token. This consumes the state.
        """
        first, (tokens, lengths) = np.asarray(logits), padded_rows(self.forced)
        later, state = decode.extend(self.params, tokens, lengths, state, logits="all")
        these = np.asarray(later)
        self.full = these if self.full is None else self.full
        records: list[dict[str, Any]] = []
        for row, forced in enumerate(self.forced):
            full, this = self.full[row, : len(forced)], these[row, : len(forced)]
            record: dict[str, Any] = {"hits": [], "outputs": [], "score": 100 * float(metrics.top1(full, this).mean())}
            record |= {"kl": float(metrics.kl(full, this).mean())}
            record |= {"ppl": metrics.perplexity(np.concatenate([first[row : row + 1], this[:-1]]), np.array(forced))}
            records.append(record)
        return records, jax.tree.map(np.asarray, state.counters)


class _Probes:
    """Compares policies with full attention on the tokens that follow each probe of a case."""

    def __init__(self, params: Any, case: Case) -> None:
        self.params, self.case = params, case
        self.rows: list[list[int]] = []  # the tokens of each probe, and those that follow
        self.full: list[np.ndarray] = []

    def records(self, state: KVState) -> tuple[list[dict[str, Any]], Counters]:
        """Return the record of the case, and the counters. The first call is full attention's.

        The probes are the rows of one batch, which share the prompt. This consumes the state.
        """
        leads = [len(lead) for lead, _ in self.case.probes]
        if not self.full:
            self.rows = [[*lead, *(after or self._answer(lead, state))] for lead, after in self.case.probes]
        tokens, lengths = padded_rows(self.rows, padded(max(map(len, self.rows))))
        logits, state = decode.extend(self.params, tokens, lengths, state.share(len(leads)), logits="all")
        rows = zip(np.asarray(logits), leads, self.rows, strict=True)
        found = [one[lead - 1 : len(row)] for one, lead, row in rows]
        self.full = self.full or found
        pairs = list(zip(self.full, found, strict=True))
        same, losses = [metrics.top1(*pair) for pair in pairs], [float(metrics.kl(*pair).mean()) for pair in pairs]
        answers = [text_of(self.params.tokenizer, row[lead:]) for lead, row in zip(leads, self.rows, strict=True)]
        record: dict[str, Any] = {"score": 100 * float(np.mean([one.mean() for one in same])), "hits": []}
        record |= {"kl": float(np.mean(losses)), "outputs": answers}
        record["probes"] = [[loss, bool(one.all())] for loss, one in zip(losses, same, strict=True)]
        return [record], jax.tree.map(lambda counts: np.asarray(counts).sum(axis=0, keepdims=True), state.counters)

    def _answer(self, lead: Sequence[int], state: KVState) -> list[int]:
        logits, fork = _feed(self.params, lead, state.fork())
        return _say(self.params, logits, fork, [self.case.samples[0].max_new_tokens])[0][0]


def _figures_of(params: Any, counters: Counters, row: int) -> dict[str, Any]:
    """Return the entries of a record that come from the counters, which began with zeros."""
    figures = row_figures(Counters.zeros(len(counters.selected)), counters, row, params.config)
    return {name: figures[name] for name in ("attended_tokens", "hit_rate")}


def _runs_together(case: Case) -> bool:
    """Return whether a case may be a row of a batch with others: it has one question at its end, or forced tokens."""
    return not (case.questions or case.turns or case.probes)


def run_cases(
    setup: Setup, plan: TaskPlan, indices: Sequence[int], policies: Sequence[Policy]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of each policy on some cases, in order. Where cases compare, full attention must come first.

    Several cases are the rows of one batch: all have the same width, and one question or forced tokens. If they are
    fewer than the rows of `setup`, the last one is repeated, so that no other program is compiled.
    """
    params, cases = setup.params, [plan.cases[index] for index in indices]
    case, together = cases[0], _runs_together(cases[0])
    filled = cases + cases[-1:] * (setup.together - len(cases) if together else 0)
    agreement, probes = _Agreement(params, filled), _Probes(params, case)
    for logits, state in _prefilled(setup, plan, filled, policies):
        records: list[dict[str, Any]]
        if case.forced:
            records, counters = agreement.records(logits, state)
        elif case.probes:
            records, counters = probes.records(state)
        elif case.questions:
            texts, counters = _answers_apart(params, case, state)
            records = [judged(case, texts) | {"apart": True}]
        elif together:
            replies, state = _say(params, logits, state, [case.samples[0].max_new_tokens for case in cases])
            records = [judged(one, [text_of(params.tokenizer, ids)]) for one, ids in zip(cases, replies, strict=True)]
            counters = jax.tree.map(np.asarray, state.counters)
        else:
            texts, state = answers(params, case, logits, state)
            records, counters = [judged(case, texts)], jax.tree.map(np.asarray, state.counters)
        yield [record | _figures_of(params, counters, row) for row, record in enumerate(records[: len(cases)])]


def judged(case: Case, texts: Sequence[str]) -> dict[str, Any]:
    """Score the answers to a case, and return its record."""
    pairs = zip(case.samples, texts, strict=True)
    scores = [score(sample.scorer, sample.answers, text, sample.choices) for sample, text in pairs]
    hits = [one == 1 for one in scores]
    record = {"score": 100 * sum(scores) / len(scores), "hits": hits, "kl": None, "outputs": list(texts)}
    return record if scores == hits else record | {"scores": scores}


def _prefilled(
    setup: Setup, plan: TaskPlan, cases: Sequence[Case], policies: Sequence[Policy]
) -> Iterator[tuple[Any, KVState]]:
    """Yield the logits [B, V] and the state of each policy, in order. The prompts of the cases are the rows."""
    params = setup.params
    resolved = [policy.resolve(params.config, plan.capacity) for policy in policies]
    tokens, lengths = padded_rows([case.prompt for case in cases], max(map(plan.width, cases)))
    options: dict[str, Any] = {"capacity": plan.capacity, "fetch": setup.fetch, "room": plan.room}
    attends = [attention_of(policy) is not None for policy in resolved]
    twice = [reads_twice(policy, params.config) for policy in resolved]
    learned = [setup.arrays_of(policy) for policy in policies]
    apart = [any(flags) for flags in zip(attends, twice, (arrays is not None for arrays in learned), strict=True)]
    sharing = [policy for policy, alone in zip(policies, apart, strict=True) if not alone]
    together: list[tuple[Any, KVState]] = []
    for policy, alone, attention, arrays in zip(policies, apart, attends, learned, strict=True):
        if alone:
            own_options = options | {"attention": None if attention else setup.prefill, "fitted": arrays}
            yield decode.prefill_many(params, tokens, lengths, [policy], **own_options)[0]
            continue
        if not together:
            some, sharing = sharing[:MOST_TOGETHER], sharing[MOST_TOGETHER:]
            together = decode.prefill_many(params, tokens, lengths, some, **options, attention=setup.prefill)
        yield together.pop(0)  # each state is freed as soon as it is used


Progress = Callable[[int, int], None]
Place = tuple[int, int]  # of a sample: place of the plan, and place of the case in it
MOST_PROGRAMS = 32  # maximum number of cached decode programs; each takes about 100 MB for a deep model


def sample_key(setup: Setup, model: str, plan: TaskPlan, index: int, policy: Policy) -> str:
    """Return a digest of everything that a sample's record depends on. Parts with their default values are left out."""
    case = plan.cases[index]
    tokens = [case.prompt, case.turns, case.forced, [(one.answer, one.max_new_tokens) for one in case.samples]]
    parts: list[Any] = [model, plan.task, tokens, plan.capacity, setup.fetch, repr(policy)]
    parts += [case.questions] if case.questions else []
    parts += [case.probes, "probes"] if case.probes else []
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
    check_integer("together", asked.together, least=1)
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

    Of the wanted samples, those of one plan come one after another. `progress` is called with (samples done, samples).
    """
    if store.damaged:
        print(f"{store.path}: {store.damaged} damaged line(s), those samples run again", file=sys.stderr)
    last, programs = None, 0
    finished: dict[Place, dict[Policy, dict[str, Any]]] = {}
    samples = (_Wanted.of(evaluation, one, store) for one in wanted)
    for group in _groups_of(samples, evaluation.setup.together):
        plan = group[0].plan
        if plan is not last:
            last, programs = plan, programs + len(plan.entries)
        if programs > MOST_PROGRAMS:
            jax.clear_caches()
            programs = len(plan.entries)
        if group[0].missing:
            _finish_group(evaluation, group, store)
        for sample in group:
            finished[sample.place] = {policy: store.records[key] for policy, key in sample.keys.items()}
        if progress is not None:
            progress(len(finished), len(wanted))
    return finished


class _Wanted(NamedTuple):
    """A sample that is wanted, with the key of each policy's record, and the policies whose records are missing."""

    place: Place
    plan: TaskPlan
    keys: dict[Policy, str]
    missing: list[Policy]

    @property
    def case(self) -> Case:
        return self.plan.cases[self.place[1]]

    @classmethod
    def of(cls, evaluation: Evaluation, place: Place, store: SampleStore) -> "_Wanted":
        plan, setup = evaluation.plans[place[0]], evaluation.setup
        policies = dict.fromkeys(entry.policy for entry in plan.entries if entry.policy is not None)
        keys = {one: sample_key(setup, evaluation.model, plan, place[1], one) for one in policies}
        return cls(place, plan, keys, [policy for policy, key in keys.items() if key not in store.records])


def _groups_of(samples: Iterable[_Wanted], most: int) -> Iterator[list[_Wanted]]:
    """Yield neighboring samples that can run as the rows of one batch, at most `most` of them at once."""

    def alike(sample: _Wanted) -> tuple[Any, ...]:
        alone = sample.place if most == 1 or not _runs_together(sample.case) else None
        return sample.place[0], sample.plan.width(sample.case), sample.missing, alone

    for _, found in itertools.groupby(samples, alike):
        neighbors = list(found)
        yield from (neighbors[first : first + most] for first in range(0, len(neighbors), most))


def _finish_group(evaluation: Evaluation, group: Sequence[_Wanted], store: SampleStore) -> None:
    """Run the policies that the samples of a group miss, and put their records into the store."""
    setup, plan, missing = evaluation.setup, group[0].plan, group[0].missing
    indices = [sample.place[1] for sample in group]
    # The logits of full attention are not stored, so it runs again if a policy is compared with them.
    first = next(iter(group[0].keys))
    run = [first, *missing] if group[0].case.compares and first not in missing else missing
    for policy, records in zip(run, run_cases(setup, plan, indices, run), strict=True):
        for sample, record in zip(group, records, strict=True):
            if policy in missing:
                store.add(sample.keys[policy], record, _context_of(evaluation, sample, policy))


def _context_of(evaluation: Evaluation, sample: _Wanted, policy: Policy) -> dict[str, Any]:
    """Return what a record in the store says of its sample, for people who read the file."""
    setup, plan, case, index = evaluation.setup, sample.plan, sample.case, sample.place[1]
    depth = plan.depths[index] if plan.depths else None
    context: dict[str, Any] = {"task": plan.task, "length": plan.length, "sample": index, "depth": depth}
    answers = [one.answer for one in case.samples]
    context |= {"answers": answers, "fetch": setup.fetch, "model": evaluation.model}
    context |= {"prefill": setup.prefill.label()} if setup.prefill else {}
    context |= {"truncated": case.truncated} if case.truncated else {}
    return context | {"policy": label(policy)}
