"""The registry of policies: names are unique, a class that is defined again replaces the first, any name has a look."""

import dataclasses
from pathlib import Path

import pytest
from plugins import strangers

from jshadow.errors import ConfigError
from jshadow.evaluation.laws import subject_of
from jshadow.evaluation.plots import style
from jshadow.policies import POLICIES, EvictingPolicy, Policy, Quest, register
from jshadow.policies.registry import place_of


@pytest.fixture
def folder(tmp_path: Path):
    with strangers(tmp_path):
        yield tmp_path


def test_a_class_that_is_defined_again_replaces_the_first(folder):
    """As when a notebook's cell runs twice."""

    def cell(default: int) -> type[Policy]:
        @register(small={"kept": 12})
        @dataclasses.dataclass(frozen=True)
        class Again(EvictingPolicy):
            kept: int = default
            name = "again"

            def slots(self, capacity):
                return min(self.kept, capacity)

            def score(self, spec, prompt):
                raise NotImplementedError

        return Again

    first, second = cell(1), cell(2)
    assert place_of(first) == place_of(second)
    assert POLICIES["again"] is second is not first
    assert subject_of(second).small == second(kept=12)


def test_two_policies_of_one_name():
    with pytest.raises(ConfigError, match=r"a policy's name must be unique, got 'quest' of .*Other"):

        @register()
        @dataclasses.dataclass(frozen=True)
        class Other(Quest):
            pass

    assert POLICIES["quest"] is Quest


def test_what_is_no_class_is_not_registered():
    with pytest.raises(ConfigError, match=r"must be a subclass of .*, got Quest"):
        register()(Quest())  # type: ignore[type-var]


def test_an_unknown_method_has_a_look():
    one, other = style.look_of("newest"), style.look_of("newest", 1)
    assert one == style.look_of("newest")
    assert one["color"] == other["color"]
    assert one != other
