"""attend_chunks equals attention over the keys and values that fetch_reconstruct gives."""

import dataclasses

import jax
import kernel_calls
import kernel_truth
import numpy as np
import pytest
from few import quick
from kernel_cases import CHUNKS, PACKED, fetch_inputs, name, normal

from pallas_kernels import ChosenKeys, HostRows, attend_chunks
from pallas_kernels.attend_chunks import kernel
from pallas_kernels.reconstruct_keys.kernel import Form

ALL = [dataclasses.replace(case, kept=False) for case in (*PACKED, CHUNKS[0], CHUNKS[2], CHUNKS[6])]


def operands(case):
    """The query of three heads for each KV head, the values and the keys."""
    inputs = fetch_inputs(case)
    rows = HostRows(
        inputs.pop("values"),
        inputs.pop("values_tail", None),
        inputs.pop("value_bits", None),
        inputs.pop("value_dtype", None),
    )
    q = normal(np.random.default_rng(1), case.batch, 1, 3 * case.kv_heads, case.dim, dtype=case.dtype)
    return q, rows, ChosenKeys(**inputs)


def attended(case, scale):
    """The same in float64."""
    inputs = fetch_inputs(case)
    keys, values = kernel_truth.kept_or_rebuilt(**inputs), kernel_truth.wide(kernel_truth.fetched_values(**inputs))
    q = kernel_truth.wide(operands(case)[0]).reshape(case.batch, case.kv_heads, 3, case.dim)
    scores = scale * np.einsum("bhrd,bhnd->bhrn", q, keys)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("bhrn,bhnd->bhrd", weights / weights.sum(axis=-1, keepdims=True), values)
    return out.reshape(case.batch, 1, 3 * case.kv_heads, case.dim)


@pytest.mark.parametrize("case", quick([ALL[0], ALL[-1]], ALL), ids=name)
def test_it_is_attention_over_the_rebuilt_keys(case):
    want, near = attended(case, case.dim**-0.5), 1e-5 if case.dtype == "float32" else 2e-2  # of the weights too
    for implementation in ("xla", "interpret"):
        given = fetch_inputs(case) | {"scale": case.dim**-0.5, "implementation": implementation}
        got = kernel_calls.attend_chunks(operands(case)[0], **given)
        assert got.dtype == case.dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, rtol=near, atol=near * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("form", [Form(32, 4), Form(64, 4, 32, 2)])
def test_forms_change_the_speed_only(form):
    case = ALL[-5]
    q, values, keys = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), operands(case))
    got = kernel.attend_chunks(q, values, keys, 0.1, True, form)
    want = kernel.attend_chunks(q, values, keys, 0.1, True)
    np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.wide(want), rtol=2e-2, atol=2e-2)


def test_what_it_cannot_do_is_told():
    q, values, keys = operands(ALL[1])
    with pytest.raises(ValueError, match=r"q must have shape \[2, 1, h_q, 64\], got \[2, 2, 3, 64\]"):
        attend_chunks(np.concatenate([q, q], axis=1), values, keys, scale=1.0)
    with pytest.raises(NotImplementedError, match="up to 16 queries a head, got 18"):
        attend_chunks(np.tile(q, (1, 1, 6, 1)), values, keys, scale=1.0, implementation="interpret")
    none = dataclasses.replace(keys, ids=np.asarray(keys.ids)[:, :, :0])
    with pytest.raises(ValueError, match="at least one chunk"):
        attend_chunks(q, values, none, scale=1.0)
