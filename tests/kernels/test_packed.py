"""The ops on packed numbers: references and kernels compared with NumPy, and every byte that a kernel reads."""

import math

import jax
import jax.numpy as jnp
import kernel_truth
import numpy as np
import pytest
from cases import TINY
from few import one_of, quick
from kernel_calls import chunk_scores, fetch_reconstruct, reconstruct_keys
from kernel_cases import (
    PACKED,
    PACKED_SCORES,
    TOLERANCE,
    factor_inputs,
    fetch_inputs,
    misses,
    name,
    on_host,
    score_inputs,
)
from kernel_lowering import TARGET, lowered
from kernel_refs import watched  # noqa: F401, a fixture
from random_arrays import array

from jshadow.cache.offload import unit_bytes
from jshadow.ops.packing import quantize_chunks
from jshadow.ops.rope import cos_sin, rotate
from jshadow.planner.bytes import abstract_state
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Landmarks, TransformCode, Values
from jshadow.policies.shadowkv.costs import landmark_bytes
from jshadow.policies.shadowkv.key_codecs import Sizes, TransformCodec
from pallas_kernels import ChosenKeys, HostRows, KeptRows
from pallas_kernels.bits import packed_width
from pallas_kernels.chunk_scores.packed import LANES
from pallas_kernels.fetch_reconstruct import kernel as fetch_kernel
from pallas_kernels.reconstruct_keys.kernel import Form

TO_WATCH = [PACKED[0], PACKED[4]]


@pytest.mark.parametrize("case", one_of(6, PACKED), ids=name)
def test_keys_and_values(case):
    """Keys of both ops are within the tolerance of their dtype, and values are equal bit by bit."""
    inputs = fetch_inputs(case)
    want, rows = kernel_truth.reconstruct_keys(**factor_inputs(case)), kernel_truth.fetched_values(**inputs)
    joined = kernel_truth.kept_or_rebuilt(**inputs)
    for implementation in ("xla", "interpret"):
        keys, values = fetch_reconstruct(**inputs, implementation=implementation)
        alone = reconstruct_keys(**factor_inputs(case), implementation=implementation)
        assert keys.dtype == alone.dtype == values.dtype == case.dtype
        near = TOLERANCE[case.dtype]
        np.testing.assert_allclose(kernel_truth.wide(keys), joined, **near)
        np.testing.assert_allclose(kernel_truth.wide(alone), want, **near)
        np.testing.assert_array_equal(values, rows)


@pytest.mark.parametrize(
    ("profile", "dtype"),
    one_of(3, [(p, d) for p in ((5, 22, 28), (0, 64, 0), (0, 0, 12)) for d in ("float32", "bfloat16")]),
)
def test_the_reference_is_the_codec(profile, dtype):
    """The op gives the keys that the library encodes, expands and rotates."""
    rng, codec = np.random.default_rng(0), TransformCodec(profile)
    keys = array(rng.standard_normal((2, 40, 2, 64)) * (1 + np.arange(64)) ** -0.5, dtype)
    code = jax.jit(lambda keys, lengths: codec.encode(keys, lengths, 10, 4))(keys, np.array([40, 33]))
    ids = array(rng.integers(0, 10, (2, 2, 7)), np.int32)
    inverse = array(10_000.0 ** -(np.arange(32) / 32), np.float32)
    places = (np.asarray(ids)[..., None] * 4 + np.arange(4)).reshape(2, 2, 28)
    plain = jax.jit(lambda code, ids: codec.decode(code, ids, 4))(code, ids)
    want = np.asarray(jax.jit(lambda x, at: rotate(x, *cos_sin(at, inverse)))(plain, places)).astype(jnp.dtype(dtype))
    got = reconstruct_keys(left=code.left, ids=ids, inverse=inverse, **codec.operands(code.right), implementation="xla")
    # bfloat16 is equal bit by bit. float32 differs by the order of its sums, because the op takes one head at a time.
    near = {"rtol": 1e-5, "atol": 3e-6} if dtype == "float32" else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), **near)


@pytest.mark.parametrize("case", one_of(6, PACKED_SCORES), ids=name)
def test_scores(case):
    inputs = score_inputs(case)
    want = kernel_truth.chunk_scores(**inputs)
    for implementation in ("xla", "interpret"):
        got = chunk_scores(**inputs, implementation=implementation)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, **TOLERANCE["float32"])
    assert (want[-1, -1] == -1).all() == (case.batch * case.kv_heads > 1)


def test_scores_of_large_logits_are_finite_and_do_not_depend_on_what_is_no_candidate():
    inputs = score_inputs(PACKED_SCORES[1]) | {"scale": 30.0}
    there = np.repeat(np.asarray(inputs["candidates"]), 4, axis=2)[..., None]
    wild = inputs | {"landmark_scale": np.where(there, inputs["landmark_scale"], np.float32(1e4))}
    for implementation in ("xla", "interpret"):
        got = chunk_scores(**inputs, implementation=implementation)
        np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(got, chunk_scores(**wild, implementation=implementation))


def test_values_of_a_prompt_come_back():
    """The op reads the values that the library packs, and clips ids that do not exist."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((1, 2, 5, 4, 64)).astype(jnp.bfloat16)
    values[0, 0, 1, 2] = 0
    inputs = {"left": np.asarray(fetch_inputs(PACKED[1])["left"])[:1, :5], "right": np.zeros((1, 2, 144, 64))}
    inputs["right"], inputs["mean"] = (x.astype(jnp.bfloat16) for x in (inputs["right"], np.ones((1, 2, 64))))
    ids = np.array([[[-3, 1, 9], [4, 0, 2]]], np.int32)
    for bits in (8, 4):
        rows = on_host(jax.jit(quantize_chunks, static_argnums=(1, 2))(values, bits, "bfloat16"))
        _, got = fetch_reconstruct(
            rows,
            ids=ids,
            inverse=np.ones(32, np.float32),
            profile=(16, 64, 64),
            value_bits=bits,
            value_dtype="bfloat16",
            implementation="interpret",
            **inputs,
        )
        chosen = np.take_along_axis(np.asarray(values, np.float64), np.clip(ids, 0, 4)[..., None, None], axis=2)
        most = np.abs(chosen).max(axis=-1, keepdims=True) / (2 ** (bits - 1) - 1)
        assert (np.abs(np.asarray(got, np.float64).reshape(chosen.shape) - chosen) <= 0.52 * most + 0.01).all()
        assert not np.asarray(got)[0, 0, 4 + 2].any()


@pytest.mark.parametrize("form", [Form(16, 4), Form(128, 8, 64, 2)])
def test_every_form_of_the_kernel_gives_the_same(form):
    """Also parts with bytes left over, and programs that do not hold whole chunks."""
    for case in PACKED[-2:]:
        inputs = {
            key: jax.device_put(x, jax.memory.Space.Device)
            for key, x in fetch_inputs(case).items()
            if hasattr(x, "shape")
        }
        rows = HostRows(inputs["values"], inputs.get("values_tail"), case.value_bits, case.dtype)
        fields = {key: inputs.get(key) for key in ("left", "right", "ids", "inverse", "tail", "tail_unit", "mean")}
        kept = (
            KeptRows(*(inputs[key] for key in ("kept_values", "kept_keys", "places", "missed"))) if case.kept else None
        )
        keys, values = fetch_kernel.fetch_reconstruct(
            rows, kept, ChosenKeys(**fields, profile=case.profile), True, form
        )
        want = kernel_truth.kept_or_rebuilt(**fetch_inputs(case))
        np.testing.assert_allclose(kernel_truth.wide(keys), want, **TOLERANCE[case.dtype])
        np.testing.assert_array_equal(values, kernel_truth.fetched_values(**fetch_inputs(case)))


# Bytes


@pytest.mark.slow
@pytest.mark.parametrize("case", TO_WATCH, ids=name)
def test_the_kernel_reads_what_it_must_and_once(case, watched):  # noqa: F811
    """It reads host rows and left rows of chunks that are not kept, once a head, and nothing out of bounds."""
    inputs = fetch_inputs(case)
    keys, values = fetch_reconstruct(**inputs, implementation="interpret")
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
    want = kernel_truth.kept_or_rebuilt(**inputs)
    np.testing.assert_allclose(kernel_truth.wide(keys), want, **TOLERANCE[case.dtype])
    [(source, kept, factors)] = watched
    ids = np.clip(np.asarray(inputs["ids"]), 0, case.units + case.tail - 1)
    miss, asked = misses(inputs), np.zeros((case.batch, case.kv_heads, case.units + case.tail + 1), int)
    for b, h, j in np.ndindex(ids.shape):
        asked[b, h, ids[b, h, j]] += miss[b, h, j]
    halves = [(source.prompt, factors.left, slice(0, case.units))]
    halves += [(source.tail, factors.tail, slice(case.units, None))] if case.tail else []
    for rows, left, part in halves:
        used = case.chunk * (math.ceil(case.dim * case.value_bits / 16) + (2 if case.dtype == "float32" else 1))
        once = np.broadcast_to(asked[:, :, part, None], rows.shape) * (np.arange(rows.shape[3]) < used)
        np.testing.assert_array_equal(rows.reads, once)
        once = asked[:, :, part][:, :, : left.shape[-2]]
        once = once.sum(axis=1)
        np.testing.assert_array_equal(left.reads, np.broadcast_to(once[..., None], left.shape))
    if case.kept:
        np.testing.assert_array_equal(kept.values.reads, 0)
        np.testing.assert_array_equal(kept.keys.reads, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [PACKED_SCORES[i] for i in (2, 5, 8)], ids=name)
def test_each_landmark_is_read_once(case, watched):  # noqa: F811
    """A landmark is read once for all queries of its head. A chunk of four landmarks has one result.

    The four lanes that hold a packed landmark also load its scale, its spread and whether it is a candidate. They do it
    with the same instruction, which moves each number once.
    """
    inputs = score_inputs(case)
    got = chunk_scores(**inputs, implementation="interpret")
    np.testing.assert_allclose(got, kernel_truth.chunk_scores(**inputs), **TOLERANCE["float32"])
    (_, chunks), _ = watched
    blocks = -(-case.queries * case.group // (16 if case.dtype == "float32" or case.bits else 64))
    assert (chunks.landmarks.reads == blocks).all()
    for ref in jax.tree.leaves(chunks._replace(landmarks=None)):
        assert (ref.reads == blocks * (LANES if case.bits else 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_reads_the_bytes_that_the_plan_counts(dtype, watched):  # noqa: F811
    """The kernel reads each element of left rows, landmarks and host rows of a policy's state that the plan counts."""
    policy = ShadowKV(
        budget=32,
        outlier_chunks=2,
        local_chunks=1,
        keys=TransformCode(profile=(3, 10, 8)),
        landmarks=Landmarks(tokens=2, dtype="int4"),
        values=Values("int4"),
    )
    shapes = abstract_state(TINY, policy, batch=2, capacity=96, prompt=90, dtype=dtype, fetch="zero_copy")
    spec, layer, rng = shapes.specs[0], shapes.layers[0], np.random.default_rng(0)
    policy, layout = spec.policy, spec.policy.host_layout(spec)
    assert layout.no_kernel == ""

    def filled(leaf):
        if leaf.dtype == np.uint8:
            return array(rng.integers(0, 256, leaf.shape, np.uint8))
        return array(rng.standard_normal(leaf.shape), leaf.dtype)

    frozen = jax.tree.map(filled, layer.frozen)
    count = policy.max_selected(96)
    assert count == 4
    ids = array(rng.permuted(np.tile(np.arange(layout.units), (2, 2, 1)), axis=2)[:, :, :count], np.int32)
    fetch_reconstruct(
        filled(layer.host.prompt.array),
        left=frozen.left,
        ids=ids,
        inverse=np.ones(spec.head_dim // 2, np.float32),
        value_bits=layout.bits,
        value_dtype=dtype,
        implementation="interpret",
        **policy.codec.operands(frozen.right),
    )
    chunk_scores(
        filled(jax.ShapeDtypeStruct((2, 1, spec.q_heads, spec.head_dim), dtype)),
        frozen.landmarks.codes,
        np.ones((2, 2, layout.units), bool),
        scale=1.0,
        landmark_scale=frozen.landmarks.scale,
        implementation="interpret",
    )
    (source, _, factors), (_, chunks), _ = watched
    planned = policy.step_bytes(spec, layer)
    width = packed_width(policy.keys.profile)
    assert factors.left.reads.sum() == planned["left"][0] == 2 * 2 * count * policy.chunk_size * width
    words = source.prompt.reads.sum() // (2 * 2 * count)  # of a chunk; the plan counts whole sectors of 32 bytes
    assert planned["values"][1] == 2 * 2 * count * unit_bytes(spec, layout)
    assert unit_bytes(spec, layout) == 32 * math.ceil(2 * words / 32)
    assert (chunks.scale.reads == LANES).all()  # by the lanes of a group at once
    read = chunks.landmarks.reads.sum() + chunks.scale.reads.sum() // LANES * chunks.scale.dtype.itemsize
    assert read == planned["landmarks"][0]
    assert read == landmark_bytes(policy, 2 * layout.units, Sizes(2, spec.head_dim, dtype))


# Programs and errors


@pytest.mark.parametrize("case", quick([PACKED[0], PACKED[7], PACKED[11]], PACKED), ids=name)
def test_auto_is_the_kernel_on_cuda(case):
    """The kernel reads host rows in place: the program has no copy of them to the device or on the host."""
    text = lowered("fetch_reconstruct", fetch_inputs(case), "cuda")
    assert text.count(TARGET) == 1
    assert "annotate_device_placement" not in text
    assert TARGET in lowered("reconstruct_keys", factor_inputs(case), "cuda")


@pytest.mark.parametrize("case", one_of(4, PACKED_SCORES), ids=name)
def test_scores_have_a_kernel_on_cuda(case):
    assert lowered("chunk_scores", score_inputs(case), "cuda").count(TARGET) == 2  # the logits, and `finish`
    assert TARGET not in lowered("chunk_scores", score_inputs(case), "cpu")


def test_many_landmarks_a_chunk_are_left_to_xla():
    inputs = score_inputs(PACKED_SCORES[1])
    many = inputs | {"candidates": np.ones((2, 2, 6), bool)}  # 18 landmarks each
    assert TARGET not in lowered("chunk_scores", many, "cuda")
    np.testing.assert_allclose(chunk_scores(**many), kernel_truth.chunk_scores(**many), **TOLERANCE["float32"])
    with pytest.raises(NotImplementedError, match="up to 16 landmarks a chunk, got 18"):
        chunk_scores(**many, implementation="pallas")


WRONG = [
    ("reconstruct_keys", "mean", lambda x: None, "mean and profile belong together, got a profile without"),
    ("reconstruct_keys", "profile", lambda x: None, "mean and profile belong together"),
    ("reconstruct_keys", "profile", lambda x: (5, 21, 28), r"fill whole bytes, got \(5, 21, 28\)"),
    ("reconstruct_keys", "profile", lambda x: (0, 0, 0), r"fill whole bytes, got \(0, 0, 0\)"),
    ("reconstruct_keys", "left", lambda x: x.astype("float32"), "left must be uint8, got float32"),
    ("reconstruct_keys", "left", lambda x: x[:, :, 1:], "left's rows must be a multiple of 23 bytes, got 183"),
    ("reconstruct_keys", "right", lambda x: x[:, :, 1:], r"right must have shape \[1, 2, 55, 128\]"),
    ("reconstruct_keys", "tail", lambda x: x[:, :, 1:], r"tail must have shape \[1, W, 184\]"),
    ("fetch_reconstruct", "value_bits", lambda x: None, r"values\.bits and values\.dtype belong together"),
    ("fetch_reconstruct", "value_bits", lambda x: 2, r"values\.bits must be 8 or 4"),
    ("fetch_reconstruct", "value_bits", lambda x: 8, r"values must have shape \[1, 2, 27, 528\], got .*272\]"),
    ("fetch_reconstruct", "value_dtype", lambda x: "int8", r"values\.dtype must be floating, got int8"),
    ("fetch_reconstruct", "values", lambda x: x.astype("int8"), "values must be uint16, got int8"),
    ("fetch_reconstruct", "kept_values", lambda x: x.astype("float32"), r"kept\.values must be bfloat16, got float32"),
    ("chunk_scores", "landmarks", lambda x: x[..., 1:], "8 or 4 bits for each of 128 numbers, got 63 bytes"),
    ("chunk_scores", "landmarks", lambda x: x.astype("int8"), "landmarks must be uint8, got int8"),
    ("chunk_scores", "landmark_scale", lambda x: x[:, :, 1:], r"landmark_scale must have shape \[1, 2, 244, 1\]"),
    (
        "chunk_scores",
        "candidates",
        lambda x: x[:, :, 1:],
        "landmarks must be a multiple of the 60 candidates, got 244 landmarks",
    ),
]


@pytest.mark.parametrize(("op", "argument", "change", "message"), WRONG)
def test_wrong_arguments_are_told(op, argument, change, message):
    made = {"reconstruct_keys": factor_inputs, "fetch_reconstruct": fetch_inputs}
    inputs = made[op](PACKED[0]) if op in made else score_inputs(PACKED_SCORES[0])
    ops = {"reconstruct_keys": reconstruct_keys, "fetch_reconstruct": fetch_reconstruct, "chunk_scores": chunk_scores}
    given = np.asarray(inputs[argument]) if isinstance(inputs[argument], jax.Array) else inputs[argument]
    with pytest.raises(ValueError, match=message):
        ops[op](**inputs | {argument: change(given)})
