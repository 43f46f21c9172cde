"""Speculation at random: the tokens of plain decoding, also of SmolLM2, and the distribution of the model."""

import dataclasses
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CAPACITY, TINY, model, setting
from scipy import stats

import jshadow
from jshadow import CompressedDraft, DraftModel, Full, PromptLookup, Quest, Sampler, SelfDraft, ShadowKV
from jshadow.engine import decode
from jshadow.engine.speculation import cycle
from jshadow.evaluation.tasks.texts import paragraphs
from jshadow.weights.params import init_params

ROWS = 40  # of a batch
NEAR = 1e-4  # two logits that differ by less may be ordered either way
LOOKUP = PromptLookup(tokens=4, ngram=1)
SELF = SelfDraft(tokens=4, policy=Quest(budget=8, unit=4, recent=3, dense_layers=0))
COMPRESSED = CompressedDraft(tokens=4, policy=ShadowKV(8, budget=8, chunk_size=4, outlier_chunks=1, local_chunks=1))
OTHER = DraftModel(init_params(dataclasses.replace(TINY, num_layers=1), seed=9), tokens=3)
CASES = [(name, LOOKUP) for name in ("full", "snapkv", "quest", "loki", "shadowkv", "shadowkv_transform")]
CASES += [(name, LOOKUP) for name in ("shadowkv_plus", "omnikv", "streaming_llm", "kivi")]
CASES += [("infinigen", PromptLookup(tokens=1, ngram=1))]
CASES += [("full", SELF), ("offloaded", COMPRESSED), ("shadowkv", OTHER)]
# These can go back only before they evict or quantize a token after the prompt.
WIDE = {
    "streaming_llm": jshadow.StreamingLLM(sinks=2, window=CAPACITY),
    "kivi": jshadow.KIVI(bits=2, group=8, residual=CAPACITY),
}
ROUNDS = (0.0, 0.0, 0.7)  # the temperature of each: 1,680 rows in all


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
    logits, _ = decode.prefill(params, np.array([ids]), [len(ids)], policy, capacity=max(CAPACITY, len(ids) + 1))
    return abs(float(logits[0, pair[0]] - logits[0, pair[1]]))


def fork_of(one, other):
    """Where two lists of tokens begin to differ, and the tokens there."""
    return next((at, pair) for at, pair in enumerate(itertools.zip_longest(one, other)) if pair[0] != pair[1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "drafter"), CASES, ids=[f"{name}-{drafter.name}" for name, drafter in CASES])
def test_the_tokens_are_those_of_plain_decoding(name, drafter, record_property):
    """Greedy and drawn, with stop tokens, and with a second turn on the state. Rows are independent cases."""
    rng, ties, cases = np.random.default_rng(len(name)), 0, 0
    policy = WIDE[name] if name in WIDE else setting(name, "restricted")
    stop = rng.integers(0, TINY.vocab_size, 3).tolist()  # of all rounds but the first, which then share programs
    for round_, temperature in enumerate(ROUNDS):
        texts = prompts(rng)
        asked = {"max_new_tokens": 20, "sampler": Sampler(temperature), "seed": round_, "capacity": CAPACITY}
        asked["stop"] = stop if round_ else None
        plain = jshadow.generate(model(), texts, policy, **asked)
        fast = jshadow.generate(model(), texts, policy, **asked, speculate=drafter)
        for row, (one, other) in enumerate(zip(plain, fast, strict=True)):
            cases += 1
            if one.tokens == other.tokens:
                assert other.state.lengths.tolist() == [len(texts[row]) + len(one.tokens)]
                continue
            assert temperature == 0, "a draw is not the draw of its number"
            at, pair = fork_of(one.tokens, other.tokens)
            assert margin(model(), [*texts[row], *one.tokens[:at]], policy, pair) < NEAR
            ties += 1
        if round_ == 0:
            second = None if isinstance(drafter, DraftModel) else drafter  # it would have to read the text again
            asked = {"max_new_tokens": 5}
            turns, again = (
                [jshadow.generate(model(), [3, 4, 5], state=one.state, speculate=which, **asked).tokens for one in ones]
                for ones, which in ((plain[:4], None), (fast[:4], second))
            )
            assert again == turns or ties
    assert ties <= cases // 20
    record_property("random_cases", cases)
    record_property("near_ties", ties)


# The distribution of drawn tokens

SMALL = dataclasses.replace(TINY, vocab_size=5, num_layers=1)
FIRST = [1, 2, 3, 1, 2, 3, 1, 2]
DRAWN, DRAWS, SEEDS = 4, 2000, 10
WARM = Sampler(temperature=1.0)


tiny = functools.cache(functools.partial(init_params, SMALL, seed=3))


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
    counts = np.zeros(5**DRAWN)
    for seed in range(SEEDS):
        asked = {"max_new_tokens": DRAWN, "sampler": WARM, "seed": seed, "speculate": drafter}
        out = jshadow.generate(tiny(), [FIRST] * DRAWS, Full(), **asked)
        numbers = np.array([one.tokens for one in out]) @ 5 ** np.arange(DRAWN)[::-1]
        counts += np.bincount(numbers, minlength=len(counts))
    expected = probabilities() * SEEDS * DRAWS
    rare = expected < 5
    pairs = [np.append(x[~rare], x[rare].sum()) for x in (counts, expected)]
    kept = pairs[1] > 0
    return stats.chisquare(pairs[0][kept], pairs[1][kept] * pairs[0].sum() / pairs[1].sum()).pvalue > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [PromptLookup(tokens=3, ngram=1), SelfDraft(tokens=3, policy=SELF.policy)], ids=str)
def test_draws_have_the_model_s_distribution(drafter):
    assert is_the_model_s(drafter)


@pytest.mark.slow
def test_a_wrong_rule_of_acceptance_has_another_distribution(monkeypatch):
    """A planted fault: the first proposed token of a cycle is always accepted."""
    real = cycle.sample_numbered

    def wrong(sampler, logits, key, first):
        drawn = real(sampler, logits, key, first)
        return drawn.at[:, 0].set(wrong.guess) if logits.shape[1] > 1 else drawn

    propose = PromptLookup.propose

    def spy(self, memory, target, width):
        proposal = propose(self, memory, target, width)
        wrong.guess = jnp.where(target.wanted > 0, proposal.tokens[:, 0], 0) if width else 0
        return proposal

    monkeypatch.setattr(cycle, "sample_numbered", wrong)
    monkeypatch.setattr(PromptLookup, "propose", spy)
    assert not is_the_model_s(PromptLookup(tokens=2, ngram=1))


# SmolLM2: 512 new tokens of 20 prompts, up to near ties

NEW, NEAR_REAL = 512, 1e-3  # logits are about 10; in float32 a turn and single steps differ by about 1e-5 of them


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
    expected = jshadow.generate(params, passages(), policy, max_new_tokens=NEW)
    out = jshadow.generate(params, passages(), policy, max_new_tokens=NEW, speculate=PromptLookup())
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
