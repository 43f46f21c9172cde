"""Which cases of a list run in `make test`. The others are marked as slow: only the complete suite runs them."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(case: Any) -> Any:
    """A case that only the complete suite runs. A plain tuple is several arguments."""
    return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.slow)


def one_of(count: int, cases: Iterable[Any]) -> list[Any]:
    """The first case of so many is quick, and then each that comes `count` places later."""
    return [slow(case) if number % count else case for number, case in enumerate(cases)]


def quick(names: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases that are named are quick."""
    chosen = list(names)
    return [case if case in chosen else slow(case) for case in cases]


def pairwise(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each two values of different options meet: far fewer than all combinations."""
    every = list(itertools.product(*map(list, options)))
    open_pairs = {pair for case in every for pair in _pairs(case)}
    found = []
    while open_pairs:
        best = max(every, key=lambda case: len(open_pairs.intersection(_pairs(case))))
        open_pairs.difference_update(_pairs(best))
        found.append(best)
    return found


def each_once(*options: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases in which each value of each option occurs, as many as the longest option has values."""
    values = [list(option) for option in options]
    places = range(max(map(len, values)))
    return [tuple(own[(i + j * (i // len(own))) % len(own)] for j, own in enumerate(values)) for i in places]


def _pairs(case: tuple[Any, ...]) -> set[Any]:
    """Each two options of a case and their values."""
    return {(i, repr(case[i]), j, repr(case[j])) for i, j in itertools.combinations(range(len(case)), 2)}
