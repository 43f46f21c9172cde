"""Mutants of the library: where they are, that each changes one place, and that tests notice them."""

import argparse
import dataclasses
import json
import re
from collections import Counter

import pytest
from mutate import __main__ as command
from mutate.sites import LEAST, ROOMS, Mutant, chosen

TEXT = '''
def clipped(low, high, step=2):
    """A docstring with 7 and a + b."""
    if low > high:
        raise ValueError("low is above high: " + str(low))
    scores = where(low < high, low, 0.0)
    return sum_of(scores, axis=0) + step, both(low, high), "a" + "b"
'''
WANTED = {
    "off by one": ["2"],
    "bound": ["low > high", "low < high"],
    "skipped check": ["low > high"],
    "dropped mask": ["where(low < high, low, 0.0)"],
    "wrong axis": ["0"],
    "sign": ["sum_of(scores, axis=0) + step"],
    "swapped arguments": ["low, high"],
}


@pytest.fixture
def tree(tmp_path):
    """A library with one function in every room."""
    for room in ROOMS:
        (tmp_path / room).mkdir(parents=True, exist_ok=True)
        (tmp_path / room / "part.py").write_text(TEXT)
    return tmp_path


def test_every_kind_of_change_is_found_and_changes_one_place(tree):
    mutants = chosen(tree, 8 * len(ROOMS), seed=1)
    found = {}
    for mutant in mutants:
        found.setdefault(mutant.kind, set()).add(mutant.before)
        changed = mutant.applied(TEXT)
        compile(changed, "part.py", "exec")
        places = [match.start() for match in re.finditer(re.escape(mutant.before), TEXT)]
        assert changed in {TEXT[:at] + mutant.after + TEXT[at + len(mutant.before) :] for at in places}
    assert {kind: set(texts) for kind, texts in WANTED.items()} == found


def test_a_choice_is_spread_over_rooms_and_repeats_itself(tree):
    mutants = chosen(tree, LEAST * len(ROOMS) + 5, seed=3)
    assert mutants == chosen(tree, LEAST * len(ROOMS) + 5, seed=3) != chosen(tree, LEAST * len(ROOMS) + 5, seed=4)
    assert len(set(mutants)) == len(mutants) == LEAST * len(ROOMS) + 5
    assert min(Counter(mutant.room for mutant in mutants).values()) >= LEAST


def test_the_committed_list_is_well_formed():
    mutants = [Mutant(**entry) for entry in json.loads(command.LIST.read_text())]
    assert len(set(mutants)) == 80
    assert {mutant.room for mutant in mutants} == set(ROOMS)


def test_a_text_that_is_gone_is_told(tree):
    mutant = chosen(tree, 60, seed=1)[0]
    with pytest.raises(LookupError, match="does not exist"):
        dataclasses.replace(mutant, function="other").applied(TEXT)


def test_the_tests_that_name_a_module_come_first(tree):
    room = tree / "tests" / "planner"
    room.mkdir(parents=True)
    for name, text in {"test_a.py": "", "test_part.py": "", "test_z.py": "clipped()"}.items():
        (room / name).write_text(text)
    mutant = Mutant("jshadow/planner/part.py", "clipped", "sign", "a", "b", 0)
    assert command.test_files(tree, mutant) == [
        f"tests/planner/{name}.py" for name in ("test_part", "test_z", "test_a")
    ]


@pytest.mark.slow
@pytest.mark.process
def test_a_failing_test_kills_and_a_passing_one_does_not(tmp_path):
    args = argparse.Namespace(cache=tmp_path / "cache", marks=command.QUICK, seconds=60)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n    real\n")
    for name, result in {"passes": "living", "fails": "killed"}.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    assert {name == 'passes'}\n")
        found = command._tested(tmp_path, [f"test_{name}.py"], args)
        assert found["result"] == result
        assert result == "living" or found["by"] == "test_fails.py::test_it"
