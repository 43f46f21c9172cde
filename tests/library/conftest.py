"""A library over a model of a few kilobytes, whose states take about 1.4 KB each."""

import numpy as np
import pytest
from small_state import POLICY, SMALL

import jshadow
from jshadow.library import TierLimits
from jshadow.weights.params import init_params

CAPACITY = 40


@pytest.fixture(scope="session")
def params():
    return init_params(SMALL)


@pytest.fixture
def opened(params, tmp_path):
    """Opens a library in the test's directory. Every library is closed at the end."""
    libraries = []

    def open_library(name="library", **options):
        options = {"policy": POLICY, "capacity": CAPACITY, "fetch": "device_put"} | options
        place = name if "://" in name else tmp_path / name
        limits = TierLimits(**options.pop("limits", {}))
        libraries.append(jshadow.Library(place, options.pop("params", params), limits=limits, **options))
        return libraries[-1]

    open_library.libraries = libraries
    yield open_library
    for library in libraries:
        library.close()


@pytest.fixture
def text():
    """Returns n token ids of one random text for each seed."""
    return lambda seed, length=20: np.random.default_rng(seed).integers(0, SMALL.vocab_size, length).tolist()
