"""The training of LESS: its examples, the errors of the learned arrays, and refused arguments."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_sisters
import pytest
from cases import CAPACITY, LENGTHS, PROMPT, STEPS, TINY, model, random_kernels, random_tokens
from cases import run_steps as run
from less_arrays import SMALL

import jshadow
from jshadow.cache.prompt_walk import prompts_of
from jshadow.cache.records import StepKV
from jshadow.engine import decode
from jshadow.errors import ConfigError, PromptError
from jshadow.ops.attention import group_queries
from jshadow.planner.bytes import cache_specs
from jshadow.policies import H2O
from jshadow.policies.less.errors import errors_of
from jshadow.policies.less.training import answers, evictions, make_examples

TEXT, OTHER = random_tokens(4, 200, seed=31), random_tokens(2, 200, seed=32)
TRAINED = dataclasses.replace(SMALL, state_rank=8, hidden=32)


def layer_spec(policy, tokens, batch=1):
    return cache_specs(TINY, policy.resolve(TINY, tokens), batch, tokens, tokens, "float32", "resident")[0]


def test_evictions_are_those_of_the_oracle_s_h2o():
    """The oracle decodes from an empty cache and keeps its tokens in dictionaries."""
    policy, text = H2O(heavy=6, recent=8), TEXT[:1, :90]
    prompt = next(prompts_of(model(), text))
    gone = np.asarray(jax.jit(evictions, static_argnums=1)(prompt, layer_spec(policy, 90)))[0]
    q, k = (np.asarray(x, np.float64)[0] for x in (prompt.q_post, prompt.k_post))
    oracle, want = oracle_sisters.H2O(heavy=6, recent=8), np.full((TINY.kv_heads, 90), 90)
    memory = [{} for _ in range(TINY.kv_heads)]
    for at in range(90):
        seen, _ = oracle.see(memory, q[at], k[: at + 1])
        probs = []
        for head, positions in enumerate(seen):
            logits = k[positions, head // TINY.group] @ q[at, head] * TINY.attention_scale
            probs.append(np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())
        before = [set(one) for one in memory]
        oracle.saw(memory, seen, probs, at + 1)
        for head, held in enumerate(before):
            for position in held - set(memory[head]):
                want[head, position] = at
    np.testing.assert_array_equal(gone, want)


def test_what_is_trained_is_what_a_step_does():
    """The masked sums over a text equal the results of LESS's hooks, token by token."""
    text, kernels = TEXT[:1, :70], random_kernels(SMALL, TINY.kv_heads, TINY.head_dim)
    prompt = next(prompts_of(model(), text))
    examples = jax.jit(make_examples, static_argnames="spec")(prompt, spec=layer_spec(H2O(heavy=6, recent=8), 70))
    spec = layer_spec(SMALL, 70)
    shift = np.zeros(TINY.kv_heads, np.float32)
    got = np.asarray(jax.jit(answers)(kernels, examples.q, np.arange(70), examples, shift))
    state = jax.jit(lambda: SMALL.init(spec))()

    @jax.jit
    def one(state, q, k, v, at):
        at = jnp.full((1, 1), at)
        step = StepKV(q, q, k, k, v, at, at >= 0, at[:, 0], *[jnp.zeros(0)] * 3, learned=kernels)
        state, _ = SMALL.append(spec, state, step)
        out, state = SMALL.attend(spec, state, step, None)
        return group_queries(out, TINY.kv_heads), state

    rows = [np.asarray(x) for x in (prompt.q_post, prompt.k_post, prompt.v)]
    for at in range(70):
        out, state = one(state, *(x[:, at : at + 1] for x in rows), np.int32(at))
        want = np.asarray(out)[:, :, :, 0]
        np.testing.assert_allclose(got[:, :, :, at], want, atol=2e-5, err_msg=str(at))


@functools.cache
def trained(seed=0, steps=120):
    """The learned arrays, and the list of reported progress."""
    reports = []

    def note(done, total):
        reports.append((done, total))

    return TRAINED.fit(model(), TEXT, steps=steps, rate=3e-3, seed=seed, progress=note), reports


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
    params, tokens = model(), random_tokens(4, 120, seed=41)
    steps = random_tokens(4, 20, seed=42)
    logits = [
        run(params, decode.prefill(params, tokens, [120] * 4, policy, capacity=160, fitted=fitted)[1], steps)[0]
        for policy, fitted in ((jshadow.Full(), None), (TRAINED, None), (TRAINED, trained()[0]))
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
    assert np.isnan(errors_of(TRAINED, model(config), TEXT[:1, :64], fitted)).tolist() == [
        [True] * 2,
        [False] * 2,
        [True] * 2,
    ]
    params = model(config)
    first, state = decode.prefill(params, PROMPT, np.array(LENGTHS), TRAINED, capacity=CAPACITY, fitted=fitted)
    logits, _ = run(params, state, STEPS)
    assert np.isfinite(first).all()
    assert np.isfinite(logits).all()


BAD_FITS = {
    "short": (dict(tokens=TEXT[0, :15]), PromptError, "nothing is evicted"),
    "empty": (dict(tokens=np.zeros((1, 0), np.int32)), PromptError, "tokens must be integers"),
    "floats": (dict(tokens=np.ones(40)), PromptError, "tokens must be integers"),
    "three_axes": (dict(tokens=np.ones((1, 2, 40), int)), PromptError, "tokens must be integers"),
    "id": (dict(tokens=np.full(40, 101)), PromptError, r"vocab_size=101"),
    "long": (dict(tokens=np.ones(300, int)), PromptError, "context=256"),
    "steps": (dict(steps=0), ConfigError, "fit's steps"),
    "rate": (dict(rate=float("nan")), ConfigError, "fit's rate"),
}


@pytest.mark.parametrize("case", BAD_FITS)
def test_bad_fits_are_told(case):
    settings, error, message = BAD_FITS[case]
    with pytest.raises(error, match=message):
        TRAINED.fit(model(), **dict(tokens=TEXT[0]) | settings)
