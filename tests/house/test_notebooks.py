"""The notebooks: source and .ipynb agree, what is stored is small and sound, and all run on the real small model."""

import ast
import base64
import os
import re
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import REPO
from nbclient import NotebookClient
from plugins import strangers

from jshadow.evaluation.laws import subject_of
from jshadow.policies import find_policy

FOLDER = REPO / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
SECONDS = 900  # the limit of one notebook, on a machine that does much else
MOST_BYTES, MOST_PICTURE_BYTES = 1_500_000, 100_000  # of the whole folder, of one picture in a notebook
MEANS = ("02_svd_rank", "03_chunk_size_and_outliers", "04_methods_side_by_side")
BARS = ("06_add_a_policy", "07_batch_decode")
# What runs before a notebook, so that the model is loaded once.
FIRST = """import functools, jshadow
if not hasattr(jshadow.load, "cache_info"):
    jshadow.load = functools.cache(jshadow.load)
del functools, jshadow"""
# Where fewer samples show as well that the cells run.
FEWER = {
    "LENGTH, SAMPLES = 1024, 3": "LENGTH, SAMPLES = 1024, 2",
    "samples=4,": "samples=2,",
    "SAMPLES, PROMPT, FORCED = 4, 640, 32": "SAMPLES, PROMPT, FORCED = 2, 640, 32",
}

sources = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def outputs_of(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook) -> list[bytes]:
    """The PNG files among a notebook's outputs."""
    stored = [output["data"]["image/png"] for output in outputs_of(notebook) if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in stored]


def printed(notebook) -> str:
    """The text that a notebook's cells print."""
    return "".join(output.text for output in outputs_of(notebook) if output.get("name") == "stdout")


def stored(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(source: Path) -> list[str]:
    return [cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code"]


@sources
def test_a_stored_notebook_is_its_source_run_from_top_to_bottom(source):
    """`jupytext --sync notebooks/*.py` would change nothing. The cells ran in their order in one session, without an
    error, and left text and pictures of few bytes. The first one names the model and the text."""
    notebook, paired = stored(source.stem), jupytext.read(source)
    nbformat.validate(notebook)
    for one in (paired, notebook):
        assert one.metadata["jupytext"]["formats"] == "ipynb,py:percent"
        assert one.metadata["kernelspec"]["name"] == "python3"
    here, there = ([(cell.cell_type, cell.source) for cell in one.cells] for one in (notebook, paired))
    assert here == there
    assert notebook.cells[0].source.startswith("# ")
    assigned = {node.targets[0].id for node in ast.parse(code_of(source)[0]).body if isinstance(node, ast.Assign)}
    assert {"MODEL", "TEXT"} <= assigned
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    wrong = [one for one in outputs_of(notebook) if one.output_type == "error" or one.get("name") == "stderr"]
    assert not wrong
    assert printed(notebook)
    sizes = [len(picture) for picture in pictures(notebook)]
    assert 0 < min(sizes, default=0) <= max(sizes, default=0) <= MOST_PICTURE_BYTES, sizes


def test_the_folder_is_small_and_has_a_source_for_every_notebook():
    assert SOURCES
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == [path.stem for path in SOURCES]
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES
    assert max(path.stat().st_size for path in (FOLDER / "pictures").iterdir()) <= MOST_PICTURE_BYTES


def test_means_and_pictures_have_their_errors_and_every_method_uses_its_share():
    for name in MEANS:
        lines = [line for line in printed(stored(name)).splitlines() if "±" in line]
        assert re.search(r"\d\.\d+ ±", "\n".join(lines)), name
    for name in BARS:
        assert "yerr=" in (FOLDER / f"{name}.py").read_text(), name
    text = printed(stored("04_methods_side_by_side"))
    rows = re.findall(r"^(\w+) +(\d+) % +([\d.]+) %", text, flags=re.MULTILINE)
    assert {name for name, _, _ in rows} == {"full", "snapkv", "quest", "shadowkv"}
    for name, share, used in rows:
        assert 0.95 * int(share) <= float(used) <= int(share), name


def test_the_class_of_the_recipe_is_a_policy_by_itself(tmp_path):
    """The cells of its imports and of the class make a module. The notebook runs the laws on it."""
    cells = code_of(FOLDER / "06_add_a_policy.py")
    [imports] = [cell for cell in cells if "from jshadow.policies import " in cell]
    [body] = [cell for cell in cells if "class SmallNorms" in cell]
    (tmp_path / "small_norms_recipe.py").write_text(f"{imports}\n\n\n{body}\n")
    with strangers(tmp_path):
        policy = find_policy("small_norms_recipe:SmallNorms")
        assert policy.name == "small_norms"
        assert subject_of(policy).small == policy(kept=14, recent=4)


@pytest.fixture(scope="module")
def kernel(smollm2_dir):
    """One kernel for all notebooks, in the folder that they lie in, with this checkout's jshadow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        resources = {"metadata": {"path": str(FOLDER)}}
        client = NotebookClient(nbformat.v4.new_notebook(), timeout=SECONDS, kernel_name="python3", resources=resources)
        with client.setup_kernel():
            yield client


def test_samples_can_be_fewer():
    code = "".join(text for source in SOURCES for text in code_of(source))
    assert all(many in code for many in FEWER)


@pytest.mark.real
@pytest.mark.process
@pytest.mark.timeout(SECONDS)
@pytest.mark.xdist_group("notebooks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@sources
def test_notebooks_run(source, kernel):
    """Each prints something and draws something. It sees no name of the notebooks before it."""
    cells = ["%reset -f", FIRST, *code_of(source)]
    for many, few in FEWER.items():
        cells = [text.replace(many, few) for text in cells]
    notebook = kernel.nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    for place, cell in enumerate(notebook.cells):
        kernel.execute_cell(cell, place)
    assert pictures(notebook), "a notebook shows a picture"
    assert printed(notebook)
