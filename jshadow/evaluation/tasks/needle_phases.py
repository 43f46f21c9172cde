"""Needles at every phase: the place of a planted fact within a chunk of tokens.

A method that selects chunks may find a fact that begins with a chunk, and miss the same fact if it begins inside one
(arXiv 2609.36322 reports differences of up to 40 points). These tasks plant facts at all phases equally often.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from jshadow.evaluation.tasks.framing import HEAD, Case
from jshadow.evaluation.tasks.needles import needles
from jshadow.evaluation.tasks.texts import documentation, noise, story
from jshadow.weights.templates import frame
from jshadow.weights.tokenizer import decode

PHASES = 8  # number of tokens of a chunk, which is the default of ShadowKV


def needle_at_phase(
    tokenizer: Any,
    length: int,
    depth: float,
    seed: int,
    *,
    source: Callable[[Any, random.Random], Iterator[int]],
) -> Case:
    """Plant one fact, so that the index of its first token modulo PHASES is the seed modulo PHASES.

    The case is that of the needle task for a slightly longer prompt, without the first tokens of its text.

    Args:
        tokenizer, length, depth: see `make`.
        seed: seed of the fact and of the text. It also decides the phase.
        source: returns the endless token ids of a text for (tokenizer, random generator).
    """
    for extra in itertools.count():
        case = needles(tokenizer, length + extra, depth, seed, source=source)
        planted = case.planted[0] - extra
        if planted % PHASES == seed % PHASES:
            break
    sample = case.samples[0]
    head, tail = frame(tokenizer, sample.question, sample.answer_prefix, head=HEAD)
    text = case.prompt[len(head) + extra : len(case.prompt) - len(tail)]
    shown = decode(tokenizer, text).strip("\ufffd")  # the first and the last character may be incomplete
    samples = (dataclasses.replace(sample, context=shown),)
    return dataclasses.replace(case, samples=samples, prompt=(*head, *text, *tail), planted=(planted,))


PHASE_TASKS = {
    f"needle_{name}_phases": functools.partial(needle_at_phase, source=source)
    for name, source in (("noise", noise), ("story", story), ("docs", documentation))
}


def seed_at_phase(seed: int, index: int) -> int:
    """Return a seed near `seed` whose phase is that of sample number `index`."""
    return seed - seed % PHASES + index % PHASES
