"""constraints.txt has one set of versions for Python 3.11 and one for later versions."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] not in "#-"]
LANES = {python: {"python_version": python, "sys_platform": "linux"} for python in ("3.11", "3.12", "3.13")}


def versions(python: str) -> dict[str, Version]:
    """The exact version of each package in one lane."""
    found: dict[str, Version] = {}
    for requirement in map(Requirement, LINES):
        if requirement.marker is None or requirement.marker.evaluate(LANES[python]):
            assert requirement.name not in found, requirement.name
            [exact] = requirement.specifier
            assert exact.operator == "=="
            found[requirement.name] = Version(exact.version)
    return found


def test_each_lane_has_its_jax_and_its_flax():
    old, new = versions("3.11"), versions("3.12")
    assert old["jax"] == old["jaxlib"] < Version("0.11") <= new["jax"] == new["jaxlib"]
    assert old["flax"] < Version("0.12.9") <= new["flax"]
    assert versions("3.13") == new


def test_every_dependency_is_pinned_in_each_lane():
    """Also those of the extras, except the packages of a GPU and exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if not name.startswith("cuda")}
    needed = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    ranges = [one for one in map(Requirement, needed) if not str(one.specifier).startswith("==")]
    names = {canonicalize_name(one.name) for one in ranges} - {"jshadow"}
    assert {"jax", "flax", "numpy", "fastapi"} <= names
    for python in LANES:
        assert names <= set(map(canonicalize_name, versions(python)))
