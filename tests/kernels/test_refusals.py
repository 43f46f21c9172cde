"""What the ops refuse: wrong arguments, and arguments that only the reference takes."""

from functools import partial

import jax
import jax.numpy as jnp
import kernel_calls
import kernel_cases as table
import numpy as np
import pytest
from append_cases import Appends, append_inputs
from level_cases import LEVELS, level_inputs
from prefill_cases import Prompt, prefill_inputs

import pallas_kernels
from pallas_kernels import ChosenKeys, HostRows
from pallas_kernels.level_scores.kernel import MOST as MOST_CHUNKS
from pallas_kernels.level_scores.kernel import MOST_PARTS
from pallas_kernels.select_chunks.kernel import MOST as MOST_CANDIDATES
from pallas_kernels.sparse_attention.operands import Piece


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


PLACED = zeros(1, 1, 3, dtype=np.int32)
# Ops, and the right arguments of a case. A name may have a word before that of its op.
RIGHT = {
    "chunk_scores": partial(table.score_inputs, table.SCORES[1]),
    "packed chunk_scores": partial(table.score_inputs, table.PACKED_SCORES[0]),
    "batched chunk_scores": partial(table.score_inputs, table.PACKED_SCORES[1]),
    "reconstruct_keys": partial(table.factor_inputs, table.CHUNKS[0]),
    "packed reconstruct_keys": partial(table.factor_inputs, table.PACKED[0]),
    "fetch_reconstruct": partial(table.fetch_inputs, table.CHUNKS[0]),
    "packed fetch_reconstruct": partial(table.fetch_inputs, table.PACKED[0]),
    "attend_chunks": partial(table.attend_inputs, table.ATTENDED[1]),
    "sparse_attention": partial(table.attention_inputs, table.ATTENTION[1]),
    "level_scores": partial(level_inputs, LEVELS[4]),
    "packed level_scores": partial(level_inputs, LEVELS[0]),
    "single level_scores": partial(level_inputs, LEVELS[-1]),
    "sparse_prefill": partial(prefill_inputs, Prompt(64)),
    "odd sparse_prefill": partial(prefill_inputs, Prompt(16, block=24, count=1, lengths=(24,), tokens=24)),
    "append_rows": partial(append_inputs, Appends(1, 4)),
    "select_chunks": lambda: {"scores": zeros(1, 1, 4), "asked": np.ones(1, bool), "resident": PLACED, "count": 2},
}


def refuse(op, change, message, error=ValueError, **options):
    """The op raises the error for changed arguments. A key of `change` is several names, a value may be a function."""
    inputs = RIGHT[op]() | options
    for names, new in change.items():
        for name in names.split():
            given = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, inputs.get(name))
            inputs[name] = new(given) if callable(new) else new
    with pytest.raises(error, match=message):
        getattr(kernel_calls, op.split()[-1])(**inputs)


def cut(x, axis):
    return x.take(np.arange(x.shape[axis] - 1), axis=axis) if x.shape[axis] > 1 else np.concatenate([x, x], axis)


def to(dtype):
    return lambda x: x.astype(dtype)


PLACES = zeros(1, 2, 3, dtype=np.int32)


def listed(piece, **changes):
    """A piece of sparse_attention with a list of three places, and something that is wrong."""
    return Piece(*piece[:2], np.ones((1, 1, 1, 1), np.int32), PLACES)._replace(**changes)


def pieces(change):
    return {"pieces": change}


def lists(**change):
    return {"lists": lambda x: x._replace(**change)}


BROADCASTABLE = r"pieces\[0\] valid must be broadcastable to \[1, 2, 1, m\] where m divides"
ONE_COUNT = r"pieces\[0\] valid must be broadcastable to \[1, 2, 1, 1\], got \[1, 2, 1, 61\]"
WRONG = [
    ("chunk_scores", {"q": lambda x: x[0]}, r"q must have shape \[B, T, h_q, d\], got \[1, 8, 128\]"),
    ("chunk_scores", {"q": lambda x: x[:, :, :7]}, "q's heads must be a multiple of the 2 KV heads, got 7"),
    ("chunk_scores", {"q": to(int)}, "q must be floating, got int"),
    ("chunk_scores", {"landmarks": lambda x: cut(x, 3)}, r"landmarks must have shape \[1, h_kv, m, 128\], got .*127\]"),
    ("chunk_scores", {"landmarks": to(int)}, "landmarks must be floating"),
    ("chunk_scores", {"candidates": lambda x: cut(x, 2)}, "landmarks must be a multiple of the 60 candidates, got 61"),
    ("chunk_scores", {"candidates": lambda x: cut(x, 1)}, r"candidates must have shape \[1, 2, n\], got \[1, 1, 61\]"),
    ("chunk_scores", {"candidates": to(int)}, "candidates must be bool, got int"),
    ("chunk_scores", {"implementation": "triton"}, r"implementation must be one of .*, got 'triton'"),
    ("packed chunk_scores", {"landmarks": lambda x: x[..., 1:]}, "8 or 4 bits for each of 128 numbers, got 63 bytes"),
    ("packed chunk_scores", {"landmarks": to("int8")}, "landmarks must be uint8, got int8"),
    ("packed chunk_scores", {"landmark_scale": lambda x: x[:, :, 1:]}, r"landmark_scale must .* \[1, 2, 244, 1\]"),
    ("packed chunk_scores", {"candidates": lambda x: x[:, :, 1:]}, "multiple of the 60 candidates, got 244 landmarks"),
    ("reconstruct_keys", {"left": lambda x: x[0]}, "left must have shape"),
    ("reconstruct_keys", {"left": lambda x: cut(x, 2)}, "left's rows must be a multiple of the rank 160, got 1279"),
    ("reconstruct_keys", {"left": to(int)}, "left must be floating"),
    ("reconstruct_keys", {"left tail tail_unit": None, "left": zeros(1, 0, 1280)}, "left must have at least one chunk"),
    ("reconstruct_keys", {"right": lambda x: cut(x, 0)}, r"right must have shape \[1, h_kv, r, d\]"),
    ("reconstruct_keys", {"right": to(int)}, "right must be floating"),
    ("reconstruct_keys", {"ids": lambda x: cut(x, 1)}, r"ids must have shape \[1, 2, k\], got \[1, 1, 7\]"),
    ("reconstruct_keys", {"ids": to("float32")}, "ids must be int32, got float32"),
    ("reconstruct_keys", {"inverse": lambda x: x[None]}, "inverse must have shape"),
    ("reconstruct_keys", {"inverse": to("bfloat16")}, "inverse must be float32, got bfloat16"),
    ("reconstruct_keys", {"inverse": zeros(0)}, "inverse must have 1 to 64 angles for heads 128 wide, got 0"),
    ("reconstruct_keys", {"inverse": zeros(65)}, "inverse must have 1 to 64 angles for heads 128 wide, got 65"),
    ("reconstruct_keys", {"tail": None}, "tail and tail_unit belong together"),
    ("reconstruct_keys", {"tail": lambda x: cut(x, 2)}, r"tail must have shape \[1, W, 1280\], got \[1, 3, 1279\]"),
    ("reconstruct_keys", {"tail": to("float32")}, "tail must be bfloat16, got float32"),
    ("reconstruct_keys", {"tail_unit": lambda x: x[0]}, "tail_unit must have shape"),
    ("reconstruct_keys", {"tail_unit": to("float32")}, "tail_unit must be int32"),
    ("packed reconstruct_keys", {"mean": None}, "mean and profile belong together, got a profile without"),
    ("packed reconstruct_keys", {"profile": None}, "mean and profile belong together"),
    ("packed reconstruct_keys", {"profile": (5, 21, 28)}, r"fill whole bytes, got \(5, 21, 28\)"),
    ("packed reconstruct_keys", {"profile": (0, 0, 0)}, r"fill whole bytes, got \(0, 0, 0\)"),
    ("packed reconstruct_keys", {"left": to("float32")}, "left must be uint8, got float32"),
    ("packed reconstruct_keys", {"left": lambda x: x[:, :, 1:]}, "left's rows must be a multiple of 23 bytes, got 183"),
    ("packed reconstruct_keys", {"right": lambda x: x[:, :, 1:]}, r"right must have shape \[1, 2, 55, 128\]"),
    ("packed reconstruct_keys", {"tail": lambda x: x[:, :, 1:]}, r"tail must have shape \[1, W, 184\]"),
    ("fetch_reconstruct", {"values": lambda x: x[:, :, 1:]}, r"values must have shape \[1, 2, 27, 1024\]"),
    ("fetch_reconstruct", {"values": to(int)}, "values must be floating"),
    ("fetch_reconstruct", {"values_tail": None}, r"values\.tail and tail belong together"),
    ("fetch_reconstruct", {"values_tail": lambda x: x[:, :, :2]}, r"values\.tail must have the 3 chunks .*, got 2"),
    ("fetch_reconstruct", {"values_tail": to("float32")}, r"values\.tail must be bfloat16"),
    ("fetch_reconstruct", {"kept_values": lambda x: x[:, :, 1:]}, r"kept.keys must have shape \[1, 2, 9, 1024\]"),
    ("fetch_reconstruct", {"kept_keys": lambda x: cut(x, 3)}, r"kept\.keys must have shape"),
    ("fetch_reconstruct", {"kept_keys": to("float32")}, r"kept\.keys must be bfloat16"),
    ("fetch_reconstruct", {"missed": lambda x: cut(x, 2)}, r"kept\.missed must have shape"),
    ("fetch_reconstruct", {"missed": to("float32")}, r"kept\.missed must be int32"),
    ("packed fetch_reconstruct", {"value_bits": None}, r"values\.bits and values\.dtype belong together"),
    ("packed fetch_reconstruct", {"value_bits": 2}, r"values\.bits must be 8 or 4"),
    ("packed fetch_reconstruct", {"value_bits": 8}, r"values must have shape \[1, 2, 27, 528\], got .*272\]"),
    ("packed fetch_reconstruct", {"value_dtype": "int8"}, r"values\.dtype must be floating, got int8"),
    ("packed fetch_reconstruct", {"values": to("int8")}, "values must be uint16, got int8"),
    ("packed fetch_reconstruct", {"kept_values": to("float32")}, r"kept\.values must be bfloat16, got float32"),
    ("attend_chunks", {"q": lambda x: np.tile(x, (1, 2, 1, 1))}, r"q must .* \[2, 1, h_q, 64\], got \[2, 2, 3, 64\]"),
    ("attend_chunks", {"ids": lambda x: x[:, :, :0]}, "at least one chunk"),
    ("sparse_attention", {"q": lambda x: x[0]}, "q must have shape"),
    ("sparse_attention", {"q": lambda x: x[:, :, :7]}, "q's heads must be a multiple of the 2 KV heads, got 7"),
    ("sparse_attention", {"q": to(int)}, "q must be floating"),
    ("sparse_attention", {"pieces": []}, "pieces must hold at least one piece"),
    ("sparse_attention", pieces(lambda x: [x[0], (cut(x[1][0], 3), *x[1][1:])]), r"pieces\[1\] k must have shape"),
    ("sparse_attention", pieces(lambda x: [(x[0][0], cut(x[0][1], 2), x[0][2])]), r"pieces\[0\] v must have shape"),
    ("sparse_attention", pieces(lambda x: [(*x[0][:2], x[0][2].astype("int8"))]), r"pieces\[0\] valid must be bool"),
    ("sparse_attention", pieces(lambda x: [(*x[0][:2], cut(x[0][2], 3))]), BROADCASTABLE + r" 61, got \[1, 2, 1, 60\]"),
    ("sparse_attention", pieces(lambda x: [(*x[0][:2], x[0][2].astype("int32"))]), ONE_COUNT),
    ("sparse_attention", pieces(lambda x: [listed(x[0], places=cut(PLACES, 1))]), r"\[0\] places must .* \[1, 2"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], places=PLACES[0])]), r"places must have shape \[1, 2, L\]"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], places=zeros(1, 2, 3))]), r"\[0\] places must be int32"),
    ("sparse_attention", pieces(lambda x: [x[0], listed(x[1], k=x[1][0][:, :1])]), r"pieces\[1\] k must have shape"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], k=cut(x[0][0], 3))]), "of the 128 columns .* got 127"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], k=x[0][0][..., :0])]), "of the 128 columns .* got 0"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], v=cut(x[0][1], 3))]), r"pieces\[0\] v must have shape"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], k=x[0][0][:, :, None])]), r"\[1, 2, P, c \* d\], got"),
    ("sparse_attention", pieces(lambda x: [listed(x[0], valid=x[0][2])]), BROADCASTABLE + r" 3, got \[1, 2, 1, 61\]"),
    ("level_scores", {"q": lambda x: x[0]}, r"q must have shape \[B, T, h_q, d\]"),
    ("level_scores", {"scores": lambda x: x[:, :, 0]}, r"scores must have shape \[2, h_kv, 3, n\]"),
    ("level_scores", {"scores": to("bfloat16")}, "scores must be float32"),
    ("level_scores", {"means": lambda x: x[:, :, 1:]}, r"means must have shape \[2, 1, 33, w\]"),
    ("level_scores", {"means": lambda x: x[..., 1:]}, "means must have whole rows of 80 numbers, got 79 columns"),
    ("level_scores", {"means": lambda x: np.tile(x, 2)}, "means must have one row of 80 numbers"),
    ("level_scores", {"means": to(int)}, "means must be floating"),
    ("level_scores", {"details": lambda x: x[..., 1:]}, "details must have whole rows of 80 numbers, got 239 columns"),
    ("level_scores", {"details": lambda x: x[..., 80:]}, "a power of two of landmarks, and at least 2, got 3"),
    ("level_scores", {"mean_scale": zeros(2, 1, 33, 1)}, "means must be uint8"),
    ("level_scores", {"spread": lambda x: x[..., 1:]}, r"spread must have shape \[2, 1, 33, 4\]"),
    ("level_scores", {"spread": to(int)}, "spread must be floating"),
    ("level_scores", {"count": 0}, "count and size must be at least 1, got 0 and 4"),
    ("packed level_scores", {"details": lambda x: x[..., 1:]}, "whole rows of 128 numbers, got 191 columns"),
    ("packed level_scores", {"detail_scale": lambda x: x[:, :, 1:]}, r"scale of details must .* \[1, 2, 61, r\]"),
    ("packed level_scores", {"details": zeros(1, 2, 61, 384), "detail_scale": None}, "both have a scale, or neither"),
    ("packed level_scores", {"mean_scale": lambda x: np.repeat(x, 2, axis=3)}, "one scale for each chunk, got 2"),
    ("sparse_prefill", lists(blocks=zeros(1, 1, 3, 2, dtype=np.int32)), "each of the 3 query blocks"),
    ("sparse_prefill", lists(blocks=zeros(1, 1, 2, 2)), "blocks must be int32, got float32"),
    ("sparse_prefill", lists(columns=zeros(1, 2, 2, 2, dtype=np.int32)), r"columns must have shape \[1, 1, 2, C\]"),
    ("sparse_prefill", lists(diagonals=np.ones((1, 1, 128), bool)), "diagonals and in_column belong together"),
    ("append_rows", {"k": zeros(1, 1, 4)}, r"k must have shape \[B, h_kv, W, d\]"),
    ("append_rows", {"v": zeros(1, 1, 2, 4)}, r"v must have shape \[1, 1, 1, 4\]"),
    ("append_rows", {"v": to("bfloat16")}, "v must be float32"),
    ("append_rows", {"q_new": zeros(2, 1, 1, 4)}, r"new.q must have shape \[1, T, h_q, 4\]"),
    ("append_rows", {"k v": zeros(1, 2, 1, 4)}, "multiple of the 2 KV heads"),
    ("append_rows", {"k_new": zeros(1, 2, 1, 4)}, r"new.k must have shape \[1, 1, 1, 4\]"),
    ("append_rows", {"v_new": to("bfloat16")}, "new.v must be float32"),
    ("append_rows", {"sin": zeros(1, 1, 1)}, r"new.sin must have shape \[1, 1, 2\]"),
    ("append_rows", {"cos": to("bfloat16")}, "new.cos must be float32"),
    ("append_rows", {"cos sin": zeros(1, 1, 3)}, "new.cos must have at most 2 columns"),
    ("append_rows", {"slots": zeros(1, 2, dtype=np.int32)}, r"new.slots must have shape \[1, 1\]"),
    ("append_rows", {"valid": to(np.int32)}, "new.valid must be bool"),
    ("append_rows", {"implementation": "cuda"}, "implementation must be one of"),
    ("select_chunks", {"scores": to("bfloat16")}, "scores must be float32"),
    ("select_chunks", {"asked": np.ones(2, bool)}, r"asked must have shape \[1\]"),
    ("select_chunks", {"resident": zeros(1, 2, 3, dtype=np.int32)}, r"resident must have shape \[1, 1, P\]"),
    ("select_chunks", {"ages": zeros(1, 1, 4, dtype=np.int32)}, r"ages must have shape \[1, 1, 3\]"),
    ("select_chunks", {"ages": zeros(1, 1, 3)}, "ages must be int32"),
    ("select_chunks", {"numbers": zeros(1, 1, 3, dtype=np.int32)}, r"numbers must have shape \[1, 1, 4\]"),
    ("select_chunks", {"count": 4}, "count must be 0 to 3"),
    ("select_chunks", {"implementation": "cuda"}, "implementation must be one of"),
]


@pytest.mark.parametrize(("op", "change", "message"), WRONG)
def test_wrong_arguments_are_told(op, change, message):
    refuse(op, change, message)


def of_rows(count):
    return lambda x: zeros(*x.shape[:2], count, *x.shape[3:])


WIDE = zeros(1, 1, 1, 320)
MANY = {"means details spread": of_rows(MOST_CHUNKS + 1), "scores": zeros(2, 1, 3, MOST_CHUNKS + 1)}
PARTS = {"details": zeros(2, 1, 33, 80 * (2 * MOST_PARTS - 1)), "spread": zeros(2, 1, 33, 2 * MOST_PARTS)}
OWN_ROWS = (zeros(1, 2, 1, 5, 128, dtype=jnp.bfloat16),) * 2 + (np.ones((1, 2, 1, 5), bool),)
UNSUPPORTED = [
    ("chunk_scores", {"q landmarks": lambda x: np.tile(x, 3)}, "up to 256 wide, got 384"),
    ("chunk_scores", {"q landmarks": to(jnp.float8_e4m3fn)}, "got float8_e4m3fn"),
    ("batched chunk_scores", {"candidates": np.ones((2, 2, 6), bool)}, "up to 16 landmarks a chunk, got 18"),
    ("reconstruct_keys", {"left": zeros(1, 0, 1280, dtype=jnp.bfloat16)}, "empty"),
    ("attend_chunks", {"q": lambda x: np.tile(x, (1, 1, 6, 1))}, "up to 16 queries a head, got 18"),
    ("sparse_attention", pieces(lambda x: [x[0], OWN_ROWS]), "separate rows for each query"),
    ("level_scores", MANY, f"up to {MOST_CHUNKS} chunks"),
    ("level_scores", PARTS, f"up to {MOST_PARTS} landmarks a chunk"),
    ("single level_scores", {"q": zeros(1, 1, 17, 64)}, "up to 16 query heads a KV head, got 17"),
    ("odd sparse_prefill", {}, "16, 32, 64 or 128 queries, got 24"),
    ("append_rows", {"k v q_new k_new v_new": WIDE}, "up to 256 wide"),
    ("append_rows", {"k v": zeros(1, 1, 0, 4)}, "empty"),
    ("select_chunks", {"scores": zeros(1, 1, MOST_CANDIDATES + 1)}, f"up to {MOST_CANDIDATES} candidates"),
    ("select_chunks", {"count": 0}, "empty"),
]


@pytest.mark.parametrize(("op", "change", "message"), UNSUPPORTED)
def test_what_a_kernel_cannot_do_is_told(op, change, message):
    refuse(op, change, message, NotImplementedError, implementation="pallas")
    refuse(op, change, message, NotImplementedError, implementation="interpret")


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
    call = partial(pallas_kernels.fetch_reconstruct, implementation="pallas")
    if refused:
        with pytest.raises(NotImplementedError, match="up to 2,147,483,648 elements in an array of at most 4 GiB"):
            jax.eval_shape(call, values, keys)
    else:
        assert jax.eval_shape(call, values, keys)[1].shape == (rows, 8, count * 8, 128)
