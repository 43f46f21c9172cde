"""Which implementation of an op runs: by the platform, by what the kernel supports, and in which memory."""

import importlib
import sys
from functools import partial

import jax
import kernel_cases as table
import numpy as np
import pytest
from append_cases import APPENDS, append_inputs
from kernel_lowering import TARGET, lowered
from level_cases import LEVELS, level_inputs
from random_arrays import array

import pallas_kernels
from pallas_kernels import IMPLEMENTATIONS, in_host_memory, on_host

# Ops and their arguments, and how many kernels a program for CUDA has.
PROGRAMS = [
    ("chunk_scores", partial(table.score_inputs, table.SCORES[1]), 2),  # the logits, and `finish`
    ("reconstruct_keys", partial(table.factor_inputs, table.CHUNKS[0]), 1),
    ("fetch_reconstruct", partial(table.fetch_inputs, table.CHUNKS[0]), 1),
    ("sparse_attention", partial(table.attention_inputs, table.ATTENTION[1]), 2),
    ("level_scores", partial(level_inputs, LEVELS[0]), 3),
    ("append_rows", partial(append_inputs, APPENDS[0]), 1),
]
PROGRAMS += [("chunk_scores", partial(table.score_inputs, table.PACKED_SCORES[number]), 2) for number in (0, 4, 8)]
PROGRAMS += [("fetch_reconstruct", partial(table.fetch_inputs, table.PACKED[number]), 1) for number in (0, 7, 11)]
PROGRAMS += [("reconstruct_keys", partial(table.factor_inputs, table.PACKED[number]), 1) for number in (0, 7, 11)]


@pytest.mark.parametrize(("op", "inputs", "kernels"), PROGRAMS)
def test_auto_is_the_kernel_on_cuda_and_the_reference_elsewhere(op, inputs, kernels):
    """The kernel reads host rows in place: the program has no copy of them to the device or on the host."""
    inputs = inputs()
    text = lowered(op, inputs, "cuda")
    assert text.count(TARGET) == kernels
    assert "annotate_device_placement" not in text
    assert TARGET not in lowered(op, inputs, "cpu")
    assert TARGET not in lowered(op, inputs, "cuda", implementation="xla")


def test_a_kernel_for_cuda_takes_values_where_they_lie():
    """The program copies no operand in host memory, neither to the device nor on the host."""
    text = lowered("fetch_reconstruct", table.fetch_inputs(table.CHUNKS[0]), "cuda", implementation="pallas")
    assert text.count('mhlo.memory_kind = "pinned_host"') == 2
    assert "annotate_device_placement" not in text


def test_auto_falls_back_where_the_kernel_cannot():
    inputs, levels = table.score_inputs(table.SCORES[1]), level_inputs(LEVELS[4])
    many = table.score_inputs(table.PACKED_SCORES[1]) | {"candidates": np.ones((2, 2, 6), bool)}  # 18 landmarks each
    levels |= {"details": np.zeros((2, 1, 33, 80 * 31), np.float32), "spread": np.zeros((2, 1, 33, 32), np.float32)}
    wide = inputs | {key: np.tile(inputs[key], 3) for key in ("q", "landmarks")}
    for op, refused in (("chunk_scores", wide), ("chunk_scores", many), ("level_scores", levels)):
        assert TARGET not in lowered(op, refused, "cuda")


def test_the_implementations_are_four():
    assert IMPLEMENTATIONS == ("auto", "xla", "pallas", "interpret")


def test_host_memory_is_told_and_used():
    here = array(np.arange(6, dtype=np.float32))
    there = jax.device_put(np.asarray(here), jax.memory.Space.Host)
    assert in_host_memory(there)
    assert not in_host_memory(here)
    seen = []

    @jax.jit
    def double(x):
        seen.append(in_host_memory(x))
        return on_host(lambda y: y * 2)(x)

    out = double(there)
    assert seen == [True]
    assert in_host_memory(out)
    np.testing.assert_array_equal(out, 2 * np.asarray(here))


def test_a_jax_without_the_triton_backend_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with pytest.raises(ImportError, match=r"needs a jax below 0\.13, whose Pallas has a Triton backend, got jax \d"):
        importlib.reload(pallas_kernels)
