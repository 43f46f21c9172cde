"""`jshadow policies NAME`: what each setting of a policy means."""

import dataclasses
import json

import pytest

from jshadow.cli.policies import attribute_texts, setting_rows
from jshadow.policies import POLICIES
from jshadow.policies.settings import setting_types


def test_each_setting_has_its_type_default_and_text(answer, printed):
    quest = answer("policies", "quest")
    assert (quest["name"], quest["paper"]) == ("quest", "arXiv 2406.10774, section 3")
    rows = {row["name"]: row for row in quest["settings"]}
    assert (rows["unit"]["type"], rows["unit"]["default"], rows["top_p"]["default"]) == ("int", 16, 1.0)
    assert "tokens" in rows["budget"]["text"]
    assert "unit: int = 16" in printed("policies", "quest")


def test_a_setting_of_a_record_names_what_chooses_it():
    rows = setting_rows(POLICIES["shadowkv"]())
    names = ("keys.bits", "keys", "landmarks.tokens")
    bits, keys, tokens = ([row for row in rows if row["name"] == name] for name in names)
    assert [row["with"] for row in bits][:1] == ["keys=transform"]  # the codes of a plugin follow, if it is imported
    [row] = keys
    assert (row["type"].startswith("lowrank or transform or exact"), row["default"]) == (True, "lowrank")
    assert [(row["with"], row["default"]) for row in tokens] == [("", None)]


@pytest.mark.parametrize("name", POLICIES)
def test_no_setting_is_without_a_text(name):
    rows = setting_rows(POLICIES[name]())
    assert {row["name"] for row in rows} == set(setting_types(POLICIES[name]))
    assert [row["name"] for row in rows if not row["text"]] == []
    json.dumps(rows)


def test_texts_of_bases_and_of_several_attributes():
    @dataclasses.dataclass
    class Base:
        """A base.

        Attributes:
            one, two: both of them,
                in two lines.
            three: of the base.

        More text: not an attribute.
        """

    @dataclasses.dataclass
    class Other(Base):
        """Another one.

        Attributes:
            three: its own.
        """

    both = "both of them, in two lines."
    assert attribute_texts(Other) == {"one": both, "two": both, "three": "its own."}


def test_an_unknown_policy_or_another_option_is_told(refused):
    refused("policy must be one of", "policies", "magic")
    refused("--context must be left out", "policies", "quest", "--context", "5")
