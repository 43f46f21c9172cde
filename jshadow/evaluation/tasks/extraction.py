"""A task that turns a text into data. It asks for every field of many records, so most of the context matters.

It follows the Text2JSON benchmark of arXiv 2604.08426, where retrieval from a compressed cache loses much. The records
and the text were written for this project.
"""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from jshadow.evaluation.tasks.drawing import numbers
from jshadow.evaluation.tasks.filling import Pieces, filled, planted
from jshadow.evaluation.tasks.framing import Case, Sample
from jshadow.evaluation.tasks.texts import STORY, noise_pieces
from jshadow.weights.tokenizer import encode

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
SPREAD = 3  # tokens of the prompt for each token of a record
FEWEST, MOST = 3, 32  # limits of the number of records
HEAD = "This is a report on the orders of a shop.\n\n"
QUESTION = (
    "List all orders of the report as a JSON array, one object an order, in the order of the text. Its keys are order "
    "(a number), name, city, count (a number) and goods."
)


def records(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield random orders. Each has a different number."""
    for number in numbers(rng, 4):
        yield {
            "order": int(number),
            "name": rng.choice(NAMES),
            "city": rng.choice(PLACES),
            "count": rng.randrange(2, 100),
            "goods": rng.choice(GOODS),
        }


def text_to_json(tokenizer: Any, length: int, depth: float, seed: int) -> Case:
    """Spread records evenly over filler sentences. The score is the share of correct fields.

    The depth shifts all records by a part of their distance.
    """
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
    room = len(encode(tokenizer, answer)) * 9 // 8 + 8  # the same JSON may be formatted differently
    return filled(tokenizer, length, compose, [Sample("", QUESTION, "", answer, room, "json_fields")])
