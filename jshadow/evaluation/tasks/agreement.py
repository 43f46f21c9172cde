"""Tasks that measure agreement with full attention on plain text. They have no questions and no answers."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import bible, code, documentation
from jshadow.weights.tokenizer import decode, opening

FORCED = 64  # number of tokens that are fed after the prompt


def agreement(
    tokenizer: Any,
    length: int,
    depth: float,
    seed: int,
    *,
    source: Callable[[Any, random.Random], Iterator[int]] = documentation,
) -> Case:
    """Create a case whose prompt is `length` tokens of plain text. The next FORCED tokens of the text are given.

    Args:
        tokenizer: a transformers tokenizer.
        length: number of tokens of the prompt.
        depth: ignored, because there is no fact.
        seed: seed of the place where the text starts.
        source: returns the endless token ids of a text for (tokenizer, random generator).
    """
    del depth
    begin = opening(tokenizer)
    text = itertools.islice(source(tokenizer, random.Random(seed)), max(0, length - len(begin)) + FORCED)
    ids = (*begin, *text)
    prompt, forced = ids[:length], ids[length:]
    context = decode(tokenizer, prompt[len(begin) :]).strip("\ufffd")
    return Case((Sample(context, "", "", "", len(forced)),), prompt, forced=forced)


agreement_bible = functools.partial(agreement, source=bible)
agreement_code = functools.partial(agreement, source=code)
