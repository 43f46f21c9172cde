"""The stored notebooks: means have errors, methods use the memory that they may use, and 06's class is a policy."""

import re

import jupytext
import nbformat
import pytest
from conftest import REPO
from plugins import strangers

from jshadow.evaluation.laws import run_laws, subject_of
from jshadow.policies import find_policy

FOLDER = REPO / "notebooks"
ERRORS = {"02_svd_rank": "±", "03_chunk_size_and_outliers": "±", "04_methods_side_by_side": "±"}
BARS = ("06_add_a_policy", "07_batch_decode")


def stored(name):
    """The text that a notebook printed when it was stored."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("name", ERRORS)
def test_means_have_their_standard_errors(name):
    figures = re.findall(r"\d\.\d+ (\S)", "\n".join(line for line in stored(name).splitlines() if "±" in line))
    assert ERRORS[name] in figures


@pytest.mark.parametrize("name", BARS)
def test_pictures_have_error_bars(name):
    assert "yerr=" in (FOLDER / f"{name}.py").read_text()


def test_every_method_uses_its_share():
    rows = re.findall(r"^(\w+) +(\d+) % +([\d.]+) %", stored("04_methods_side_by_side"), flags=re.MULTILINE)
    assert {name for name, _, _ in rows} == {"full", "snapkv", "quest", "shadowkv"}
    for name, share, used in rows:
        assert 0.95 * int(share) <= float(used) <= int(share), name


def test_the_class_of_the_recipe_is_a_policy_by_itself(tmp_path):
    """The cells of its imports and of the class make a module, and the policy keeps laws there."""
    cells = [cell.source for cell in jupytext.read(FOLDER / "06_add_a_policy.py").cells if cell.cell_type == "code"]
    [imports] = [cell for cell in cells if "from jshadow.policies import (" in cell]
    [body] = [cell for cell in cells if "class SmallNorms" in cell]
    (tmp_path / "small_norms_recipe.py").write_text(f"{imports}\n\n\n{body}\n")
    with strangers(tmp_path):
        subject = subject_of(find_policy("small_norms_recipe:SmallNorms"))
        for outcome in run_laws(subject, names=["lossless_is_full", "inactive_rows_do_not_change"]):
            assert not outcome.broken
