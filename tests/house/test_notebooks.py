"""The notebooks: source and .ipynb agree, stored outputs are small, and every one runs on the real small model."""

import ast
import base64
import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import REPO
from nbclient import NotebookClient

FOLDER = REPO / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
SECONDS = 600  # the limit of one notebook; all of them together should take less
MOST_BYTES, MOST_PICTURE_BYTES = 1_500_000, 100_000  # of the whole folder, of one picture in a notebook


def stem(path: Path) -> str:
    return path.stem


def pictures(notebook) -> list[bytes]:
    """The PNG files among a notebook's outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    stored = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [base64.b64decode(picture) for picture in stored]


def printed(notebook) -> str:
    """The text that a notebook's cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def test_every_notebook_has_a_source():
    assert SOURCES
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == [path.stem for path in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_pairs_agree(source):
    """`jupytext --sync notebooks/*.py` would change nothing; outputs are not compared."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    paired = jupytext.read(source)
    for one in (paired, notebook):
        assert one.metadata["jupytext"]["formats"] == "ipynb,py:percent"
        assert one.metadata["kernelspec"]["name"] == "python3"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in paired.cells
    ]
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_the_first_code_cell_names_the_model_and_the_text(source):
    code = next(cell.source for cell in jupytext.read(source).cells if cell.cell_type == "code")
    assigned = {node.targets[0].id for node in ast.parse(code).body if isinstance(node, ast.Assign)}
    assert {"MODEL", "TEXT"} <= assigned


@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_outputs_are_stored_and_small(source):
    """All cells ran in their order in one session, without an error, and left text and pictures of few bytes."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert printed(notebook)
    sizes = [len(picture) for picture in pictures(notebook)]
    assert 0 < min(sizes, default=0) <= max(sizes, default=0) <= MOST_PICTURE_BYTES, sizes


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= MOST_BYTES
    assert max(path.stat().st_size for path in (FOLDER / "pictures").iterdir()) <= MOST_PICTURE_BYTES


@pytest.mark.real
@pytest.mark.timeout(SECONDS)
@pytest.mark.xdist_group("notebooks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_notebooks_run(source, smollm2_dir, monkeypatch):
    """From the folder that they lie in, with this checkout's jshadow. Each prints something and draws something."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    assert pictures(notebook), "a notebook shows a picture"
    assert printed(notebook)
