"""What kernels read and write: each element that the result needs, as often as they must, and nothing out of bounds."""

import math

import jax
import kernel_calls as ops
import kernel_cases as table
import kernel_truth
import numpy as np
import pytest
from append_cases import APPENDS, append_inputs, written
from cases import TINY
from kernel_refs import watched  # noqa: F401, a fixture
from level_cases import LEVELS, level_inputs, level_truth
from prefill_cases import Prompt, prefill_inputs, prefill_truth
from random_arrays import array
from selection_cases import SELECTIONS, selection_inputs, selection_truth

from jshadow.cache.offload import unit_bytes
from jshadow.planner.machine import abstract_state
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Landmarks, TransformCode, Values
from pallas_kernels.bits import packed_width
from pallas_kernels.chunk_scores import packed
from pallas_kernels.chunk_scores.packed import LANES

# ruff: noqa: F811, `watched` is a fixture
pytestmark = pytest.mark.slow  # one that is watched runs without XLA


def near(got, want, dtype="float32"):
    np.testing.assert_allclose(kernel_truth.wide(got), want, **table.TOLERANCE[dtype])


def same(reads, want):
    """The counts are those, or those for each column of a row."""
    np.testing.assert_array_equal(reads, np.broadcast_to(want, reads.shape))


def blocks_of(case):
    """How many programs share the query rows of a head: each reads the rows of its head once."""
    return -(-case.queries * case.group // (16 if case.dtype == "float32" or case.bits else 64))


@pytest.mark.parametrize("case", [APPENDS[i] for i in (1, 4)], ids=table.name)
def test_appending_reads_no_old_row_and_writes_only_new_ones(case, watched):
    inputs = append_inputs(case)
    ops.append_rows(**inputs, implementation="interpret")
    [(k, v, new)] = watched
    for buffer in (k, v):
        same(buffer.reads, 0)
        same(buffer.writes, written(inputs)[:, None, :, None])
    slots, valid = np.asarray(inputs["slots"]), np.asarray(inputs["valid"])
    needed = np.ones(new.heads.shape, bool)  # all queries, and the keys and values of tokens that are written
    needed[:, :, case.kv_heads * case.group :] = (valid & (slots < case.slots))[..., None, None]
    same(new.heads.reads, needed)


@pytest.mark.parametrize("case", [SELECTIONS[i] for i in (0, 4, 6)], ids=table.name)
def test_each_score_is_read_once_if_its_row_is_asked(case, watched):
    inputs = selection_inputs(case)
    got, want = (
        jax.tree.leaves(x) for x in (ops.select_chunks(**inputs, implementation="interpret"), selection_truth(**inputs))
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    [(candidates,)] = watched
    same(candidates.scores.reads, np.asarray(inputs["asked"])[:, None, None])


@pytest.mark.parametrize("case", [table.SCORES[2], *(table.PACKED_SCORES[i] for i in (5, 8))], ids=table.name)
def test_each_landmark_is_read_once(case, watched):
    """A landmark is read once for all queries of its head. A chunk of four landmarks has one result.

    The four lanes that hold a packed landmark also load its scale, its spread and whether it is a candidate. They do it
    with the same instruction, which moves each number once.
    """
    inputs = table.score_inputs(case)
    near(ops.chunk_scores(**inputs, implementation="interpret"), kernel_truth.chunk_scores(**inputs))
    (queries, chunks), _ = watched
    same(chunks.landmarks.reads, blocks_of(case))
    for ref in jax.tree.leaves(chunks._replace(landmarks=None)):
        same(ref.reads, blocks_of(case) * (LANES if case.bits else 1))
    if not case.bits:
        same(queries.reads, queries.reads[0, 0, 0, 0])


def test_a_walk_over_tiles_reads_each_landmark_once(watched, monkeypatch):
    monkeypatch.setattr(packed, "PROGRAMS", 1)
    monkeypatch.setattr(packed, "STEPS", 2)
    inputs = table.score_inputs(table.Heads((300,), 64, group=4, kv_heads=2, dtype="bfloat16", bits=4, spread=True))
    near(ops.chunk_scores(**inputs, implementation="interpret"), kernel_truth.chunk_scores(**inputs))
    (_, chunks), (partial, _) = watched
    assert partial[1].shape[2] == 2
    same(chunks.landmarks.reads, 1)


@pytest.mark.parametrize("case", [LEVELS[1], LEVELS[4]], ids=table.name)
def test_the_landmarks_of_chosen_chunks_are_read_once(case, watched):
    inputs = level_inputs(case)
    got, want = ops.level_scores(**inputs, implementation="interpret"), level_truth(**inputs)
    near(got.scores, want[0])
    np.testing.assert_array_equal(got.ids, want[1])
    _, ((_, scores, levels), _), _ = watched  # kernels choose groups, score their chunks and complete the softmax
    times = np.zeros(scores.shape[:2] + scores.shape[3:], int)
    for b, h, t, place in np.argwhere(np.asarray(got.scores) >= 0):
        times[b, h, got.ids[b, h, t, place]] += 1
    for rows in (levels.means, levels.details):
        assert (rows.reads.reshape(*times.shape, -1) == times[..., None]).all()
    for numbers in (levels.mean_scale, levels.detail_scale, levels.spread):  # read by several lanes at once
        if numbers is not None:
            assert ((numbers.reads.reshape(*times.shape, -1) > 0) == (times > 0)[..., None]).all()


@pytest.mark.parametrize("case", [table.ATTENTION[2], table.ATTENTION[5]], ids=table.name)
def test_attention_reads_each_row_once(case, watched):
    inputs = table.attention_inputs(case)
    near(
        ops.sparse_attention(**inputs, implementation="interpret"), kernel_truth.sparse_attention(**inputs), case.dtype
    )
    (q, pieces, sinks), *partials = watched
    assert q.array.shape == inputs["q"].shape
    assert sinks is None
    assert len(pieces) == len(case.rows)
    for piece in pieces:
        same(piece.k.reads, blocks_of(case))
        same(piece.v.reads, blocks_of(case))
    for partial in partials:  # the merge reads each partial result once, and the statistics once for each tile
        same(partial[0].reads, 1)


def test_a_prefill_reads_what_its_lists_say(watched):
    """Each program reads the valid numbers of its lists, and the rows of these keys once."""
    case = Prompt(16, 3, 2, 32, 2, 1, (90, 32, 70), 90, "bfloat16")
    inputs = prefill_inputs(case)
    near(ops.sparse_prefill(**inputs, implementation="interpret"), prefill_truth(**inputs), "bfloat16")
    _, keys, lists, _ = watched[0]
    want = np.zeros((3, 90, 2, 1), int)
    for b, h, i in np.ndindex(3, 6, 2):
        begun = 32 * (1 + i) < case.lengths[b]
        counts = [int(x.array[b, h, i]) * begun for x in (lists.block_counts, lists.column_counts)]
        for ids, count in zip((lists.blocks, lists.columns), counts, strict=True):
            same(ids.reads[b, h, i], np.arange(ids.shape[3]) < count)
        for number in lists.blocks.array[b, h, i, : counts[0]]:
            want[b, 32 * number : 32 * (number + 1), h // 3] += 1
        np.add.at(want[b, :, h // 3], lists.columns.array[b, h, i, : counts[1]], 1)
    same(keys.k.reads, want)
    same(keys.v.reads, want)


@pytest.mark.parametrize("case", [table.CHUNKS[i] for i in (2, 3)], ids=table.name)
def test_keys_are_rebuilt_from_the_rows_of_the_chosen_chunks(case, watched):
    inputs = table.factor_inputs(case)
    near(
        ops.reconstruct_keys(**inputs, implementation="interpret"), kernel_truth.reconstruct_keys(**inputs), case.dtype
    )
    [(keys,)] = watched
    ids = np.clip(inputs["ids"], 0, case.units + case.tail - 1)
    for b in range(case.batch):
        assert set(np.flatnonzero(keys.left.reads[b].any(axis=1))) == {i for i in ids[b].ravel() if i < case.units}


@pytest.mark.parametrize("case", [table.CHUNKS[2], *(table.PACKED[i] for i in (0, 4))], ids=table.name)
def test_a_fetch_reads_the_host_rows_of_missed_chunks_once(case, watched):
    """A row that stays is neither read nor written. Others are written once. Packed left rows are read once a head."""
    inputs = table.fetch_inputs(case)
    keys, values = ops.fetch_reconstruct(**inputs, implementation="interpret")
    np.testing.assert_array_equal(values, kernel_truth.fetched_values(**inputs))
    near(keys, kernel_truth.kept_or_rebuilt(**inputs), case.dtype)
    [(source, kept, factors)] = watched
    asked = np.zeros((case.batch, case.kv_heads, case.units + case.tail + 1), int)
    ids, miss = np.clip(np.asarray(inputs["ids"]), 0, case.units + case.tail - 1), table.misses(inputs)
    np.add.at(asked, (*np.indices(ids.shape)[:2], ids), miss)
    used = source.prompt.shape[3]
    if case.value_bits:
        used = case.chunk * (math.ceil(case.dim * case.value_bits / 16) + (2 if case.dtype == "float32" else 1))
    halves = [(source.prompt, factors.left, asked[:, :, : case.units])]
    halves += [(source.tail, factors.tail, asked[:, :, case.units :])] if case.tail else []
    for rows, left, once in halves:
        same(rows.reads, once[..., None] * (np.arange(rows.shape[3]) < used))
        if case.profile:
            same(left.reads, once[:, :, : left.shape[-2]].sum(axis=1)[..., None])
    if case.kept:
        assert 0 < miss.sum() < miss.size
        writes = np.zeros((*kept.keys.shape[:3], 1), int)
        for b, h, j in np.argwhere(miss):
            first = int(inputs["places"][b, h, j]) * case.chunk
            writes[b, h, first : first + case.chunk] += 1
        for rows in (kept.values, kept.keys):
            same(rows.reads, 0)
            same(rows.writes, writes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_reads_the_bytes_that_the_plan_counts(dtype, watched):
    """The kernel reads each element of left rows, landmarks and host rows of a policy's state that the plan counts."""
    parts = {"landmarks": Landmarks(tokens=2, dtype="int4"), "values": Values("int4")}
    policy = ShadowKV(budget=32, outlier_chunks=2, local_chunks=1, keys=TransformCode(profile=(3, 10, 8)), **parts)
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
    inverse = np.ones(spec.head_dim // 2, np.float32)
    options = {"value_bits": layout.bits, "value_dtype": dtype, "implementation": "interpret"}
    rows, operands = filled(layer.host.prompt.array), policy.codec.operands(frozen.right)
    ops.fetch_reconstruct(rows, left=frozen.left, ids=ids, inverse=inverse, **options, **operands)
    q, marks = filled(jax.ShapeDtypeStruct((2, 1, spec.q_heads, spec.head_dim), dtype)), frozen.landmarks
    there = np.ones((2, 2, layout.units), bool)
    ops.chunk_scores(q, marks.codes, there, scale=1.0, landmark_scale=marks.scale, implementation="interpret")
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
