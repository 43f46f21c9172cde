"""Samplers against plain NumPy: what each filter keeps, what draws depend on, and settings for each row of a batch."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import row_oracle
from byte_models import BARE, CONFIG

import jshadow
from jshadow.engine import rows as row_filters
from jshadow.engine import sampling
from jshadow.engine.rows import (
    RowParts,
    RowSampling,
    RowSettings,
    _set_row,
    draw,
    idle_rows,
    pack_mask,
    row_of,
    set_row,
)
from jshadow.engine.sampling import NO_TOKEN, Sampler
from jshadow.errors import ConfigError, PromptError

LOGITS = np.random.default_rng(9).standard_normal((4, 50), np.float32)
FILTERS = [
    *({"top_k": k} for k in (1, 5, 10, 14)),
    *({"top_p": p} for p in (0.05, 0.52, 0.9)),
    *({"min_p": p} for p in (0.01, 0.4, 1.0)),
]
keys = functools.cache(lambda: jax.random.split(jax.random.key(1), 4000))


@functools.partial(jax.jit, static_argnums=0)
def filtered(samplers, rows):
    return [jnp.isfinite(sampling.filter_logits(sampler, rows)) for sampler in samplers]


def kept_of_a_row(row, kept, top_k=None, top_p=None, min_p=None):
    """Check what one filter keeps. Return whether rounding decides nothing."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert kept[order[0]]
    if top_k:
        assert np.flatnonzero(kept).tolist() == sorted(order[:top_k])
    elif top_p:
        probs = oracle.softmax(row.astype(float))
        before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
        if np.abs(before[1:] - top_p).min() <= 1e-5:
            return False
        assert kept[order].tolist() == (before < top_p).tolist()
    else:
        share = np.exp(row.astype(float) - max(row))
        clear = np.abs(share - min_p) > 1e-4
        assert kept[clear].tolist() == (share >= min_p)[clear].tolist()
    return True


@pytest.mark.parametrize(("size", "settings"), [(11, FILTERS), (2, [{"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}])])
def test_a_filter_keeps_what_its_definition_says(size, settings):
    """Exactly k; the fewest that reach p; what is likely enough. Rows of small integers have many ties."""
    rng = np.random.default_rng(size)
    rows = np.concatenate([rng.integers(-top, top + 1, (200, size)) for top in (1, 3, 8)]).astype(np.float32)
    samplers = tuple(Sampler(1.0, **one) for one in settings)
    for one, kept in zip(settings, map(np.asarray, filtered(samplers, rows)), strict=True):
        assert sum(kept_of_a_row(*pair, **one) for pair in zip(rows, kept, strict=True)) > 500, one


def test_filters_compose_and_draws_stay_inside():
    sampler, logits = Sampler(0.7, top_k=12, top_p=0.9, min_p=0.05), LOGITS * 2
    allowed = np.asarray(filtered((sampler,), logits / np.float32(0.7))[0])
    assert 1 <= allowed.sum(axis=1).min() <= allowed.sum(axis=1).max() <= 12
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: sampling.sample(sampler, logits, key)))(keys()))
    assert allowed[np.arange(4), drawn].all()


def test_all_64_bits_of_a_seed_count():
    seeds = (7, 7 + 2**32, 7 + 2**33, 7 - 2**32, 7 - 2**63, np.int64(7 + 2**40))
    keys = {tuple(np.asarray(jax.random.key_data(sampling.seed_key(seed))).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
    for seed in (0, 7, 2**31, 2**32 - 1, np.uint8(7)):  # as jax.random.key has them
        got, want = (np.asarray(jax.random.key_data(key)) for key in (sampling.seed_key(seed), jax.random.key(seed)))
        np.testing.assert_array_equal(got, want)


def test_next_to_nothing_is_greedy_and_the_lower_id_wins_a_tie():
    logits = np.array([[5.0, 7.0, -80.0, 6.9], [-3.0, -90.0, -2.0, -np.inf], [1.0, 4.0, 4.0, 0.0]], np.float32)
    cold = [Sampler(temperature) for temperature in (1e-3, 1e-38, 1e-40, 1e-300)]
    cold += [Sampler(1e-40, top_p=0.9), Sampler(1e-300, top_k=3, min_p=0.5)]

    @jax.jit
    def drawn(logits):
        return [sampling.sample(sampler, logits, jax.random.key(1)) for sampler in (*cold, Sampler())]

    *some, greedy = drawn(logits)
    assert [tokens.tolist()[:2] for tokens in some] == [[1, 2]] * len(cold)
    assert greedy.tolist() == [1, 2, 1]


def test_draws_have_the_probabilities():
    logits = np.log(np.array([[0.5, 0.3, 0.2]], np.float32))
    draws = np.asarray(jax.jit(jax.vmap(lambda key: sampling.sample(Sampler(1.0), logits, key)[0]))(keys()))
    np.testing.assert_allclose(np.bincount(draws) / 4000, [0.5, 0.3, 0.2], atol=0.03)


# Settings for each row


SIZE = 67  # no multiple of 32
PARTS = RowParts(SIZE, penalties=True, bias_limit=4, grammar=True)


def random_sampler(rng: np.random.Generator, size: int) -> Sampler:
    temperature = 0.0 if rng.random() < 0.2 else float(rng.uniform(0.3, 2.0))
    filters = int(rng.integers(1, size + 3)), float(rng.uniform(0.1, 1.0)), float(10 ** rng.uniform(-3, 0))
    return Sampler(temperature, *(None if rng.random() < 0.4 else value for value in filters))


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


def batch_of(settings, parts=PARTS, **more) -> RowSampling:
    """Rows of some settings. `more`: lists with the prompt or the drawn tokens of each."""
    each = [dict(zip(more, values, strict=True)) for values in zip(*more.values(), strict=True)] or [{}] * len(settings)
    rows = [row_of(one, parts, **its) for one, its in zip(settings, each, strict=True)]
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *rows)


def assert_equal(one: RowSampling, other: RowSampling) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("count", "dtype"), [(1, "float32"), (3, "bfloat16"), (8, "float32")])
def test_draws_are_those_of_the_oracle(count, dtype):
    rng, told, drawn = np.random.default_rng(count), 0, [[] for _ in range(count)]
    settings = [random_settings(rng) for _ in range(count)]
    prompts = [rng.integers(0, SIZE, 9).tolist() for _ in range(count)]
    rows = batch_of(settings, prompt=prompts)
    for step in range(12):
        logits = (rng.standard_normal((count, SIZE)) * 3).astype(jnp.dtype(dtype))
        allowed = rng.random((count, SIZE)) < 0.7
        tokens, rows = draw(rows.replace(allowed=pack_mask(allowed)), logits)
        for row, token in enumerate(tokens.tolist()):
            scores = row_oracle.change(settings[row], np.asarray(logits[row], np.float32), prompts[row], drawn[row])
            want, close = row_oracle.draw(settings[row], np.where(allowed[row], scores, -np.inf), step)
            assert close or token == want
            told += not close
            drawn[row].append(token)
    assert told >= 11 * count
    rows = rows.replace(allowed=idle_rows(PARTS, count).allowed)
    assert_equal(rows, batch_of(settings, prompt=prompts, drawn=drawn))


@pytest.mark.parametrize(("count", "size"), [(8, SIZE), (3, 2), (1, 1)])
def test_filters_keep_what_the_oracle_keeps(count, size):
    rng, keep = np.random.default_rng(size), jax.jit(row_filters.keep_likely)
    for scale in (0, 2, 2, 30, 200):  # integers: many ties
        settings = [RowSettings(dataclasses.replace(random_sampler(rng, size), temperature=0.5)) for _ in range(count)]
        cooled = np.stack([row_oracle.cool(one, np.rint(rng.standard_normal(size) * scale)) for one in settings])
        rows = batch_of(settings, RowParts(size))
        kept = np.asarray(keep(cooled.astype(np.float32), rows.top_k, rows.top_p, rows.min_p))
        for row, one in enumerate(settings):
            want, close = row_oracle.keep(one, cooled[row])
            assert close or kept[row].tolist() == want.tolist(), one


def test_sums_of_shares_are_exact_in_a_large_vocabulary():
    size, rng, compiled = 300_001, np.random.default_rng(0), jax.jit(row_filters.shares)
    for tail in (1.0, 1e-3, 1e-6, 1e-9):
        weights = (tail * rng.random((1, size))).astype(np.float32)
        weights[0, 7] = 1
        shares = np.asarray(compiled(weights))[0].astype(np.float64)
        assert shares.sum() < 2**32
        want = weights[0] / weights.sum(dtype=np.float64)
        np.testing.assert_allclose(np.cumsum(shares) / shares.sum(), np.cumsum(want), atol=1e-6, err_msg=str(tail))


def test_a_row_depends_on_nothing_but_itself():
    rng, steps = np.random.default_rng(5), 6
    settings = [random_settings(rng) for _ in range(8)]
    settings[0] = dataclasses.replace(settings[0], sampler=Sampler(1.1, top_k=30, top_p=0.8, min_p=1e-3))
    rows = batch_of(settings, prompt=[[3, 60]] * 8)
    logits = rng.standard_normal((steps, 8, SIZE), np.float32) * 3

    def pick(rows: RowSampling, places: list[int]) -> RowSampling:
        return jax.tree.map(lambda array: np.asarray(array)[places], rows)

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
    """The sampler and the sizes are those of a test of generate, so they are compiled once."""
    prompt = np.random.default_rng(0).integers(0, 256, 203).tolist()
    settings = RowSettings(Sampler(1.5, 50, 0.95, 0.01), seed=7 + 2**40)
    options = {"capacity": 256, "sampler": settings.sampler, "seed": settings.seed}
    offline = jshadow.generate(BARE, prompt, jshadow.Full(), max_new_tokens=9, **options)
    state = jshadow.generate(BARE, prompt[:-1], jshadow.Full(), max_new_tokens=0, **options).state
    parts, tokens, newest = RowParts(CONFIG.vocab_size), [], prompt[-1]
    rows = set_row(idle_rows(parts, 3), 1, row_of(settings, parts))
    for _ in range(9):
        logits, state = jshadow.decode_step(BARE, [newest], state)
        drawn, rows = draw(rows, np.repeat(np.asarray(logits), 3, axis=0))
        newest = int(np.asarray(drawn)[1])
        tokens.append(newest)
    assert tokens == list(offline.tokens)


def test_a_row_without_a_token_leaves_the_others():
    rows = batch_of([Sampler(), Sampler(1.0)] * 4)
    logits = np.random.default_rng(1).standard_normal((8, SIZE), np.float32)
    clean, _ = draw(rows, logits)
    allowed = np.ones((8, SIZE), bool)
    allowed[2:4] = False
    logits[:2, 5], logits[4:6] = np.nan, -np.inf
    tokens, after = draw(rows.replace(allowed=pack_mask(allowed)), logits)
    assert tokens.tolist() == [NO_TOKEN] * 6 + clean.tolist()[6:]
    assert np.asarray(after.counts).sum(axis=1).tolist() == [0] * 6 + [1] * 2


def test_an_infinite_logit_and_extreme_settings():
    logits = np.zeros((8, SIZE), np.float32)
    logits[:, 9], logits[:, 4] = 2.0, -np.inf
    rows = batch_of([Sampler(1e-300), Sampler(1e300), Sampler(1.0, top_p=1e-60), *[Sampler()] * 5])
    tokens = np.stack([np.asarray(draw(rows.replace(step=rows.step + t), logits)[0]) for t in range(30)])
    assert (tokens[:, [0, 2]] == 9).all()
    assert len(set(tokens[:, 1].tolist())) > 10  # every token is as likely as any other
    assert not (tokens == 4).any()
    logits[:, 11] = np.inf
    assert draw(rows, logits)[0].tolist() == [11] * 8


TIED = np.zeros((8, SIZE), np.float32)
TIED[:, [3, 40, 66]] = 2.0


def test_a_greedy_tie_goes_to_the_lower_id():
    assert draw(batch_of([Sampler(), Sampler(1.0, top_k=1)] * 4), TIED)[0].tolist() == [3] * 8
    cold, _ = draw(batch_of([RowSettings(Sampler(1e-300), seed) for seed in range(8)]), TIED)
    assert set(cold.tolist()) == {3, 40, 66}  # a temperature above 0 draws between equals


def test_paused_rows_count_nothing():
    rows = batch_of([RowSettings(Sampler(1.0), seed) for seed in range(8)])
    active = np.arange(8) % 2 == 0
    tokens, after = draw(rows, TIED, active)
    assert after.step.tolist() == active.astype(int).tolist()
    assert np.asarray(after.counts).sum(axis=1).tolist() == active.astype(int).tolist()
    np.testing.assert_array_equal(np.asarray(draw(after, TIED)[0])[1::2], np.asarray(tokens)[1::2])


def test_no_value_compiles_anything():
    rng, rows = np.random.default_rng(2), idle_rows(PARTS, 8)
    _, rows = draw(rows, TIED)
    rows = set_row(rows, 3, row_of(Sampler(), PARTS))
    before = draw._cache_size(), _set_row._cache_size()
    for index in range(8):
        rows = set_row(rows, index, row_of(random_settings(rng), PARTS, prompt=[index], drawn=[1] * index))
        _, rows = draw(rows, TIED)
    assert (draw._cache_size(), _set_row._cache_size()) == before


BAD = {
    "temperature": [-0.1, -1.0, float("inf"), float("nan"), "1"],
    "top_k": [0, -1, 1.5, True],
    "top_p": [0.0, 1.1, 1.5, -1.0, float("nan")],
    "min_p": [0.0, 1.1, -1, float("nan")],
}
FIVE, PAIR = dict.fromkeys(range(5), 1.0), idle_rows(PARTS, 2)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *(
            (lambda bad={field: value}: Sampler(**{"temperature": 1.0} | bad), ConfigError, f"sampler.{field}")
            for field, values in BAD.items()
            for value in values
        ),
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
