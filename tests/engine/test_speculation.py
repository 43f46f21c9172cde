"""Speculation: a drafter proposes tokens, the model checks several at once, and no token changes."""

import dataclasses
import functools
import itertools
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, prefilled, random_tokens, setting
from family_cases import short_hybrid
from few import slow
from scipy import stats
from small_state import SMALL as SMALLEST
from small_state import small
from tiny_text import byte_tokenizer

import jshadow
from jshadow import CompressedDraft, DraftModel, Full, Loki, PromptLookup, Quest, Sampler, SelfDraft, ShadowKV
from jshadow.engine import decode
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.sampling import sample_checked, sample_numbered
from jshadow.engine.speculation import parse_drafter, run
from jshadow.engine.speculation.drafter import Pace, Target, Text
from jshadow.errors import ConfigError, PromptError, VerificationError
from jshadow.evaluation.tasks.texts import paragraphs
from jshadow.weights.params import init_params

# One world: a row that repeats itself, one that does not, and one that begins with one token.
RNG = np.random.default_rng(5)
PROMPTS = [np.resize(RNG.integers(0, TINY.vocab_size, 9), 50).tolist(), RNG.integers(0, TINY.vocab_size, 21).tolist()]
PROMPTS.append([7])
NEW, WARM = 24, 0.8
OTHER = init_params(dataclasses.replace(TINY, num_layers=1), seed=9)
SLIDING = dataclasses.replace(TINY, sliding_window=12, sliding_layers=(1,))
TWO = dataclasses.replace(TINY, num_layers=2)
HYBRID = dataclasses.replace(short_hybrid("qwen3_5"), vocab_size=TINY.vocab_size)
LOOKUP = PromptLookup(tokens=4, ngram=1)
SELF = SelfDraft(tokens=4, policy=Quest(budget=8, unit=4, recent=3, dense_layers=1))
COMPRESSED = CompressedDraft(tokens=4, policy=setting("shadowkv", "restricted"))
MODEL = DraftModel(OTHER, tokens=4)
# These propose what the model itself draws.
EXACT = {
    "self": SelfDraft(tokens=4, policy=Quest(budget=CAPACITY, unit=4, recent=3, dense_layers=0)),
    "compressed": CompressedDraft(tokens=4, policy=Full()),
    "model": DraftModel(model(), tokens=4),
}
TARGET = Target(*[None] * 6)  # prompt lookup does not look at the model


def generate(name="full", temperature=0.0, config=TINY, **options):
    policy = setting(name, "restricted") if isinstance(name, str) else name
    asked = {"max_new_tokens": NEW, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 11}
    return jshadow.generate(model(config), PROMPTS, policy, **asked | options)


plain = functools.cache(generate)


def tokens_of(results):
    return [one.tokens for one in results]


def end_of(results):
    return [(one.state.lengths.tolist(), one.state.last.tolist()) for one in results]


def a_turn(results, row, speculate=None, config=TINY):
    asked = {"state": results[row].state.fork(), "max_new_tokens": 6, "speculate": speculate}
    return jshadow.generate(model(config), [3, 4], **asked).tokens


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
        return None, 0
    again = [*text]
    for j in range(width):
        again.append(again[best[1] + j])
    return again[len(text) :], best[0]


def test_the_longest_and_newest_agreement_is_found():
    rng, found, lookups = np.random.default_rng(1), 0, [PromptLookup(tokens=6, ngram=ngram) for ngram in (1, 2, 3)]

    @jax.jit
    def hear_and_propose(memories, tokens, counts):
        pairs = zip(lookups, memories, strict=True)
        heard = [memory._replace(live=one.heard(memory, tokens, counts, None)) for one, memory in pairs]
        pairs = zip(lookups, heard, strict=True)
        return heard, [(one.propose(memory, TARGET, 6).tokens, one.ready(memory)) for one, memory in pairs]

    lengths, texts = rng.integers(1, 40, 60), rng.integers(0, 4, (60, 50))
    text = Text(texts[:, :40], lengths, TINY)
    memories = [lookup.begin(text, SimpleNamespace(capacity=60)) for lookup in lookups]
    more, counts = np.zeros((60, 5), np.int32), np.zeros(60, np.int32)
    for _ in range(3):
        memories, proposed = hear_and_propose(memories, more, counts)
        for row, count in enumerate(counts):
            texts[row, lengths[row] : lengths[row] + count] = more[row, :count]
        lengths = lengths + counts
        for lookup, (guesses, ready) in zip(lookups, jax.tree.map(np.asarray, proposed), strict=True):
            for row, length in enumerate(lengths):
                want, agreeing = continuation(texts[row, :length].tolist(), lookup.ngram, 6)
                assert ready[row] == (0 if want is None else min(6, 2 * (agreeing - lookup.ngram + 1)))
                assert want is None or guesses[row].tolist() == want
                found += want is not None
        more, counts = rng.integers(0, 4, (60, 5)).astype(np.int32), rng.integers(0, 6, 60).astype(np.int32)
    assert found > 120


# The tokens of `generate`. Of other policies and drafters: below, at random


@pytest.mark.parametrize(
    ("drafter", "config"), [(SELF, TINY), (COMPRESSED, TINY), slow((SELF, SLIDING)), slow((COMPRESSED, SLIDING))]
)
def test_no_token_changes(drafter, config):
    """Each row's state holds its text, however many tokens the last cycle drew."""
    expected, out = plain("full", 0.0, config), generate("full", 0.0, config, speculate=drafter)
    assert tokens_of(out) == tokens_of(expected)
    assert end_of(out) == end_of(expected)
    reports = [one.report for one in out]
    for report in reports:
        # the first token comes from the prompt, and each cycle gives one token and those that were accepted
        assert report.cycles + report.accepted_tokens == report.generated_tokens - 1
        assert report.accepted_tokens <= report.proposed_tokens <= drafter.tokens * report.cycles
    assert 0 < sum(one.accepted_tokens for one in reports) < sum(one.proposed_tokens for one in reports)
    assert expected[0].report.cycles is None
    # a drafter stores tokens of its own in the state, or beside it
    assert a_turn(out, 1, None, config) == a_turn(expected, 1, None, config)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature"), [("self", WARM), ("compressed", 0.0), ("model", WARM)])
def test_what_the_model_itself_would_draw_is_accepted(kind, temperature):
    """Also where tokens are drawn at random: a draw has its number's key."""
    out = generate("full", temperature, speculate=EXACT[kind])
    assert tokens_of(out) == tokens_of(plain("full", temperature))
    for one in out:
        assert one.report.accepted_tokens == one.report.proposed_tokens > 0
        assert one.report.cycles <= 6


def test_a_stop_token_inside_a_cycle_ends_a_row():
    """Its state goes on, and a limit of few tokens is kept too."""
    answer = plain()[0].tokens
    stop = next(token for token in answer[6:] if answer.index(token) > 3)
    expected, out = plain(stop=(stop,)), generate(stop=(stop,), speculate=LOOKUP)
    assert tokens_of(out) == tokens_of(expected)
    assert out[0].tokens[-1] == stop
    assert len(out[0].tokens) < NEW
    assert end_of(out) == end_of(expected)
    assert sum(one.report.accepted_tokens for one in out) > 0
    for row in range(3):
        assert a_turn(out, row) == a_turn(expected, row)
    for count in (0, 1, 2):
        out = generate(max_new_tokens=count, stop=(stop,), speculate=LOOKUP)
        assert tokens_of(out) == [one.tokens[:count] for one in expected]
        assert [int(one.state.lengths[0]) for one in out] == [len(prompt) + count for prompt in PROMPTS]


@pytest.mark.slow
def test_a_stop_string_that_began_in_an_earlier_cycle_needs_no_state():
    """Without the final state, nothing is given back that a ring buffer has lost."""
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, "returns_state": False, "speculate": LOOKUP}
    loop = GenerationLoop(model(TWO), PROMPTS[0], GenerateOptions(setting("quest", "restricted"), **options))
    loop.streams[0].kept = lambda: 2  # as if a long stop string had begun after two tokens
    answer = plain("quest", 0.0, TWO)[0].tokens
    assert [token for _, _, token in loop] == answer
    assert loop.results()[0].tokens == answer[:2]


@pytest.mark.slow
def test_an_answer_ends_at_a_stop_string_and_its_chat_goes_on():
    """A stop string of many tokens can begin in an earlier cycle. The tokens fed since then are given back."""
    config = dataclasses.replace(HYBRID, vocab_size=257, eos_ids=(256,))
    params = dataclasses.replace(init_params(config, seed=1), tokenizer=byte_tokenizer())
    drafter = SelfDraft(tokens=6, policy=Quest(budget=CAPACITY, unit=4, recent=3, dense_layers=0))
    prompts, asked = ["hello hello", "abc"], {"max_new_tokens": 30, "capacity": 96}
    text = jshadow.generate(params, prompts, Full(), **asked)[0].text
    for stop in (text[10:13], text[3:22]):
        expected, out = (
            jshadow.generate(params, prompts, Full(), stop=stop, speculate=one, **asked) for one in (None, drafter)
        )
        assert tokens_of(out) == tokens_of(expected)
        assert end_of(out) == end_of(expected)
        assert len(out[0].tokens) < 30
        assert sum(one.report.accepted_tokens for one in out) > 0
        chat = [{"role": "user", "content": "go on"}]
        turns = [
            jshadow.generate(params, chat, state=ones[0].state.fork(), max_new_tokens=5, speculate=one).tokens
            for ones, one in ((expected, None), (out, None), (out, drafter))
        ]
        assert turns[0] == turns[1] == turns[2]


def test_a_draw_depends_on_its_number_alone():
    logits = np.random.default_rng(1).standard_normal((3, 4, 50)).astype(np.float32)
    key, first = jax.random.key(2), np.array([5, 0, 2])
    samplers = Sampler(), Sampler(0.9, top_k=20, top_p=0.9, min_p=0.01)

    @jax.jit
    def drawn(logits):
        def alone(sampler, row, place):
            return sample_checked(sampler, logits[:, place], jax.random.fold_in(key, first[row] + place))[row]

        each = [[[alone(one, row, place) for place in range(4)] for row in range(3)] for one in samplers]
        return [sample_numbered(one, logits, key, first) for one in samplers], each

    np.testing.assert_array_equal(*drawn(logits))


@pytest.mark.slow
def test_verified_speculation_is_compared_with_single_steps(monkeypatch):
    asked = {"config": TWO, "verify": True, "fetch": "device_put", "max_new_tokens": 12}
    out = generate("shadowkv", speculate=LOOKUP, **asked)
    assert out[0].report.verified_steps >= 11  # rows get unequal numbers of tokens in a cycle
    real = run.VerifiedRun.draw
    monkeypatch.setattr(run.VerifiedRun, "draw", lambda *args: (real(*args) + 1) % TINY.vocab_size)
    with pytest.raises(VerificationError, match="speculation drew token"):
        # another number of tokens, so that the program is traced anew
        generate("shadowkv", speculate=PromptLookup(tokens=5, ngram=1), **asked)


# Cycles in one compiled loop: `decode_steps(speculate=)`


TEXTS = [PROMPT[row, :length].tolist() for row, length in enumerate(LENGTHS)]
COUNT = 18


def start_of(name):
    logits, state = prefilled(name, "restricted")
    return np.asarray(logits).argmax(-1).astype(np.int32), state


CHANGES = {
    "forked": lambda state, path: state.fork(),
    "taken": lambda state, path: state.take([2, 0, 1]),
    "inserted": lambda state, path: state.insert(1, state.take([0])),
    "saved": lambda state, path: jshadow.save_state(path, state, model()) or jshadow.load_state(path, model()),
}


def test_cycles_of_a_loop_draw_the_tokens_of_plain_steps(tmp_path):
    """A state between two cycles holds tokens that were proposed and given back. Nothing reads them."""
    first, state = start_of("shadowkv")
    tokens, steps = decode.decode_steps(model(), first, state.fork(), COUNT)
    again, cycles = decode.decode_steps(model(), first, state, COUNT, speculate=LOOKUP, before=TEXTS)
    np.testing.assert_array_equal(again, tokens)
    assert cycles.lengths.tolist() == steps.lengths.tolist()
    assert cycles.last.tolist() == steps.last.tolist()
    turn = random_tokens(3, 7, seed=11)
    for change in CHANGES:
        logits = []
        for state in (steps, cycles):
            out = np.asarray(
                decode.extend(model(), turn, [7, 2, 5], CHANGES[change](state, tmp_path / "s"), logits="all")[0]
            )
            logits.append(np.concatenate([out[row, :count] for row, count in enumerate((7, 2, 5))]))
        np.testing.assert_allclose(*logits, atol=2e-4, err_msg=change)


@pytest.mark.slow
def test_rows_that_share_a_prompt():
    state, first = prefilled("shadowkv", "restricted")[1].take([0]), [5, 1, 8]
    steps, _ = decode.decode_steps(model(), first, state.share(3), COUNT)
    fast, after = decode.decode_steps(model(), first, state.share(3), COUNT, speculate=LOOKUP, before=TEXTS[:1] * 3)
    np.testing.assert_array_equal(fast, steps)
    assert after.shares_prompt
    assert after.lengths.tolist() == [LENGTHS[0] + COUNT] * 3


def test_a_loop_that_cannot_speculate_is_refused():
    params, tokens = small()[0], random_tokens(2, 13, config=SMALLEST)
    _, state = decode.prefill(params, tokens, [13, 6], jshadow.H2O(heavy=2, recent=4), capacity=24)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        decode.decode_steps(params, [1, 2], state, 4, speculat=LOOKUP)
    with pytest.raises(ConfigError, match="policy must be able to give tokens back to speculate"):
        decode.decode_steps(params, [1, 2], state, 4, speculate=LOOKUP)
    assert state.lengths.tolist() == [13, 6]
    first, state = start_of("full")
    for before, error in (
        (TEXTS[:2], "before must have 3 rows, like the state, got 2"),
        ([TEXTS[0], TEXTS[1], [9] * 6], r"before must have the \[61, 27, 5\] tokens that the state holds"),
        ([TEXTS[0], TEXTS[1], [2**40]], "before must lie in"),
        ([TEXTS[0], TEXTS[1], [1.5]], "before must be integers"),
    ):
        with pytest.raises(PromptError, match=error):
            decode.decode_steps(model(), first, state, 4, speculate=LOOKUP, before=before)


# What drafters keep beside the state


@pytest.mark.slow
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
    names = ("specs", "layers", "lengths", "last", "capacity", "batch", "policy")
    narrow = SimpleNamespace(**{name: getattr(state, name) for name in names}, room=lambda: np.full(3, 8))
    memories = [COMPRESSED.begin(Text(PROMPT, np.array(LENGTHS), TINY), target) for target in (state, narrow)]
    wide, small = (memory.fixed[1].specs[1].window for memory in memories)
    assert small < wide


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
    pace, ready, both = Pace(8, 0.08, 2), np.full(2, 8), np.ones(2, bool)
    assert pace.choose(ready, both) == 8
    assert pace.choose(np.zeros(2), both) == 0
    for _ in range(20):
        pace.heard(np.array([8, 8]), np.array([0, 0]))
    assert pace.choose(ready, both) == 0
    widths = [pace.choose(ready, both) for _ in range(100)]
    assert {0, 2} == set(widths)  # now and then it tries again
    for _ in range(20):
        pace.heard(np.array([2, 0]), np.array([2, 0]))
    assert [pace.choose(ready, np.array(active)) for active in ([True, False], [False, True])] == [8, 0]
    pace.begin(1)
    assert pace.choose(ready, np.array([False, True])) == 8


def test_the_pace_follows_the_times_of_cycles():
    pace, ready, active = Pace(8, 0.08, 1), np.full(1, 8), np.ones(1, bool)
    for width in pace.widths:
        pace.timed(width, 60.0)  # with the time to compile
    pace.timed(0, 1.0)
    assert pace.choose(ready, active) == 8
    for seconds in (9.0, 4.0, 5.0):  # as long as five steps
        pace.timed(8, seconds)
    assert pace.choose(ready, active) == 2
    pace.timed(2, 40.0)
    assert pace.choose(ready, active) == 0
    for seconds in (1.2, 1.3):
        pace.timed(2, seconds)  # one long time of three is an exception
    assert pace.choose(ready, active) == 2


# At random: the tokens of plain decoding. The laws have the turns and rewinds of every policy

ROWS = 40  # of a batch
NEAR = 1e-4  # two logits that differ by less may be ordered either way
LONG_LOOKUP = PromptLookup(tokens=15, ngram=1)
CASES = [
    ("full", LOOKUP, TWO, WARM),
    ("shadowkv_transform", LOOKUP, TWO, WARM),
    ("kivi", LOOKUP, TWO, 0.0),
    ("infinigen", PromptLookup(tokens=1, ngram=1), TWO, 0.0),
    ("shadowkv_plus", DraftModel(init_params(HYBRID), tokens=5), TWO, WARM),
    ("shadowkv", PromptLookup(tokens=15, ngram=1), HYBRID, 0.0),
    ("full", SelfDraft(tokens=4, policy=dataclasses.replace(SELF.policy, dense_layers=0)), HYBRID, WARM),
    ("offloaded", COMPRESSED, HYBRID, 0.0),
]
# This one can go back only before it quantizes a token after the prompt.
WIDE = {"kivi": jshadow.KIVI(bits=2, group=8, residual=CAPACITY)}


def prompts(rng):
    """Random prompts of all lengths. Half of them repeat themselves."""
    found = []
    for row in range(ROWS):
        count = int(rng.integers(1, 48))
        base = rng.integers(0, TINY.vocab_size, count if row % 2 else int(rng.integers(1, 7)))
        found.append(np.resize(base, count).tolist())
    return found


def margin(params, ids, policy, pair):
    """How much the logits of two tokens differ that may follow a text."""
    padded = np.resize(ids, (1, CAPACITY))  # one width, one program
    logits, _ = decode.prefill(params, padded, [len(ids)], policy, capacity=CAPACITY)
    return abs(float(logits[0, pair[0]] - logits[0, pair[1]]))


def fork_of(one, other):
    return next((at, pair) for at, pair in enumerate(itertools.zip_longest(one, other)) if pair[0] != pair[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "drafter", "config", "temperature"),
    CASES,
    ids=[f"{name}-{drafter.name}-{config.model_type}" for name, drafter, config, _ in CASES],
)
def test_the_tokens_are_those_of_plain_decoding(name, drafter, config, temperature, record_property):
    """Greedy or drawn, with stop tokens, and with a step after them. Rows are independent cases."""
    rng, ties, params = np.random.default_rng(len(name)), 0, model(config)
    policy = WIDE.get(name) or setting(name, "restricted", config)
    texts = prompts(rng)
    counts, padded = np.array([len(text) for text in texts]), np.zeros((ROWS, 48), np.int32)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    logits, state = decode.prefill(params, padded, counts, policy, capacity=CAPACITY)
    first = np.asarray(logits).argmax(-1).astype(np.int32)
    asked = {"sampler": Sampler(temperature), "seed": 5, "stop": rng.integers(0, TINY.vocab_size, 3).tolist()}
    tokens, steps = decode.decode_steps(params, first, state.fork(), COUNT, **asked)
    tokens, same = np.asarray(tokens), np.ones(ROWS, bool)
    assert 0 < (tokens[:, -1] == -1).sum() < ROWS
    searches = isinstance(drafter, PromptLookup)
    for before in (None, texts) if searches and temperature else (texts,):  # a search may not know the text
        again, cycles = decode.decode_steps(
            params, first, state.fork(), COUNT, **asked, speculate=drafter, before=before
        )
        for row in np.flatnonzero((np.asarray(again) != tokens).any(axis=1)):
            assert temperature == 0, "a draw is not the draw of its number"
            at, pair = fork_of(tokens[row], np.asarray(again)[row])
            assert margin(params, [*texts[row], first[row], *tokens[row, :at]], policy, pair) < NEAR
            same[row], ties = False, ties + 1
    for what in ("lengths", "last"):
        np.testing.assert_array_equal(*(np.asarray(getattr(one, what))[same] for one in (cycles, steps)))
    token = random_tokens(ROWS, seed=11)
    logits = [np.asarray(decode.decode_step(params, token, one)[0])[same] for one in (cycles, steps)]
    np.testing.assert_allclose(*logits, atol=2e-3)  # a stale token changes them by tenths
    assert ties <= ROWS // 20
    record_property("random_cases", ROWS)
    record_property("near_ties", ties)


# The distribution of drawn tokens

FIVE = dataclasses.replace(TINY, vocab_size=5, num_layers=1)
FIRST = [1, 2, 3, 1, 2, 3, 1, 2]
DRAWN, DRAWS, SEEDS = 4, 2000, 10


tiny = functools.cache(functools.partial(init_params, FIVE, seed=3))


@functools.cache
def probabilities():
    """The probability of every sequence of four tokens after the prompt, float64 [625]."""
    sequences = np.array(list(itertools.product(range(5), repeat=DRAWN)), np.int32)
    texts = np.concatenate([np.tile(FIRST, (len(sequences), 1)), sequences], axis=1)
    lengths = np.full(len(texts), texts.shape[1])
    logits, _ = decode.prefill(tiny(), texts, lengths, Full(), capacity=16, logits="all")
    shares = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)[:, len(FIRST) - 1 : -1]
    return np.take_along_axis(shares, sequences[:, :, None], axis=2)[..., 0].prod(axis=1)


def is_the_model_s(drafter):
    """Whether 20,000 draws with speculation have the model's distribution, by a chi-square test at 1 %."""
    counts, texts = np.zeros(5**DRAWN), [FIRST[:-1]] * DRAWS
    _, state = decode.prefill(tiny(), np.array(texts), [len(FIRST) - 1] * DRAWS, Full(), capacity=16)
    asked = {"sampler": Sampler(1.0), "speculate": drafter, "before": texts}
    for seed in range(SEEDS):
        out, _ = decode.decode_steps(tiny(), np.full(DRAWS, FIRST[-1]), state.fork(), DRAWN, seed=seed, **asked)
        counts += np.bincount(np.asarray(out) @ 5 ** np.arange(DRAWN)[::-1], minlength=len(counts))
    expected = probabilities() * SEEDS * DRAWS
    rare = expected < 5
    pairs = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    kept = pairs[1] > 0
    return stats.chisquare(pairs[0][kept], pairs[1][kept] * pairs[0].sum() / pairs[1].sum()).pvalue > 0.01


NO_DENSE = dataclasses.replace(SELF.policy, dense_layers=0)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [PromptLookup(tokens=3, ngram=1), SelfDraft(tokens=3, policy=NO_DENSE)], ids=str)
def test_draws_have_the_model_s_distribution(drafter):
    assert is_the_model_s(drafter)


@pytest.mark.slow
def test_a_wrong_rule_of_acceptance_has_another_distribution(monkeypatch):
    """A planted fault: the first proposed token of a cycle is always accepted."""
    real = run.sample_numbered

    def wrong(sampler, logits, key, first):
        drawn = real(sampler, logits, key, first)
        return drawn.at[:, 0].set(wrong.guess) if logits.shape[1] > 1 else drawn

    propose = PromptLookup.propose

    def spy(self, memory, target, width):
        proposal = propose(self, memory, target, width)
        wrong.guess = jnp.where(target.wanted > 0, proposal.tokens[:, 0], 0) if width else 0
        return proposal

    monkeypatch.setattr(run, "sample_numbered", wrong)
    monkeypatch.setattr(PromptLookup, "propose", spy)
    assert not is_the_model_s(PromptLookup(tokens=2, ngram=1))


# SmolLM2: 512 new tokens of 20 prompts, up to near ties

REAL_NEW, NEAR_REAL = 512, 1e-3  # logits are about 10; in float32 a turn and single steps differ by about 1e-5 of them


@functools.cache
def passages(count=20):
    """Passages of Python's documentation. To every second one, its first words are added at the end."""
    chosen = [text for text in paragraphs() if 60 <= len(text.split()) <= 120]
    texts = random.Random(4).sample(chosen, count)
    return [f"{text}\n\n{' '.join(text.split()[:8])}" if row % 2 else text for row, text in enumerate(texts)]


@pytest.mark.real
@pytest.mark.timeout(1800)
def test_512_tokens_of_smollm2_are_those_of_plain_decoding(smollm2_dir, record_property):
    policy, params = Full(), jshadow.load(smollm2_dir, dtype="float32")
    expected = jshadow.generate(params, passages(), policy, max_new_tokens=REAL_NEW)
    out = jshadow.generate(params, passages(), policy, max_new_tokens=REAL_NEW, speculate=PromptLookup())
    near = 0
    for row, (one, other) in enumerate(zip(expected, out, strict=True)):
        if one.tokens == other.tokens:
            continue
        at, pair = fork_of(one.tokens, other.tokens)
        ids = [*params.tokenizer.encode(passages()[row]), *one.tokens[:at]]
        assert margin(params, ids, policy, pair) < NEAR_REAL, row
        near += 1
    assert near <= 2
    assert sum(one.report.accepted_tokens for one in out) > sum(len(one.tokens) for one in out) // 4
    record_property("near_ties", near)


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
        ("compressed:dense_first.layers=1", CompressedDraft(policy=jshadow.DenseFirst(inner=ShadowKV(), layers=1))),
    ],
)
def test_names_of_drafters(text, drafter):
    assert parse_drafter(text) == drafter


STREAMING, SNAPKV = jshadow.StreamingLLM(sinks=2, window=30), jshadow.SnapKV()
FOREIGN = [
    DraftModel(init_params(dataclasses.replace(TINY, **other))) for other in ({"vocab_size": 97}, {"context": 64})
]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: parse_drafter("self:h2o"), "a policy such as quest, got h2o"),
        (lambda: parse_drafter("compressed:shadowkv:tokens=abc"), "tokens=NUMBER, got"),
        (lambda: parse_drafter("compressed:tokens=-3"), "tokens=NUMBER, got"),
        (lambda: parse_drafter("self:quest:tokens="), "tokens=NUMBER, got"),
        (lambda: CompressedDraft(policy="shadowkv"), "policy must be"),
        (lambda: DraftModel("a directory"), r"draft_model\.params must be Params"),
        (lambda: PromptLookup(tokens=0), r"must be an integer in \[1, 64\]"),
        (lambda: PromptLookup(tokens=65), r"must be an integer in \[1, 64\]"),
        (lambda: PromptLookup(ngram=True), r"must be an integer in \[1, 64\]"),
        (
            lambda: jshadow.generate(model(), [1, 2], state=plain()[0].state.fork(), max_new_tokens=4, speculate=MODEL),
            "a state does not have its tokens",
        ),
    ],
)
def test_what_is_no_drafter_is_refused(make, told):
    with pytest.raises(ConfigError, match=told):
        make()


@pytest.mark.parametrize(
    ("drafter", "policy", "told"),
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
            CompressedDraft(tokens=12, policy=Quest(budget=8, unit=4)),
            "offloaded",
            "compressed.tokens must be at most 8",
        ),
        (CompressedDraft(policy=jshadow.SpeCache(group=8)), "offloaded", r"compressed\.policy must"),
        (FOREIGN[0], "full", "must have the tokenizer of the model, with vocab_size=101, got"),
        (FOREIGN[1], "full", f"context of at least capacity={CAPACITY} tokens, got 64"),
    ],
)
def test_what_cannot_draft_is_refused(drafter, policy, told):
    with pytest.raises(ConfigError, match=told):
        generate(policy, speculate=drafter)
