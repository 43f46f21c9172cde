"""Checks of every kernel: against float64 NumPy at awkward sizes, and against the float32 reference at real sizes."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import kernel_calls
import kernel_truth
import numpy as np
from append_cases import APPENDS, REAL_APPENDS, append_inputs, append_truth
from jax.experimental.pallas import triton as pltriton
from kernel_cases import (
    ATTENTION,
    CHUNKS,
    PACKED,
    PACKED_SCORES,
    SCORES,
    TOLERANCE,
    Chunks,
    Heads,
    attention_inputs,
    factor_inputs,
    fetch_inputs,
    name,
    score_inputs,
)
from level_cases import LEVELS, REAL_LEVELS, level_inputs, level_truth
from recurrence_cases import REAL_STEPS, STEPS, step_inputs, step_truth
from selection_cases import REAL_SELECTIONS, SELECTIONS, selection_inputs, selection_truth
from tile_cases import PRODUCTS, product_inputs, product_truth

from gpu.runner import Task, brief
from gpu.sizes import Sizes
from gpu.timing import side_by_side
from pallas_kernels import tile_products

# The target of the custom calls of our kernels. XLA also uses Triton for its own matrix products.
TRITON = getattr(pltriton, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")
# The shapes of a decode step of Llama-3.1-8B. The batch is small, because it does not change the work of a program.
REAL_SCORES = tuple(Heads((n,), 128, 4, kv_heads=8, dtype=t) for n, t in ((15_356, "bfloat16"), (7_676, "float32")))
REAL_ATTENTION = tuple(Heads((1_912, 384, 96), 128, 4, kv_heads=8, dtype=t) for t in ("bfloat16", "float32"))
REAL_CHUNKS = tuple(
    Chunks(n, 8, 160, 128, count=239, kept=True, kv_heads=8, dtype=t)
    for n, t in ((15_356, "bfloat16"), (1_532, "float32"))
)
# The same cases with packed landmarks, keys and values.
REAL_PACKED_SCORES = tuple(
    dataclasses.replace(case, **kind)
    for case in REAL_SCORES
    for kind in ({"parts": 4, "bits": 4}, {"bits": 8, "spread": True})
)
REAL_PACKED = tuple(dataclasses.replace(case, rank=0, profile=(144, 224, 0), value_bits=4) for case in REAL_CHUNKS)


class Op(NamedTuple):
    """A kernel and its cases.

    Attributes:
        cases: cases of awkward sizes.
        real: cases of real sizes.
        inputs: returns the arguments of a case.
        call: the op.
        truth: returns the results in float64.
        scores: whether results are float32 for any dtype of the arguments.
        moved: whether the second result must be exact, because it is a copy.
    """

    cases: tuple[Any, ...]
    real: tuple[Any, ...]
    inputs: Callable[[Any], dict[str, Any]]
    call: Callable[..., Any]
    truth: Callable[..., tuple[np.ndarray, ...]]
    scores: bool = False
    moved: bool = False


def fetch_truth(**inputs: Any) -> tuple[np.ndarray, ...]:
    """Return the keys and values of fetch_reconstruct in float64."""
    return kernel_truth.kept_or_rebuilt(**inputs), kernel_truth.fetched_values(**inputs)


OPS = {
    "chunk_scores": Op(
        SCORES,
        REAL_SCORES,
        score_inputs,
        kernel_calls.chunk_scores,
        lambda **x: (kernel_truth.chunk_scores(**x),),
        scores=True,
    ),
    "reconstruct_keys": Op(
        CHUNKS,
        REAL_CHUNKS,
        factor_inputs,
        kernel_calls.reconstruct_keys,
        lambda **x: (kernel_truth.reconstruct_keys(**x),),
    ),
    "fetch_reconstruct": Op(CHUNKS, REAL_CHUNKS, fetch_inputs, kernel_calls.fetch_reconstruct, fetch_truth, moved=True),
    "sparse_attention": Op(
        ATTENTION,
        REAL_ATTENTION,
        attention_inputs,
        kernel_calls.sparse_attention,
        lambda **x: (kernel_truth.sparse_attention(**x),),
    ),
    "append_rows": Op(APPENDS, REAL_APPENDS, append_inputs, kernel_calls.append_rows, append_truth),
    "select_chunks": Op(SELECTIONS, REAL_SELECTIONS, selection_inputs, kernel_calls.select_chunks, selection_truth),
    "level_scores": Op(
        LEVELS, REAL_LEVELS, level_inputs, kernel_calls.level_scores, lambda **x: level_truth(**x), scores=True
    ),
    "recurrent_step": Op(STEPS, REAL_STEPS, step_inputs, kernel_calls.recurrent_step, step_truth),
    "tile_products": Op(PRODUCTS, (), product_inputs, tile_products, lambda **x: (product_truth(**x),)),
    "packed landmarks": Op(
        PACKED_SCORES,
        REAL_PACKED_SCORES,
        score_inputs,
        kernel_calls.chunk_scores,
        lambda **x: (kernel_truth.chunk_scores(**x),),
        scores=True,
    ),
    "packed keys": Op(
        PACKED,
        REAL_PACKED,
        factor_inputs,
        kernel_calls.reconstruct_keys,
        lambda **x: (kernel_truth.reconstruct_keys(**x),),
    ),
    "packed fetch": Op(PACKED, REAL_PACKED, fetch_inputs, kernel_calls.fetch_reconstruct, fetch_truth, moved=True),
}


def compiled(op: Op, arrays: dict[str, Any], fixed: dict[str, Any], implementation: str) -> tuple[Any, bool]:
    """Compile an op with one implementation. Returns the program, and whether it contains a Triton kernel."""
    lowered = jax.jit(lambda x: op.call(**x, **fixed, implementation=implementation)).lower(arrays)
    program = lowered.compile()
    # Both texts are searched, because XLA may rewrite the call while it compiles.
    return program, TRITON in lowered.as_text() or TRITON in program.as_text()


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments on the device with all floating arrays in float32, so that the reference is exact.

    Rows that are kept with packed values keep their dtype, because packed values are unpacked to that dtype.
    """

    def one(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.memory.Space.Device)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    alone = parts_of(inputs)[1].keys() | ({"kept_values"} if "value_bits" in inputs else set())
    return {key: x if key in alone else jax.tree.map(one, x) for key, x in inputs.items()}


def parts_of(inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into those that have arrays, and all others."""
    fixed = {key: x for key, x in inputs.items() if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(x))}
    return {key: x for key, x in inputs.items() if key not in fixed}, fixed


def compare(got: Any, want: np.ndarray, dtype: str) -> dict[str, Any]:
    """Return the largest error, and whether it is within the tolerances of the tests."""
    mine, want = kernel_truth.wide(got), kernel_truth.wide(want)
    limit = TOLERANCE[dtype]
    error = np.abs(mine - want)
    good = mine.shape == want.shape and bool((error <= limit["atol"] + limit["rtol"] * np.abs(want)).all())
    return {"ok": good, "error": float(error.max()), "relative": float(np.linalg.norm(error) / np.linalg.norm(want))}


def outputs(made: Any) -> list[Any]:
    """Return the results of an op as a list, without those that are None."""
    return jax.tree.leaves(made)


def check_case(key: str, case: Any, inputs: dict[str, Any], real: bool, program: Any) -> tuple[list[str], float]:
    """Run a compiled case. Returns the failed checks, and the largest relative error."""
    op, made = OPS[key], outputs(program(parts_of(inputs)[0]))
    truth = outputs(op.call(**wide(inputs), implementation="xla") if real else op.truth(**inputs))
    kinds = ["float32" if op.scores else case.dtype] * len(made)
    found = [compare(got, want, kind) for got, want, kind in zip(made, truth, kinds, strict=True)]
    wrong = [f"error {one['error']:.3g}, relative {one['relative']:.3g}" for one in found if not one["ok"]]
    if op.moved and found[1]["error"] != 0:
        wrong.append(f"values differ by up to {found[1]['error']:.3g}, they should be copies")
    return wrong, max(one["relative"] for one in found)


def check_kernel(key: str, sizes: Sizes) -> dict[str, Any]:
    """Check all cases of a kernel. Returns a row with "ok", "cases", "worst_relative" and "wrong"."""
    op = OPS[key]
    awkward = op.cases[: sizes.cases]
    implementation = "interpret" if jax.default_backend() == "cpu" else "auto"
    wanted = [(case, op.inputs(case), False) for case in awkward]
    wanted += [] if sizes.dry else [(case, op.inputs(case), True) for case in op.real]
    jobs = {n: functools.partial(compiled, op, *parts_of(x), implementation) for n, (_, x, _) in enumerate(wanted)}
    programs, wrong, worst = side_by_side(jobs, sizes.workers), [], 0.0
    for n, (case, inputs, real) in enumerate(wanted):
        try:
            program, ours = programs[n].result()
            told, relative = check_case(key, case, inputs, real, program)
            told += [] if ours or implementation != "auto" else ["no kernel of ours ran"]
            worst = max(worst, relative)
        except Exception as error:  # the other cases still run, and show which sizes fail
            told = [brief(error)]
        wrong += [f"{name(case)}: {reason}" for reason in told]
    return {"ok": not wrong, "cases": len(wanted), "worst_relative": worst, "wrong": wrong}


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Yield one task for each kernel."""
    for key in OPS:
        yield Task(f"kernel {key}", 10, functools.partial(check_kernel, key, sizes))
