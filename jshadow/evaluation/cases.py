"""Running policies on a case: its prompt is read once, and each policy answers. B rows of a batch.

Cases of one question each, and agreement cases, may run together as the rows of a batch. So a decode step reads the
weights once for all.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jshadow.cache.state import Counters, KVState
from jshadow.engine import decode
from jshadow.engine.report import row_figures
from jshadow.evaluation import metrics
from jshadow.evaluation.replies import generate_rows, greedy
from jshadow.evaluation.settings import Setup, TaskPlan
from jshadow.evaluation.tasks import Case
from jshadow.evaluation.tasks.framing import padded
from jshadow.evaluation.text_metrics import score
from jshadow.policies import Policy
from jshadow.policies.capabilities import attention_of
from jshadow.policies.checks import reads_twice
from jshadow.weights.tokenizer import decode as text_of

MOST_TOGETHER = 12  # maximum number of states of one prompt that exist at the same time


def say(params: Any, logits: Any, state: KVState, count: int) -> tuple[list[int], KVState]:
    """Generate at most `count` token ids greedily, without the end token. The last id is not fed to the model."""
    [reply], state = say_rows(params, logits, state, [count])
    return reply, state


def say_rows(params: Any, logits: Any, state: KVState, counts: Sequence[int]) -> tuple[list[list[int]], KVState]:
    """Do what `say` does in the first rows of a batch. `counts` has the most tokens of each of these rows."""
    stop = frozenset(params.config.eos_ids)
    replies: list[list[int]] = [[] for _ in counts]

    def take(row: int, token: int) -> bool:
        if token in stop:
            return False
        replies[row].append(token)
        return len(replies[row]) < counts[row]

    state = generate_rows(params, logits, state, max(counts), greedy, take, rows=len(counts))
    return replies, state


def padded_rows(rows: Sequence[Sequence[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids int32 [B, S] with zeros after each row, and the lengths int32 [B]. S is at least `width`."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), max(width, *lengths)), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


def feed(params: Any, question: Sequence[int], state: KVState) -> tuple[Any, KVState]:
    """Feed a question, padded so that few programs are compiled. Returns its last logits and the new state."""
    return decode.extend(params, *padded_rows([question], padded(len(question))), state)


def answers(params: Any, case: Case, logits: Any, state: KVState) -> tuple[list[str], KVState]:
    """Answer every turn greedily. Answers stay in the cache, and the next question is appended to it."""
    texts = []
    for turn, sample in enumerate(case.samples):
        length = int(np.asarray(state.lengths)[0])
        reply, state = say(params, logits, state, sample.max_new_tokens)
        texts.append(text_of(params.tokenizer, reply))
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
        texts.append(text_of(params.tokenizer, reply))
        counters.append(jax.tree.map(np.asarray, fork.counters))
    return texts, jax.tree.map(lambda *counts: sum(counts), *counters)


class Agreement:
    """Compares policies with full attention on the forced tokens of some cases, which are the rows of a batch."""

    def __init__(self, params: Any, cases: Sequence[Case]) -> None:
        self.params = params
        self.forced = [case.forced for case in cases]
        self.full: np.ndarray | None = None

    def records(self, logits: Any, state: KVState) -> tuple[list[dict[str, Any]], Counters]:
        """Feed the forced tokens. Return the record of each row, and the counters. The first call is full attention's.

        Args:
            logits: float32 [B, V], the logits of each prompt's last token. They predict the first forced token.
            state: the state after the prompts. This consumes it.
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


def run_case(setup: Setup, plan: TaskPlan, index: int, policies: Sequence[Policy]) -> Iterator[dict[str, Any]]:
    """Yield the record of each policy on one case, in order. For an agreement case, full attention must come first."""
    params, case = setup.params, plan.cases[index]
    agreement = Agreement(params, [case])
    for logits, state in prefilled(setup, plan, [case], policies):
        record: dict[str, Any]
        if case.forced:
            [record], counters = agreement.records(logits, state)
        elif case.questions:
            texts, counters = answers_apart(params, case, state)
            record = judged(case, texts) | {"apart": True}
        else:
            texts, state = answers(params, case, logits, state)
            record, counters = judged(case, texts), jax.tree.map(np.asarray, state.counters)
        yield record | figures_of(params, counters, 0)


def figures_of(params: Any, counters: Counters, row: int) -> dict[str, Any]:
    """Return the entries of a record that come from the counters, which began with zeros."""
    figures = row_figures(Counters.zeros(len(counters.selected)), counters, row, params.config.num_layers)
    return {name: figures[name] for name in ("attended_tokens", "hit_rate")}


def runs_together(case: Case) -> bool:
    """Return whether a case may be a row of a batch with others: it has one question at its end, or forced tokens."""
    return not (case.questions or case.turns)


def run_together(
    setup: Setup, plan: TaskPlan, indices: Sequence[int], policies: Sequence[Policy]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of each policy on some cases, which are rows of one batch.

    The cases must have the same width. If they are fewer than the rows of `setup`, the last one is repeated, so that
    no other program is compiled. For agreement cases, full attention must come first.
    """
    params, cases = setup.params, [plan.cases[index] for index in indices]
    filled = cases + cases[-1:] * (setup.together - len(cases))
    agreement = Agreement(params, filled)
    for logits, state in prefilled(setup, plan, filled, policies):
        if cases[0].forced:
            records, counters = agreement.records(logits, state)
        else:
            replies, state = say_rows(params, logits, state, [case.samples[0].max_new_tokens for case in cases])
            texts = [text_of(params.tokenizer, reply) for reply in replies]
            records = [judged(case, [text]) for case, text in zip(cases, texts, strict=True)]
            counters = jax.tree.map(np.asarray, state.counters)
        yield [record | figures_of(params, counters, row) for row, record in enumerate(records[: len(cases)])]


def judged(case: Case, texts: Sequence[str]) -> dict[str, Any]:
    """Score the answers to a case, and return its record."""
    pairs = zip(case.samples, texts, strict=True)
    scores = [score(sample.scorer, sample.answers, text, sample.choices) for sample, text in pairs]
    hits = [one == 1 for one in scores]
    record = {"score": 100 * sum(scores) / len(scores), "hits": hits, "kl": None, "outputs": list(texts)}
    return record if scores == hits else record | {"scores": scores}


def prefilled(
    setup: Setup, plan: TaskPlan, cases: Sequence[Case], policies: Sequence[Policy]
) -> Iterator[tuple[Any, KVState]]:
    """Yield the logits [B, V] and the state of each policy, in order. The prompts of the cases are the rows.

    Most policies share one prefill. A policy with its own prefill attention has a separate prefill, and so has a policy
    that reads the prompt twice. The third kind are those with learned arrays: a prefill takes the arrays of one policy.
    """
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
