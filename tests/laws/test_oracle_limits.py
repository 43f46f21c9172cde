"""The oracle against itself: settings that must change nothing, or make it full attention, and hand-made choices.

What is here needs no compiled program: an oracle that is wrong in the same way as the library would pass test_oracle.
"""

import dataclasses

import numpy as np
import oracle
import oracle_shadowkv
import pytest
from cases import CONFIGS, model, random_tokens

CONFIG = CONFIGS["group2"]
COLUMNS = CONFIG.key_columns
PROMPT, TURNS = random_tokens(75, seed=41).tolist(), [random_tokens(n, seed=42 + n).tolist() for n in (11, 3, 1)]
BASE = oracle.ShadowKV(rank=12, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
PLUS = oracle.ShadowKVPlus(**dataclasses.asdict(BASE), later_keys="projected")
EVERYTHING = {"rank": COLUMNS, "budget": 400}


def run(policy, prompt=PROMPT, turns=TURNS):
    """Logits [1 + new tokens, V] and the trace."""
    model_run = oracle.Oracle(model(CONFIG).weights, CONFIG, policy)
    logits = [model_run.prefill(prompt)[None], *(model_run.extend(turn) for turn in turns)]
    return np.concatenate(logits), model_run.trace


LIMITS = [
    dataclasses.replace(BASE, **EVERYTHING),
    dataclasses.replace(BASE, **EVERYTHING, turn_selection="shared", extend_piece=4),
    dataclasses.replace(BASE, **EVERYTHING, exact_preload=True, score_dtype="bfloat16", chunk_multiple=4),
    dataclasses.replace(PLUS, **EVERYTHING),
    dataclasses.replace(PLUS, **EVERYTHING, local_chunks=0, extra_outlier_chunks=1, exact_preload=True),
]


@pytest.mark.parametrize("policy", LIMITS, ids=lambda policy: f"{type(policy).__name__}-{policy.turn_selection}")
@pytest.mark.parametrize("length", [1, 7, 75])
def test_everything_selected_at_full_rank_is_full_attention(policy, length):
    logits, trace = run(policy, PROMPT[:length])
    full, full_trace = run(oracle.Full(), PROMPT[:length])
    np.testing.assert_allclose(logits, full, atol=1e-10)
    assert sum(entry["attended"] for entry in trace) == sum(entry["attended"] for entry in full_trace)


def test_settings_that_change_nothing_and_those_that_change_something():
    """Without the latter, the oracle could pass the limits above by ignoring its settings."""
    base = run(BASE)[0]
    for same in (
        {"turn_selection": "shared", "extend_piece": 1},
        {"score_dim": CONFIG.head_dim},
        {"chunk_multiple": 2},
    ):
        np.testing.assert_allclose(run(dataclasses.replace(BASE, **same))[0], base, atol=1e-10)  # 75 tokens: 16 chunks
    for other in ({"turn_selection": "shared"}, {"score_dim": 1}, {"chunk_multiple": 5}, {"exact_preload": True}):
        assert np.abs(run(dataclasses.replace(BASE, **other))[0] - base).max() > 1e-3, other
    assert np.abs(run(PLUS)[0] - base).max() > 1e-3


def test_a_shared_selection_is_the_piece_s():
    """A turn of 11 tokens in pieces of 4: three pieces, each with one entry a layer."""
    _, trace = run(dataclasses.replace(BASE, turn_selection="shared", extend_piece=4), turns=TURNS[:1])
    assert [entry["queries"] for entry in trace if entry["layer"] == 0] == [4, 4, 3]
    held = [75 + np.arange(0, 4), 75 + np.arange(4, 8), 75 + np.arange(8, 11)]
    for entry, positions in zip(trace[::2], held, strict=True):  # 64 tokens of the prompt are in chunks
        assert entry["attended"] == sum(positions + 1 - 64 + (2 + 4) * 4)
        assert entry["output"].shape == (len(positions), CONFIG.q_heads, CONFIG.head_dim)


def test_chunks_join_one_by_one():
    """75 tokens, chunks of 4, window of 3: at position 75 chunk 15 is the last that left, at 80 chunk 17."""
    _, trace = run(PLUS)
    sizes = [entry["scores"].shape[1] for entry in trace if entry["layer"] == 0]
    assert sizes == [max(16, p // 4 + 1 - 3) for p in range(75, 75 + 15)]
    assert sizes[0] == 16
    assert sizes[-1] == 20
    chosen = set().union(*(head for entry in trace for head in entry["selected"]))
    assert max(chosen) >= 16, "no joined chunk was ever selected"


def test_extra_outliers_are_the_worst_represented_ones():
    """Strictly below the best kept outlier of the head, in order of id, as many as allowed; never without outliers."""
    kept = {}
    for limit in (0, 1, 16):
        policy = dataclasses.replace(PLUS, outlier_chunks=8, extra_outlier_chunks=limit)
        kept[limit] = run(policy, turns=[random_tokens(60, seed=9).tolist()])[1][-1]["extra"]
    assert kept[0] == [set(), set()]
    assert any(len(head) > 1 for head in kept[16])
    for one, many in zip(kept[1], kept[16], strict=True):
        assert one == set(sorted(many)[:1])
    _, trace = run(dataclasses.replace(PLUS, outlier_chunks=0), turns=[random_tokens(60, seed=9).tolist()])
    assert trace[-1]["extra"] == [set(), set()]


def test_equal_bfloat16_scores_go_to_the_lower_chunk():
    """The third and the first landmark differ by less than bfloat16 can tell; the second is far away."""
    landmarks = np.array([[1.0, 0.0], [-9.0, 0.0], [1.0004, 0.0]])
    queries = np.array([[[1.0, 0.0]]])
    picks = {}
    for dtype in ("float32", "bfloat16"):
        policy = oracle.ShadowKV(rank=1, budget=1, chunk_size=1, score_dtype=dtype)
        picks[dtype] = oracle_shadowkv.choose(policy, queries, landmarks[:, None], np.arange(3))
    assert picks["float32"][0] == [2]
    assert picks["bfloat16"][0] == [0]
    assert picks["bfloat16"][2] == np.inf


def test_a_rounding_that_hangs_on_a_bit_is_a_near_tie():
    """1 / 4 + 1 / 1024 lies half way between two bfloat16 numbers: down it ties with 1 / 4, up it is larger."""
    policy = oracle.ShadowKV(rank=1, budget=2, chunk_size=1, score_dtype="bfloat16", score_dim=1)
    gaps = []
    for more in (1 / 1024, 1 / 4096):
        for mass in ([0.25, 0.25 + more, 0.5 - more], [0.25 + more, 0.25, 0.5 - more]):
            keys = np.log(mass)[:, None, None]
            gaps.append(oracle_shadowkv.choose(policy, np.ones((1, 1, 1)), keys, np.arange(3))[2])
    assert gaps == [0.0, np.inf, np.inf, np.inf]  # where the lower id is the larger one, both roundings choose it


def test_preloaded_chunks_are_exact_until_they_miss():
    """Rank 1: rebuilt keys are far from exact ones, so a step tells which it used."""
    policy = dataclasses.replace(BASE, rank=1, exact_preload=True)
    one = oracle.Oracle(model(CONFIG).weights, CONFIG, policy)
    one.prefill(PROMPT)
    memory = one.caches[0].memory
    assert all(len(head) == 4 for head in memory.exact)
    before = [set(head) for head in memory.exact]
    one.extend(TURNS[0])
    after = [set(head) for head in memory.exact]
    assert all(late <= early for late, early in zip(after, before, strict=True))
    assert after != before
    ever = [set.intersection(*(e["selected"][head] for e in one.trace if e["layer"] == 0)) for head in range(2)]
    assert after == [early & always for early, always in zip(before, ever, strict=True)]
