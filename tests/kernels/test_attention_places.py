"""sparse_attention over pieces with a list of places: compared with NumPy, and bit for bit with the listed rows."""

import kernel_truth
import numpy as np
import pytest
from few import one_of, quick
from kernel_calls import sparse_attention
from kernel_cases import TOLERANCE, normal
from kernel_lowering import TARGET, lowered
from kernel_refs import watched  # noqa: F401, a fixture
from random_arrays import array

from pallas_kernels.sparse_attention import kernel
from pallas_kernels.sparse_attention.operands import Piece

BATCH, HEADS, DIM = 2, 2, 64
DTYPES = ("float32", "bfloat16")
NOWHERE = (-1, 2**31 - 1, 10_000)  # entries that no query may see


def piece_of(rng, *, places, entries, chunk, dim=DIM, seen=None, dtype="float32"):
    """A piece with a list: each row of the batch and head has its own. `seen` is `Piece.valid`; None: random counts."""
    if seen is None:
        seen = rng.integers(0, entries + 1, (BATCH, HEADS, 1, 1), np.int32)
    lists = np.zeros((BATCH, HEADS, entries), np.int32)
    for b, h in np.ndindex(BATCH, HEADS):
        lists[b, h] = [rng.permutation(places)[:entries], rng.integers(0, places, entries)][entries > places]
    seen = np.asarray(seen)
    whole = np.broadcast_to(seen, (BATCH, HEADS, *seen.shape[2:]))
    if seen.dtype == np.int32:
        used = np.arange(entries) < whole.max(axis=2)
    else:  # flags of entries, or of the rows of entries
        per_entry = whole.shape[3] // entries
        used = whole.any(axis=2).reshape(BATCH, HEADS, entries, per_entry).any(axis=3)
    nowhere = np.asarray((*NOWHERE, places), np.int64)[np.arange(entries) % 4]
    lists = np.where(used, lists, nowhere).astype(np.int32)
    k, v = (normal(rng, BATCH, HEADS, places, chunk * dim, dtype=dtype) for _ in range(2))
    return Piece(k, v, array(seen), array(lists))


def in_order(piece, dim=DIM):
    """The same piece without a list: its rows are gathered in NumPy."""
    places, chunk = np.asarray(piece.places), piece.k.shape[3] // dim
    index = np.where((places < 0) | (places >= piece.k.shape[2]), 0, places)[..., None]
    valid = np.asarray(piece.valid)
    k, v = (
        array(np.take_along_axis(np.asarray(x), index, axis=2).reshape(*places.shape[:2], -1, dim)) for x in piece[:2]
    )
    return Piece(k, v, np.minimum(valid, places.shape[2]) * np.int32(chunk) if valid.dtype == np.int32 else valid)


def queries_of(rng, *, queries=1, group=1, dim=DIM, dtype="float32"):
    return normal(rng, BATCH, queries, HEADS * group, dim, dtype=dtype)


def check(q, pieces):
    """Both implementations agree with NumPy, and give the bits that they give for the gathered rows."""
    dim, dtype = q.shape[3], q.dtype.name
    want = kernel_truth.sparse_attention(q, pieces, dim**-0.5)
    plain = [piece if piece.places is None else in_order(piece, dim) for piece in pieces]
    for implementation in ("xla", "interpret"):
        got = sparse_attention(q, pieces, scale=dim**-0.5, implementation=implementation)
        assert got.dtype == q.dtype
        np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[dtype])
        same = sparse_attention(q, plain, scale=dim**-0.5, implementation=implementation)
        np.testing.assert_array_equal(kernel_truth.wide(got), kernel_truth.wide(same))
    return want


CASES = {  # places, entries, chunk, dim, group, queries, dtype
    "one token a place": (40, 33, 1, 64, 1, 1, "float32"),
    "chunks of eight": (24, 13, 8, 128, 4, 1, "bfloat16"),
    "as many places as entries": (9, 9, 8, 80, 3, 1, "float32"),
    "chunks of five": (16, 15, 5, 80, 2, 1, "bfloat16"),
    "chunks of three, more entries than places": (5, 12, 3, 64, 8, 1, "float32"),
    "chunks longer than a block": (5, 3, 70, 64, 6, 1, "bfloat16"),
    "one entry": (4, 1, 8, 64, 7, 1, "float32"),
    "several queries": (16, 11, 8, 64, 5, 3, "float32"),
    "blocks of query rows": (11, 7, 6, 128, 8, 9, "bfloat16"),
}


@pytest.mark.parametrize("case", quick(["chunks of eight", "several queries"], CASES))
def test_the_rows_of_listed_places(case):
    places, entries, chunk, dim, group, queries, dtype = CASES[case]
    rng = np.random.default_rng(entries)
    sizes = {"places": places, "entries": entries, "chunk": chunk, "dim": dim, "dtype": dtype}
    check(queries_of(rng, queries=queries, group=group, dim=dim, dtype=dtype), [piece_of(rng, **sizes)])


SEEN = {
    "a count for each query": lambda rng: rng.integers(0, 10, (BATCH, HEADS, 3, 1), np.int32),
    "a count for each query of all rows": lambda rng: rng.integers(0, 10, (1, 1, 3, 1), np.int32),
    "a count beyond the list": lambda rng: np.full((1, 1, 1, 1), 2**29, np.int32),
    "no entry": lambda rng: np.zeros((1, HEADS, 1, 1), np.int32),
    "flags of entries": lambda rng: rng.random((BATCH, HEADS, 1, 9)) < 0.4,
    "flags of entries for each query": lambda rng: rng.random((BATCH, 1, 3, 9)) < 0.4,
    "flags of rows": lambda rng: rng.random((BATCH, HEADS, 3, 45)) < 0.2,
    "one flag": lambda rng: np.arange(3).reshape(1, 1, 3, 1) > 0,
}


@pytest.mark.parametrize(("kind", "dtype"), one_of(8, ((kind, dtype) for kind in SEEN for dtype in DTYPES)))
def test_what_queries_may_see(kind, dtype):
    rng = np.random.default_rng(1)
    seen = SEEN[kind](rng)
    if kind == "one flag":
        piece = piece_of(rng, places=14, entries=9, chunk=5, seen=np.full((1, 1, 1, 1), 9, np.int32), dtype=dtype)
        piece = piece._replace(valid=array(seen))
    else:
        piece = piece_of(rng, places=14, entries=9, chunk=5, seen=seen, dtype=dtype)
    want = check(queries_of(rng, queries=3, group=2, dtype=dtype), [piece])
    assert want.any() == (kind != "no entry")


def other_pieces(rng, dtype):
    """Pieces without a list: a count that is a single number, and flags."""
    rows = [tuple(normal(rng, BATCH, HEADS, n, DIM, dtype=dtype) for _ in range(2)) for n in (21, 67)]
    flags = array(rng.random((BATCH, 1, 1, 67)) < 0.5)
    return [Piece(*rows[0], np.full((1, 1, 1, 1), 12, np.int32)), Piece(*rows[1], flags)]


def forget_programs():
    """Programs are compiled anew, with another constant of the kernel's file."""
    for cached in (kernel.sparse_attention, sparse_attention):
        cached.clear_cache()


@pytest.mark.parametrize(
    ("dtype", "programs"), quick([("bfloat16", 9)], ((dtype, count) for dtype in DTYPES for count in (1, 9, 512)))
)
def test_pieces_with_and_without_lists(programs, dtype, monkeypatch):
    """With 1 program a head is not split. With more, its rows are split over several programs, and merged."""
    rng = np.random.default_rng(2)
    single = np.full((1, 1, 1, 1), 10, np.int32)
    lists = [
        piece_of(rng, places=30, entries=25, chunk=8, dtype=dtype),
        piece_of(rng, places=14, entries=13, chunk=3, seen=single, dtype=dtype),
    ]
    window, outliers = other_pieces(rng, dtype)
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    forget_programs()
    check(queries_of(rng, group=4, dtype=dtype), [window, lists[0], outliers, lists[1]])
    forget_programs()


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_where_chunks_lie_changes_no_bit(implementation):
    """A larger cache, and other places of the same chunks: the list names them in the same order."""
    rng = np.random.default_rng(3)
    piece, q = (
        piece_of(rng, places=12, entries=9, chunk=8, dtype="bfloat16"),
        queries_of(rng, group=4, dtype="bfloat16"),
    )
    moved = rng.permutation(31)[:12]
    k, v = (np.array(normal(rng, BATCH, HEADS, 31, 8 * DIM, dtype="bfloat16")) for _ in range(2))
    k[:, :, moved], v[:, :, moved] = piece.k, piece.v
    places = np.asarray(piece.places)
    away = np.where((places >= 0) & (places < 12), moved[np.clip(places, 0, 11)], 31).astype(np.int32)
    first, second = (
        sparse_attention(q, [one], scale=0.1, implementation=implementation)
        for one in (piece, Piece(k, v, piece.valid, array(away)))
    )
    np.testing.assert_array_equal(kernel_truth.wide(first), kernel_truth.wide(second))


def test_pieces_without_entries_or_places_are_passed_over():
    rng = np.random.default_rng(4)
    q, piece = queries_of(rng, group=2), piece_of(rng, places=6, entries=5, chunk=4)
    arrays = Piece(*map(np.asarray, piece))
    no_entries = piece._replace(places=arrays.places[..., :0])
    no_places = piece._replace(k=arrays.k[:, :, :0], v=arrays.v[:, :, :0])
    for implementation in ("xla", "interpret"):
        assert not np.asarray(sparse_attention(q, [no_entries], scale=0.1, implementation=implementation)).any()
        with_them, alone = (
            sparse_attention(q, pieces, scale=0.1, implementation=implementation)
            for pieces in ([no_places, piece, no_entries], [piece])
        )
        np.testing.assert_array_equal(with_them, alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "programs"),
    [("a count for each query", 1), ("flags of entries", 512), ("no entry", 512)],
)
def test_the_kernel_reads_only_the_rows_of_entries_that_a_query_sees(kind, programs, watched, monkeypatch):  # noqa: F811
    """Unseen entries are not loaded. Each seen one is loaded once for each of its rows, which are loaded once."""
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    rng = np.random.default_rng(5)
    seen = SEEN[kind](rng)
    piece, q = piece_of(rng, places=14, entries=9, chunk=5, seen=seen), queries_of(rng, queries=3, group=2)
    got = sparse_attention(q, [piece], scale=0.125, implementation="interpret")
    np.testing.assert_allclose(got, kernel_truth.sparse_attention(q, [piece], 0.125), **TOLERANCE["float32"])
    refs = watched[0][1][0]
    places = np.asarray(piece.places)
    used = (places >= 0) & (places < 14)
    np.testing.assert_array_equal(refs.places.reads, np.where(used, 5, 0))
    want = np.zeros((BATCH, HEADS, 14, 5 * DIM), int)
    for b, h, j in np.ndindex(places.shape):
        if used[b, h, j]:
            want[b, h, places[b, h, j]] += 1
    np.testing.assert_array_equal(refs.k.reads, want)
    np.testing.assert_array_equal(refs.v.reads, want)


def test_auto_is_the_kernel_on_cuda_and_the_reference_elsewhere():
    rng = np.random.default_rng(7)
    piece = piece_of(rng, places=24, entries=13, chunk=8, dtype="bfloat16")
    inputs = {"q": queries_of(rng, group=4, dtype="bfloat16"), "pieces": [piece], "scale": 0.1}
    assert TARGET in lowered("sparse_attention", inputs, "cuda")
    assert TARGET not in lowered("sparse_attention", inputs, "cpu")


@pytest.mark.parametrize(("places", "entries", "read"), [(40, 9, 9), (6, 9, 6)])
def test_the_kernel_says_that_it_reads_the_listed_places(places, entries, read):
    piece = piece_of(np.random.default_rng(6), places=places, entries=entries, chunk=8)
    arrays = BATCH * HEADS * 4 * (2 * read * 8 * DIM + entries + 1)
    assert kernel.piece_bytes(piece, 8 * entries) == arrays
