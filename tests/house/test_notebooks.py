"""The notebooks: source and .ipynb agree, no outputs are stored, and every one runs on the real small model."""

import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from conftest import REPO
from nbclient import NotebookClient

FOLDER = REPO / "notebooks"
SOURCES = sorted(FOLDER.glob("*.py"))
SECONDS = 600  # after which a notebook hangs; together they should take less


def stem(path: Path) -> str:
    return path.stem


def test_every_notebook_has_a_source():
    assert SOURCES
    assert [path.stem for path in sorted(FOLDER.glob("*.ipynb"))] == [path.stem for path in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_pairs_agree_and_hold_no_outputs(source):
    """What `jupytext --sync notebooks/*.py` would change, or a notebook saved after it ran."""
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    own = jupytext.read(source)
    for one in (own, notebook):
        assert one.metadata["jupytext"]["formats"] == "ipynb,py:percent"
        assert one.metadata["kernelspec"]["name"] == "python3"
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in own.cells
    ]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.xdist_group("notebooks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("source", SOURCES, ids=stem)
def test_notebooks_run(source, smollm2_dir, monkeypatch):
    """From the folder that they lie in, with this checkout's jshadow, and with something printed and drawn."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    resources = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=SECONDS, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}, "a notebook shows a picture"
    assert any(output.output_type == "stream" and output.name == "stdout" for output in outputs)
