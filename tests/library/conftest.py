"""A library over a model of a few kilobytes, whose states take about 1.4 KB each."""

import numpy as np
import pytest
from small_state import POLICY, SMALL

import jshadow
from jshadow.library import TierLimits
from jshadow.library.tiers import size_of
from jshadow.weights.params import init_params


@pytest.fixture(scope="session")
def params():
    return init_params(SMALL)


@pytest.fixture
def opened(params, tmp_path):
    """Opens a library in the test's directory. Every library is closed at the end."""
    libraries = []

    def open_library(name="library", **options):
        options = {"policy": POLICY, "capacity": 40, "fetch": "device_put", "params": params} | options
        limits = TierLimits(**options.pop("limits", {}))
        libraries.append(jshadow.Library(name if "://" in name else tmp_path / name, limits=limits, **options))
        return libraries[-1]

    yield open_library
    for library in libraries:
        library.close()


@pytest.fixture
def text():
    """Returns n token ids of one random text for each seed."""
    return lambda seed, length=20: np.random.default_rng(seed).integers(0, SMALL.vocab_size, length).tolist()


@pytest.fixture
def state_of(opened, text):
    """Returns a state of the text of a seed, from another library."""
    return lambda seed: (other := opened("other")).load(other.add(text(seed)).key)


@pytest.fixture
def size(state_of):
    """The size of a state of 20 tokens."""
    return size_of(state_of(99))
