"""Ops that rebuild keys and fetch values: the memory they use, every form of the kernel, and what the library packs."""

import jax
import kernel_cases as table
import kernel_truth
import numpy as np
import pytest
from few import quick, slow
from kernel_calls import fetch_reconstruct, operands, reconstruct_keys
from random_arrays import array

from jshadow.ops.packing import quantize_chunks
from jshadow.ops.rope import cos_sin, rotate
from jshadow.policies.shadowkv.key_codecs import TransformCodec
from pallas_kernels import in_host_memory
from pallas_kernels.attend_chunks import kernel as attend_kernel
from pallas_kernels.fetch_reconstruct import kernel as fetch_kernel
from pallas_kernels.reconstruct_keys.kernel import Form
from pallas_kernels.tiles import spans

CHUNKS, PACKED = table.CHUNKS, table.PACKED


def here(inputs):
    """The arguments with all arrays in device memory."""
    return {key: array(x) if isinstance(x, jax.Array) else x for key, x in inputs.items()}


def test_everything_in_the_tail():
    """No chunk of a short prompt is compressed. The kernel refuses this case, and "auto" uses the reference."""
    inputs = table.fetch_inputs(CHUNKS[2])
    inputs |= {"left": np.asarray(inputs["left"])[:, :0], "values": np.asarray(inputs["values"])[:, :, :0]}
    inputs |= {"ids": np.arange(28, dtype=np.int32).reshape(2, 2, 7) % 2}
    keys, values = fetch_reconstruct(**inputs)
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
    np.testing.assert_allclose(keys, kernel_truth.kept_or_rebuilt(**inputs), **table.TOLERANCE["float32"])


def test_no_ids_no_keys():
    inputs = table.factor_inputs(CHUNKS[1])
    assert reconstruct_keys(**inputs | {"ids": np.asarray(inputs["ids"])[:, :, :0]}).shape == (2, 1, 0, 64)


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_values_that_stay_may_be_anything_on_the_host(implementation):
    """This also holds inside jit with operands in host memory."""
    inputs = table.fetch_inputs(CHUNKS[2])
    ids, miss = np.clip(np.asarray(inputs["ids"]), 0, 28), table.misses(inputs)
    want = kernel_truth.fetched_values(**inputs)
    prompt, tail = np.array(inputs["values"]), np.array(inputs["values_tail"])
    for b, h in np.ndindex(ids.shape[:2]):
        wanted = ids[b, h][miss[b, h]]
        prompt[b, h][~np.isin(np.arange(27), wanted)] = np.nan
        tail[b, h][~np.isin(27 + np.arange(3), wanted)] = np.nan
    assert np.isnan(prompt).any()
    given = inputs | {"values": table.on_host(prompt), "values_tail": table.on_host(tail)}
    _, values = fetch_reconstruct(**given, implementation=implementation)
    np.testing.assert_array_equal(values, want)


def test_a_donated_buffer_becomes_the_result():
    """Without donation the caller's rows do not change."""
    inputs, names = table.fetch_inputs(CHUNKS[1]), ("kept_keys", "kept_values")
    fetch = jax.jit(lambda kept, rest: fetch_reconstruct(**kept, **rest, implementation="interpret"), donate_argnums=0)
    rest, kept = ({key: x for key, x in inputs.items() if (key in names) is kept} for kept in (False, True))
    before, want = jax.tree.map(np.array, kept), fetch_reconstruct(**inputs, implementation="interpret")
    jax.tree.map(np.testing.assert_array_equal, kept, before)
    jax.tree.map(np.testing.assert_array_equal, fetch(kept, rest), want)
    assert all(kept[name].is_deleted() for name in names)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_values_on_the_device_will_do(implementation):
    inputs = table.fetch_inputs(CHUNKS[5])
    assert in_host_memory(inputs["values"])
    keys, values = fetch_reconstruct(**here(inputs), implementation=implementation)
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
    np.testing.assert_allclose(keys, kernel_truth.kept_or_rebuilt(**inputs), **table.TOLERANCE["float32"])


@pytest.mark.parametrize("form", [Form(16, 4), slow(Form(128, 8, 64, 2))])
def test_every_form_of_the_kernel_gives_the_same(form):
    """Also parts with bytes left over, and programs that do not hold whole chunks."""
    for case in PACKED[-2:]:
        inputs = table.fetch_inputs(case)
        rows, keys, kept = operands(**here(inputs))
        keys, values = fetch_kernel.fetch_reconstruct(rows, kept, keys, True, form)
        want = kernel_truth.kept_or_rebuilt(**inputs)
        np.testing.assert_allclose(kernel_truth.wide(keys), want, **table.TOLERANCE[case.dtype])
        np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))


@pytest.mark.slow
@pytest.mark.parametrize("form", [Form(32, 4), Form(64, 4, 32, 2)])
def test_every_form_of_attention_gives_the_same(form):
    inputs = table.attend_inputs(table.ATTENDED[-5])
    q, _ = inputs.pop("q"), inputs.pop("scale")
    values, keys, _ = operands(**here(inputs))
    got, want = (attend_kernel.attend_chunks(q, values, keys, 0.1, True, *more) for more in ([form], []))
    np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.wide(want), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [1, 16, 20, 24, 40, 48, 64, 80, 96, 100, 120, 128, 160, 176, 192, 256])
def test_spans_hold_an_axis_without_much_waste(size):
    cut = spans(size)
    assert [start for start, _ in cut] == list(np.cumsum([0, *[width for _, width in cut]])[:-1])
    assert all(width in (16, 32, 64, 128) for _, width in cut)
    assert size <= sum(width for _, width in cut) < max(size + 16, 1.25 * size)


# What the library packs


PROFILES = [(p, d) for p in ((5, 22, 28), (0, 64, 0), (0, 0, 12)) for d in ("float32", "bfloat16")]


@pytest.mark.parametrize(("profile", "dtype"), quick([PROFILES[0], PROFILES[3]], PROFILES))
def test_the_reference_is_the_codec(profile, dtype):
    """The op gives the keys that the library encodes, expands and rotates."""
    rng, codec = np.random.default_rng(0), TransformCodec(profile)
    keys = array(rng.standard_normal((2, 40, 2, 64)) * (1 + np.arange(64)) ** -0.5, dtype)
    code = jax.jit(lambda keys, lengths: codec.encode(keys, lengths, 10, 4))(keys, np.array([40, 33]))
    ids = array(rng.integers(0, 10, (2, 2, 7)), np.int32)
    inverse = array(10_000.0 ** -(np.arange(32) / 32), np.float32)
    places = (np.asarray(ids)[..., None] * 4 + np.arange(4)).reshape(2, 2, 28)
    plain = jax.jit(lambda code, ids: codec.decode(code, ids, 4))(code, ids)
    want = np.asarray(jax.jit(lambda x, at: rotate(x, *cos_sin(at, inverse)))(plain, places)).astype(dtype)
    got = reconstruct_keys(left=code.left, ids=ids, inverse=inverse, **codec.operands(code.right), implementation="xla")
    # bfloat16 is equal bit by bit. float32 differs by the order of its sums, because the op takes one head at a time.
    near = {"rtol": 1e-5, "atol": 3e-6} if dtype == "float32" else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(kernel_truth.wide(got), kernel_truth.wide(want), **near)


@pytest.mark.parametrize("bits", [8, 4])
def test_values_of_a_prompt_come_back(bits):
    """The op reads the values that the library packs, and clips ids that do not exist."""
    values = np.random.default_rng(0).standard_normal((1, 2, 5, 4, 64)).astype("bfloat16")
    values[0, 0, 1, 2] = 0
    ids = np.array([[[-3, 1, 9], [4, 0, 2]]], np.int32)
    inputs = {"left": np.asarray(table.factor_inputs(PACKED[1])["left"])[:1, :5], "profile": (16, 64, 64)}
    inputs |= {"right": np.zeros((1, 2, 144, 64), "bfloat16"), "mean": np.ones((1, 2, 64), "bfloat16"), "ids": ids}
    inputs |= {"inverse": np.ones(32, np.float32), "value_bits": bits, "value_dtype": "bfloat16"}
    rows = table.on_host(jax.jit(quantize_chunks, static_argnums=(1, 2))(values, bits, "bfloat16"))
    got = kernel_truth.wide(fetch_reconstruct(rows, **inputs, implementation="interpret")[1])
    chosen = np.take_along_axis(kernel_truth.wide(values), np.clip(ids, 0, 4)[..., None, None], axis=2)
    most = np.abs(chosen).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
    assert (np.abs(got.reshape(chosen.shape) - chosen) <= 0.52 * most + 0.01).all()
    assert not got[0, 0, 4 + 2].any()
