"""The step of a recurrent layer by one kernel: beside NumPy and the step in XLA, what it reads, and what it refuses."""

import functools

import jax
import kernel_calls
import kernel_cases as table
import numpy as np
import pytest
from few import quick
from kernel_refs import watched  # noqa: F401, a fixture
from random_arrays import wide
from recurrence_cases import STEPS, Steps, step_inputs, step_truth

from jshadow.cache import recurrence
from pallas_kernels import HeldRows, NextToken, recurrent_step

# ruff: noqa: F811, `watched` is a fixture
NAMES = ("outputs", "state", "k", "u", "log_decay", "folded", "q_inputs", "k_inputs", "v_inputs")


@pytest.mark.parametrize("case", quick(STEPS[2:4], STEPS), ids=table.name)
def test_a_step_is_its_definition(case):
    """A row without a token keeps all bits, and one that folds nothing keeps those of its state."""
    inputs, kept = step_inputs(case), np.arange(case.batch) == 3
    held, want = jax.tree.leaves(inputs["held"]), step_truth(**inputs)
    made = {
        kind: jax.tree.leaves(kernel_calls.recurrent_step(**inputs, implementation=kind))
        for kind in ("xla", "interpret")
    }
    folds = want[5] != np.asarray(held[4])
    assert folds[:3].tolist() == [False, True, False]
    for kind, got in made.items():
        for name, mine, right in zip(NAMES, got, want, strict=True):
            np.testing.assert_allclose(wide(mine), right, **table.TOLERANCE[case.dtype], err_msg=f"{kind} {name}")
        for name, mine, old in zip(NAMES[1:], got[1:], held, strict=True):
            rows = kept | (~folds if name == "state" else False)
            assert np.asarray(mine)[rows].tobytes() == np.asarray(old)[rows].tobytes(), f"{kind} {name}"
    if case.dtype == "float32":
        for name, one, other in zip(NAMES, *made.values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6, err_msg=name)


def test_a_state_is_changed_in_place():
    inputs = step_inputs(STEPS[2])
    held = jax.tree.map(lambda x: jax.device_put(x, may_alias=False), inputs["held"])
    places = {x.unsafe_buffer_pointer() for x in (held.state, *held.recent, *held.inputs)}
    call = functools.partial(recurrence.step_tokens, implementation="interpret")
    after = jax.jit(call, donate_argnums=0)(held, inputs["new"])[1]
    assert {x.unsafe_buffer_pointer() for x in (after.state, *after.recent, *after.inputs)} == places


@pytest.mark.slow
def test_rows_under_vmap_are_those_of_a_batch():
    inputs = step_inputs(STEPS[2])
    held, new = inputs["held"], inputs["new"]

    def one(*row):
        held, heads, gates, lengths, valid = jax.tree.map(lambda x: x[None], row)
        token = new.replace(heads=heads, gates=gates, lengths=lengths, valid=valid)
        return jax.tree.map(lambda x: x[0], recurrence.step_tokens(held, token, "interpret"))

    got = jax.jit(jax.vmap(one))(held, new.heads, new.gates, new.lengths, new.valid)
    want = kernel_calls.recurrent_step(held, new, implementation="interpret")
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", [STEPS[1], STEPS[2]], ids=table.name)
def test_no_program_reads_what_another_one_writes(case, watched):
    """Only pending tokens are read, and S once. S is written in rows that fold."""
    inputs = step_inputs(case)
    held, new = inputs["held"], inputs["new"]
    kernel_calls.recurrent_step(**inputs, implementation="interpret")
    [(refs, _)] = watched
    np.testing.assert_array_equal(refs.state.reads, 1)
    full = np.asarray(new.lengths) + 1 - np.asarray(held.folded) >= case.slots
    np.testing.assert_array_equal(refs.state.writes, np.broadcast_to(full[:, None, None, None], refs.state.shape))
    for row, (length, folded) in enumerate(zip(new.lengths, held.folded, strict=True)):
        pending = np.isin(np.arange(case.slots), np.arange(folded, length) % case.slots)
        np.testing.assert_array_equal((refs.u.reads[row] > 0).any(axis=(1, 2)), pending)
    for name in HeldRows._fields[1:]:
        ref = getattr(refs, name)
        assert not (ref.reads.astype(bool) & ref.writes.astype(bool)).any(), name
        assert ref.writes.any()


def test_what_only_xla_takes():
    """A width that is no power of two, and several tokens. The step then falls back to XLA, which says nothing."""
    odd = Steps(4, 1, 2, 24, 16)
    with pytest.raises(NotImplementedError, match="takes powers of two from 16 to 256 for keys, got 24"):
        kernel_calls.recurrent_step(**step_inputs(odd), implementation="interpret")
    inputs = step_inputs(STEPS[2])
    new = inputs["new"]
    two = new.replace(heads=tuple(np.repeat(x, 2, axis=1) for x in new.heads))
    with pytest.raises(NotImplementedError, match="takes one token, got 2"):
        kernel_calls.recurrent_step(inputs["held"], two, implementation="interpret")


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("state", lambda x: x[0], r"held.state must have shape \[B, n_v, d_k, d_v\], got \[3, 16, 16\]"),
        ("u", lambda x: x[:, 1:], r"held.u must have shape \[6, 16, 3, 16\], got \[6, 15, 3, 16\]"),
        ("log_decay", lambda x: x.astype("float16"), "held.log_decay must be float32, got float16"),
        ("v_inputs", lambda x: x.astype("float16"), "held.v_inputs must be float32, got float16"),
        (
            "k",
            lambda x: np.repeat(x, 2, axis=2),
            "held.state's heads must be a multiple of the 6 heads of held.k, got 3",
        ),
        ("beta", lambda x: x[:, :, 1:], r"new.beta must have shape \[6, 1, 3\], got \[6, 1, 2\]"),
        ("k_taps", lambda x: x[1:], r"new.k_taps must have shape \[2, 3, 16\], got \[1, 3, 16\]"),
        ("folds", lambda x: x.astype("int16"), "new.folds must be int32, got int16"),
        ("valid", lambda x: x.astype("int32"), "new.valid must be bool, got int32"),
    ],
)
def test_wrong_arrays_are_named(field, change, message):
    inputs = jax.tree.map(np.asarray, step_inputs(STEPS[2]))
    held, new = inputs["held"], inputs["new"]
    counts = new.lengths, held.folded, 0 * held.folded
    held = HeldRows(held.state, *held.recent, *held.inputs)
    token = NextToken(*new.heads, *new.gates, *new.taps, None, *counts, new.valid)
    if field in HeldRows._fields:
        held = held._replace(**{field: change(getattr(held, field))})
    else:
        token = token._replace(**{field: change(getattr(token, field))})
    with pytest.raises(ValueError, match=message):
        recurrent_step(held, token, interpret=True)
