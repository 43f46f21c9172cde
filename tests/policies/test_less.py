"""LESS: equal to H2O without learned arrays, equal to an oracle with them; and the training of the arrays."""

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

import jshadow
from jshadow.cache.accounting import state_nbytes
from jshadow.cache.prompt_walk import prompts_of
from jshadow.cache.records import StepKV
from jshadow.engine import decode
from jshadow.errors import ConfigError, PromptError, StateMismatch
from jshadow.ops.attention import group_queries
from jshadow.planner.bytes import cache_specs
from jshadow.policies import H2O, LESS, Full, Loki
from jshadow.policies.less import combine
from jshadow.policies.less.training import answers, errors_of, make_examples


def start(policy, fitted=None, params=None, **options):
    """Logits and state of the batch of three lengths."""
    return decode.prefill(
        params or model(), PROMPT, np.array(LENGTHS), policy, capacity=CAPACITY, fitted=fitted, **options
    )


def decoded(policy, fitted=None, params=None):
    """Logits of the prompt and of all steps, and the state."""
    first, state = start(policy, fitted, params)
    rest, state = run(params or model(), state, STEPS)
    return np.concatenate([np.asarray(first)[:, None], rest], axis=1), state


@pytest.mark.parametrize(("fitted", "dtype"), one_of(2, [(False, "float32"), (True, "bfloat16")]))
def test_untaught_it_is_h2o_to_the_bit(fitted, dtype):
    """Or if its kernels are times 0. It takes over two seconds: no other quick test runs LESS."""
    got, state = decoded(SMALL, fitted_for(TINY, scale=0.0) if fitted else None, model(TINY, dtype))
    want, other = decoded(H2O(heavy=6, recent=8), None, model(TINY, dtype))
    np.testing.assert_array_equal(got, want)
    for layer, h2o in zip(state.layers, other.layers, strict=True):
        for field in ("cache", "positions", "mass"):
            jax.tree.map(np.testing.assert_array_equal, getattr(layer.live, field), getattr(h2o.live, field))
        assert not np.asarray(layer.live.numerator).any()
        assert not np.asarray(layer.live.denominator).any()


CASES = {
    "group2": SMALL,
    "group1": dataclasses.replace(SMALL, heavy=0, recent=12, normalize=True, state_rank=1),
    "head_dim80": dataclasses.replace(SMALL, heavy=11, recent=1, hidden=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(case):
    """The logits of each row equal the oracle's, after the prompt and after each step."""
    config, policy = CONFIGS.get(case, CONFIGS["group2"]), CASES[case]
    params, fitted = model(config), fitted_for(config, policy)
    logits, plain = (decoded(policy, arrays, params)[0] for arrays in (fitted, None))
    assert np.abs(logits[0] - plain[0]).max() > 0.02  # the state matters
    for row, length in enumerate(LENGTHS):
        h2o = oracle_sisters.H2O(policy.heavy, policy.recent, policy.normalize)
        oracle = oracle_sisters.LESSOracle(params.weights, config, h2o)
        oracle.fitted = fitted
        want = [oracle.prefill(PROMPT[row, :length].tolist()), *(oracle.step(int(token)) for token in STEPS[row])]
        np.testing.assert_allclose(logits[row], np.stack(want), atol=1e-4)


@pytest.mark.slow
def test_arrays_that_are_given_are_those_of_the_law_table():
    """The law tests' policy TaughtLESS contains its kernels. The same kernels through `fitted` give the same logits."""
    settings = dict(heavy=6, recent=8, normalize=True, state_rank=4, hidden=16)
    one = random_kernels(SMALL, TINY.kv_heads, TINY.head_dim)
    fitted = jax.tree.map(lambda leaf: np.stack([leaf] * TINY.num_layers), one)
    given, state = decoded(LESS(**settings), fitted)
    np.testing.assert_allclose(given, decoded(TaughtLESS(**settings))[0], atol=1e-5)
    sizes = state_nbytes(state)
    assert sizes["fitted"] == (sum(leaf.nbytes for leaf in jax.tree.leaves(fitted)), 0)
    assert sizes["numerator"] == (4 * 3 * 3 * TINY.kv_heads * 4 * TINY.head_dim, 0)


@pytest.mark.slow
def test_a_taught_state_is_a_value(tmp_path):
    """Forks, taken and inserted rows, turns, prefill in pieces, and a saved state give the same logits."""
    fitted, params = fitted_for(TINY), model()
    _, state = start(SMALL, fitted)
    want, after = run(params, state.fork(), STEPS[:, :6])
    np.testing.assert_allclose(decode.extend(params, STEPS[:, :6], [6] * 3, state.fork())[0], want[:, 5], atol=1e-5)
    turned = run(params, state.take([2, 0, 1]), STEPS[[2, 0, 1], :6])[0]
    np.testing.assert_allclose(turned, want[[2, 0, 1]], atol=1e-5)
    joined = state.insert(1, start(SMALL, fitted, prefill_chunk=13)[1].take([1]))
    np.testing.assert_allclose(run(params, joined, STEPS[:, :6])[0], want, atol=1e-4)
    jshadow.save_state(tmp_path / "state", after, params)
    loaded = jshadow.load_state(tmp_path / "state", params)
    np.testing.assert_array_equal(run(params, loaded, STEPS[:, 6:9])[0], run(params, after, STEPS[:, 6:9])[0])


@pytest.mark.slow
def test_generate_takes_the_arrays_and_says_why_it_will_not():
    config = CONFIGS["group2"]
    params, prompt = model(config), random_tokens(40, seed=3).tolist()
    plain = jshadow.generate(params, prompt, SMALL, max_new_tokens=12)
    taught = jshadow.generate(params, prompt, SMALL, max_new_tokens=12, fitted=fitted_for(config, scale=30.0))
    assert taught.tokens != plain.tokens
    assert taught.report.device_bytes > plain.report.device_bytes
    loki = Loki(budget=12, columns=5, calibration="offline")
    basis = loki.fit(params, random_tokens(80, seed=9))
    verified = jshadow.generate(params, prompt, loki, max_new_tokens=4, fitted=basis, verify=True)
    assert verified.tokens == jshadow.generate(params, prompt, loki, max_new_tokens=4, fitted=basis).tokens
    with pytest.raises(ConfigError, match="left out with a state"):
        jshadow.generate(params, [3], max_new_tokens=1, state=plain.state, fitted=fitted_for(config))


BAD_ARRAYS = [
    (jshadow.ShadowKV(rank=8), fitted_for(TINY), "uses no learned arrays"),
    (Full(), {"components": np.zeros(3)}, "fitted must be left out"),
    (Loki(), {"components": np.zeros(3)}, "fitted must be left out"),
    (SMALL, {"phi": fitted_for(TINY)["phi"]}, r"fitted must have \['phi', 'psi'\], got \['phi'\]"),
    (SMALL, {"components": np.ones((3, 2))}, "what the fit of less returned"),
    (SMALL, jax.tree.map(lambda leaf: np.asarray(leaf)[:1], fitted_for(TINY)), "what the fit of less returned"),
    (dataclasses.replace(SMALL, hidden=17), fitted_for(TINY), r"fitted\.phi\.first must be float32 \(3, 2, 16, 17\)"),
]


def test_learned_arrays_that_do_not_fit_are_refused():
    for policy, fitted, message in BAD_ARRAYS:
        with pytest.raises(ConfigError, match=message):
            start(policy, fitted)


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


TEXT, OTHER = random_tokens(4, 200, seed=31), random_tokens(2, 200, seed=32)
TRAINED = dataclasses.replace(SMALL, state_rank=8, hidden=32)


def layer_spec(policy, tokens, batch=1):
    return cache_specs(TINY, policy.resolve(TINY, tokens), batch, tokens, tokens, "float32", "resident")[0]


def test_what_is_trained_is_what_a_step_does():
    """The masked sums over a text equal the results of LESS's hooks, token by token, which evict as H2O's."""
    text, kernels = TEXT[:1, :90], random_kernels(SMALL, TINY.kv_heads, TINY.head_dim)
    prompt = next(prompts_of(model(), text))
    examples = jax.jit(make_examples, static_argnames="spec")(prompt, spec=layer_spec(H2O(heavy=6, recent=8), 90))
    spec = layer_spec(SMALL, 90)
    shift = np.zeros(TINY.kv_heads, np.float32)
    got = np.asarray(jax.jit(answers)(kernels, examples.q, np.arange(90), examples, shift))
    state = jax.jit(lambda: SMALL.init(spec))()

    @jax.jit
    def one(state, q, k, v, at):
        at = jnp.full((1, 1), at)
        step = StepKV(q, q, k, k, v, at, at >= 0, at[:, 0], *[jnp.zeros(0)] * 3, learned=kernels)
        state, _ = SMALL.append(spec, state, step)
        out, state = SMALL.attend(spec, state, step, None)
        return group_queries(out, TINY.kv_heads), state

    rows = [np.asarray(x) for x in (prompt.q_post, prompt.k_post, prompt.v)]
    for at in range(90):
        out, state = one(state, *(x[:, at : at + 1] for x in rows), np.int32(at))
        want = np.asarray(out)[:, :, :, 0]
        np.testing.assert_allclose(got[:, :, :, at], want, atol=2e-5, err_msg=str(at))


@functools.cache
def trained(seed=0, steps=120):
    """The learned arrays, and the list of reported progress."""
    reports = []
    fitted = TRAINED.fit(model(), TEXT, steps=steps, rate=3e-3, seed=seed, progress=lambda *done: reports.append(done))
    return fitted, reports


@pytest.mark.slow
def test_training_brings_every_layer_nearer_to_full_attention():
    """On texts without training, the error of each layer is at most half of H2O's."""
    errors = errors_of(TRAINED, model(), OTHER, trained()[0])
    assert errors.shape == (3, 2)
    assert (errors[:, 1] < 0.5 * errors[:, 0]).all(), errors
    untaught = errors_of(TRAINED, model(), OTHER, jax.tree.map(jnp.zeros_like, trained()[0]))
    np.testing.assert_array_equal(untaught[:, 0], untaught[:, 1])
    np.testing.assert_allclose(untaught[:, 0], errors[:, 0])


@pytest.mark.slow
def test_trained_arrays_bring_a_decode_nearer_to_full_attention():
    """The prompt is compressed at once, which the training does not simulate, and the logits are still closer."""
    params, tokens, steps = model(), random_tokens(4, 120, seed=41), random_tokens(4, 20, seed=42)
    logits = [
        run(params, decode.prefill(params, tokens, [120] * 4, policy, capacity=160, fitted=fitted)[1], steps)[0]
        for policy, fitted in ((Full(), None), (TRAINED, None), (TRAINED, trained()[0]))
    ]
    plain, taught = (np.square(np.asarray(one - logits[0])).mean() for one in logits[1:])
    assert taught < 0.7 * plain, (taught, plain)


@pytest.mark.slow
def test_training_is_what_its_seed_says():
    fitted, reports = trained(steps=53)
    again, _ = trained.__wrapped__(steps=53)
    jax.tree.map(np.testing.assert_array_equal, fitted, again)
    other, _ = trained(seed=1, steps=53)
    assert np.abs(other["phi"]["first"] - fitted["phi"]["first"]).max() > 0.1
    assert reports == [(50, 159), (53, 159), (103, 159), (106, 159), (156, 159), (159, 159)]
    assert {leaf.dtype for leaf in jax.tree.leaves(fitted)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_layers_with_a_window_learn_nothing():
    config = dataclasses.replace(TINY, sliding_window=16, sliding_layers=(0, 2))
    fitted = TRAINED.fit(model(config), TEXT[:1, :64], steps=2)
    scale = np.asarray(fitted["psi"]["scale"])
    assert not scale[[0, 2]].any()
    assert scale[1].any()
    errors = errors_of(TRAINED, model(config), TEXT[:1, :64], fitted)
    assert np.isnan(errors).tolist() == [[True] * 2, [False] * 2, [True] * 2]
    assert np.isfinite(start(TRAINED, fitted, model(config))[0]).all()


BAD_FITS = [
    (dict(tokens=TEXT[0, :15]), PromptError, "nothing is evicted"),
    (dict(tokens=np.zeros((1, 0), np.int32)), PromptError, "tokens must be integers"),
    (dict(tokens=np.ones(40)), PromptError, "tokens must be integers"),
    (dict(tokens=np.ones((1, 2, 40), int)), PromptError, "tokens must be integers"),
    (dict(tokens=np.full(40, 101)), PromptError, r"vocab_size=101"),
    (dict(tokens=np.ones(300, int)), PromptError, "context=256"),
    (dict(steps=0), ConfigError, "fit's steps"),
    (dict(rate=float("nan")), ConfigError, "fit's rate"),
]


def test_bad_fits_are_told():
    for settings, error, message in BAD_FITS:
        with pytest.raises(error, match=message):
            TRAINED.fit(model(), **dict(tokens=TEXT[0]) | settings)
