"""Every op equals its definition in NumPy, element by element: the reference in XLA, and the kernel."""

import jax
import kernel_calls as ops
import kernel_cases as table
import kernel_truth as truth
import numpy as np
import pytest
from append_cases import APPENDS, append_inputs
from few import slow
from gpu.kernels import OPS, Op
from level_cases import LEVELS, level_inputs
from prefill_cases import PROMPTS, prefill_inputs, prefill_truth

from pallas_kernels import in_host_memory

MORE = {
    "attend_chunks": Op(table.ATTENDED, (), table.attend_inputs, ops.attend_chunks, truth.attend_chunks),
    "sparse_prefill": Op(PROMPTS, (), prefill_inputs, ops.sparse_prefill, prefill_truth),
}
# Three ops have tests of their own. Of the others, the cases that are quick, and those that are slow: together each
# dtype, group and size of a head that a kernel knows, and each code. `make gpu` runs all cases.
EVERY = {key: op for key, op in (OPS | MORE).items() if key not in ("append_rows", "recurrent_step", "tile_products")}
PLACES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "chunk_scores": ((0, 4), (1, 2, 3, 5, 7)),
    "sparse_attention": ((0, 4), (1, 2, 3, 5)),
    "sparse_prefill": ((0, 3), (1, 2, 4)),
    "attend_chunks": ((0, 15), (7, 10, 14)),
    "reconstruct_keys": ((3,), (0, 1, 2, 4)),
    "fetch_reconstruct": ((0, 6), (1, 2, 3, 4)),
    "select_chunks": ((4,), (0, 1, 2, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)),  # few programs
    "level_scores": ((0, 1), (2, 3, 5, 6)),
    "packed landmarks": ((0, 6), (3, 4, 5, 8, 9)),
    "packed keys": ((6,), (0, 5, 8, 10)),
    "packed fetch": ((0, 12), (2, 6, 7, 10)),
}
QUICK, SLOW = ([(key, EVERY[key].cases[i]) for key, both in PLACES.items() for i in both[part]] for part in (0, 1))


def compare(got, want, *, dtype, exact=False, of_weights=False):
    """Compare with the tolerance of a dtype. Whole numbers, 0 and -1 (no candidate) must be exact."""
    assert got.dtype == dtype
    got, want = truth.wide(got), truth.wide(want)
    near = table.TOLERANCE.get(dtype, {"rtol": 0, "atol": 0})
    if of_weights:  # weights are rounded too
        near = 1e-5 if dtype == "float32" else 2e-2
        near = {"rtol": near, "atol": near * np.abs(want).max()}
    np.testing.assert_allclose(got, want, **{"rtol": 0, "atol": 0} if exact else near)
    fixed = (want == 0) | (want == -1)
    np.testing.assert_array_equal(got[fixed], want[fixed])


@pytest.mark.parametrize(("key", "case"), [*QUICK, *map(slow, SLOW)], ids=table.name)
def test_an_op_is_its_definition(key, case):
    op, inputs = EVERY[key], EVERY[key].inputs(case)
    want = jax.tree.leaves(op.truth(**inputs))
    for implementation in ("xla", "interpret"):
        got = jax.tree.leaves(op.call(**inputs, implementation=implementation))
        for index, (mine, right) in enumerate(zip(got, want, strict=True)):
            whole = np.issubdtype(right.dtype, np.integer)
            dtype = "int32" if whole else "float32" if op.scores else case.dtype
            moved = op.moved and index == 1  # values are copies
            compare(mine, right, dtype=dtype, exact=moved, of_weights=key == "attend_chunks")
            assert not in_host_memory(mine)
    if op.scores:  # a row and head without candidates is among the cases
        assert (want[0][-1, -1] == -1).all() == (case.batch * case.kv_heads > 1)


def test_every_op_has_cases():
    assert set(PLACES) == set(EVERY)


def test_factors_of_two_dtypes():
    """The basis may be float32 while the rows are bfloat16. It is not rounded."""
    inputs = table.factor_inputs(table.CHUNKS[5])
    inputs |= {key: np.asarray(inputs[key]).astype("bfloat16") for key in ("left", "tail")}
    for implementation in ("xla", "interpret"):
        got = ops.reconstruct_keys(**inputs, implementation=implementation)
        compare(got, truth.reconstruct_keys(**inputs), dtype="bfloat16")


# The kernels under `jax.vmap` over rows, with arrays of one prompt that all rows share

PROMPT = {"landmarks", "candidates", "landmark_scale", "spread", "means", "details", "mean_scale", "detail_scale"}
PROMPT |= {"left", "right", "mean", "values", "first"}


def appends(case):
    inputs = append_inputs(case)
    slots = np.asarray(inputs["slots"]) + 2 * 8
    return inputs | {"slots": slots, "first": np.full(case.batch, 2, np.int32), "unit": 8}


def attention(case):
    """The first piece is each row's own, and the second the prompt's. Its mask is too."""
    inputs = table.attention_inputs(case)
    [own] = inputs.pop("pieces")
    return inputs | dict(zip(("k", "v", "valid", "k_prompt", "v_prompt", "valid_prompt"), own * 2, strict=True))


def attend(q, k, v, valid, k_prompt, v_prompt, valid_prompt, **options):
    return ops.sparse_attention(q, [(k, v, valid), (k_prompt, v_prompt, valid_prompt)], **options)


CALLS = {  # the op, its cases and its arguments
    "scores": (ops.chunk_scores, table.SCORES, table.score_inputs),
    "scores of two levels": (ops.level_scores, LEVELS, level_inputs),
    "keys": (ops.reconstruct_keys, table.CHUNKS, table.factor_inputs),
    "packed keys": (ops.reconstruct_keys, table.PACKED, table.factor_inputs),
    "values and keys in kept places": (ops.fetch_reconstruct, table.CHUNKS, table.fetch_inputs),
    "appended tokens": (ops.append_rows, APPENDS, appends),
    "attention": (attend, table.ATTENTION, attention),
}


@pytest.mark.parametrize("key", CALLS)
def test_a_row_of_many_gets_what_it_gets_with_a_prompt_of_its_own(key):
    """The reference gets the prompt's arrays once for each row."""
    call, cases, made = CALLS[key]
    case = next(case for case in cases if case.batch > 1)
    inputs = made(case)
    arrays = {name: np.asarray(x) for name, x in inputs.items() if hasattr(x, "shape") and name != "inverse"}
    rest = {name: x for name, x in inputs.items() if name not in arrays}
    prompt = {name: x[:1] for name, x in arrays.items() if name in PROMPT or name.endswith("_prompt")}
    live = {name: x for name, x in arrays.items() if name not in prompt}
    assert prompt
    assert live

    def one(live):
        alone = {name: x[None] for name, x in live.items()}
        return jax.tree.map(lambda x: x[0], call(**alone, **prompt, **rest, implementation="interpret"))

    repeated = {name: np.repeat(x, case.batch, axis=0) for name, x in prompt.items()}
    want = call(**live, **repeated, **rest, implementation="xla")
    both = (jax.jit(jax.vmap(one))(live), want)
    for got, right in zip(*([truth.wide(x) for x in jax.tree.leaves(made)] for made in both), strict=True):
        np.testing.assert_allclose(got, right, **table.TOLERANCE["float32"])
