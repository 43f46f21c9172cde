"""Decoding with and without speculation on texts, and the time of one cycle of self-drafting in one layer."""

import importlib.util
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow.cache.records import HostTier, KeyValues, LayerState
from jshadow.engine import decode
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.speculation import Drafter, SelfDraft
from jshadow.engine.step import AllLayers, step_layer
from jshadow.errors import ConfigError
from jshadow.evaluation.speed import LEFT, QUERIES, Shape, compiled, layer_state, random_step
from jshadow.evaluation.tasks.texts import documentation, paragraphs
from jshadow.planner.machine import abstract_state
from jshadow.policies import Full, Policy
from jshadow.policies.full import OneCache
from jshadow.weights.params import Params
from jshadow.weights.tokenizer import encode

SHOWN = 12  # words of a passage that the prompt already has when the passage is to be copied
HELD_BACK = 8  # the last tokens of a prompt are read with the answer, after the state of the others was forked
LOOKUP = 8  # tokens that transformers proposes


class Text(NamedTuple):
    """A text to continue, as token ids, and the name of its task."""

    task: str
    ids: list[int]


def texts_of(tokenizer: Any, tokens: int, seed: int = 0) -> list[Text]:
    """Return a text of about `tokens` tokens for each task.

    "copy" ends with the beginning of an earlier passage. "rewrite" does so after two passages that were rewritten with
    a word replaced. "extract" ends with a list of names that begins, whose members stand in the text. "free" goes on
    with the text.
    """
    rng = random.Random(seed)
    stream = documentation(tokenizer, random.Random(seed))
    chosen = [passage for passage in paragraphs() if 80 <= len(passage.split()) <= 160]
    first, *others = rng.sample(chosen, 3)
    names = rng.sample(sorted({word for passage in chosen for word in passage.split() if word.isalpha()}), 24)
    facts = "\n".join(f"The color of item {name} is {rng.choice(('red', 'blue', 'green'))}." for name in names)

    def start(passage: str) -> str:
        return " ".join(passage.split()[:SHOWN])

    def rewriting(passage: str, rewritten: str) -> str:
        return f"Original: {passage}\n\nWith every THE in capital letters: {rewritten.replace(' the ', ' THE ')}"

    examples = "".join(f"{rewriting(passage, passage)}\n\n" for passage in others)
    parts = {
        "copy": (first, f"The passage once more, word for word:\n\n{start(first)}"),
        "extract": (facts, "All facts about colors, in their order:\n\n" + "\n".join(facts.split("\n")[:2]) + "\n"),
        "rewrite": (examples, rewriting(first, start(first))),
        "free": ("", ""),
    }
    found = []
    for task, (begin, end) in parts.items():
        head, tail = (encode(tokenizer, part) for part in (f"{begin}\n\n", f"\n\n{end}"))
        filler = [next(stream) for _ in range(max(0, tokens - len(head) - (len(tail) if end else 0)))]
        found.append(Text(task, [*(head if begin else []), *filler, *(tail if end else [])]))
    return found


def bench_speculation(
    params: Params,
    policy: Policy,
    drafters: Sequence[Drafter],
    texts: Sequence[Text],
    new: int,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Continue each text without and with each drafter, `repeats` times after a run that compiles.

    Args:
        params: the model.
        policy: the policy, which must be able to give tokens back.
        drafters: the drafters.
        texts: the texts to continue.
        new: number of new tokens. A text ends earlier at an end token.
        repeats: number of measured runs of each system, in turn.
        progress: called with the name of each text and system before its runs.

    Returns:
        One row for each text and system: task, system, tokens_per_second (its median), ratio, least and most (to plain
        decoding: the median, the smallest and the largest ratio of two runs that followed each other), tokens_a_cycle,
        accepted (the share of the proposed tokens), acceptance (the result of `acceptance`), new_tokens, and same
        (whether the tokens are those of plain decoding).

    Raises:
        ConfigError: `repeats` is below 1, or as in `generate`.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    rows = []
    for text in texts:
        capacity = len(text.ids) + new + 2 * max((drafter.tokens for drafter in drafters), default=0)
        ids = np.array([text.ids[:-HELD_BACK]], np.int32)
        _, state = decode.prefill(params, ids, [ids.shape[1]], policy, capacity=capacity, fetch="resident")

        def run(drafter: Drafter | None, state: Any = state, text: Text = text) -> Any:
            before = [text.ids[:-HELD_BACK]]
            options = GenerateOptions(
                max_new_tokens=new, state=state.fork(), speculate=drafter, before=before, returns_state=False
            )
            loop = GenerationLoop(params, text.ids[-HELD_BACK:], options)
            for _ in loop:
                pass
            return loop.results()[0]

        systems: dict[str, Drafter | None] = {"plain": None} | {str(drafter): drafter for drafter in drafters}
        results: dict[str, list[Any]] = {name: [] for name in systems}
        for turn in range(1 + repeats):
            for name, drafter in systems.items():
                if progress is not None:
                    progress(f"{text.task}, {name}, run {turn} of {repeats}")
                result = run(drafter)
                if turn:
                    results[name].append(result)
        rows += [row_of(text.task, name, results[name], results["plain"]) for name in systems]
    return rows


def row_of(task: str, name: str, results: Sequence[Any], plain: Sequence[Any]) -> dict[str, Any]:
    """Return the row of a system, from its generations and those of plain decoding."""
    rates, others = ([one.report.decode_tokens_per_second for one in runs] for runs in (results, plain))
    report, row = results[0].report, rates_of(task, name, rates, others)
    row |= {"new_tokens": len(results[0].tokens), "same": results[0].tokens == plain[0].tokens}
    if report.cycles:
        row["tokens_a_cycle"] = 1 + report.accepted_tokens / report.cycles
    if report.proposed_tokens:
        row |= {"accepted": report.accepted_tokens / report.proposed_tokens, "acceptance": acceptance(report)}
    return row


def rates_of(task: str, name: str, rates: Sequence[float], plain: Sequence[float]) -> dict[str, Any]:
    """Return a row with the speed of a system, from its rates in tokens per second and those of plain decoding."""
    ratios = [rate / other for rate, other in zip(rates, plain, strict=True)]
    return {
        "task": task,
        "system": name,
        "tokens_per_second": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "tokens_a_cycle": None,
        "accepted": None,
        "acceptance": None,
    }


def acceptance(report: Any) -> float:
    """Return the probability that a proposed token is accepted if those before it were.

    It is taken to be the same for all tokens. With it, cycles of as many proposed tokens as those of the report have on
    average give as many tokens as they gave.
    """
    if report.accepted_tokens == report.proposed_tokens:
        return 1.0
    drafts, given = report.proposed_tokens / report.cycles, 1 + report.accepted_tokens / report.cycles
    shares = np.linspace(0, 1, 10_001)[:-1]
    tokens = (1 - shares ** (drafts + 1)) / (1 - shares)
    return float(shares[np.argmin(np.abs(tokens - given))])


def bench_transformers(model: str, texts: Sequence[Text], new: int, repeats: int = 3) -> list[dict[str, Any]]:
    """Continue each text with transformers, without and with its prompt lookup. Return rows as `bench_speculation`.

    The time of the prompt, which each run reads again, is that of a run with one new token. No row if torch is not
    installed.
    """
    if importlib.util.find_spec("torch") is None:
        return []
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rows = []
    for text in texts:
        ids = torch.tensor([text.ids])

        def run(count: int, ids: Any = ids, **options: Any) -> tuple[float, list[int]]:
            start = time.perf_counter()
            with torch.no_grad():
                out = network.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **options)
            return time.perf_counter() - start, out[0, ids.shape[1] :].tolist()

        rates: dict[str, list[float]] = {"transformers": [], "transformers, prompt lookup": []}
        tokens: dict[str, list[int]] = {}
        for _ in range(repeats):
            reading = run(1)[0]
            for name, options in zip(rates, ({}, {"prompt_lookup_num_tokens": LOOKUP}), strict=True):
                seconds, tokens[name] = run(new, **options)
                rates[name].append((len(tokens[name]) - 1) / max(seconds - reading, 1e-9))
        for name, found in rates.items():
            told = {"new_tokens": len(tokens[name]), "same": tokens[name] == tokens["transformers"]}
            rows.append(rates_of(text.task, name, found, rates["transformers"]) | told)
    return rows


PROGRAMS = ("step", "draft", "check")  # a step of full attention; all drafts of a cycle; their check


def bench_cycle(shape: Shape, drafter: SelfDraft, acceptance: float, repeats: int = 10) -> dict[str, Any]:
    """Time the drafts and the check of a cycle, and one step of full attention.

    Args:
        shape: the shape of the layer.
        drafter: how tokens are drafted.
        acceptance: probability that a draft is accepted if those before it were.
        repeats: number of timed calls of each, in turn.

    Returns:
        context, batch, dtype, step_seconds, draft_seconds (all drafts of a cycle), check_seconds (each the median),
        tokens_a_cycle, and ratio: the tokens per second of cycles to those of steps, with its least and its most.

    Raises:
        ConfigError: acceptance is not in [0, 1], or a setting of the drafter is out of range.
    """
    if not 0 <= acceptance <= 1:
        raise ConfigError(f"acceptance must lie in [0, 1], got {acceptance!r}")
    sizes: dict[str, Any] = {
        "batch": shape.batch,
        "capacity": shape.context + LEFT,
        "prompt": shape.context,
        "dtype": shape.dtype,
    }
    drafter.check_target(shape.config(), abstract_state(shape.config(), Full(), **sizes, fetch="resident"))
    run = cycle_programs(shape, drafter)
    for name in PROGRAMS:
        run(name)
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(repeats):
        for name, seconds in times.items():
            start = time.perf_counter()
            run(name)
            seconds.append(time.perf_counter() - start)
    tokens = sum(acceptance**place for place in range(drafter.tokens + 1))
    ratios = [tokens * step / (draft + check) for step, draft, check in zip(*times.values(), strict=True)]
    return {
        "context": shape.context,
        "batch": shape.batch,
        "dtype": shape.dtype,
        **{f"{name}_seconds": statistics.median(seconds) for name, seconds in times.items()},
        "tokens_a_cycle": tokens,
        "ratio": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
    }


def cycle_programs(shape: Shape, drafter: SelfDraft) -> Callable[[str], None]:
    """Compile the programs of a layer on one random cache. Return a function that runs one of PROGRAMS and waits."""
    spec, state = layer_state(shape, Full(), "resident")
    policy, unit, count = drafter.policy, drafter.policy.unit, spec.capacity // drafter.policy.unit
    keys = state.live.cache.k[:, :, : count * unit].reshape(*state.live.cache.k.shape[:2], count, unit, -1)
    there = jnp.broadcast_to(jnp.arange(count * unit) < shape.context, (shape.batch, count * unit))
    summaries = jax.jit(lambda keys: policy.summarize(spec, keys, there.reshape(-1, count, unit), None))(keys)
    held = jnp.full(shape.batch, shape.context, jnp.int32)

    def layer_of(cache: KeyValues) -> LayerState:
        return LayerState(None, OneCache(cache), HostTier())

    def check(cache: KeyValues, step: Any) -> tuple[Array, KeyValues]:
        out, layer, _ = step_layer(spec, layer_of(cache), step, AllLayers((spec,), [HostTier()]))
        return out, layer.live.cache

    def drafts(cache: KeyValues, summaries: Any, step: Any) -> tuple[Array, KeyValues]:
        def one(cache: KeyValues, place: Array) -> tuple[KeyValues, Array]:
            moved = step.replace(positions=step.positions + place, lengths=step.lengths + place)
            layer, _ = spec.policy.append(spec, layer_of(cache), moved)
            seen = moved.replace(q_post=moved.q_post if layer.q_post is None else layer.q_post)
            return layer.live.cache, drafter.attend(spec, layer, seen, summaries, held)

        cache, outs = jax.lax.scan(one, cache, jnp.arange(drafter.tokens))
        return outs, cache

    def valid(step: Any) -> Any:
        return step.replace(valid=jnp.ones_like(step.valid))

    steps = itertools.cycle([valid(random_step(shape, seed)) for seed in range(1, 1 + QUERIES)])
    turns = itertools.cycle([valid(random_step(shape, seed, drafter.tokens + 1)) for seed in range(1, 1 + QUERIES)])
    cache = state.live.cache
    programs = {
        "step": compiled(check, cache, next(steps), donate=(0,))[0],
        "draft": compiled(drafts, cache, summaries, next(steps), donate=(0,))[0],
        "check": compiled(check, cache, next(turns), donate=(0,))[0],
    }
    latest = [cache]

    def run(name: str) -> None:
        more = {"step": (next(steps),), "draft": (summaries, next(steps)), "check": (next(turns),)}[name]
        out, latest[0] = programs[name](latest[0], *more)
        jax.block_until_ready((out, latest[0]))

    return run
