"""Sampling with settings for each row, against plain NumPy, `generate` and itself in other batches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_oracle
from byte_models import BARE, CONFIG

import jshadow
from jshadow.engine.rows import filters as row_filters
from jshadow.engine.rows.sampling import RowSampling, _set_row, draw, idle_rows, pack_mask, row_of, set_row
from jshadow.engine.rows.settings import RowParts, RowSettings
from jshadow.engine.sampling import NO_TOKEN, Sampler
from jshadow.errors import ConfigError, PromptError

SIZE = 67  # no multiple of 32
PARTS = RowParts(SIZE, penalties=True, bias_limit=4, grammar=True)


def random_sampler(rng: np.random.Generator, size: int) -> Sampler:
    def maybe(value: float) -> float | None:
        return None if rng.random() < 0.4 else value

    temperature = 0.0 if rng.random() < 0.2 else float(rng.uniform(0.3, 2.0))
    return Sampler(
        temperature,
        maybe(int(rng.integers(1, size + 3))),
        maybe(float(rng.uniform(0.1, 1.0))),
        maybe(float(10 ** rng.uniform(-3, 0))),
    )


def random_settings(rng: np.random.Generator) -> RowSettings:
    biased = rng.choice(SIZE, int(rng.integers(0, PARTS.bias_limit + 1)), replace=False)
    return RowSettings(
        random_sampler(rng, SIZE),
        seed=int(rng.integers(-(2**63), 2**63)),
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-2, 2)),
        repetition_penalty=float(rng.uniform(0.5, 2)),
        logit_bias={int(token): float(rng.uniform(-4, 4)) for token in biased},
    )


def batch_of(rows: list[RowSampling]) -> RowSampling:
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)


def pick(rows: RowSampling, places: list[int]) -> RowSampling:
    return jax.tree.map(lambda array: np.asarray(array)[places], rows)


def assert_equal(one: RowSampling, other: RowSampling) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("count", "dtype"), [(1, "float32"), (3, "bfloat16"), (8, "float32")])
def test_draws_are_those_of_the_oracle(count, dtype):
    rng, told, drawn = np.random.default_rng(count), 0, [[] for _ in range(count)]
    settings = [random_settings(rng) for _ in range(count)]
    prompts = [rng.integers(0, SIZE, 9).tolist() for _ in range(count)]
    rows = batch_of([row_of(one, PARTS, prompt=prompt) for one, prompt in zip(settings, prompts, strict=True)])
    for step in range(12):
        logits = jnp.asarray(rng.standard_normal((count, SIZE)) * 3, dtype)
        allowed = rng.random((count, SIZE)) < 0.7
        tokens, rows = draw(rows.replace(allowed=jnp.asarray(pack_mask(allowed))), logits)
        for row, token in enumerate(tokens.tolist()):
            scores = row_oracle.change(settings[row], np.asarray(logits[row], np.float32), prompts[row], drawn[row])
            want, close = row_oracle.draw(settings[row], np.where(allowed[row], scores, -np.inf), step)
            assert close or token == want
            told += not close
            drawn[row].append(token)
    assert told >= 11 * count
    rows = rows.replace(allowed=idle_rows(PARTS, count).allowed)
    parts = zip(settings, prompts, drawn, strict=True)
    assert_equal(rows, batch_of([row_of(one, PARTS, prompt=prompt, drawn=past) for one, prompt, past in parts]))


@pytest.mark.parametrize(("count", "size"), [(8, SIZE), (3, 2), (1, 1)])
def test_filters_keep_what_the_oracle_keeps(count, size):
    rng, keep = np.random.default_rng(size), jax.jit(row_filters.keep_likely)
    for scale in (0, 2, 2, 30, 200):  # integers: many ties
        settings = [RowSettings(dataclasses.replace(random_sampler(rng, size), temperature=0.5)) for _ in range(count)]
        cooled = np.stack([row_oracle.cool(one, np.rint(rng.standard_normal(size) * scale)) for one in settings])
        rows = batch_of([row_of(one, RowParts(size)) for one in settings])
        kept = np.asarray(keep(jnp.asarray(cooled, jnp.float32), rows.top_k, rows.top_p, rows.min_p))
        for row, one in enumerate(settings):
            want, close = row_oracle.keep(one, cooled[row])
            assert close or kept[row].tolist() == want.tolist(), one


@pytest.mark.parametrize("tail", [1.0, 1e-3, 1e-6, 1e-9])
def test_sums_of_shares_are_exact_in_a_large_vocabulary(tail):
    size, rng = 300_001, np.random.default_rng(0)
    weights = (tail * rng.random((1, size))).astype(np.float32)
    weights[0, 7] = 1
    shares = np.asarray(SHARES(weights))[0].astype(np.float64)
    assert shares.sum() < 2**32
    want = weights[0] / weights.sum(dtype=np.float64)
    np.testing.assert_allclose(np.cumsum(shares) / shares.sum(), np.cumsum(want), atol=1e-6)


SHARES = jax.jit(row_filters.shares)


def test_a_row_depends_on_nothing_but_itself():
    rng, steps = np.random.default_rng(5), 6
    settings = [random_settings(rng) for _ in range(8)]
    settings[0] = dataclasses.replace(settings[0], sampler=Sampler(1.1, top_k=30, top_p=0.8, min_p=1e-3))
    rows = batch_of([row_of(one, PARTS, prompt=[3, 60]) for one in settings])
    logits = rng.standard_normal((steps, 8, SIZE), np.float32) * 3

    def run(picked: list[int]) -> tuple[np.ndarray, RowSampling]:
        picks, tokens = pick(rows, picked), []
        for step in range(steps):
            token, picks = draw(picks, logits[step, picked])
            tokens.append(token)
        return np.stack(tokens, axis=1), picks

    tokens, after = run(list(range(8)))
    for picked in ([0], [7], [2, 0, 5], [5, 2, 0], [6, 3, 1, 0, 7, 4, 2, 5], [0] * 8):
        some, left = run(picked)
        np.testing.assert_array_equal(some, tokens[picked])
        assert_equal(left, pick(after, picked))


def test_a_seeded_row_draws_the_tokens_of_generate():
    prompt, count, settings = list(range(40, 120)), 9, RowSettings(Sampler(1.5, 50, 0.95, 0.01), seed=7 + 2**40)
    options = {"sampler": settings.sampler, "seed": settings.seed}
    offline = jshadow.generate(BARE, prompt, jshadow.Full(), max_new_tokens=count, **options)
    parts = RowParts(CONFIG.vocab_size)
    rows = set_row(idle_rows(parts, 3), 1, row_of(settings, parts))
    logits, state = jshadow.prefill(BARE, [prompt], [len(prompt)], jshadow.Full(), capacity=128)
    tokens = []
    for _ in range(count):
        drawn, rows = draw(rows, np.repeat(logits, 3, axis=0))
        tokens.append(int(drawn[1]))
        logits, state = jshadow.decode_step(BARE, [tokens[-1]], state)
    assert tokens == list(offline.tokens)


def test_a_row_without_a_token_leaves_the_others():
    settings = [RowSettings(sampler) for sampler in (Sampler(), Sampler(1.0)) * 4]
    rows = batch_of([row_of(one, PARTS) for one in settings])
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((8, SIZE), np.float32))
    clean, _ = draw(rows, logits)
    allowed = np.ones((8, SIZE), bool)
    allowed[2:4] = False
    broken = logits.at[:2, 5].set(jnp.nan).at[4:6].set(-jnp.inf)
    tokens, after = draw(rows.replace(allowed=jnp.asarray(pack_mask(allowed))), broken)
    assert tokens.tolist() == [NO_TOKEN] * 6 + clean[6:].tolist()
    assert np.asarray(after.counts.sum(axis=1)).tolist() == [0] * 6 + [1] * 2


def test_an_infinite_logit_and_extreme_settings():
    logits = jnp.zeros((3, SIZE)).at[:, 9].set(2.0).at[:, 4].set(-jnp.inf)
    samplers = [Sampler(1e-300), Sampler(1e300), Sampler(1.0, top_p=1e-60)]
    rows = batch_of([row_of(sampler, PARTS) for sampler in samplers])
    tokens = np.stack([draw(rows.replace(step=rows.step + t), logits)[0] for t in range(30)])
    assert (tokens[:, [0, 2]] == 9).all()
    assert len(set(tokens[:, 1].tolist())) > 10  # every token is as likely as any other
    assert not (tokens == 4).any()
    infinite, _ = draw(rows, logits.at[:, 11].set(jnp.inf))
    assert infinite.tolist() == [11] * 3


def test_a_greedy_tie_goes_to_the_lower_id():
    tokens, _ = draw(batch_of([row_of(Sampler(t, top_k=k), PARTS) for t, k in ((0.0, None), (1.0, 1))] * 4), TIED)
    assert tokens.tolist() == [3] * 8
    cold, _ = draw(batch_of([row_of(RowSettings(Sampler(1e-300), seed), PARTS) for seed in range(8)]), TIED)
    assert set(cold.tolist()) == {3, 40, 66}  # a temperature above 0 draws between equals


TIED = jnp.zeros((8, SIZE), jnp.float32).at[:, jnp.array([3, 40, 66])].set(2.0)


def test_paused_rows_count_nothing():
    rows = batch_of([row_of(RowSettings(Sampler(1.0), seed), PARTS) for seed in range(8)])
    active = jnp.arange(8) % 2 == 0
    tokens, after = draw(rows, TIED, active)
    assert after.step.tolist() == active.astype(int).tolist()
    assert after.counts.sum(axis=1).tolist() == active.astype(int).tolist()
    np.testing.assert_array_equal(draw(after, TIED)[0][1::2], tokens[1::2])


def test_no_value_compiles_anything():
    rng, rows = np.random.default_rng(2), idle_rows(PARTS, 8)
    _, rows = draw(rows, TIED)
    rows = set_row(rows, 3, row_of(Sampler(), PARTS))
    before = draw._cache_size(), _set_row._cache_size()
    for index in range(8):
        rows = set_row(rows, index, row_of(random_settings(rng), PARTS, prompt=[index], drawn=[1] * index))
        _, rows = draw(rows, TIED)
    assert (draw._cache_size(), _set_row._cache_size()) == before


FIVE, PAIR = dict.fromkeys(range(5), 1.0), idle_rows(PARTS, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RowSettings(None), ConfigError, "sampler must be a Sampler, got None"),
        (lambda: RowSettings(seed=2**63), ConfigError, "seed must be"),
        (lambda: RowSettings(presence_penalty=2.1), ConfigError, "presence_penalty must lie in [-2.0, 2.0], got 2.1"),
        (lambda: RowSettings(frequency_penalty=float("nan")), ConfigError, "frequency_penalty must lie in"),
        (lambda: RowSettings(repetition_penalty=0), ConfigError, "repetition_penalty must lie in [0.01, 100.0], got 0"),
        (lambda: RowSettings(logit_bias=[1]), ConfigError, "logit_bias must be a mapping"),
        (lambda: RowSettings(logit_bias={1: 101}), ConfigError, "logit_bias[1] must lie in [-100.0, 100.0], got 101"),
        (lambda: RowParts(0), ConfigError, "parts.vocab_size"),
        (lambda: RowParts(9, bias_limit=-1), ConfigError, "parts.bias_limit"),
        (lambda: row_of(RowSettings(logit_bias=FIVE), PARTS), ConfigError, "at most bias_limit=4 tokens, got 5"),
        (lambda: row_of(RowSettings(logit_bias={SIZE: 1}), PARTS), PromptError, f"vocab_size={SIZE}), got {SIZE}"),
        (lambda: row_of(RowSettings(presence_penalty=1), RowParts(9)), ConfigError, "presence_penalty must be 0.0"),
        (lambda: row_of(RowSettings(), PARTS, prompt=[-1]), PromptError, "prompt must lie in"),
        (lambda: row_of(RowSettings(), PARTS, drawn=[1.5]), PromptError, "drawn must be integers"),
        (lambda: idle_rows(PARTS, 0), ConfigError, "rows.count"),
        (lambda: set_row(PAIR, 2, PAIR), ConfigError, "index must lie in [0, 2), got 2"),
        (lambda: set_row(PAIR, 0, PAIR), ConfigError, "row.temperature must have the shape (1,), got (2,)"),
        (lambda: set_row(PAIR, 0, row_of(Sampler(), RowParts(SIZE))), ConfigError, "row.counts must have the shape"),
    ],
)
def test_bad_settings_name_the_field(make, error, words):
    with pytest.raises(error, match=re.escape(words)):
        make()
