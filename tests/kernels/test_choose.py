"""Which implementation of an op runs, and the errors for wrong arguments."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import kernel_calls
import numpy as np
import pytest
from kernel_cases import ATTENTION, CHUNKS, SCORES, attention_inputs, factor_inputs, fetch_inputs, score_inputs
from kernel_lowering import TARGET, lowered
from level_cases import LEVELS, level_inputs
from random_arrays import array

import pallas_kernels
from pallas_kernels import IMPLEMENTATIONS, in_host_memory, on_host
from pallas_kernels.sparse_attention.operands import Piece

OPS = {
    "chunk_scores": functools.partial(score_inputs, SCORES[1]),
    "reconstruct_keys": functools.partial(factor_inputs, CHUNKS[0]),
    "fetch_reconstruct": functools.partial(fetch_inputs, CHUNKS[0]),
    "sparse_attention": functools.partial(attention_inputs, ATTENTION[1]),
    "level_scores": functools.partial(level_inputs, LEVELS[0]),
}


@pytest.mark.parametrize("op", OPS)
def test_auto_is_the_kernel_on_cuda_and_the_reference_elsewhere(op):
    inputs = OPS[op]()
    assert TARGET in lowered(op, inputs, "cuda")
    assert TARGET not in lowered(op, inputs, "cpu")
    assert TARGET not in lowered(op, inputs, "cuda", implementation="xla")


def test_a_kernel_for_cuda_takes_values_where_they_lie():
    """The program copies no operand in host memory, neither to the device nor on the host."""
    text = lowered("fetch_reconstruct", OPS["fetch_reconstruct"](), "cuda", implementation="pallas")
    assert text.count('mhlo.memory_kind = "pinned_host"') == 2
    assert "annotate_device_placement" not in text


def test_auto_falls_back_where_the_kernel_cannot():
    inputs = score_inputs(SCORES[1])
    wide = inputs | {key: np.concatenate([inputs[key]] * 3, axis=-1) for key in ("q", "landmarks")}
    assert TARGET not in lowered("chunk_scores", wide, "cuda")
    with pytest.raises(NotImplementedError, match="up to 256 wide, got 384"):
        kernel_calls.chunk_scores(**wide, implementation="pallas")
    odd = inputs | {key: np.asarray(inputs[key]).astype(jnp.float8_e4m3fn) for key in ("q", "landmarks")}
    with pytest.raises(NotImplementedError, match="got float8_e4m3fn"):
        kernel_calls.chunk_scores(**odd, implementation="interpret")


def test_the_implementation_must_exist():
    with pytest.raises(ValueError, match=r"implementation must be one of .*, got 'triton'"):
        pallas_kernels.chunk_scores(**score_inputs(SCORES[0]), implementation="triton")
    assert IMPLEMENTATIONS == ("auto", "xla", "pallas", "interpret")


def test_host_memory_is_told_and_used():
    here = array(np.arange(6, dtype=np.float32))
    there = jax.device_put(here, jax.memory.Space.Host)
    assert in_host_memory(there)
    assert not in_host_memory(here)
    seen = []

    @jax.jit
    def double(x):
        seen.append(in_host_memory(x))
        return on_host(lambda y: y * 2)(x)

    out = double(there)
    assert seen == [True]
    assert in_host_memory(out)
    np.testing.assert_array_equal(out, 2 * np.asarray(here))


def cut(x, axis):
    return x.take(np.arange(x.shape[axis] - 1), axis=axis) if x.shape[axis] > 1 else np.concatenate([x, x], axis)


PLACES = np.zeros((1, 2, 3), np.int32)


def listed(piece, **changes):
    """A piece of sparse_attention with a list of three places, and something that is wrong."""
    return Piece(*piece[:2], np.ones((1, 1, 1, 1), np.int32), PLACES)._replace(**changes)


WRONG = [
    ("chunk_scores", "q", lambda x: x[0], r"q must have shape \[B, T, h_q, d\], got \[1, 8, 128\]"),
    ("chunk_scores", "q", lambda x: x[:, :, :7], "q's heads must be a multiple of the 2 KV heads, got 7"),
    ("chunk_scores", "q", lambda x: x.astype(int), "q must be floating, got int"),
    ("chunk_scores", "landmarks", lambda x: cut(x, 3), r"landmarks must have shape \[1, h_kv, m, 128\], got .*127\]"),
    ("chunk_scores", "landmarks", lambda x: x.astype(int), "landmarks must be floating"),
    ("chunk_scores", "candidates", lambda x: cut(x, 2), "landmarks must be a multiple of the 60 candidates, got 61"),
    ("chunk_scores", "candidates", lambda x: cut(x, 1), r"candidates must have shape \[1, 2, n\], got \[1, 1, 61\]"),
    ("chunk_scores", "candidates", lambda x: x.astype(int), "candidates must be bool, got int"),
    ("reconstruct_keys", "left", lambda x: x[0], "left must have shape"),
    ("reconstruct_keys", "left", lambda x: cut(x, 2), "left's rows must be a multiple of the rank 160, got 1279"),
    ("reconstruct_keys", "left", lambda x: x.astype(int), "left must be floating"),
    ("reconstruct_keys", "right", lambda x: cut(x, 0), r"right must have shape \[1, h_kv, r, d\]"),
    ("reconstruct_keys", "right", lambda x: x.astype(int), "right must be floating"),
    ("reconstruct_keys", "ids", lambda x: cut(x, 1), r"ids must have shape \[1, 2, k\], got \[1, 1, 7\]"),
    ("reconstruct_keys", "ids", lambda x: x.astype("float32"), "ids must be int32, got float32"),
    ("reconstruct_keys", "inverse", lambda x: x[None], "inverse must have shape"),
    ("reconstruct_keys", "inverse", lambda x: x.astype("bfloat16"), "inverse must be float32, got bfloat16"),
    ("reconstruct_keys", "tail", lambda x: None, "tail and tail_unit belong together"),
    ("reconstruct_keys", "tail", lambda x: cut(x, 2), r"tail must have shape \[1, W, 1280\], got \[1, 3, 1279\]"),
    ("reconstruct_keys", "tail", lambda x: x.astype("float32"), "tail must be bfloat16, got float32"),
    ("reconstruct_keys", "tail_unit", lambda x: x[0], "tail_unit must have shape"),
    ("reconstruct_keys", "tail_unit", lambda x: x.astype("float32"), "tail_unit must be int32"),
    ("fetch_reconstruct", "values", lambda x: np.asarray(x)[:, :, 1:], r"values must have shape \[1, 2, 27, 1024\]"),
    ("fetch_reconstruct", "values", lambda x: np.asarray(x).astype(int), "values must be floating"),
    ("fetch_reconstruct", "values_tail", lambda x: None, r"values\.tail and tail belong together"),
    ("fetch_reconstruct", "values_tail", lambda x: x[:, :, :2], r"values\.tail must have the 3 chunks of tail, got 2"),
    ("fetch_reconstruct", "values_tail", lambda x: x.astype("float32"), r"values\.tail must be bfloat16"),
    ("fetch_reconstruct", "kept_values", lambda x: x[:, :, 1:], r"kept.keys must have shape \[1, 2, 9, 1024\]"),
    ("fetch_reconstruct", "kept_keys", lambda x: cut(x, 3), r"kept\.keys must have shape"),
    ("fetch_reconstruct", "kept_keys", lambda x: x.astype("float32"), r"kept\.keys must be bfloat16"),
    ("fetch_reconstruct", "missed", lambda x: cut(x, 2), r"kept\.missed must have shape"),
    ("fetch_reconstruct", "missed", lambda x: x.astype("float32"), r"kept\.missed must be int32"),
    ("sparse_attention", "q", lambda x: x[0], "q must have shape"),
    ("sparse_attention", "q", lambda x: x[:, :, :7], "q's heads must be a multiple of the 2 KV heads, got 7"),
    ("sparse_attention", "q", lambda x: x.astype(int), "q must be floating"),
    ("sparse_attention", "pieces", lambda x: [], "pieces must hold at least one piece"),
    ("sparse_attention", "pieces", lambda x: [x[0], (cut(x[1][0], 3), *x[1][1:])], r"pieces\[1\] k must have shape"),
    ("sparse_attention", "pieces", lambda x: [(x[0][0], cut(x[0][1], 2), x[0][2])], r"pieces\[0\] v must have shape"),
    ("sparse_attention", "pieces", lambda x: [(*x[0][:2], x[0][2].astype("int8"))], r"pieces\[0\] valid must be bool"),
    (
        "sparse_attention",
        "pieces",
        lambda x: [(*x[0][:2], cut(x[0][2], 3))],
        r"pieces\[0\] valid must be broadcastable to \[1, 2, 1, m\] where m divides 61, got \[1, 2, 1, 60\]",
    ),
    (
        "sparse_attention",
        "pieces",
        lambda x: [(*x[0][:2], x[0][2].astype("int32"))],
        r"pieces\[0\] valid must be broadcastable to \[1, 2, 1, 1\], got \[1, 2, 1, 61\]",
    ),
    (
        "sparse_attention",
        "pieces",
        lambda x: [listed(x[0], places=cut(PLACES, 1))],
        r"\[0\] places must have shape \[1, 2",
    ),
    ("sparse_attention", "pieces", lambda x: [listed(x[0], places=PLACES[0])], r"places must have shape \[1, 2, L\]"),
    (
        "sparse_attention",
        "pieces",
        lambda x: [listed(x[0], places=PLACES.astype("float32"))],
        r"\[0\] places must be int32",
    ),
    ("sparse_attention", "pieces", lambda x: [x[0], listed(x[1], k=x[1][0][:, :1])], r"pieces\[1\] k must have shape"),
    (
        "sparse_attention",
        "pieces",
        lambda x: [listed(x[0], k=cut(x[0][0], 3))],
        "a multiple of the 128 columns .* got 127",
    ),
    (
        "sparse_attention",
        "pieces",
        lambda x: [listed(x[0], k=x[0][0][..., :0])],
        "a multiple of the 128 columns .* got 0",
    ),
    ("sparse_attention", "pieces", lambda x: [listed(x[0], v=cut(x[0][1], 3))], r"pieces\[0\] v must have shape"),
    ("sparse_attention", "pieces", lambda x: [listed(x[0], k=x[0][0][:, :, None])], r"\[1, 2, P, c \* d\], got"),
    (
        "sparse_attention",
        "pieces",
        lambda x: [listed(x[0], valid=x[0][2])],
        r"pieces\[0\] valid must be broadcastable to \[1, 2, 1, m\] where m divides 3, got \[1, 2, 1, 61\]",
    ),
]


@pytest.mark.parametrize(("op", "argument", "change", "message"), WRONG)
def test_wrong_arguments_are_told(op, argument, change, message):
    inputs = OPS[op]()
    given = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, inputs[argument])
    with pytest.raises(ValueError, match=message):
        getattr(kernel_calls, op)(**inputs | {argument: change(given)})


@pytest.mark.parametrize("columns", [0, 65])
def test_rotation_must_fit_the_heads(columns):
    inputs = factor_inputs(CHUNKS[0])
    with pytest.raises(ValueError, match=f"inverse must have 1 to 64 angles for heads 128 wide, got {columns}"):
        kernel_calls.reconstruct_keys(**inputs | {"inverse": np.zeros(columns, np.float32)})


def test_something_must_be_there_to_choose_from():
    inputs = factor_inputs(CHUNKS[1])
    with pytest.raises(ValueError, match="left must have at least one chunk"):
        kernel_calls.reconstruct_keys(**inputs | {"left": np.asarray(inputs["left"])[:, :0]})


def test_a_jax_without_the_triton_backend_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with pytest.raises(ImportError, match=r"needs a jax below 0\.13, whose Pallas has a Triton backend, got jax \d"):
        importlib.reload(pallas_kernels)
