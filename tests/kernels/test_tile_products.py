"""Products of tiles of rows with the matrices of a stack: beside NumPy, what they read, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kernel_cases as table
import numpy as np
import pytest
from few import quick
from kernel_refs import watched  # noqa: F401, a fixture
from tile_cases import PRODUCTS, Products, product_inputs, product_truth

import pallas_kernels
from pallas_kernels.tile_products import kernel

# ruff: noqa: F811, `watched` is a fixture
tile_products = jax.jit(pallas_kernels.tile_products, static_argnames=("height", "dtype", "implementation"))


def compare(got, want, dtype):
    """Sums of many codes are large: the tolerance is of the largest number."""
    assert got.dtype == dtype
    near = table.TOLERANCE[str(dtype)]["rtol"]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=near, atol=near * np.abs(want).max())


@pytest.mark.parametrize("case", quick([PRODUCTS[i] for i in (2, 4)], PRODUCTS), ids=table.name)
def test_each_tile_is_multiplied_by_its_matrix(case):
    inputs = product_inputs(case)
    want = product_truth(**inputs)
    for implementation in ("xla", "interpret"):
        compare(tile_products(**inputs, implementation=implementation), want, case.dtype)


@pytest.mark.slow
def test_sums_may_stay_wide():
    inputs = product_inputs(PRODUCTS[4])
    for implementation in ("xla", "interpret"):
        got = tile_products(**inputs, dtype="float32", implementation=implementation)
        compare(got, product_truth(**inputs), "float32")


@pytest.mark.slow  # one that is watched runs without XLA
@pytest.mark.parametrize("kind", [None, "int4"])
def test_one_token_reads_each_chosen_matrix_once(kind, watched):
    """The sum of a step is cut into parts. No byte of another matrix is read, and none twice."""
    inputs = product_inputs(Products((6, 512, 24), (4, 1, 3), (1, 1, 1), 1, kind))
    got = pallas_kernels.tile_products(**inputs, implementation="interpret")
    compare(got, product_truth(**inputs), "float32")
    [(_, stack, _)] = watched
    chosen = np.isin(np.arange(6), (4, 1, 3))[:, None, None]
    for ref in jax.tree.leaves(stack):
        np.testing.assert_array_equal(ref.reads, np.broadcast_to(chosen, ref.shape))


def test_enough_programs_read_at_once():
    """A decode step of Qwen3-30B-A3B on an H100, which has 132 multiprocessors."""
    x, stack = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16), product_inputs(PRODUCTS[2])["stack"]
    stack = stack._replace(kernel=np.zeros((1, 1024, 768), np.uint8), scale=np.zeros((1, 64, 768)))
    plan, parts = kernel.plan_of(x, stack, 8, 1, (16, False, False))
    programs = parts * 8 * -(-768 // plan.width)
    assert 3 * 132 <= programs <= 4 * 132
    assert parts * plan.steps * plan.depth >= 1024


def cut(axis):
    return lambda x: x.take(np.arange(x.shape[axis] - 1), axis=axis)


WRONG = [
    (2, "x", lambda x: x[0], r"x must have shape \[N, D\], got \[128\]"),
    (2, "x", lambda x: x.astype("int32"), "x must be floating, got int32"),
    (2, "kernel", cut(1), r"kernel must have shape \[E, 64, F\], got \[4, 63, 130\]"),
    (2, "kernel", lambda x: x.astype("int8"), "kernel must be uint8, got int8"),
    (0, "kernel", lambda x: x.astype("uint8"), "kernel must be floating or int8, got uint8"),
    (2, "scale", lambda x: None, "scale must be given with zero"),
    (5, "scale", cut(1), r"scale must have shape \[1, 96\], got \[1, 95\]"),
    (2, "scale", cut(2), r"scale must have shape \[4, D/g, 130\], got \[4, 4, 129\]"),
    (2, "zero", cut(1), r"zero must have shape \[4, 4, 130\], got \[4, 3, 130\]"),
    (2, "scale zero", cut(1), "scale must have groups of an even number of the 128 rows, got 3 groups"),
    (2, "scale zero", lambda x: x.astype("int32"), "scale must be floating, got int32"),
    (2, "first", cut(0), r"first must have shape \[3\], got \[2\]"),
    (2, "end", lambda x: x.astype("float32"), "end must be int32, got float32"),
    (2, "height", lambda x: 0, "height must be at least 1, got 0"),
]


@pytest.mark.parametrize(("index", "names", "change", "told"), WRONG)
def test_wrong_arguments_are_refused(index, names, change, told):
    inputs = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, product_inputs(PRODUCTS[index]))
    for name in names.split():
        for key, part in inputs.items():
            if name == key:
                inputs[key] = change(part)
            elif hasattr(part, "_fields") and name in part._fields:
                inputs[key] = part._replace(**{name: change(getattr(part, name))})
    with pytest.raises(ValueError, match=told):
        pallas_kernels.tile_products(**inputs)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"height": 129}, "takes tiles of up to 128 rows, got 129"),
        ({"sizes": (1, 1024, 4), "kind": "int4", "group": 512}, "takes groups of up to 256 rows, got 512"),
        ({"sizes": (1, 0, 4)}, "takes no empty array"),
    ],
)
def test_what_only_the_reference_takes(changes, told):
    group = changes.pop("group", None)
    case = dataclasses.replace(PRODUCTS[0], **{"sizes": (1, 64, 4)} | changes)
    inputs = product_inputs(dataclasses.replace(case, sizes=(1, 1, 4)) if 0 in case.sizes else case)
    if 0 in case.sizes:
        inputs |= {"x": inputs["x"][:, :0], "stack": inputs["stack"]._replace(kernel=inputs["stack"].kernel[:, :0])}
    if group is not None:
        stack = inputs["stack"]
        inputs["stack"] = stack._replace(scale=stack.scale[:, : 1024 // group], zero=stack.zero[:, : 1024 // group])
    with pytest.raises(NotImplementedError, match=told):
        pallas_kernels.tile_products(**inputs, implementation="pallas")


def test_rows_may_be_batched():
    """As in a step of several requests that share a prompt."""
    inputs = product_inputs(PRODUCTS[2])
    x = np.asarray(inputs.pop("x"))
    run = functools.partial(pallas_kernels.tile_products, **inputs, implementation="interpret")
    both = jax.jit(jax.vmap(run))(np.stack([x, 2 * x]))
    compare(both[1], 2 * product_truth(x, **inputs), "bfloat16")
