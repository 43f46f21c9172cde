"""The kernels under `jax.vmap` over rows, with arrays of one prompt that all rows share."""

import jax
import kernel_calls
import kernel_cases as table
import numpy as np
import pytest
from append_cases import APPENDS, append_inputs
from level_cases import LEVELS, level_inputs
from random_arrays import wide

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
    return kernel_calls.sparse_attention(q, [(k, v, valid), (k_prompt, v_prompt, valid_prompt)], **options)


CALLS = {  # the op, its cases and its arguments
    "scores": (kernel_calls.chunk_scores, table.SCORES, table.score_inputs),
    "scores of two levels": (kernel_calls.level_scores, LEVELS, level_inputs),
    "keys": (kernel_calls.reconstruct_keys, table.CHUNKS, table.factor_inputs),
    "packed keys": (kernel_calls.reconstruct_keys, table.PACKED, table.factor_inputs),
    "values and keys in kept places": (kernel_calls.fetch_reconstruct, table.CHUNKS, table.fetch_inputs),
    "appended tokens": (kernel_calls.append_rows, APPENDS, appends),
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
    for got, right in zip(*([wide(x) for x in jax.tree.leaves(made)] for made in both), strict=True):
        np.testing.assert_allclose(got, right, **table.TOLERANCE["float32"])
