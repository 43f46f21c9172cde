"""Which part of some work a process does. Every process finds the same answer by itself."""

import dataclasses
import re
from collections.abc import Sequence

from jshadow.errors import ConfigError


@dataclasses.dataclass(frozen=True, order=True)
class Part:
    """One part of some work.

    Attributes:
        index: which part, from 1 to `count`.
        count: number of parts.

    Raises:
        ConfigError: the index is not in this range.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ConfigError(f"part must be I/N with I from 1 to N, got {self}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str) -> Part:
    """Return the part of a text such as "2/3". Raises ConfigError if it is not I/N, or I is not from 1 to N."""
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise ConfigError(f"part must be I/N with I from 1 to N, such as 2/3, got {text!r}")
    index, count = map(int, text.split("/"))
    return Part(index, count)


def deal(sizes: Sequence[int], part: Part) -> list[int]:
    """Return the items of a part, as places in a list, in ascending order. Each item is in exactly one part.

    The items are dealt like cards, the largest first and one to each part in turn. Of equal items, the one that comes
    first in the list is dealt first. So each part gets as many large items as any other, but for one. The costs of two
    parts differ by at most the cost of the largest item, however the cost grows with the size.

    Args:
        sizes: the size of each item: the tokens of a prompt, or the bytes of a file.
        part: the part.
    """
    largest_first = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    return sorted(largest_first[part.index - 1 :: part.count])
