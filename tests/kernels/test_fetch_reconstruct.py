"""fetch_reconstruct: keys equal those of reconstruct_keys, values are exact copies, only needed host rows are read."""

import functools

import jax
import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from few import one_of
from kernel_calls import fetch_reconstruct
from kernel_cases import CHUNKS, TOLERANCE, fetch_inputs, misses, name, on_host
from kernel_refs import watched  # noqa: F401, a fixture

import pallas_kernels
from pallas_kernels import ChosenKeys, HostRows, in_host_memory


@pytest.mark.parametrize("case", one_of(6, CHUNKS), ids=name)
def test_keys_and_values(case):
    inputs = fetch_inputs(case)
    want = kernel_truth.kept_or_rebuilt(**inputs)
    for implementation in ("xla", "interpret"):
        keys, values = fetch_reconstruct(**inputs, implementation=implementation)
        np.testing.assert_allclose(kernel_truth.wide(keys), want, **TOLERANCE[case.dtype])
        np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
        assert not in_host_memory(keys)
        assert not in_host_memory(values)


@pytest.mark.parametrize("implementation", ["auto", "xla", "interpret"])
def test_values_that_stay_may_be_anything_on_the_host(implementation):
    """This also holds inside jit with operands in host memory."""
    inputs = fetch_inputs(CHUNKS[2])
    ids = np.clip(np.asarray(inputs["ids"]), 0, 28)
    want = kernel_truth.fetched_values(**inputs)
    prompt, tail = np.array(inputs["values"]), np.array(inputs["values_tail"])
    miss = misses(inputs)
    for b, h in np.ndindex(ids.shape[:2]):
        wanted = ids[b, h][miss[b, h]]
        prompt[b, h][~np.isin(np.arange(27), wanted)] = np.nan
        tail[b, h][~np.isin(27 + np.arange(3), wanted)] = np.nan
    assert np.isnan(prompt).any()
    given = inputs | {"values": on_host(prompt), "values_tail": on_host(tail)}
    _, values = jax.jit(lambda x: fetch_reconstruct(**x, implementation=implementation))(given)
    np.testing.assert_array_equal(values, want)


def test_a_donated_buffer_becomes_the_result():
    inputs = fetch_inputs(CHUNKS[1])
    names = ("kept_keys", "kept_values")
    fetch = jax.jit(lambda kept, rest: fetch_reconstruct(**kept, **rest, implementation="interpret"), donate_argnums=0)
    rest, kept = ({key: x for key, x in inputs.items() if (key in names) is kept} for kept in (False, True))
    want, kept = fetch_reconstruct(**inputs, implementation="interpret"), jax.tree.map(jnp.array, kept)
    jax.tree.map(np.testing.assert_array_equal, fetch(kept, rest), want)
    assert all(kept[name].is_deleted() for name in names)
    # without donation the caller's rows do not change
    np.testing.assert_array_equal(want[1], kernel_truth.fetched_values(**inputs))
    for name_ in names:
        np.testing.assert_array_equal(inputs[name_], fetch_inputs(CHUNKS[1])[name_])


def test_values_on_the_device_will_do():
    inputs = fetch_inputs(CHUNKS[5])
    here = {key: jax.device_put(x, jax.memory.Space.Device) for key, x in inputs.items()}
    assert in_host_memory(inputs["values"])
    for implementation in ("xla", "interpret"):
        for got, want in zip(
            fetch_reconstruct(**here, implementation=implementation),
            fetch_reconstruct(**inputs, implementation=implementation),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)


HALVES = ("left", "values")


def test_everything_in_the_tail():
    inputs = fetch_inputs(CHUNKS[2])
    ids, left, values = np.arange(28, dtype=np.int32).reshape(2, 2, 7) % 2, *(np.asarray(inputs[k]) for k in HALVES)
    inputs |= {"left": left[:, :0], "values": values[:, :, :0], "ids": ids}
    _, values = fetch_reconstruct(**inputs)
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize("case", [CHUNKS[i] for i in (2, 0)], ids=name)
def test_the_kernel_reads_from_the_host_what_it_must_and_once(case, watched):  # noqa: F811
    inputs = fetch_inputs(case)
    keys, values = fetch_reconstruct(**inputs, implementation="interpret")
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
    want = kernel_truth.kept_or_rebuilt(**inputs)
    np.testing.assert_allclose(kernel_truth.wide(keys), want, **TOLERANCE[case.dtype])
    [(source, kept, _)] = watched
    asked = np.zeros((case.batch, case.kv_heads, case.units + case.tail + 1), int)
    ids, miss = np.clip(np.asarray(inputs["ids"]), 0, case.units + case.tail - 1), misses(inputs)
    for b, h, j in np.ndindex(ids.shape):
        asked[b, h, ids[b, h, j]] += miss[b, h, j]
    assert 0 < miss.sum() < miss.size
    np.testing.assert_array_equal(
        source.prompt.reads, np.broadcast_to(asked[:, :, : case.units, None], source.prompt.shape)
    )
    # A row that stays is neither read nor written; the others are written, once.
    written = np.zeros((*kept.keys.shape[:3], 1), int)
    for b, h, j in np.ndindex(ids.shape):
        first = int(inputs["places"][b, h, j]) * case.chunk
        written[b, h, first : first + case.chunk] += miss[b, h, j]
    for rows in (kept.values, kept.keys):
        np.testing.assert_array_equal(rows.reads, 0)
        np.testing.assert_array_equal(rows.writes, np.broadcast_to(written, rows.shape))
    if case.tail:
        late = np.broadcast_to(asked[:, :, case.units :, None], source.tail.shape)
        np.testing.assert_array_equal(source.tail.reads, late)


@pytest.mark.parametrize(("rows", "refused"), [(33, False), (68, False), (69, True), (136, True), (137, False)])
def test_bytes_whose_offsets_exceed_31_bits_are_left_to_xla(rows, refused):
    """From 2 GiB on, an offset is negative in 32 bits. Only from 4 GiB on, Pallas computes it in 64 bits.

    A row of the batch has 30 MiB of key codes, which are bytes. Its 64 MiB of values are words and never refused.
    """
    chunks, count = 15_356, 2
    array = lambda *shape, dtype: jax.ShapeDtypeStruct((rows, *shape), dtype)  # noqa: E731
    half, ids = jax.ShapeDtypeStruct((64,), jnp.float32), array(8, count, dtype=jnp.int32)
    left, right = array(chunks, 8 * 256, dtype=jnp.uint8), array(8, 256, 128, dtype=jnp.bfloat16)
    keys = ChosenKeys(left, right, ids, half, mean=array(8, 128, dtype=jnp.bfloat16), profile=(256, 0, 0))
    values = HostRows(array(8, chunks, 272, dtype=jnp.uint16), bits=4, dtype=jnp.bfloat16)
    call = functools.partial(pallas_kernels.fetch_reconstruct, implementation="pallas")
    if refused:
        with pytest.raises(NotImplementedError, match="up to 2,147,483,648 elements in an array of at most 4 GiB"):
            jax.eval_shape(call, values, keys)
    else:
        assert jax.eval_shape(call, values, keys)[1].shape == (rows, 8, count * 8, 128)
