"""Speculation: a drafter proposes tokens, the model checks several at once, and no token changes."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, prefilled, random_tokens, setting
from small_state import SMALL as SMALLEST
from small_state import small

import jshadow
from jshadow import (
    CompressedDraft,
    DraftModel,
    Full,
    Loki,
    Offloaded,
    PromptLookup,
    Quest,
    Sampler,
    SelfDraft,
    ShadowKV,
    load_state,
    save_state,
)
from jshadow.engine import decode
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.sampling import sample_checked, sample_numbered
from jshadow.engine.speculation import parse_drafter
from jshadow.engine.speculation.drafter import Target, Text
from jshadow.engine.speculation.pace import Pace
from jshadow.errors import ConfigError, PromptError, VerificationError
from jshadow.weights.params import init_params

# One world: a row that repeats itself, one that does not, and one that begins with one token.
RNG = np.random.default_rng(5)
PROMPTS = [np.resize(RNG.integers(0, TINY.vocab_size, 9), 50).tolist(), RNG.integers(0, TINY.vocab_size, 21).tolist()]
PROMPTS.append([7])
NEW, WARM = 24, 0.8
OTHER = init_params(dataclasses.replace(TINY, num_layers=1), seed=9)
SLIDING = dataclasses.replace(TINY, sliding_window=12, sliding_layers=(1,))
LOOKUP = PromptLookup(tokens=4, ngram=1)
SELF = SelfDraft(tokens=4, policy=Quest(budget=8, unit=4, recent=3, dense_layers=1))
SMALL = setting("shadowkv", "restricted")
COMPRESSED = CompressedDraft(tokens=4, policy=SMALL)
MODEL = DraftModel(OTHER, tokens=4)
# These propose what the model itself draws.
EXACT = {
    "self": SelfDraft(tokens=4, policy=Quest(budget=CAPACITY, unit=4, recent=3, dense_layers=0)),
    "compressed": CompressedDraft(tokens=4, policy=Full()),
    "model": DraftModel(model(), tokens=4),
}
TARGET = Target(*[None] * 7)  # prompt lookup does not look at the model
slow = pytest.mark.slow


def policy_of(name):
    return setting(name, "restricted") if isinstance(name, str) else name


def generate(name="full", temperature=0.0, config=TINY, **options):
    asked = {"max_new_tokens": NEW, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 11}
    return jshadow.generate(model(config), PROMPTS, policy_of(name), **asked | options)


plain = functools.cache(generate)


def tokens_of(results):
    return [one.tokens for one in results]


def end_of(results):
    """What the states of the rows hold."""
    return [(one.state.lengths.tolist(), one.state.last.tolist()) for one in results]


def a_turn(results, row, speculate=None, config=TINY):
    """The tokens of a further turn on the state of a row."""
    return jshadow.generate(
        model(config), [3, 4], state=results[row].state.fork(), max_new_tokens=6, speculate=speculate
    ).tokens


# The search


def continuation(text, ngram, width):
    """What prompt lookup must propose, from the definition."""
    best = (0, -1)
    for place in range(ngram, len(text)):
        length = 0
        while length < min(place, 16) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= ngram:
            best = max(best, (length, place))
    if best[1] < 0:
        return None
    again = [*text]
    for j in range(width):
        again.append(again[best[1] + j])
    return again[len(text) :]


@functools.partial(jax.jit, static_argnums=0)
def hear_and_propose(lookup, memory, tokens, counts):
    memory = memory._replace(live=lookup.heard(memory, tokens, counts, None))
    return memory, lookup.propose(memory, TARGET, 6).tokens, lookup.ready(memory)


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_the_longest_and_newest_agreement_is_found(ngram):
    rng, found = np.random.default_rng(ngram), 0
    lookup = PromptLookup(tokens=6, ngram=ngram)
    lengths, texts = rng.integers(1, 40, 60), rng.integers(0, 4, (60, 50))
    memory = lookup.begin(Text(texts[:, :40], lengths, TINY), SimpleNamespace(capacity=60))
    more, counts = np.zeros((60, 5), np.int32), np.zeros(60, np.int32)
    for _ in range(3):
        memory, *proposed = hear_and_propose(lookup, memory, more, counts)
        guesses, ready = map(np.asarray, proposed)
        for row, count in enumerate(counts):
            texts[row, lengths[row] : lengths[row] + count] = more[row, :count]
        lengths = lengths + counts
        for row, length in enumerate(lengths):
            want = continuation(texts[row, :length].tolist(), ngram, 6)
            assert ready[row] == (0 if want is None else 6)
            assert want is None or guesses[row].tolist() == want
            found += want is not None
        more = rng.integers(0, 4, (60, 5)).astype(np.int32)
        counts = rng.integers(0, 6, 60).astype(np.int32)
    assert found > 40


# The tokens of `generate`


def speculated(name, drafter, temperature, config, *marks):
    text = drafter.name + ("-sliding" if config is SLIDING else "") + ("-warm" if temperature else "")
    return pytest.param(name, drafter, temperature, config, marks=marks, id=f"{getattr(name, 'name', name)}-{text}")


@pytest.mark.parametrize(
    ("name", "drafter", "temperature", "config"),
    [
        *(
            speculated(name, LOOKUP, 0.0, TINY, slow)
            for name in ("shadowkv", "quest", "snapkv", "shadowkv_plus", "omnikv", "loki")
        ),
        *(speculated(name, LOOKUP, WARM, TINY, slow) for name in ("full", "snapkv")),
        speculated("full", SELF, 0.0, TINY),
        speculated("full", SELF, 0.0, SLIDING, slow),
        speculated("full", COMPRESSED, 0.0, TINY),
        speculated("full", COMPRESSED, 0.0, SLIDING, slow),
        speculated(Offloaded(block=16), COMPRESSED, 0.0, TINY, slow),
        speculated("full", MODEL, 0.0, TINY, slow),
        speculated("shadowkv", MODEL, 0.0, TINY, slow),
        speculated("quest", MODEL, 0.0, TINY, slow),
    ],
)
def test_no_token_changes(name, drafter, temperature, config):
    """Each row's state holds its text, however many tokens the last cycle drew."""
    expected, out = plain(name, temperature, config), generate(name, temperature, config, speculate=drafter)
    assert tokens_of(out) == tokens_of(expected)
    assert end_of(out) == end_of(expected)
    reports = [one.report for one in out]
    for report in reports:
        # the first token comes from the prompt, and each cycle gives one token and those that were accepted
        assert report.cycles + report.accepted_tokens == report.generated_tokens - 1
        assert report.accepted_tokens <= report.proposed_tokens <= drafter.tokens * report.cycles
    accepted, proposed = (sum(getattr(one, f"{kind}_tokens") for one in reports) for kind in ("accepted", "proposed"))
    assert accepted < proposed
    assert accepted > 0 or temperature or drafter is MODEL
    assert expected[0].report.cycles is None
    if drafter in (SELF, COMPRESSED):  # they store tokens of their own in the state, or beside it
        assert a_turn(out, 1, None, config) == a_turn(expected, 1, None, config)


@slow
@pytest.mark.parametrize(
    ("kind", "temperature"),
    [(kind, temperature) for temperature in (0.0, WARM) for kind in EXACT],
)
def test_what_the_model_itself_would_draw_is_accepted(kind, temperature):
    """Also where tokens are drawn at random: a draw has its number's key."""
    out = generate("full", temperature, speculate=EXACT[kind])
    assert tokens_of(out) == tokens_of(plain("full", temperature))
    for one in out:
        assert one.report.accepted_tokens == one.report.proposed_tokens > 0
        assert one.report.cycles <= 6


@functools.cache
def stopping():
    """A token that ends row 0 inside a cycle, and the answers with it."""
    answer = plain()[0].tokens
    stop = next(token for token in answer[6:] if answer.index(token) > 3)
    return stop, plain(stop=(stop,)), generate(stop=(stop,), speculate=LOOKUP)


def test_a_stop_token_inside_a_cycle_ends_a_row():
    stop, expected, out = stopping()
    assert tokens_of(out) == tokens_of(expected)
    assert out[0].tokens[-1] == stop
    assert len(out[0].tokens) < NEW
    assert end_of(out) == end_of(expected)
    assert sum(one.report.accepted_tokens for one in out) > 0


@pytest.mark.parametrize("drafter", [None, pytest.param(LOOKUP, marks=slow)], ids=["plain", "speculated"])
def test_the_state_goes_on(drafter):
    _, expected, out = stopping()
    for row in range(3):
        assert a_turn(out, row, drafter) == a_turn(expected, row)


def test_few_new_tokens_are_enough():
    stop, expected, _ = stopping()
    for count in (0, 1, 2):
        out = generate(max_new_tokens=count, stop=(stop,), speculate=LOOKUP)
        assert tokens_of(out) == [one.tokens[:count] for one in expected]
        assert [int(one.state.lengths[0]) for one in out] == [len(prompt) + count for prompt in PROMPTS]


@slow
def test_a_stop_string_that_began_in_an_earlier_cycle_needs_no_state():
    """Without the final state, nothing is given back that a ring buffer has lost."""
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, "returns_state": False, "speculate": LOOKUP}
    loop = GenerationLoop(model(), PROMPTS[0], GenerateOptions(policy_of("quest"), **options))
    stream = loop.streams[0]
    stream.kept = lambda: 2  # as if a long stop string had begun after two tokens
    answer = plain("quest")[0].tokens
    assert [token for _, _, token in loop] == answer
    assert loop.results()[0].tokens == answer[:2]


def test_a_draw_depends_on_its_number_alone():
    logits = np.random.default_rng(1).standard_normal((3, 4, 50)).astype(np.float32)
    key, first = jax.random.key(2), np.array([5, 0, 2])
    for sampler in (Sampler(), Sampler(0.9, top_k=20, top_p=0.9, min_p=0.01)):
        together = np.asarray(jax.jit(sample_numbered, static_argnums=0)(sampler, logits, key, first))

        @jax.jit
        def alone(logits, number, sampler=sampler):
            return sample_checked(sampler, logits, jax.random.fold_in(key, number))

        for place in range(4):
            for row in range(3):
                assert np.asarray(alone(logits[:, place], first[row] + place))[row] == together[row, place]


@slow
def test_verified_speculation_is_compared_with_single_steps(monkeypatch):
    out = generate("shadowkv", verify=True, fetch="device_put", speculate=LOOKUP, max_new_tokens=12)
    assert tokens_of(out) == [one.tokens[:12] for one in plain("shadowkv")]
    assert out[0].report.verified_steps >= 11  # rows get unequal numbers of tokens in a cycle
    from jshadow.engine.speculation import cycle

    real = cycle.sample_numbered
    monkeypatch.setattr(cycle, "sample_numbered", lambda *args: (real(*args) + 1) % TINY.vocab_size)
    with pytest.raises(VerificationError, match="speculation drew token"):
        # another number of tokens, so that the program is traced anew
        generate("shadowkv", verify=True, fetch="device_put", speculate=PromptLookup(tokens=5, ngram=1))


# Cycles in one compiled loop: `decode_steps(speculate=)`


TEXTS = [PROMPT[row, :length].tolist() for row, length in enumerate(LENGTHS)]
COUNT = 18


def start_of(name):
    """The first token of each row, and the state of the batch of all laws."""
    logits, state = prefilled(name, "restricted")
    return np.asarray(logits).argmax(-1).astype(np.int32), state


def both(name, drafter, **options):
    """Tokens and states of plain steps, and of cycles."""
    first, state = start_of(name)
    steps = decode.decode_steps(model(), first, state.fork(), COUNT, **options)
    return steps, decode.decode_steps(model(), first, state, COUNT, **options, speculate=drafter, before=TEXTS)


def forked(state, tmp_path):
    return state.fork()


def taken(state, tmp_path):
    return state.take([2, 0, 1])


def inserted(state, tmp_path):
    return state.insert(1, state.take([0]))


def saved(state, tmp_path):
    save_state(tmp_path / "state", state, model())
    return load_state(tmp_path / "state", model())


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("shadowkv", LOOKUP),
        *(
            pytest.param(name, LOOKUP, marks=slow)
            for name in ("full", "snapkv", "quest", "loki", "omnikv", "offloaded", "shadowkv_plus")
        ),
        pytest.param("shadowkv_transform", LOOKUP, marks=slow),
        pytest.param("full", SELF, marks=slow),
        pytest.param("offloaded", EXACT["compressed"], marks=slow),
        pytest.param("full", EXACT["model"], marks=slow),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_cycles_of_a_loop_draw_the_tokens_of_plain_steps(name, drafter, tmp_path):
    """A state between two cycles holds tokens that were proposed and given back. Nothing reads them."""
    (tokens, steps), (again, cycles) = both(name, drafter)
    np.testing.assert_array_equal(again, tokens)
    assert cycles.lengths.tolist() == steps.lengths.tolist()
    assert cycles.last.tolist() == steps.last.tolist()
    turn = random_tokens(3, 7, seed=11)
    for change in (forked, taken, inserted, saved) if drafter is LOOKUP else (forked,):
        logits = []
        for state in (steps, cycles):
            out = np.asarray(decode.extend(model(), turn, [7, 2, 5], change(state, tmp_path), logits="all")[0])
            logits.append(np.concatenate([out[row, :count] for row, count in enumerate((7, 2, 5))]))
        np.testing.assert_allclose(*logits, atol=2e-4, err_msg=change.__name__)


@slow
def test_rows_that_share_a_prompt():
    state, first = prefilled("shadowkv", "restricted")[1].take([0]), [5, 1, 8]
    steps, _ = decode.decode_steps(model(), first, state.share(3), COUNT)
    fast, after = decode.decode_steps(model(), first, state.share(3), COUNT, speculate=LOOKUP, before=TEXTS[:1] * 3)
    np.testing.assert_array_equal(fast, steps)
    assert after.shares_prompt
    assert after.lengths.tolist() == [LENGTHS[0] + COUNT] * 3


@slow
def test_draws_and_stop_tokens_of_a_loop():
    (tokens, _), _ = both("full", LOOKUP, sampler=Sampler(0.9), seed=5)
    stop = [int(tokens[0, 6]), int(tokens[1, 2])]
    (tokens, steps), (again, cycles) = both("full", LOOKUP, sampler=Sampler(0.9), seed=5, stop=stop)
    np.testing.assert_array_equal(again, tokens)
    assert (np.asarray(tokens) == -1).any()
    assert cycles.lengths.tolist() == steps.lengths.tolist()


@slow
def test_a_drafter_that_searches_may_not_know_the_text():
    first, state = start_of("full")
    steps, _ = decode.decode_steps(model(), first, state.fork(), COUNT)
    fast, _ = decode.decode_steps(model(), first, state, COUNT, speculate=LOOKUP)
    np.testing.assert_array_equal(fast, steps)


@pytest.mark.parametrize(
    ("before", "error"),
    [
        (TEXTS[:2], "before must have 3 rows, like the state, got 2"),
        ([TEXTS[0], TEXTS[1], [9] * 6], r"before must have the \[61, 27, 5\] tokens that the state holds"),
        ([TEXTS[0], TEXTS[1], [2**40]], "before must lie in"),
        ([TEXTS[0], TEXTS[1], [1.5]], "before must be integers"),
    ],
)
def test_texts_that_are_not_those_of_the_state_are_refused(before, error):
    first, state = start_of("full")
    with pytest.raises(PromptError, match=error):
        decode.decode_steps(model(), first, state, 4, speculate=LOOKUP, before=before)


def test_a_loop_that_cannot_speculate_is_refused():
    params, tokens = small()[0], random_tokens(2, 13, config=SMALLEST)
    _, state = decode.prefill(params, tokens, [13, 6], jshadow.H2O(heavy=2, recent=4), capacity=24)
    with pytest.raises(TypeError, match="unexpected keyword arguments"):
        decode.decode_steps(params, [1, 2], state, 4, speculat=LOOKUP)
    with pytest.raises(ConfigError, match="policy must be able to give tokens back to speculate"):
        decode.decode_steps(params, [1, 2], state, 4, speculate=LOOKUP)
    assert state.lengths.tolist() == [13, 6]


# What drafters keep beside the state


@slow
@pytest.mark.parametrize("target", ["offloaded", "full"])
def test_the_compressed_cache_is_that_of_a_prefill(target):
    """It is the state that the policy makes of the prompt, up to the rounding of a rotation."""
    state, want = (prefilled(name, "restricted")[1] for name in (target, "shadowkv"))
    memory = COMPRESSED.begin(Text(PROMPT, np.array(LENGTHS), TINY), state)
    got = decode.KVState.of(memory.fixed[1], memory.live)
    assert got.specs == want.specs
    turn = random_tokens(3, 7, seed=8)
    logits = [decode.extend(model(), turn, [7] * 3, one, logits="all")[0] for one in (got, want)]
    np.testing.assert_allclose(*logits, atol=1e-3)


def test_a_compressed_cache_s_window_follows_the_room_of_the_state():
    state = prefilled("full", "restricted")[1]
    windows = []
    for room in (None, 8):
        target = state if room is None else SimpleNamespace(**vars_of(state), room=lambda: np.full(3, 8))
        memory = COMPRESSED.begin(Text(PROMPT, np.array(LENGTHS), TINY), target)
        windows.append(memory.fixed[1].specs[1].window)
    assert windows[1] < windows[0]


def vars_of(state):
    names = ("specs", "layers", "lengths", "last", "capacity", "batch", "policy")
    return {name: getattr(state, name) for name in names}


def test_summaries_follow_the_state():
    """After turns of any length, the summaries are those of all whole units, computed anew."""
    rng, text = np.random.default_rng(0), Text(PROMPT, np.array(LENGTHS), TINY)
    state = prefilled("full", "restricted")[1]
    memory = SELF.begin(text, state)
    assert memory.live[0] is None  # a dense layer
    heard = jax.jit(SELF.heard)
    for _ in range(4):
        counts = rng.integers(0, 8, 3).astype(np.int32)
        drawn = rng.integers(0, TINY.vocab_size, (3, 7)).astype(np.int32)
        _, state = decode.extend(model(), drawn, counts, state)
        memory = memory._replace(live=heard(memory, drawn, counts, state))
        whole, fresh = np.asarray(state.lengths) // SELF.policy.unit, SELF.begin(text, state).live
        for kept, new in zip(jax.tree.leaves(memory.live), jax.tree.leaves(fresh), strict=True):
            kept, new = np.asarray(kept), np.asarray(new)
            for row, count in enumerate(whole):
                np.testing.assert_array_equal(kept[row, :, :count], new[row, :, :count])


# How many are proposed


def test_the_pace_follows_what_is_accepted():
    pace, ready = Pace(8, 0.08), np.full(2, 8)
    assert pace.choose(ready) == 8
    assert pace.choose(np.zeros(2)) == 0
    for _ in range(20):
        pace.heard(np.array([8, 8]), np.array([0, 0]))
    assert pace.choose(ready) == 0
    widths = [pace.choose(ready) for _ in range(100)]
    assert {0, 2} == set(widths)  # now and then it tries again
    for _ in range(20):
        pace.heard(np.array([2, 2]), np.array([2, 2]))
    assert pace.choose(ready) == 8


# Names, and what is refused


@pytest.mark.parametrize(
    ("text", "drafter"),
    [
        ("self", SelfDraft()),
        ("self:quest:tokens=4:budget=64", SelfDraft(tokens=4, policy=Quest(budget=64))),
        ("self:quest:budget=64", SelfDraft(policy=Quest(budget=64))),
        ("self:budget=64", SelfDraft(policy=dataclasses.replace(SelfDraft().policy, budget=64))),
        ("compressed", CompressedDraft()),
        ("compressed:shadowkv:tokens=16:budget=512", CompressedDraft(tokens=16, policy=ShadowKV(budget=512))),
        (
            "compressed:dense_first.layers=1",
            CompressedDraft(policy=jshadow.DenseFirst(inner=ShadowKV(), layers=1)),
        ),
    ],
)
def test_names_of_drafters(text, drafter):
    assert parse_drafter(text) == drafter


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("self:h2o", "a policy such as quest, got h2o"),
        *((text, "tokens=NUMBER, got") for text in ("compressed:shadowkv:tokens=abc", "compressed:tokens=-3")),
        ("self:quest:tokens=", "tokens=NUMBER, got"),
    ],
)
def test_names_of_no_drafter(text, told):
    with pytest.raises(ConfigError, match=told):
        parse_drafter(text)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: CompressedDraft(policy="shadowkv"), "policy must be"),
        (lambda: DraftModel("a directory"), r"draft_model\.params must be Params"),
        *(
            (lambda wrong=wrong: PromptLookup(**wrong), r"must be an integer in \[1, 64\]")
            for wrong in ({"tokens": 0}, {"ngram": True}, {"tokens": 65})
        ),
    ],
)
def test_settings_of_no_drafter(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


STREAMING = jshadow.StreamingLLM(sinks=2, window=30)
SNAPKV = jshadow.SnapKV()


@pytest.mark.parametrize(
    ("drafter", "policy", "error"),
    [
        ("prompt_lookup", "full", "speculate must be a drafter, such as PromptLookup"),
        *((LOOKUP, name, f"as .*full, .*shadowkv.* are, got {name}") for name in ("h2o", "specache", "infllm", "less")),
        (PromptLookup(tokens=9), "quest", r"speculate.tokens must be at most 8, because .*got 9"),
        (LOOKUP, STREAMING, r"speculate.tokens must be at most 0, because .*row 0"),
        (SELF, SNAPKV, "policy must be full for speculate='self', got snapkv"),
        (SelfDraft(policy=Loki(budget=8)), "full", "must be a retrieval policy without a basis"),
        (COMPRESSED, SNAPKV, "policy must keep all keys and values for speculate='compressed'.*got snapkv"),
        (CompressedDraft(policy=jshadow.SnapKV(20, 8)), "offloaded", "must be made from keys and values alone"),
        (CompressedDraft(policy=jshadow.H2O()), "offloaded", "keys and values alone|give tokens back"),
        (
            CompressedDraft(policy=Quest(budget=8, unit=4), tokens=12),
            "offloaded",
            "compressed.tokens must be at most 8",
        ),
        (CompressedDraft(policy=jshadow.SpeCache(group=8)), "offloaded", r"compressed\.policy must"),
        (
            DraftModel(init_params(dataclasses.replace(TINY, vocab_size=97), seed=0)),
            "full",
            "must have the tokenizer of the model, with vocab_size=101, got",
        ),
        (
            DraftModel(init_params(dataclasses.replace(TINY, context=64), seed=0)),
            "full",
            f"context of at least capacity={CAPACITY} tokens, got 64",
        ),
    ],
)
def test_what_cannot_draft_is_refused(drafter, policy, error):
    with pytest.raises(ConfigError, match=error):
        generate(policy, speculate=drafter)


def test_a_draft_model_needs_the_text_of_a_state():
    with pytest.raises(ConfigError, match="a state does not have its tokens"):
        jshadow.generate(model(), [1, 2], state=plain()[0].state.fork(), max_new_tokens=4, speculate=MODEL)
