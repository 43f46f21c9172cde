"""Look-ups in long tables: a JSON object of UUIDs, and a dictionary with a key that must be computed first."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

from jshadow.evaluation.tasks.drawing import uuids
from jshadow.evaluation.tasks.filling import Pieces, filled, place
from jshadow.evaluation.tasks.framing import Case, Sample

KV_NEW_TOKENS = 50  # as in InfiniteBench
STAGES_NEW_TOKENS = 32
LARGEST_STEP = 20  # the largest second number of a sum, so that a small model can compute it
LONG_KEY = 99_999  # a key with at least as many tokens as any other
COLORS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "purple",
    "orange",
    "pink",
    "teal",
    "gray",
    "maroon",
    "violet",
    "beige",
    "cyan",
)


def kv_retrieval(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for the value of one key in a JSON object of random UUIDs.

    The task is that of arXiv 2307.03172, section 4, and of Retrieve.KV of InfiniteBench (arXiv 2402.13718).
    """
    names = uuids(random.Random(seed))
    pieces = Pieces(f'"{key}": "{value}"' for key, value in zip(names, names, strict=False))
    key, value = next(names), next(names)

    def compose(count: int, padding: str) -> str:
        pairs = pieces.first(count)
        at = place([len(pair) for pair in pairs], depth)
        return "{" + ", ".join([*pairs[:at], f'"{key}": "{value}"', *pairs[at:]]) + "}" + padding

    sample = Sample(
        "",
        f'What is the value of the key "{key}" in the JSON object above?',
        f'The value of "{key}" is "',
        value,
        KV_NEW_TOKENS,
        "string_match_part",
    )
    return filled(tokenizer, length, compose, [sample])


def two_stage(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Ask for a sum, and for the color of that key in a dictionary (2StageRetr of OmniKV, ICLR 2025, appendix A).

    As in the paper, keys are counted from 0, and the question comes after the dictionary. The paper has 200 keys. Here
    there are as many as the length allows.
    """
    rng = random.Random(seed)
    pieces = Pieces(colors(rng))
    share = rng.random()

    def compose(count: int, padding: str) -> str:
        pairs = ", ".join(f"{key}: {color}" for key, color in enumerate(pieces.first(count)))
        return "{" + pairs + "}" + padding

    def sample(key: int, answer: str) -> Sample:
        second = int(share * min(key, LARGEST_STEP))
        question = (
            f"The dictionary above has numbers and their colours. Add {key - second} + {second}, look the sum up, "
            "and answer with its colour."
        )
        return Sample("", question, "The colour is", answer, STAGES_NEW_TOKENS, "string_match_part")

    # The number of keys is known only after filling the text. So the text is filled with a longest question first. The
    # final question is not longer, so the final text has at least as many keys.
    count = filled(tokenizer, length, compose, [sample(LONG_KEY, COLORS[0])], least=2).samples[0].context.count(":")
    key = min(int(depth * count), count - 1)
    return filled(tokenizer, length, compose, [sample(key, pieces.first(key + 1)[key])], least=key + 1)


def colors(rng: random.Random) -> Iterator[str]:
    """Yield random colors without end. Neighbors differ."""
    before = ""
    for _ in itertools.count():
        before = rng.choice([color for color in COLORS if color != before])
        yield before
