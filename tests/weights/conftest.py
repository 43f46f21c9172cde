"""A tiny checkpoint as a Hugging Face directory and as a GGUF file."""

import pytest
from checkpoint_files import TINY, write_gguf

from jshadow.weights.params import init_params, save


@pytest.fixture(scope="session")
def params():
    """What `directory` holds. It is not to be changed."""
    return init_params(TINY, seed=3)


@pytest.fixture
def directory(tmp_path, params):
    save(params, tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def source(tmp_path, directory):
    return write_gguf(tmp_path / "x.gguf", directory, TINY)
