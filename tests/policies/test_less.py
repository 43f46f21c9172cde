"""LESS: equal to H2O without learned arrays, and equal to an oracle with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_sisters
import pytest
from cases import CAPACITY, CONFIGS, LENGTHS, PROMPT, STEPS, TINY, TaughtLESS, model, random_kernels, random_tokens
from cases import run_steps as run
from few import one_of
from less_arrays import SMALL, fitted_for
from oracle_less import LESSOracle

import jshadow
from jshadow.cache.accounting import state_nbytes
from jshadow.engine import decode
from jshadow.errors import ConfigError, StateMismatch
from jshadow.policies import H2O, LESS, Full, Loki
from jshadow.policies.less.kernels import combine


def decoded(policy, fitted=None, dtype="float32", params=None):
    """Logits of the prompt and of all steps, for the batch of three lengths, and the state."""
    params = params or model(TINY, dtype)
    first, state = decode.prefill(params, PROMPT, np.array(LENGTHS), policy, capacity=CAPACITY, fitted=fitted)
    rest, state = run(params, state, STEPS)
    return np.concatenate([np.asarray(first)[:, None], rest], axis=1), state


# Without learned arrays


@pytest.mark.parametrize(
    ("fitted", "dtype"), one_of(4, [(taught, dtype) for taught in (False, True) for dtype in ("float32", "bfloat16")])
)
def test_untaught_it_is_h2o_to_the_bit(fitted, dtype):
    """Or if its kernels are times 0. It takes over two seconds: no other quick test runs LESS."""
    got, state = decoded(SMALL, fitted_for(TINY, scale=0.0) if fitted else None, dtype)
    want, other = decoded(H2O(heavy=6, recent=8), None, dtype)
    np.testing.assert_array_equal(got, want)
    for layer, h2o in zip(state.layers, other.layers, strict=True):
        for field in ("cache", "positions", "mass"):
            jax.tree.map(np.testing.assert_array_equal, getattr(layer.live, field), getattr(h2o.live, field))
        assert not np.asarray(layer.live.numerator).any()
        assert not np.asarray(layer.live.denominator).any()


@pytest.mark.slow
def test_where_nothing_is_evicted_kernels_change_nothing():
    policy = LESS(heavy=0, recent=CAPACITY, state_rank=4, hidden=16)
    np.testing.assert_array_equal(decoded(policy, fitted_for(TINY))[0], decoded(policy)[0])


# With learned arrays


CASES = {
    "group2": ("group2", SMALL),
    "normalized": ("group2", dataclasses.replace(SMALL, normalize=True, state_rank=1)),
    "group1": ("group1", dataclasses.replace(SMALL, heavy=0, recent=12)),
    "wide": ("head_dim80", dataclasses.replace(SMALL, heavy=11, recent=1, hidden=7)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("row", range(3))
def test_against_the_oracle(case, row):
    """The logits of each row equal the oracle's, after the prompt and after each step."""
    name, policy = CASES[case]
    config = CONFIGS[name]
    fitted = fitted_for(config, policy)
    got = taught_run(case)[row]
    oracle = LESSOracle(
        model(config).weights, config, oracle_sisters.H2O(policy.heavy, policy.recent, policy.normalize)
    )
    oracle.fitted = fitted
    want = [oracle.prefill(PROMPT[row, : LENGTHS[row]].tolist())] + [oracle.step(int(token)) for token in STEPS[row]]
    np.testing.assert_allclose(got, np.stack(want), atol=1e-4)


@functools.cache
def taught_run(case):
    name, policy = CASES[case]
    config = CONFIGS[name]
    logits, _ = decoded(policy, fitted_for(config, policy), params=model(config))
    plain, _ = decoded(policy, params=model(config))
    assert np.abs(logits[0] - plain[0]).max() > 0.02  # the state matters
    return logits


@pytest.mark.slow
def test_arrays_that_are_given_are_those_of_the_law_table():
    """The law tests' policy TaughtLESS contains its kernels. The same kernels through `fitted` give the same logits."""
    settings = dict(heavy=6, recent=8, normalize=True, state_rank=4, hidden=16)
    one = random_kernels(SMALL, TINY.kv_heads, TINY.head_dim)
    fitted = jax.tree.map(lambda leaf: jnp.stack([leaf] * TINY.num_layers), one)
    given, state = decoded(LESS(**settings), fitted)
    np.testing.assert_allclose(given, decoded(TaughtLESS(**settings))[0], atol=1e-5)
    sizes = state_nbytes(state)
    assert sizes["fitted"] == (sum(leaf.nbytes for leaf in jax.tree.leaves(fitted)), 0)
    assert sizes["numerator"] == (4 * 3 * 3 * TINY.kv_heads * 4 * TINY.head_dim, 0)


@pytest.mark.slow
def test_a_taught_state_is_a_value(tmp_path):
    """Forks, taken and inserted rows, turns, prefill in pieces, and a saved state give the same logits."""
    fitted, params = fitted_for(TINY), model()
    _, state = decode.prefill(params, PROMPT, np.array(LENGTHS), SMALL, capacity=CAPACITY, fitted=fitted)
    want, after = run(params, state.fork(), STEPS[:, :6])
    np.testing.assert_allclose(decode.extend(params, STEPS[:, :6], [6] * 3, state.fork())[0], want[:, 5], atol=1e-5)
    turned = run(params, state.take([2, 0, 1]), STEPS[[2, 0, 1], :6])[0]
    np.testing.assert_allclose(turned, want[jnp.array([2, 0, 1])], atol=1e-5)
    _, pieces = decode.prefill(
        params, PROMPT, np.array(LENGTHS), SMALL, capacity=CAPACITY, fitted=fitted, prefill_chunk=13
    )
    joined = state.insert(1, pieces.take([1]))
    np.testing.assert_allclose(run(params, joined, STEPS[:, :6])[0], want, atol=1e-4)
    jshadow.save_state(tmp_path / "state", after, params)
    loaded = jshadow.load_state(tmp_path / "state", params)
    np.testing.assert_array_equal(run(params, loaded, STEPS[:, 6:9])[0], run(params, after, STEPS[:, 6:9])[0])


@pytest.mark.slow
def test_generate_takes_the_arrays_and_says_why_it_will_not():
    params, prompt = model(), random_tokens(40, seed=3).tolist()
    plain = jshadow.generate(params, prompt, SMALL, max_new_tokens=12)
    taught = jshadow.generate(params, prompt, SMALL, max_new_tokens=12, fitted=fitted_for(TINY, scale=30.0))
    assert taught.tokens != plain.tokens
    assert taught.report.device_bytes > plain.report.device_bytes
    for policy, fitted, message in (
        (jshadow.ShadowKV(rank=8), fitted_for(TINY), "uses no learned arrays"),
        (SMALL, {"phi": fitted_for(TINY)["phi"]}, r"fitted must have \['phi', 'psi'\], got \['phi'\]"),
        (
            dataclasses.replace(SMALL, hidden=17),
            fitted_for(TINY),
            r"fitted\.phi\.first must be float32 \(3, 2, 16, 17\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            jshadow.generate(params, prompt, policy, max_new_tokens=1, fitted=fitted)
    loki = jshadow.policies.Loki(budget=12, columns=5, calibration="offline")
    basis = loki.fit(params, random_tokens(80, seed=9))
    verified = jshadow.generate(params, prompt, loki, max_new_tokens=4, fitted=basis, verify=True)
    assert verified.tokens == jshadow.generate(params, prompt, loki, max_new_tokens=4, fitted=basis).tokens
    with pytest.raises(ConfigError, match="left out with a state"):
        jshadow.generate(params, [3], max_new_tokens=1, state=plain.state, fitted=fitted_for(TINY))
    with pytest.raises(ConfigError, match="what the fit of less returned"):
        decode.prefill(params, PROMPT, LENGTHS, SMALL, capacity=CAPACITY, fitted={"components": jnp.ones((3, 2))})


jitted_combine = jax.jit(combine)
slopes_of = jax.jit(jax.grad(lambda *args: combine(*args).sum(), argnums=(1, 2, 3)))


@pytest.mark.parametrize("lse", [-80.0, 0.0, 5.0, 300.0])
def test_no_size_of_scores_overflows(lse):
    """`combine` and its gradients are finite for all sizes of scores, also where no token was evicted."""
    out, top = np.ones((3, 2), np.float32), np.float32([[0.0, 0.0], [2e-8, 4e-8], [2e9, 4e9]])
    rest = np.full(3, lse, np.float32), top, np.float32([0.0, 1e-8, 1e9])
    got = jitted_combine(out, *rest)
    share = [0.0, 1 / (1 + np.exp(min(lse - np.log(1e-8), 700))), 1 / (1 + np.exp(min(lse - np.log(1e9), 700)))]
    want = np.array([[1 - s + 2 * s, 1 - s + 4 * s] for s in share])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert all(np.isfinite(slope).all() for slope in slopes_of(out, *rest))


@pytest.mark.parametrize(("name", "value"), [("state_rank", 0), ("hidden", 0), ("recent", 0), ("heavy", -1)])
def test_settings_are_checked(name, value):
    with pytest.raises(ConfigError, match=rf"less\.{name}"):
        LESS(**{name: value}).resolve(TINY, 96)


# Learned arrays of another state or policy


@pytest.mark.slow
def test_a_row_of_other_learned_arrays_is_refused():
    tokens, one = random_tokens(2, 40, seed=3), fitted_for(TINY)
    _, state = decode.prefill(model(), tokens, [40, 30], SMALL, capacity=64, fitted=one)
    for fitted in (fitted_for(TINY, scale=0.5), None):
        _, other = decode.prefill(model(), tokens[:1], [40], SMALL, capacity=64, fitted=fitted)
        with pytest.raises(StateMismatch, match="learned arrays"):
            state.insert(1, other)
    _, other = decode.prefill(model(), tokens[:1], [40], SMALL, capacity=64, fitted=jax.tree.map(jnp.array, one))
    state.insert(1, other)


@pytest.mark.parametrize("policy", [Full(), Loki()])
def test_learned_arrays_that_nobody_reads_are_refused(policy):
    with pytest.raises(ConfigError, match="fitted must be left out"):
        decode.prefill(model(), random_tokens(1, 9), [9], policy, capacity=16, fitted={"components": np.zeros(3)})


def test_learned_arrays_of_other_layers_are_refused():
    short = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], fitted_for(TINY))
    with pytest.raises(ConfigError, match="fitted must be what the fit of less returned"):
        decode.prefill(model(), random_tokens(1, 9), [9], SMALL, capacity=16, fitted=short)
