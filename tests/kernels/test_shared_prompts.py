"""The kernels under `jax.vmap` over rows, with arrays of one prompt that all rows share."""

import jax
import numpy as np
import pytest
from append_cases import APPENDS, append_call, append_inputs
from kernel_calls import chunk_scores, fetch_reconstruct, level_scores, reconstruct_keys, sparse_attention
from kernel_cases import (
    ATTENTION,
    CHUNKS,
    PACKED,
    SCORES,
    TOLERANCE,
    attention_inputs,
    factor_inputs,
    fetch_inputs,
    score_inputs,
)
from level_cases import LEVELS, level_inputs
from random_arrays import array

PROMPT = {"landmarks", "candidates", "landmark_scale", "spread", "means", "details", "mean_scale", "detail_scale"}
PROMPT |= {"left", "right", "mean", "values", "first"}


def several(cases, **fields):
    """Return the first case with several rows and these values of fields."""
    wanted = {key: value for key, value in fields.items()}
    return next(
        case for case in cases if case.batch > 1 and all(getattr(case, key) == value for key, value in wanted.items())
    )


def check(call, inputs, dtype="float32"):
    """Compare the kernel for each row with the reference, which gets the prompt's arrays once for each row."""
    arrays = {key: np.asarray(x) for key, x in inputs.items() if isinstance(x, jax.Array) and key != "inverse"}
    rest = {key: x for key, x in inputs.items() if key not in arrays}
    rows = max(x.shape[0] for x in arrays.values())
    prompt = {key: arrays.pop(key)[:1] for key in PROMPT & set(arrays)}
    assert prompt
    assert arrays

    def one(live):
        alone = {key: x[None] for key, x in live.items()}
        result = call(**alone, **prompt, **rest, implementation="interpret")
        return jax.tree.map(lambda x: x[0], result)

    repeated = {key: np.concatenate([x] * rows) for key, x in prompt.items()}
    want = call(**arrays, **repeated, **rest, implementation="xla")
    for got, right in zip(*map(jax.tree.leaves, (jax.jit(jax.vmap(one))(arrays), want)), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(right, np.float32), **TOLERANCE[dtype])


def test_scores():
    case = several(SCORES)
    check(chunk_scores, score_inputs(case))


def test_scores_of_two_levels():
    case = several(LEVELS)
    check(level_scores, level_inputs(case))


@pytest.mark.parametrize("packed", [False, True])
def test_keys(packed):
    case = several(PACKED if packed else CHUNKS)
    check(reconstruct_keys, factor_inputs(case), case.dtype)


def test_values_and_keys_in_kept_places():
    case = several(CHUNKS, kept=True)
    check(fetch_reconstruct, fetch_inputs(case), case.dtype)


def test_appended_tokens():
    case = several(APPENDS)
    inputs = append_inputs(case)
    first, slots = (array(x) for x in (np.full(case.batch, 2, np.int32), np.asarray(inputs["slots"]) + 2 * 8))
    check(append_call, inputs | {"slots": slots, "first": first, "unit": 8})


def test_attention():
    """The second piece is the prompt's. Its mask is too."""
    case = several(ATTENTION)
    inputs = attention_inputs(case)
    q, pieces = jax.tree.map(np.asarray, (inputs["q"], inputs["pieces"]))
    own, shared = [tuple(x for x in pieces[0])], [tuple(x[:1] for x in piece) for piece in pieces]

    def one(q, own):
        own = [tuple(x[None] for x in piece) for piece in own]
        return sparse_attention(q[None], own + shared, scale=inputs["scale"], implementation="interpret")[0]

    own = [tuple(np.broadcast_to(x, (len(q), *x.shape[1:])) for x in piece) for piece in own]
    repeated = [tuple(np.concatenate([x] * len(q)) for x in piece) for piece in shared]
    want = sparse_attention(q, own + repeated, scale=inputs["scale"], implementation="xla")
    got = jax.jit(jax.vmap(one))(q, own)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), **TOLERANCE[case.dtype])
