"""Agreement with full attention on plain text that is fed token by token. The model need not know any answer."""

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

from jshadow.evaluation.tasks.framing import Case, Sample, opening
from jshadow.evaluation.tasks.texts import bible, code, documentation

FORCED = 64  # tokens of an agreement task that are forced after its prompt


def agreement(
    tokenizer: Any,
    length: int,
    depth: float,
    seed: int,
    *,
    source: Callable[[Any, random.Random], Iterator[int]] = documentation,
) -> Case:
    """Plain text: `length` tokens as the prompt, and what really follows them to be forced."""
    del depth
    begin = opening(tokenizer)
    text = itertools.islice(source(tokenizer, random.Random(seed)), max(0, length - len(begin)) + FORCED)
    ids = (*begin, *text)
    prompt, forced = ids[:length], ids[length:]
    context = tokenizer.decode(list(prompt[len(begin) :])).strip("\ufffd")
    return Case((Sample(context, "", "", "", len(forced)),), prompt, forced=forced)


agreement_bible = functools.partial(agreement, source=bible)
agreement_code = functools.partial(agreement, source=code)
