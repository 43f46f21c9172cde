"""The Triton twin of fetch_reconstruct, where triton is: compiled for two GPUs, and run by Triton's interpreter."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from kernel_cases import CHUNKS, factor_inputs, fetch_inputs, name

from pallas_kernels import fetch_reconstruct
from pallas_kernels.fetch_reconstruct import triton_twin
from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.factors import Factors

# Triton decides at its import whether it interprets, so that happens in a process of its own.
INTERPRET = """
import json, sys
import numpy as np, torch
from pallas_kernels.fetch_reconstruct.triton_kernel import fetch_reconstruct_kernel as kernel
given, sizes, grid = np.load(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
arrays = [torch.tensor(given[str(index)]) for index in range(12)]
kernel[tuple(grid)](*arrays, **sizes)
np.savez(sys.argv[1], keys=arrays[10].numpy(), rows=arrays[11].numpy())
"""


def operands(case):
    inputs = fetch_inputs(case)
    given = {key: inputs.get(key) for key in ("values", "values_tail", "kept", "stay")}
    return Values(*given.values()), Factors(**factor_inputs(case))


@pytest.mark.parametrize("case", CHUNKS[:4], ids=name)
def test_the_sizes_are_those_of_the_arrays(case):
    values, factors = operands(case)
    sizes = triton_twin.sizes(values, factors)
    assert (sizes["CHUNK"], sizes["RANK"], sizes["DIM"]) == (case.chunk, case.rank, case.dim)
    assert (sizes["KEPT"], sizes["TAIL"], sizes["UNITS"]) == (case.kept, case.tail, case.units)
    assert sizes["VALUES_TAIL"] == (case.tail + 1 if case.tail else 0)
    assert sizes["HALF_BLOCK"] >= sizes["HALF"] == factors.inverse.shape[0]


@pytest.mark.aot
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CHUNKS[:4], ids=name)
def test_it_compiles_for_gpus(case, capability):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands(case))
    ptx = triton_twin.compile_ptx(*shapes, capability)
    assert f".target sm_{capability}" in ptx
    assert ".local" not in ptx
    assert "ld.global.v4.b32" in ptx


@pytest.mark.aot
@pytest.mark.parametrize("case", [CHUNKS[1], CHUNKS[2], CHUNKS[4], CHUNKS[5]], ids=name)
def test_it_computes_what_the_reference_does(case, tmp_path):
    values, factors = operands(case)
    given = [values.prompt, *factors[:4], values.kept, values.stay, *factors[4:], values.tail]
    arrays = [np.asarray(factors.ids if x is None else x) for x in given]
    rows = np.full(factors.out_shape, np.nan, np.float32)
    if values.kept is not None:
        rows = np.asarray(values.kept).reshape(factors.out_shape)  # one buffer
    arrays += [np.full(factors.out_shape, np.nan, np.float32), rows]
    path = tmp_path / "arrays.npz"
    np.savez(path, **{str(index): x for index, x in enumerate(arrays)})
    batch, heads, tokens, _ = factors.out_shape
    sizes, grid = triton_twin.sizes(values, factors), (-(-tokens // triton_twin.TOKENS), heads, batch)
    command = [sys.executable, "-c", INTERPRET, str(path), json.dumps(sizes), json.dumps(grid)]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    keys, rows = fetch_reconstruct(**fetch_inputs(case), implementation="xla")
    got = np.load(path)
    np.testing.assert_allclose(got["keys"], keys, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got["rows"], rows)
