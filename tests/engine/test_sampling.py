"""Samplers against plain Python: what each filter keeps, and what draws depend on."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jshadow.engine import sampling
from jshadow.engine.sampling import Sampler
from jshadow.errors import ConfigError

LOGITS = jnp.asarray(np.random.default_rng(9).standard_normal((4, 50), np.float32))

# Small integers: many ties. Two lengths only: each is compiled.
logit_rows = st.one_of(*(st.lists(st.integers(-8, 8), min_size=n, max_size=n) for n in (2, 11)))


@given(logit_rows, st.integers(1, 14))
def test_top_k_keeps_exactly_k(row, k):
    kept = np.asarray(sampling.filter_logits(Sampler(1.0, top_k=k), jnp.array([row], jnp.float32)))[0]
    best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert np.flatnonzero(np.isfinite(kept)).tolist() == sorted(best)


@given(logit_rows, st.floats(0.05, 0.95))
def test_top_p_keeps_the_fewest_that_reach_p(row, p):
    kept = np.isfinite(np.asarray(sampling.filter_logits(Sampler(1.0, top_p=p), jnp.array([row], jnp.float32)))[0])
    probs = oracle.softmax(np.array(row, float))
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    before = np.concatenate([[0.0], np.cumsum(probs[order])[:-1]])
    if np.abs(before[1:] - p).min() > 1e-5:  # else rounding decides
        assert kept[order].tolist() == (before < p).tolist()
    assert kept[order[0]]


@given(logit_rows, st.floats(0.01, 1.0))
def test_min_p_keeps_what_is_likely_enough(row, p):
    kept = np.isfinite(np.asarray(sampling.filter_logits(Sampler(1.0, min_p=p), jnp.array([row], jnp.float32)))[0])
    share = np.exp(np.array(row, float) - max(row))
    clear = np.abs(share - p) > 1e-4
    assert kept[clear].tolist() == (share >= p)[clear].tolist()
    assert kept[int(np.argmax(row))]


def test_filters_compose_and_draws_stay_inside():
    logits = LOGITS * 2
    sampler = Sampler(0.7, top_k=12, top_p=0.9, min_p=0.05)
    allowed = np.isfinite(np.asarray(sampling.filter_logits(sampler, logits / 0.7)))
    assert 1 <= allowed.sum(axis=1).min() <= allowed.sum(axis=1).max() <= 12
    for seed in range(20):
        drawn = np.asarray(sampling.sample(sampler, logits, jax.random.key(seed)))
        assert allowed[np.arange(4), drawn].all()


def test_draws_follow_the_seed_and_not_the_neighbors():
    logits, sampler = LOGITS, Sampler(1.0)
    first, again, other = (np.asarray(sampling.sample(sampler, logits, jax.random.key(s))) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    changed = sampling.sample(sampler, logits.at[2:].multiply(-1.0), jax.random.key(1))
    np.testing.assert_array_equal(changed[:2], first[:2])
    np.testing.assert_array_equal(sampling.sample(sampler, logits[:1], jax.random.key(1)), first[:1])


def test_all_64_bits_of_a_seed_count():
    seeds = (7, 7 + 2**32, 7 + 2**33, 7 - 2**32, 7 - 2**63, np.int64(7 + 2**40))
    keys = {tuple(jax.random.key_data(sampling.seed_key(seed)).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
    for seed in (0, 7, 2**31, 2**32 - 1, np.uint8(7)):  # as jax.random.key has them
        assert sampling.seed_key(seed) == jax.random.key(seed)


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-40, 1e-300])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"min_p": 0.5, "top_k": 3}])
def test_next_to_nothing_is_greedy(temperature, settings):
    logits = jnp.array([[5.0, 7.0, -80.0, 6.9], [-3.0, -90.0, -2.0, -jnp.inf]])
    drawn = sampling.sample(Sampler(temperature, **settings), logits, jax.random.key(0))
    assert drawn.tolist() == [1, 2]


def test_draws_have_the_probabilities():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.2]]))
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = np.asarray(jax.vmap(lambda key: sampling.sample(Sampler(1.0), logits, key)[0])(keys))
    np.testing.assert_allclose(np.bincount(draws) / 4000, [0.5, 0.3, 0.2], atol=0.03)
    greedy = sampling.sample(Sampler(), jnp.array([[1.0, 4.0, 4.0]]), keys[0])
    assert greedy.tolist() == [1]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("inf"), float("nan"), "1"]),
        ("top_k", [0, -1, 1.5, True]),
        ("top_p", [0.0, 1.1, -1.0, float("nan")]),
        ("min_p", [0.0, 1.1, float("nan")]),
    ],
)
def test_bad_samplers_name_the_field(field, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"sampler.{field}"):
            dataclasses.replace(Sampler(), **{field: value})
