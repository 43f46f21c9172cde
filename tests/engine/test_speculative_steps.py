"""`decode_steps(speculate=)`: cycles in one compiled loop draw the tokens of plain steps."""

import numpy as np
import pytest
from cases import CAPACITY, model, random_tokens, setting

from jshadow import (
    CompressedDraft,
    DraftModel,
    Full,
    Offloaded,
    PromptLookup,
    Quest,
    Sampler,
    SelfDraft,
    load_state,
    save_state,
)
from jshadow.engine import decode
from jshadow.errors import ConfigError, PromptError

TEXTS = [np.tile(random_tokens(1, 7, seed=2)[0], 5).tolist(), random_tokens(1, 19, seed=1)[0].tolist(), [9]]
LOOKUP = PromptLookup(tokens=4, ngram=1)
N = 18


def state_of(policy):
    tokens = np.zeros((3, 35), np.int32)
    for row, text in enumerate(TEXTS):
        tokens[row, : len(text)] = text
    lengths = np.array(list(map(len, TEXTS)))
    logits, state = decode.prefill(model(), tokens, lengths, policy, capacity=CAPACITY)
    return np.asarray(logits.argmax(-1), np.int32), state


def both(policy, drafter, **options):
    """Tokens and states of plain steps, and of cycles."""
    first, state = state_of(policy)
    plain = decode.decode_steps(model(), first, state.fork(), N, **options)
    fast = decode.decode_steps(model(), first, state, N, **options, speculate=drafter, before=TEXTS)
    return plain, fast


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("full", LOOKUP),
        pytest.param("shadowkv", LOOKUP, marks=pytest.mark.slow),
        ("full", SelfDraft(tokens=4, policy=Quest(budget=8, unit=4, recent=3, dense_layers=1))),
        pytest.param(Offloaded(block=8), CompressedDraft(tokens=3, policy=Full()), marks=pytest.mark.slow),
        pytest.param("full", DraftModel(model(), tokens=3), marks=pytest.mark.slow),
        pytest.param("loki", LOOKUP, marks=pytest.mark.slow),
    ],
    ids=["full-lookup", "shadowkv-lookup", "full-self", "offloaded-compressed", "full-model", "loki-lookup"],
)
def test_the_tokens_are_those_of_plain_steps(name, drafter):
    policy = setting(name, "restricted") if isinstance(name, str) else name
    (tokens, state), (again, after) = both(policy, drafter)
    np.testing.assert_array_equal(again, tokens)
    assert after.lengths.tolist() == state.lengths.tolist()
    assert after.last.tolist() == state.last.tolist()
    more = random_tokens(3, 1, seed=3)[:, 0]
    logits = [decode.decode_step(model(), more, one)[0] for one in (state, after)]
    np.testing.assert_allclose(*logits, atol=2e-4)


@pytest.mark.slow
def test_draws_and_stop_tokens():
    (tokens, _), _ = both(Full(), LOOKUP, sampler=Sampler(0.9), seed=5)
    stop = [int(tokens[0, 6]), int(tokens[1, 2])]
    (tokens, state), (again, after) = both(Full(), LOOKUP, sampler=Sampler(0.9), seed=5, stop=stop)
    np.testing.assert_array_equal(again, tokens)
    assert (np.asarray(tokens) == -1).any()
    assert after.lengths.tolist() == state.lengths.tolist()


def test_a_drafter_that_searches_may_not_know_the_text():
    first, state = state_of(Full())
    plain, _ = decode.decode_steps(model(), first, state.fork(), N)
    fast, _ = decode.decode_steps(model(), first, state, N, speculate=LOOKUP)
    np.testing.assert_array_equal(fast, plain)


@pytest.mark.parametrize(
    ("before", "error"),
    [
        (TEXTS[:2], "before must have 3 rows, like the state, got 2"),
        ([TEXTS[0], TEXTS[1], [9, 9]], r"before must have the \[35, 19, 1\] tokens that the state holds"),
        ([TEXTS[0], TEXTS[1], [2**40]], "before must lie in"),
        ([TEXTS[0], TEXTS[1], [1.5]], "before must be integers"),
    ],
)
def test_texts_that_are_not_those_of_the_state_are_refused(before, error):
    first, state = state_of(Full())
    with pytest.raises(PromptError, match=error):
        decode.decode_steps(model(), first, state, 4, speculate=LOOKUP, before=before)


def test_an_unknown_keyword_is_refused():
    first, state = state_of(Full())
    with pytest.raises(TypeError, match="unexpected keyword arguments"):
        decode.decode_steps(model(), first, state, 4, speculat=LOOKUP)


def test_what_cannot_go_back_is_refused():
    first, state = state_of(setting("h2o", "restricted"))
    with pytest.raises(ConfigError, match="policy must be able to give tokens back to speculate"):
        decode.decode_steps(model(), first, state, 4, speculate=LOOKUP)
    assert state.lengths.tolist() == list(map(len, TEXTS))


# A state between two cycles holds tokens that were proposed and given back. Nothing reads them.

REWINDING = ("full", "snapkv", "quest", "loki", "omnikv", "offloaded")
REWINDING += ("shadowkv", "shadowkv_plus", "shadowkv_transform")


def forked(state, tmp_path):
    return state.fork()


def taken(state, tmp_path):
    return state.take([2, 0, 1])


def inserted(state, tmp_path):
    return state.insert(1, state.take([0]))


def saved(state, tmp_path):
    save_state(tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors", state, model())
    newest = max(tmp_path.iterdir(), key=lambda path: int(path.stem))
    return load_state(newest, model())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "shadowkv" else pytest.mark.slow) for name in REWINDING]
)
def test_states_between_cycles_are_those_of_plain_decoding(name, tmp_path):
    (_, plain), (_, fast) = both(setting(name, "restricted"), LOOKUP)
    tokens = random_tokens(3, 6, seed=11)
    for change in (forked, taken, inserted, saved):
        logits = []
        for state in (plain, fast):
            out, _ = decode.extend(model(), tokens, [6, 2, 5], change(state, tmp_path), logits="all")
            logits.append(np.concatenate([np.asarray(out[row, :count]) for row, count in enumerate((6, 2, 5))]))
        np.testing.assert_allclose(*logits, atol=2e-4, err_msg=change.__name__)
