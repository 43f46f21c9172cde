"""sparse_attention over pieces with and without a list of places: what queries see, where rows lie, how it is split."""

import itertools

import kernel_truth
import numpy as np
import pytest
from few import one_of, quick, slow
from kernel_calls import sparse_attention
from kernel_cases import TOLERANCE, Heads, attention_inputs, normal
from kernel_refs import watched  # noqa: F401, a fixture
from random_arrays import array

from pallas_kernels.sparse_attention import kernel
from pallas_kernels.sparse_attention.operands import Piece

BATCH, HEADS, DIM = 2, 2, 64
DTYPES = ("float32", "bfloat16")
KINDS = ("xla", "interpret")
NOWHERE = (-1, 2**31 - 1, 10_000)  # entries that no query may see


@pytest.fixture
def split(monkeypatch):
    """A function that sets how many programs share a head. They are compiled anew, now and afterwards."""

    def forget(programs):
        monkeypatch.setattr(kernel, "PROGRAMS", programs)
        for cached in (kernel.sparse_attention, sparse_attention):
            cached.clear_cache()

    yield forget
    forget(kernel.PROGRAMS)


def number(count):
    return np.full((1, 1, 1, 1), count, np.int32)


def near(got, want):
    np.testing.assert_allclose(kernel_truth.wide(got), want, **TOLERANCE[got.dtype.name])


VALID = {  # of three pieces with 72, 50 and 61 rows
    "flags of eight rows, and counts": lambda rng: (
        rng.random((2, 2, 3, 9)) < 0.5,
        rng.integers(0, 52, (2, 1, 3, 1), np.int32),
        np.full((1, 2, 1, 1), 7, np.int32),
    ),
    "flags of queries": lambda rng: [np.array([True, False, True]).reshape(1, 1, 3, 1)] * 3,
    "two numbers": lambda rng: (number(41), None, number(7)),
    "nothing of the first": lambda rng: (number(0), None, number(61)),
    "nothing of the last": lambda rng: (None, None, number(0)),
    "a number for the first": lambda rng: (number(3), None, None),
}
IN_TURN = itertools.cycle(DTYPES)  # what a query sees does not depend on the dtype
MASKS = list(zip(VALID, IN_TURN, strict=False))


@pytest.mark.parametrize(("seen", "dtype"), quick(MASKS[:3], MASKS))
def test_flags_and_counts_of_rows(seen, dtype):
    """The kernel reads counts that are single numbers from one array if there are several."""
    case = Heads((72, 50, 61), 80, group=3, queries=3, kv_heads=2, batch=2, dtype=dtype)
    inputs, rows, masks = attention_inputs(case), [], []
    for (k, v, own), new in zip(inputs["pieces"], VALID[seen](np.random.default_rng(0)), strict=True):
        valid = np.asarray(own) if new is None else new
        rows.append((k, v, valid))
        counts = valid.dtype == np.int32
        masks.append(np.arange(k.shape[2]) < valid if counts else valid.repeat(k.shape[2] // valid.shape[3], axis=3))
    whole = [(k, v, mask) for (k, v, _), mask in zip(rows, masks, strict=True)]
    want = kernel_truth.sparse_attention(inputs["q"], whole, inputs["scale"])
    np.testing.assert_array_equal(kernel_truth.sparse_attention(inputs["q"], rows, inputs["scale"]), want)
    for kind in KINDS:
        got = sparse_attention(**inputs | {"pieces": rows}, implementation=kind)
        near(got, want)
        assert not np.asarray(got)[want == 0].any()  # a query that sees nothing


def test_rows_of_each_querys_own():
    """5-D and 4-D pieces together: "auto" uses the reference."""
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        inputs = attention_inputs(Heads((27,), 64, group=2, queries=3, kv_heads=2, dtype=dtype))
        k, v = (normal(rng, 1, 2, 3, 5, 64, dtype=dtype) for _ in range(2))
        inputs["pieces"].append((k, v, array(rng.random((1, 2, 3, 5)) < 0.6)))
        near(sparse_attention(**inputs), kernel_truth.sparse_attention(**inputs))


def test_a_program_walks_several_blocks(split):
    """With a large batch there are few splits. Each program loops over blocks, and the last one ends past the rows.

    With one program a head, no partial results are written. With five, the shorter piece ends before the last program.
    """
    inputs = attention_inputs(Heads((482, 61), 64, group=3))
    want = kernel_truth.sparse_attention(**inputs)
    for programs in (1, 2, 5):
        split(programs)
        near(sparse_attention(**inputs, implementation="interpret"), want)


# Pieces with a list of places


def piece_of(rng, *, places, entries, chunk, dim=DIM, seen=None, dtype="float32"):
    """A piece with a list: each row of the batch and head has its own. `seen` is `Piece.valid`; None: random counts."""
    if seen is None:
        seen = rng.integers(0, entries + 1, (BATCH, HEADS, 1, 1), np.int32)
    lists = np.zeros((BATCH, HEADS, entries), np.int32)
    for b, h in np.ndindex(BATCH, HEADS):
        lists[b, h] = [rng.permutation(places)[:entries], rng.integers(0, places, entries)][entries > places]
    flags = seen if seen.dtype == bool else np.arange(entries) < seen  # of entries, or of rows, or one
    flags = np.broadcast_to(flags, (BATCH, HEADS, flags.shape[2], max(entries, flags.shape[3]))).any(axis=2)
    used = flags.reshape(BATCH, HEADS, entries, -1).any(axis=3)
    nowhere = np.asarray((*NOWHERE, places), np.int64)[np.arange(entries) % 4]
    k, v = (normal(rng, BATCH, HEADS, places, chunk * dim, dtype=dtype) for _ in range(2))
    return Piece(k, v, array(seen), array(np.where(used, lists, nowhere), np.int32))


def queries_of(rng, *, queries=1, group=1, dim=DIM, dtype="float32"):
    return normal(rng, BATCH, queries, HEADS * group, dim, dtype=dtype)


def check(q, pieces):
    """Both implementations agree with NumPy. Returns its result, and theirs by name."""
    want, made = kernel_truth.sparse_attention(q, pieces, q.shape[3] ** -0.5), {}
    for kind in KINDS:
        made[kind] = sparse_attention(q, pieces, scale=q.shape[3] ** -0.5, implementation=kind)
        assert made[kind].dtype == q.dtype
        near(made[kind], want)
    return want, made


def check_bits(q, pieces):
    """Both implementations also give the bits that they give for the gathered rows."""
    rows = [kernel_truth.in_order(*piece, q.shape[3]) for piece in pieces]
    plain = [Piece(array(k, q.dtype), array(v, q.dtype), valid) for k, v, valid in rows]
    for kind, got in check(q, pieces)[1].items():
        same = sparse_attention(q, plain, scale=q.shape[3] ** -0.5, implementation=kind)
        np.testing.assert_array_equal(kernel_truth.wide(got), kernel_truth.wide(same))


CASES = {  # places, entries, chunk, dim, group, queries, dtype
    "one token a place": (40, 33, 1, 64, 1, 1, "float32"),
    "chunks of eight": (24, 13, 8, 128, 4, 1, "bfloat16"),
    "as many places as entries, chunks of five": (9, 9, 5, 80, 2, 1, "bfloat16"),
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
    q = queries_of(rng, queries=queries, group=group, dim=dim, dtype=dtype)
    check_bits(q, [piece_of(rng, places=places, entries=entries, chunk=chunk, dim=dim, dtype=dtype)])


SEEN = {
    "a count for each query": lambda rng: rng.integers(0, 10, (BATCH, HEADS, 3, 1), np.int32),
    "a count for each query of all rows": lambda rng: rng.integers(0, 10, (1, 1, 3, 1), np.int32),
    "a count beyond the list": lambda rng: number(2**29),
    "no entry": lambda rng: np.zeros((1, HEADS, 1, 1), np.int32),
    "flags of entries": lambda rng: rng.random((BATCH, HEADS, 1, 9)) < 0.4,
    "flags of entries for each query": lambda rng: rng.random((BATCH, 1, 3, 9)) < 0.4,
    "flags of rows": lambda rng: rng.random((BATCH, HEADS, 3, 45)) < 0.2,
    "one flag": lambda rng: np.arange(3).reshape(1, 1, 3, 1) > 0,
}


@pytest.mark.parametrize(("kind", "dtype"), one_of(4, zip(SEEN, IN_TURN, strict=False)))
def test_what_queries_may_see(kind, dtype):
    rng = np.random.default_rng(1)
    piece = piece_of(rng, places=14, entries=9, chunk=5, seen=SEEN[kind](rng), dtype=dtype)
    want, _ = check(queries_of(rng, queries=3, group=2, dtype=dtype), [piece])
    assert want.any() == (kind != "no entry")


@pytest.mark.parametrize(
    ("dtype", "programs"),
    [("bfloat16", 9), slow(("float32", 1)), slow(("float32", 512))],
)
def test_pieces_with_and_without_lists(programs, dtype, split):
    """With 1 program a head is not split. With more, its rows are split over several programs, and merged."""
    rng = np.random.default_rng(2)
    first = piece_of(rng, places=30, entries=25, chunk=8, dtype=dtype)
    second = piece_of(rng, places=14, entries=13, chunk=3, seen=number(10), dtype=dtype)
    rows = [tuple(normal(rng, BATCH, HEADS, n, DIM, dtype=dtype) for _ in range(2)) for n in (21, 67)]
    window, outliers = Piece(*rows[0], number(12)), Piece(*rows[1], array(rng.random((BATCH, 1, 1, 67)) < 0.5))
    split(programs)
    check_bits(queries_of(rng, group=4, dtype=dtype), [window, first, outliers, second])


@pytest.mark.parametrize("kind", KINDS)
def test_where_chunks_lie_changes_no_bit(kind):
    """A larger cache, and other places of the same chunks: the list names them in the same order."""
    rng = np.random.default_rng(3)
    piece = piece_of(rng, places=12, entries=9, chunk=8, dtype="bfloat16")
    q, moved, places = queries_of(rng, group=4, dtype="bfloat16"), rng.permutation(31)[:12], np.asarray(piece.places)
    k, v = (np.array(normal(rng, BATCH, HEADS, 31, 8 * DIM, dtype="bfloat16")) for _ in range(2))
    k[:, :, moved], v[:, :, moved] = piece.k, piece.v
    away = np.where((places >= 0) & (places < 12), moved[np.clip(places, 0, 11)], 31).astype(np.int32)
    both = (piece, Piece(k, v, piece.valid, array(away)))
    first, second = (sparse_attention(q, [one], scale=0.1, implementation=kind) for one in both)
    np.testing.assert_array_equal(kernel_truth.wide(first), kernel_truth.wide(second))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_without_entries_or_places_or_rows_are_passed_over(kind):
    rng = np.random.default_rng(4)
    q, piece = queries_of(rng, group=2), piece_of(rng, places=6, entries=5, chunk=4)
    arrays = Piece(*map(np.asarray, piece))
    no_entries = arrays._replace(places=arrays.places[..., :0])
    no_places = arrays._replace(k=arrays.k[:, :, :0], v=arrays.v[:, :, :0])
    no_rows = Piece(*np.zeros((2, BATCH, HEADS, 0, DIM), np.float32), np.zeros((BATCH, HEADS, 1, 0), bool))
    together, alone, nothing = (
        np.asarray(sparse_attention(q, pieces, scale=0.1, implementation=kind))
        for pieces in ([no_places, piece, no_entries, no_rows], [piece], [no_entries, no_rows])
    )
    np.testing.assert_array_equal(together, alone)
    assert not nothing.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "programs"), [("a count for each query", 1), ("flags of entries", 512), ("no entry", 512)]
)
def test_the_kernel_reads_only_the_places_that_a_query_sees(kind, programs, watched, monkeypatch):  # noqa: F811
    """Unseen entries are not loaded. Each seen one is loaded once for each of its rows, which are loaded once."""
    monkeypatch.setattr(kernel, "PROGRAMS", programs)
    rng = np.random.default_rng(5)
    piece = piece_of(rng, places=14, entries=9, chunk=5, seen=SEEN[kind](rng))
    q = queries_of(rng, queries=3, group=2)
    got = sparse_attention(q, [piece], scale=0.125, implementation="interpret")
    near(got, kernel_truth.sparse_attention(q, [piece], 0.125))
    refs, places = watched[0][1][0], np.asarray(piece.places)
    used = (places >= 0) & (places < 14)
    np.testing.assert_array_equal(refs.places.reads, np.where(used, 5, 0))
    want = np.zeros(refs.k.shape, int)
    for b, h, j in np.argwhere(used):
        want[b, h, places[b, h, j]] += 1
    np.testing.assert_array_equal(refs.k.reads, want)
    np.testing.assert_array_equal(refs.v.reads, want)


@pytest.mark.parametrize(("places", "entries", "read"), [(40, 9, 9), (6, 9, 6)])
def test_the_kernel_says_that_it_reads_the_listed_places(places, entries, read):
    piece = piece_of(np.random.default_rng(6), places=places, entries=entries, chunk=8)
    assert kernel.piece_bytes(piece, 8 * entries) == BATCH * HEADS * 4 * (2 * read * 8 * DIM + entries + 1)
