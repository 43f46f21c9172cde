"""Tasks with known answers. Their prompts are generated on demand, without data sets or network.

A task is a function (tokenizer, length, depth, seed) -> Case. Its prompt has exactly `length` tokens, or up to 1 % less
if the tokenizer allows no other length. The texts are filler sentences written for this project, the documentation and
source code that ship with Python, the Bible, or texts of other installed packages. Python's texts differ between its
versions, so a seed gives the same prompt only with the same version of Python. As a program, this package prints one
prompt, or writes many:

    python -m jshadow.evaluation.tasks needle_docs --model DIR --tokens 2000 --depth 0.5 --seed 0
    python -m jshadow.evaluation.tasks niah_single_1 --model DIR --tokens 4096 --samples 20 --out niah.jsonl
"""

import functools
import random
from collections.abc import Callable
from typing import Any

from jshadow.errors import ConfigError, check_integer, check_one_of
from jshadow.evaluation.tasks import questions
from jshadow.evaluation.tasks.agreement_texts import PACKAGE_TASKS, agreement, agreement_bible, agreement_code
from jshadow.evaluation.tasks.framing import Case
from jshadow.evaluation.tasks.framing import Sample as Sample
from jshadow.evaluation.tasks.needles import (
    DIGITS_OF_MANY,
    PHASE_TASKS,
    TURNS,
    NeedleKind,
    kv_retrieval,
    needles,
    niah,
    passkey,
    seed_at_phase,
    two_stage,
)
from jshadow.evaluation.tasks.texts import documentation, noise, story
from jshadow.weights.tokenizer import encode as encode

Task = Callable[[Any, int, float, int], Case]
TASK_TURNS = {"needle_multiturn": TURNS, "needle_multiturn_noise": TURNS}
GRIDS = ("needle_grid",)  # tasks whose depths reach from 0 to 1 with both ends, for the rows of a heat map
NIAH = {
    "niah_single_1": NeedleKind("noise"),
    "niah_single_2": NeedleKind(),
    "niah_single_3": NeedleKind(uuid_values=True),
    "niah_multikey_1": NeedleKind(keys=4),
    "niah_multikey_2": NeedleKind("needles"),
    "niah_multikey_3": NeedleKind("needles", uuid_keys=True, uuid_values=True),
    "niah_multivalue": NeedleKind(values=4),
    "niah_multiquery": NeedleKind(keys=4, asked=4),
    "niah_multiquery_apart": NeedleKind(keys=4, asked=4, apart=True),
}
TASKS: dict[str, Task] = {
    "needle_noise": functools.partial(needles, source=noise),
    "needle_story": functools.partial(needles, source=story),
    "needle_docs": functools.partial(needles, source=documentation),
    "needle_grid": functools.partial(needles, source=documentation),
    "needle_multiturn": functools.partial(needles, source=documentation, count=TURNS, digits=DIGITS_OF_MANY),
    "needle_multiturn_noise": functools.partial(needles, source=noise, count=TURNS, digits=DIGITS_OF_MANY),
    **PHASE_TASKS,
    **{name: functools.partial(niah, kind=kind) for name, kind in NIAH.items()},
    "passkey": passkey,
    "kv_retrieval": kv_retrieval,
    "two_stage": two_stage,
    "vt": questions.variable_tracking,
    "cwe": questions.common_words,
    "fwe": questions.frequent_words,
    "qa_1": questions.qa_1,
    "qa_2": questions.qa_2,
    "qa_1_apart": questions.qa_1_apart,
    "text_to_json": questions.text_to_json,
    "agreement": agreement,
    "agreement_bible": agreement_bible,
    "agreement_code": agreement_code,
    **PACKAGE_TASKS,
}


def check(length: Any, depth: Any, seed: Any) -> None:
    """Raise ConfigError unless length is an integer >= 1, seed is an integer >= 0, and depth is a number in [0, 1]."""
    for name, value, least in (("length", length, 1), ("seed", seed, 0)):
        check_integer(name, value, least=least)
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 <= depth <= 1:
        raise ConfigError(f"depth must be a number in [0, 1], got {depth!r}")


def make(task: str, tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Create one case of a task.

    Args:
        task: a name in TASKS.
        tokenizer: a transformers tokenizer. If it has a chat template, the prompt uses it.
        length: number of tokens of the prompt. If the questions are independent, it is the number of tokens of the
            context.
        depth: place of the (first) fact in the text, from 0 (the beginning) to 1 (the end).
        seed: seed of the facts, and of the place where the text starts.

    Raises:
        ConfigError: the task is unknown, there is no tokenizer, length, depth or seed is out of range, length is too
            short for the task, or a text is not installed.
    """
    check_one_of("task", task, sorted(TASKS))
    if tokenizer is None:
        raise ConfigError(f"task {task} needs a tokenizer, and the checkpoint has none")
    check(length, depth, seed)
    return TASKS[task](tokenizer, length, depth, seed)


def sample_of(task: str, tokenizer: Any, length: int, index: int, samples: int, seed: int) -> tuple[Case, float]:
    """Create case number `index` of `samples` cases whose depths are spread evenly. Raises ConfigError as `make` does.

    Returns:
        The case, and its depth.
    """
    depth = (index + 0.5) / samples
    if task in GRIDS and samples > 1:
        depth = index / (samples - 1)
    drawn = random.Random(f"{seed}:{index}").getrandbits(32)
    return make(task, tokenizer, length, depth, seed_at_phase(drawn, index) if task in PHASE_TASKS else drawn), depth
