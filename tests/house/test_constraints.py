"""constraints.txt has one exact version of each package, and one of every dependency."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] not in "#-"]


def test_each_package_has_one_exact_version():
    names = []
    for requirement in map(Requirement, LINES):
        [exact] = requirement.specifier
        assert exact.operator == "==", requirement
        assert requirement.marker is None, requirement
        names.append(canonicalize_name(requirement.name))
    assert len(names) == len(set(names))


def test_every_dependency_is_pinned():
    """Also those of the extras, except the packages of a GPU and exact versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if not name.startswith("cuda")}
    needed = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    ranges = [one for one in map(Requirement, needed) if not str(one.specifier).startswith("==")]
    names = {canonicalize_name(one.name) for one in ranges} - {"jshadow"}
    assert {"jax", "flax", "numpy", "fastapi"} <= names
    assert names <= {canonicalize_name(Requirement(line).name) for line in LINES}
