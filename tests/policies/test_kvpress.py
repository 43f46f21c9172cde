"""NVIDIA's kvpress keeps the tokens that jshadow keeps: SmolLM2, all layers and heads, token by token.

These tests exist only where kvpress is installed. docs/benchmarks/tests.md has the commands and the figures.
"""

import argparse
import functools
import importlib.util
import inspect
import pydoc_data.topics

import jax
import numpy as np
import pytest

import jshadow
from jshadow import TOVA, AdaKV, ExpectedAttention, Full, KeyDiff, KVzip, SnapKV
from jshadow.cache.prompt_walk import prompts_of
from jshadow.cli.demo_text import document
from jshadow.engine.prefill.whole import prefill_many
from jshadow.planner.bytes import cache_specs
from jshadow.policies.eviction import KeptPrompt

pytestmark = [pytest.mark.real, pytest.mark.parity, pytest.mark.timeout(2400)]
TEXTS = {
    "documentation": (pydoc_data.topics.topics["specialnames"], 1024),
    "code": (inspect.getsource(argparse), 512),
    "diary": (document(), 777),
}
RATIOS = (0.5, 0.75)  # the share of the tokens that is dropped
ALL = 0.9999  # both libraries compute in float32, but they add in another order
# The policy that keeps n tokens, the name and the settings of the press, and the share of tokens that must be the same.
METHODS = {
    "tova": (lambda n: TOVA(kept=n), "TOVAPress", {}, ALL),
    "keydiff": (lambda n: KeyDiff(kept=n), "KeyDiffPress", {}, ALL),
    "expected_attention": (lambda n: ExpectedAttention(kept=n), "ExpectedAttentionPress", {}, ALL),
    "expected_attention, epsilon": (
        lambda n: ExpectedAttention(kept=n, sinks=7, future=64, epsilon=0.01),
        "ExpectedAttentionPress",
        {"n_sink": 7, "n_future_positions": 64, "epsilon": 0.01},
        ALL,
    ),
    "snapkv": (lambda n: SnapKV(n, observation_window=64, kernel=5, pooling="avg"), "SnapKVPress", {}, ALL),
    "snapkv, defaults": (lambda n: SnapKV(n), "SnapKVPress", {}, 0.75),
    "adakv, keydiff": (lambda n: AdaKV(kept=n, scores="keydiff"), "KeyDiffPress", {}, ALL),
    "adakv, expected_attention": (
        lambda n: AdaKV(kept=n, scores="expected_attention", safeguard=0.4),
        "ExpectedAttentionPress",
        {},
        ALL,
    ),
}
TWICE = {"kvzip": False, "kvzip, normalized": True}  # those that read a prompt twice, in chunks of CHUNK tokens
CHUNK = 400
SAFEGUARDS = {"adakv, keydiff": 0.2, "adakv, expected_attention": 0.4}  # of those that share a budget


def places(kept, every):
    """For each head, the positions of its kept keys [n, d] among all keys [S, d]. Kept keys are exact copies."""
    found = []
    for some, all_of_them in zip(kept, every, strict=True):
        position = {key.tobytes(): at for at, key in enumerate(all_of_them)}
        found.append(sorted(position[key.tobytes()] for key in some))
    return found


def kept_keys(frozen):
    """The kept keys of each head, [n, d] each, of the first row."""
    if isinstance(frozen, KeptPrompt):
        return list(np.asarray(frozen.kept.k[0]))
    owner, held, blocks = (np.asarray(x[0]) for x in (frozen.owner, frozen.held, frozen.kept.k))
    return [
        np.concatenate([block[:count] for one, count, block in zip(owner, held, blocks, strict=True) if one == head])
        for head in range(owner.max() + 1)
    ]


@functools.cache
def their_model(folder):
    """The model as kvpress takes it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@functools.cache
def our_model(folder):
    """The model in float32."""
    return jshadow.load(folder, dtype="float32")


def unmasked(masked, shape):
    """For each head, the positions [n] that kvpress did not mask, of `shape` heads and tokens."""
    there = np.ones(shape, bool)
    there[tuple(index.numpy() for index in masked[1:])] = False
    return [np.flatnonzero(head).tolist() for head in there]


def theirs(folder, tokens):
    """The positions that kvpress keeps, by method, ratio and layer; in one pass, because a press changes no prefill."""
    import kvpress
    import torch
    from transformers import DynamicCache

    model = their_model(folder)
    presses = {
        (name, ratio): getattr(kvpress, press)(compression_ratio=ratio, **settings)
        for name, (_, press, settings, _) in METHODS.items()
        for ratio in RATIOS
    }
    for (name, ratio), press in presses.items():
        if name in SAFEGUARDS:
            presses[name, ratio] = kvpress.AdaKVPress(press, SAFEGUARDS[name])
    found = {}

    class Every(kvpress.BasePress):
        """Lets each press compress, and keeps all keys and values."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for name, press in presses.items():
                kept, _ = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                masked = getattr(module, "masked_key_indices", None)
                if masked is None:
                    found[*name, module.layer_idx] = places(kept[0].numpy(), keys[0].numpy())
                    continue
                module.masked_key_indices = None  # so that it changes no attention
                found[*name, module.layer_idx] = unmasked(masked, keys.shape[1:3])
            return keys, values

    with torch.no_grad(), Every()(model):
        model(torch.tensor([tokens]), past_key_values=DynamicCache())
    return found


def ours(folder, tokens):
    """The positions that jshadow keeps, in the same form."""
    params, count, found, programs = our_model(folder), len(tokens), {}, {}
    for name, (policy_of, *_) in METHODS.items():
        for ratio in RATIOS:
            policy = policy_of(max(1, int(count * (1 - ratio)))).resolve(params.config, count)
            spec = cache_specs(params.config, policy, 1, count, count, "float32", "resident")[0]
            program = jax.jit(
                lambda prompt, policy=policy, spec=spec: policy.compress(spec, policy.init(spec), prompt)[0].frozen
            )
            programs[name, ratio] = program, policy.reads.last_queries
    for layer, prompt in enumerate(prompts_of(params, np.array(tokens))):
        every = np.asarray(prompt.k_post[0]).swapaxes(0, 1)
        for name, (compress, last) in programs.items():
            tail = prompt.q_post[:, count - last :] if last else None
            found[*name, layer] = places(kept_keys(compress(prompt.replace(q_tail=tail))), every)
    return found


def theirs_twice(folder, tokens, monkeypatch):
    """The positions that kvpress keeps by KVzip. Its tokenizer has no chat template, as ours needs none."""
    import kvpress
    import torch
    from kvpress.presses import kvzip_press
    from transformers import AutoTokenizer, DynamicCache

    model, found = their_model(folder), {}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    monkeypatch.setattr(kvzip_press.AutoTokenizer, "from_pretrained", lambda _: tokenizer)
    for name, normalized in TWICE.items():
        for ratio in RATIOS:
            press = kvpress.KVzipPress(ratio, layerwise=True, kvzip_plus_normalization=normalized, chunk_size=CHUNK)
            with torch.no_grad(), press(model):
                model(input_ids=torch.tensor([tokens]), past_key_values=DynamicCache())
            for layer in model.model.layers:
                module = layer.self_attn
                found[name, ratio, module.layer_idx] = unmasked(
                    module.masked_key_indices, (model.config.num_key_value_heads, len(tokens))
                )
                module.masked_key_indices = None
    return found


def ours_twice(folder, tokens):
    """The positions that jshadow keeps by KVzip, in the same form."""
    params, count, found = our_model(folder), len(tokens), {}
    for name, normalized in TWICE.items():
        kept = [max(1, int(count * (1 - ratio))) for ratio in RATIOS]
        policies = [KVzip(kept=n, chunk=CHUNK, normalized=normalized) for n in kept]
        states = prefill_many(params, np.array([tokens]), np.array([count]), [Full(), *policies], capacity=count)
        (_, full), *others = states
        for ratio, (_, state) in zip(RATIOS, others, strict=True):
            for layer, (every, some) in enumerate(zip(full.layers, state.layers, strict=True)):
                found[name, ratio, layer] = places(kept_keys(some.frozen), np.asarray(every.live.cache.k[0]))
    return found


if importlib.util.find_spec("kvpress") is not None:

    @pytest.mark.filterwarnings("ignore")  # of kvpress and the packages that it imports
    @pytest.mark.parametrize("text", TEXTS)
    def test_kvpress_keeps_the_same_tokens(text, smollm2_dir, record_property, monkeypatch):
        written, count = TEXTS[text]
        tokens = our_model(smollm2_dir).tokenizer.encode(written)[:count]
        assert len(tokens) == count
        want, got = theirs(smollm2_dir, tokens), ours(smollm2_dir, tokens)
        want |= theirs_twice(smollm2_dir, tokens, monkeypatch)
        got |= ours_twice(smollm2_dir, tokens)
        assert want.keys() == got.keys()
        shares = {name: least for name, (*_, least) in METHODS.items()} | dict.fromkeys(TWICE, ALL)
        for name, least in shares.items():
            for ratio in RATIOS:
                same = total = heads = 0
                for layer in range(30):
                    for one, other in zip(want[name, ratio, layer], got[name, ratio, layer], strict=True):
                        if name not in SAFEGUARDS and name not in TWICE:
                            assert len(set(one)) == len(set(other)) == len(one) == int(count * (1 - ratio))
                        same, total = same + len(set(one) & set(other)), total + len(other)
                        heads += set(one) != set(other)
                record_property(f"{name}, {ratio}", f"{same} of {total} tokens, {heads} heads of 90 differ")
                assert total == 90 * int(count * (1 - ratio))
                # The budget of a layer is that of a head times three here. KVzip of kvpress rounds it once.
                theirs_kept = sum(len(one) for layer in range(30) for one in want[name, ratio, layer])
                assert theirs_kept - total in ((0, 30, 60) if name in TWICE else (0,))
                print(f"{text}: {name}, {ratio}: {same} of {total} tokens, {heads} heads of 90 differ")
                assert same >= least * total
