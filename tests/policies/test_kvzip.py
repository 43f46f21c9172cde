"""KVzip's scores are those of a NumPy oracle, which reads each prompt and request as one text of one row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import TINY
from family_cases import short_hybrid
from few import one_of
from tokenizers_by_kind import TOKENIZERS

import jshadow
from jshadow import AdaKV, Full, KVzip, Params, Quest, RocketKV
from jshadow.cache.prompt_walk import check_text, walk_layers
from jshadow.engine.prefill.layer import Given, LayerPlan, SecondWork, read_request
from jshadow.engine.prefill.whole import advance, begin_prefill, finish_prefill, prefill, prefill_many
from jshadow.errors import ConfigError, PromptError
from jshadow.models.transformer import abstract_weights
from jshadow.ops.attention import causal_attention
from jshadow.ops.rope import inverse_frequencies
from jshadow.planner.machine import prefill_peak
from jshadow.policies.base import full_layers
from jshadow.policies.eviction import KeptBlocks
from jshadow.policies.sizing import at_share, device_share
from jshadow.weights.params import init_params

REQUEST = "\n\nRepeat the previous context exactly.\n"
NEXT = "\n\nRepeat the part of the previous context exactly, starting with"
MODELS = {
    "group2": dataclasses.replace(TINY, num_layers=2, context=512),
    "group5": dataclasses.replace(TINY, num_layers=2, context=512, q_heads=5, kv_heads=1, head_dim=8, qk_norm=True),
    "sliding": dataclasses.replace(TINY, num_layers=2, context=512, sliding_window=12, sliding_layers=(0,)),
    "hybrid": short_hybrid("qwen3_5"),
}
# A chunk larger than the prompts, chunks of which the last is short, and chunks shorter than the sinks.
POLICIES = {
    "whole": KVzip(kept=9, sinks=2),
    "chunks": KVzip(kept=9, chunk=17, normalized=True),
    "short": KVzip(kept=9, chunk=3, sinks=5),
}
LENGTHS, TEXT = (40, 17, 1), 144  # of the prompts; of the longest prompt with a request, or more


def model(name, dtype="float32", words=False):
    """A random model, with a tokenizer that gives a token for each byte, or with none. Random prompts, padded."""
    config = dataclasses.replace(MODELS[name], vocab_size=TOKENIZERS["plain"].vocab_size + 8)
    params = dataclasses.replace(init_params(config, 3, dtype), tokenizer=TOKENIZERS["plain"] if words else None)
    ids = np.random.default_rng(5).integers(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)))
    real = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    return params, np.where(real, ids, 0).astype(np.int32), np.array(LENGTHS)


def scores_of(params, policy, tokens, lengths):
    """The scores of the second pass in each layer that sees all tokens, from the library."""
    partial = begin_prefill(params, tokens, lengths, policy, capacity=128, prefill_chunk=16)
    found = []
    while not partial.done:
        layer = len(partial.layers)
        if partial.schedule.units[layer][partial.unit].work == "compress":
            scores = partial.work.begun.second_pass
            found.append(None if scores is None else np.asarray(scores))
        partial = advance(partial)
    return [found[layer] for layer in full_layers(params.config)]


def requests(params, ids, chunk):
    """For each chunk of one prompt, its first position and the tokens of its request."""

    def words(text):
        return [] if params.tokenizer is None else params.tokenizer.encode(text, add_special_tokens=False)

    for start in range(0, len(ids), chunk):
        before = [*words(NEXT), *ids[max(0, start - 8) : start], *words("\n")] if start else words(REQUEST)
        yield start, [*before, *ids[start : start + chunk]]


def layers_of(params, text):
    """For each layer: queries, keys and values after RoPE of a text [S, h, d], and the norms of its inputs [S].

    Texts are padded to one length, so that they share programs. No token sees the padding behind it.
    """
    config, size = params.config, len(text)
    text = [*text, *[0] * (TEXT - size)]

    def keep(heads, turn, kind):
        q, k = turn.queries(heads.q_pre), turn.keys(heads.k_pre)
        out, _ = causal_attention(q, k, heads.v, config.attention_scale, 0, kind.window)
        return out, (q, k, heads.v, jnp.linalg.norm(heads.x_in.astype(jnp.float32), axis=-1))

    for found in walk_layers(params, check_text(config, text), keep):
        yield found and [np.asarray(x[0], np.float64)[:size] for x in found]


def oracle(params, policy, ids):
    """The scores [h, n] of one prompt in each layer that sees all tokens, in float64."""
    config, count = params.config, len(ids)
    group = config.q_heads // config.kv_heads
    kept = [np.zeros((config.kv_heads, count)) for _ in range(config.num_layers)]
    for start, request in requests(params, ids, policy.chunk):
        stop = min(start + policy.chunk, count)
        layers = list(layers_of(params, [*ids, *request]))
        for layer in full_layers(config):
            q, k, v, norms = layers[layer]
            kernel = np.asarray(params.weights[f"layer_{layer}"]["attention"]["o"]["kernel"], np.float64)
            kernel = kernel.reshape(config.q_heads, config.head_dim, -1)
            sinks = list(range(min(policy.sinks, start)))
            for head in range(config.q_heads):
                for at in range(count, count + len(request)):
                    seen = [*sinks, *range(start, stop), *range(count, at + 1)]
                    logits = k[seen, head // group] @ q[at, head] * config.attention_scale
                    shares = np.exp(logits - logits.max())
                    shares = (shares / shares.sum())[len(sinks) : len(sinks) + stop - start]
                    if policy.normalized:
                        shares *= np.linalg.norm(v[start:stop, head // group] @ kernel[head], axis=1) / norms[at]
                    best = kept[layer][head // group, start:stop]
                    np.maximum(best, shares, out=best)
    return [kept[layer] for layer in full_layers(config)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "dtype", "words", "tolerance"),
    [
        ("group2", "whole", "bfloat16", False, 3e-2),
        ("group5", "chunks", "float32", True, 3e-6),
        ("sliding", "short", "float32", False, 3e-6),
        ("hybrid", "chunks", "float32", True, 1e-4),
    ],
)
def test_the_scores_are_those_of_the_oracle(name, kind, dtype, words, tolerance):
    (params, tokens, lengths), policy = model(name, dtype, words), POLICIES[kind]
    found = scores_of(params, policy, tokens, lengths)
    for row, count in enumerate(lengths):
        for ours, theirs in zip(found, oracle(params, policy, tokens[row, :count].tolist()), strict=True):
            np.testing.assert_allclose(ours[row, :, :count], theirs, rtol=tolerance, atol=tolerance)
            assert not ours[row, :, count:].any()


def same_keys(states, of) -> None:
    """All layers of two states have equal keys."""
    for one, other in zip(*(state.layers for state in states), strict=True):
        np.testing.assert_array_equal(of(one), of(other))


@pytest.mark.slow
def test_the_best_tokens_and_the_first_ones_are_kept():
    """And the prefill of the prompt does not change, nor what is kept if KVzip is alone or in steps."""
    (params, tokens, lengths), policy = model("group2", words=True), KVzip(kept=9, chunk=17)
    scores = scores_of(params, policy, tokens, lengths)
    logits, alone = prefill(params, tokens, lengths, Full(), capacity=128)
    (both, full), (_, state) = prefill_many(params, tokens, lengths, [Full(), policy], capacity=128)
    np.testing.assert_array_equal(logits, both)
    same_keys((alone, full), lambda layer: layer.live.cache.k)
    stepped = finish_prefill(params, begin_prefill(params, tokens, lengths, policy, capacity=128))[1]
    same_keys((state, stepped), lambda layer: layer.frozen.kept.k)
    for layer, frozen in enumerate(one.frozen for one in state.layers):
        assert isinstance(frozen, KeptBlocks)
        keys = np.asarray(full.layers[layer].live.cache.k)
        for row, count in enumerate(lengths):
            order = scores[layer][row, :, :count].astype(np.float64)
            order[:, : policy.sinks] = np.inf
            best = np.argsort(-order.reshape(-1), kind="stable")[: min(policy.kept, count) * params.config.kv_heads]
            want = {keys[row, at // count, at % count].tobytes() for at in best}
            blocks = zip(np.asarray(frozen.held[row]), np.asarray(frozen.kept.k[row]), strict=True)
            assert {key.tobytes() for held, block in blocks for key in block[:held]} == want
    _, few = prefill(params, tokens, lengths, KVzip(kept=2, sinks=4), capacity=128)  # each head keeps first tokens
    for layer in few.layers:
        owner, held = np.asarray(layer.frozen.owner), np.asarray(layer.frozen.held)
        for row, count in enumerate(lengths):
            each = [int(held[row][owner[row] == head].sum()) for head in range(params.config.kv_heads)]
            assert each == [min(2, count)] * params.config.kv_heads


def test_a_share_of_the_bytes_decides_only_the_number_of_tokens():
    for policy in (KVzip(chunk=100, sinks=7, normalized=True), RocketKV(scores="kvzip", recent=9)):
        sized = at_share(policy, 0.3, 2048, TINY)
        assert device_share(sized, 2048, TINY) <= 0.3
        assert all(getattr(sized, name) == getattr(policy, name) for name in policy.size_free)
        assert sized.kept < 2048


@pytest.mark.slow
def test_prompts_of_one_padded_width_share_a_program():
    params, policy = model("group2", words=True)[0], KVzip(kept=9, chunk=16)
    wide = np.random.default_rng(1).integers(1, 90, (2, 64)).astype(np.int32)
    before = read_request._cache_size()
    for lengths in ((64, 20), (33, 7), (16, 1)):
        tokens = np.where(np.arange(64) < np.array(lengths)[:, None], wide, 0)
        finish_prefill(params, begin_prefill(params, tokens, np.array(lengths), policy, capacity=128))
    assert read_request._cache_size() == before + 1


def test_second_passes_and_prompts_that_do_not_fit_are_refused():
    params, tokens, lengths = model("group2")
    with pytest.raises(ConfigError, match="policies must need equal second passes to share a prefill"):
        prefill_many(params, tokens, lengths, [KVzip(), Quest(), KVzip(normalized=True)], capacity=128)
    small = Params(params.weights, dataclasses.replace(params.config, context=90))
    with pytest.raises(PromptError, match=r"context=90, got 91 tokens for a prompt of 50 and chunk=41"):
        prefill(small, np.ones((1, 50), np.int32), np.array([50]), KVzip(chunk=41), capacity=60)


@pytest.mark.slow
def test_a_prompt_whose_requests_just_fit_is_answered():
    params = model("group2")[0]
    small = Params(params.weights, dataclasses.replace(params.config, context=90))
    assert jshadow.generate(small, [1] * 50, policy=KVzip(kept=20, chunk=8), max_new_tokens=2).tokens


@pytest.mark.parametrize(
    ("tokens", "chunk", "rows", "normalized"),
    one_of(4, [(4000, 1000, 3, True), (2048, 2048, 1, False), (4096, 512, 2, True), (4000, 1000, 3, False)]),
)
def test_the_compiled_program_keeps_to_the_bound(tokens, chunk, rows, normalized):
    """The bound covers XLA's temporaries, the hidden states and the scores. The last two are replaced in place."""
    config = dataclasses.replace(MODELS["group2"], context=2**15, model_dim=256, ffn_dim=512, q_heads=8, head_dim=32)
    policy = KVzip(kept=64, chunk=chunk, normalized=normalized)
    second = policy.reads.second_pass
    sizes = {"batch": rows, "tokens": tokens, "capacity": tokens + 64, "dtype": "float32"}
    peak = prefill_peak(config, policy, **sizes)["second_pass"]
    size, chunks = second.most_tokens(tokens), -(-tokens // chunk)
    plan = LayerPlan(config, config.attention_kind(0), False, 0, tokens, second_pass=second)
    abstract = jax.ShapeDtypeStruct
    weights = jax.tree.map(lambda x: abstract(x.shape, "float32"), abstract_weights(config)["layer_0"])
    prompt = jax.eval_shape(lambda lengths: plan.empty_prompt(lengths, tokens, "float32"), abstract((rows,), "int32"))
    work = SecondWork(abstract((chunks, rows, size, 256), "float32"), abstract((chunks, rows), "int32"))
    given = Given(weights, inverse_frequencies(config.rope, config.head_dim))
    memory = read_request.lower(given, work, prompt, np.int32(0), plan=plan).compile().memory_analysis()
    scores = 4 * rows * config.kv_heads * tokens
    assert memory.alias_size_in_bytes >= 4 * chunks * rows * size * 256 + scores
    assert memory.temp_size_in_bytes + 4 * chunks * rows * size * 256 + scores <= peak
    assert prefill_peak(config, AdaKV(kept=64), **sizes)["second_pass"] == 0
