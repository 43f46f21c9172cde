"""Speculation: a drafter proposes tokens, the model checks several at once, and no token changes."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, TINY, model, setting

import jshadow
from jshadow import PromptLookup, Sampler
from jshadow.engine import decode
from jshadow.engine.generation import GenerationLoop
from jshadow.engine.options import GenerateOptions
from jshadow.engine.sampling import sample_checked, sample_numbered
from jshadow.engine.speculation.drafter import Target, Text
from jshadow.engine.speculation.pace import Pace
from jshadow.errors import ConfigError, VerificationError

RNG = np.random.default_rng(5)
PATTERN = RNG.integers(0, TINY.vocab_size, 9)
PROMPTS = [np.tile(PATTERN, 4).tolist(), RNG.integers(0, TINY.vocab_size, 21).tolist(), [7]]
LOOKUP = PromptLookup(tokens=4, ngram=1)
TARGET = Target(*[None] * 7)  # prompt lookup does not look at the model


@functools.cache
def plain(name, temperature=0.0, **options):
    return generate(name, temperature, **options)


def generate(name, temperature=0.0, **options):
    policy = setting(name, "restricted") if isinstance(name, str) else name
    asked = {"max_new_tokens": 24, "capacity": CAPACITY, "sampler": Sampler(temperature), "seed": 11}
    return jshadow.generate(model(), PROMPTS, policy, **asked | options)


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


def test_the_longest_and_newest_agreement_is_found():
    rng, found = np.random.default_rng(0), 0
    for ngram in (1, 2, 3):
        lookup = PromptLookup(tokens=6, ngram=ngram)
        lengths = rng.integers(1, 40, 60)
        texts = rng.integers(0, 3 + ngram, (60, 40))
        memory = lookup.begin(Text(texts[:, :40], lengths, TINY), SimpleNamespace(capacity=60))
        live = lookup.heard(memory, jnp.zeros((60, 1), int), jnp.zeros(60, int), None)
        memory = memory._replace(live=live)
        for _ in range(2):
            guesses, ready = np.asarray(lookup.propose(memory, TARGET, 6).tokens), np.asarray(lookup.ready(memory))
            for row, length in enumerate(lengths):
                want = continuation(texts[row, :length].tolist(), ngram, 6)
                assert ready[row] == (0 if want is None else 6)
                assert want is None or guesses[row].tolist() == want
                found += want is not None
            more, counts = rng.integers(0, 3 + ngram, (60, 5)), rng.integers(0, 6, 60)
            memory = memory._replace(live=lookup.heard(memory, jnp.asarray(more), jnp.asarray(counts), None))
            texts = np.pad(texts, ((0, 0), (0, 5)))
            for row, count in enumerate(counts):
                texts[row, lengths[row] : lengths[row] + count] = more[row, :count]
            lengths = lengths + counts
    assert found > 150


# The tokens


GREEDY = [(name, 0.0) for name in ("full", "shadowkv", "quest", "snapkv", "shadowkv_plus", "omnikv", "loki")]


@pytest.mark.parametrize(("name", "temperature"), [*GREEDY, ("full", 0.6), ("snapkv", 0.6)])
def test_no_token_changes(name, temperature):
    """Rows that repeat themselves, that do not, and that begin with one token."""
    out = generate(name, temperature, speculate=LOOKUP)
    assert [one.tokens for one in out] == [one.tokens for one in plain(name, temperature)]
    reports = [one.report for one in out]
    for report in reports:
        # the first token comes from the prompt, and each cycle gives one token and those that were accepted
        assert report.cycles + report.accepted_tokens == report.generated_tokens - 1
        assert report.accepted_tokens <= report.proposed_tokens <= LOOKUP.tokens * report.cycles
    assert sum(report.accepted_tokens for report in reports) > 0 or temperature
    assert plain(name, temperature)[0].report.cycles is None


def test_the_state_goes_on():
    """Each row's state holds its text, however many tokens the last cycle drew."""
    for before, after in zip(plain("full"), generate("full", speculate=LOOKUP), strict=True):
        assert after.state.lengths.tolist() == before.state.lengths.tolist()
        assert after.state.last.tolist() == before.state.last.tolist()
        turns = [jshadow.generate(model(), [3, 4], state=one.state.fork(), max_new_tokens=6) for one in (before, after)]
        assert turns[0].tokens == turns[1].tokens
        again = jshadow.generate(model(), [3, 4], state=after.state, max_new_tokens=6, speculate=LOOKUP)
        assert again.tokens == turns[0].tokens


def test_a_stop_token_inside_a_cycle_ends_a_row():
    answer = plain("full")[0].tokens
    stop = next(token for token in answer[6:] if answer.index(token) > 3)
    expected = plain("full", stop=(stop,))
    out = generate("full", stop=(stop,), speculate=LOOKUP)
    assert [one.tokens for one in out] == [one.tokens for one in expected]
    assert out[0].tokens[-1] == stop
    assert [one.state.lengths.tolist() for one in out] == [one.state.lengths.tolist() for one in expected]


def test_few_new_tokens_are_enough():
    for count in (0, 1, 2):
        out = generate("full", max_new_tokens=count, speculate=LOOKUP)
        assert [one.tokens for one in out] == [one.tokens[:count] for one in plain("full")]
        assert [int(one.state.lengths[0]) for one in out] == [len(prompt) + count for prompt in PROMPTS]


def test_a_stop_string_that_began_in_an_earlier_cycle_needs_no_state():
    """Without the final state, nothing is given back that a ring buffer has lost."""
    answer = plain("quest")[0].tokens
    words = {"max_new_tokens": 24, "capacity": CAPACITY, "returns_state": False, "speculate": LOOKUP}
    loop = GenerationLoop(model(), PROMPTS[0], GenerateOptions(setting("quest", "restricted"), **words))
    stream = loop.streams[0]
    stream.kept = lambda: 2  # as if a long stop string had begun after two tokens
    assert [token for _, _, token in loop] == answer
    assert loop.results()[0].tokens == answer[:2]


def test_rows_that_share_a_prompt():
    policy = setting("shadowkv", "restricted")
    _, state = decode.prefill(model(), np.array(PROMPTS[:1]), [len(PROMPTS[0])], policy, capacity=CAPACITY)
    turns = [[5, 6, 7], [1], [8, 8, 8, 8]]
    plain, fast = (
        jshadow.generate(model(), turns, state=state.share(3), max_new_tokens=12, speculate=drafter)
        for drafter in (None, LOOKUP)
    )
    assert [one.tokens for one in fast] == [one.tokens for one in plain]
    assert sum(one.report.accepted_tokens for one in fast)


def test_a_draw_depends_on_its_number_alone():
    logits = jax.random.normal(jax.random.key(1), (3, 4, 50))
    key, first = jax.random.key(2), jnp.array([5, 0, 2])
    for sampler in (Sampler(), Sampler(0.9, top_k=20, top_p=0.9, min_p=0.01)):
        together = sample_numbered(sampler, logits, key, first)
        for place in range(4):
            for row in range(3):
                number = jax.random.fold_in(key, first[row] + place)
                assert sample_checked(sampler, logits[:, place], number)[row] == together[row, place]


def test_verified_speculation_is_compared_with_single_steps(monkeypatch):
    policy = setting("shadowkv", "restricted")
    out = generate("shadowkv", verify=True, fetch="device_put", speculate=LOOKUP, max_new_tokens=12)
    assert [one.tokens for one in out] == [one.tokens[:12] for one in plain("shadowkv")]
    assert out[0].report.verified_steps >= 11  # rows get unequal numbers of tokens in a cycle
    from jshadow.engine.speculation import cycle

    real = cycle.sample_numbered
    monkeypatch.setattr(cycle, "sample_numbered", lambda *args: (real(*args) + 1) % TINY.vocab_size)
    with pytest.raises(VerificationError, match="speculation drew token"):
        # another number of tokens, so that the program is traced anew
        generate(policy, verify=True, fetch="device_put", speculate=PromptLookup(tokens=5, ngram=1))


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


# Bad input


@pytest.mark.parametrize("name", ["h2o", "specache", "infllm", "less"])
def test_a_policy_that_cannot_give_tokens_back_is_named(name):
    with pytest.raises(ConfigError, match=rf"as .*full, .*shadowkv.* are, got {name}"):
        generate(name, speculate=LOOKUP)


def test_what_is_no_drafter_is_refused():
    with pytest.raises(ConfigError, match="speculate must be a drafter, such as PromptLookup"):
        generate("full", speculate="prompt_lookup")
    for wrong in ({"tokens": 0}, {"ngram": True}, {"tokens": 65}):
        with pytest.raises(ConfigError, match=r"must be an integer in \[1, 64\]"):
            PromptLookup(**wrong)


def test_more_proposals_than_a_ring_buffer_gives_back_are_refused():
    with pytest.raises(ConfigError, match=r"speculate.tokens must be at most 8, because .*got 9"):
        generate("quest", speculate=PromptLookup(tokens=9))
    window = jshadow.StreamingLLM(sinks=2, window=30)
    with pytest.raises(ConfigError, match=r"speculate.tokens must be at most 0, because .*row 0"):
        generate(window, speculate=LOOKUP)
