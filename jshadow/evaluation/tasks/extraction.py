"""Turn a text into data. Every field of many records is asked for, so that most of the context matters.

After the Text2JSON benchmark of arXiv 2604.08426, where retrieval from a compressed cache loses much. The records and
the text are our own.
"""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from jshadow.evaluation.tasks.drawing import numbers
from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import Case, Sample, encode
from jshadow.evaluation.tasks.texts import STORY, noise_pieces

NAMES = (
    "Ada",
    "Bruno",
    "Clara",
    "David",
    "Elena",
    "Farid",
    "Greta",
    "Hugo",
    "Irene",
    "Jonas",
    "Katja",
    "Leo",
    "Mira",
    "Nils",
    "Olga",
    "Pavel",
)
PLACES = ("Basel", "Bergen", "Porto", "Kyoto", "Quebec", "Malmo", "Graz", "Leeds", "Tunis", "Perth")
GOODS = ("lamps", "chairs", "books", "clocks", "ropes", "tents", "bells", "tables", "baskets", "mirrors")
FORMS = (
    "Order {order} came from {name} of {city}, who wanted {count} {goods}. ",
    "{name} in {city} asked for {count} {goods}; this is order {order}. ",
    "Under number {order} we sent {count} {goods} to {city}, to be paid by {name}. ",
)
SPREAD = 3  # a record has so many times its own tokens of the prompt
FEWEST, MOST = 3, 32
HEAD = "This is a report on the orders of a shop.\n\n"
QUESTION = (
    "List all orders of the report as a JSON array, one object an order, in the order of the text. Its keys are order "
    "(a number), name, city, count (a number) and goods."
)


def records(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Orders, each with a number of its own."""
    for number in numbers(rng, 4):
        yield {
            "order": int(number),
            "name": rng.choice(NAMES),
            "city": rng.choice(PLACES),
            "count": rng.randrange(2, 100),
            "goods": rng.choice(GOODS),
        }


def text_to_json(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Records spread evenly over filler sentences; the depth moves them all. Score: share of the fields got right."""
    rng = random.Random(seed)
    chosen = list(itertools.islice(records(rng), MOST))
    lines = [rng.choice(FORMS).format(**record) for record in chosen]
    count = min(max(length // (SPREAD * len(encode(tokenizer, "".join(lines))) // MOST), FEWEST), MOST)
    chosen, lines = chosen[:count], lines[:count]
    depths = [(index + depth) / count for index in range(count)]
    pieces = Pieces(noise_pieces(rng, STORY))

    def compose(some: int, padding: str) -> str:
        return (HEAD + planted(pieces.first(some), lines, depths)).rstrip() + padding

    answer = json.dumps(chosen)
    room = len(encode(tokenizer, answer)) * 9 // 8 + 8  # for another way to write the same
    return filled(tokenizer, length, compose, [Sample("", QUESTION, "", answer, room, "json_fields")])
