"""NVIDIA's kvpress keeps the tokens that jshadow keeps: SmolLM2, all layers and heads, token by token.

These tests exist only where kvpress is installed. docs/benchmarks/kvpress.md has the commands and the figures.
"""

import argparse
import importlib.util
import inspect
import pydoc_data.topics

import jax
import numpy as np
import pytest

import jshadow
from jshadow import TOVA, ExpectedAttention, KeyDiff, SnapKV
from jshadow.cache.prompt_walk import prompts_of
from jshadow.cli.demo_text import document
from jshadow.planner.bytes import cache_specs

pytestmark = [pytest.mark.slow, pytest.mark.parity]
TEXTS = {
    "documentation": (pydoc_data.topics.topics["specialnames"], 1024),
    "code": (inspect.getsource(argparse), 512),
    "diary": (document(), 777),
}
RATIOS = (0.5, 0.75)  # the share of the tokens that is dropped
# The policy that keeps n tokens, and the name and the settings of the press.
METHODS = {
    "tova": (lambda n: TOVA(kept=n), "TOVAPress", {}),
    "keydiff": (lambda n: KeyDiff(kept=n), "KeyDiffPress", {}),
    "expected_attention": (lambda n: ExpectedAttention(kept=n), "ExpectedAttentionPress", {}),
    "expected_attention, epsilon": (
        lambda n: ExpectedAttention(kept=n, sinks=7, future=64, epsilon=0.01),
        "ExpectedAttentionPress",
        {"n_sink": 7, "n_future_positions": 64, "epsilon": 0.01},
    ),
    "snapkv": (lambda n: SnapKV(n, observation_window=64, kernel=5, pooling="avg"), "SnapKVPress", {}),
}
LEAST = 0.9999  # share of the kept tokens that must be the same; both compute in float32, in another order


def places(kept, every):
    """Positions [h, n] of kept keys [h, n, d] among all keys [h, S, d], in rising order."""
    found = []
    for some, all_of_them in zip(kept.astype(np.float64), every.astype(np.float64), strict=True):
        squares = (all_of_them**2).sum(axis=-1) - 2 * some @ all_of_them.T
        found.append(np.sort(squares.argmin(axis=1)))
    return np.stack(found)


def theirs(folder, tokens):
    """The positions that kvpress keeps, by method, ratio and layer; in one pass, because a press changes no prefill."""
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    presses = {
        (name, ratio): getattr(kvpress, press)(compression_ratio=ratio, **settings)
        for name, (_, press, settings) in METHODS.items()
        for ratio in RATIOS
    }
    found = {}

    class Every(kvpress.BasePress):
        """Lets each press compress, and keeps all keys and values."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for name, press in presses.items():
                kept, _ = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                found[*name, module.layer_idx] = places(kept[0].numpy(), keys[0].numpy())
            return keys, values

    with torch.no_grad(), Every()(model):
        model(torch.tensor([tokens]), past_key_values=DynamicCache())
    return found


def ours(folder, tokens):
    """The positions that jshadow keeps, in the same form."""
    params, count, found, programs = jshadow.load(folder, dtype="float32"), len(tokens), {}, {}
    for name, (policy_of, *_) in METHODS.items():
        for ratio in RATIOS:
            policy = policy_of(max(1, int(count * (1 - ratio)))).resolve(params.config, count)
            spec = cache_specs(params.config, policy, 1, count, count, "float32", "resident")[0]
            programs[name, ratio] = jax.jit(
                lambda prompt, policy=policy, spec=spec: policy.compress(spec, policy.init(spec), prompt)[0].frozen.kept.k
            )
    for layer, prompt in enumerate(prompts_of(params, np.array(tokens))):
        every = np.asarray(prompt.k_post[0]).swapaxes(0, 1)
        for name, compress in programs.items():
            window = prompt.q_post[:, -64:] if name[0] == "snapkv" else prompt.q_post[:, -1:]
            found[*name, layer] = places(np.asarray(compress(prompt.replace(q_tail=window))[0]), every)
    return found


if importlib.util.find_spec("kvpress") is not None:

    @pytest.mark.filterwarnings("ignore")  # of kvpress and the packages that it imports
    @pytest.mark.parametrize("text", TEXTS)
    def test_kvpress_keeps_the_same_tokens(text, smollm2_dir, record_property):
        written, count = TEXTS[text]
        tokens = jshadow.load(smollm2_dir).tokenizer.encode(written)[:count]
        assert len(tokens) == count
        want, got = theirs(smollm2_dir, tokens), ours(smollm2_dir, tokens)
        assert want.keys() == got.keys()
        for name in METHODS:
            for ratio in RATIOS:
                same = total = heads = 0
                for layer in range(30):
                    for one, other in zip(want[name, ratio, layer], got[name, ratio, layer], strict=True):
                        assert len(set(one)) == len(set(other)) == len(one) == int(count * (1 - ratio))
                        same, total = same + len(set(one) & set(other)), total + len(one)
                        heads += set(one) != set(other)
                record_property(f"{name}, {ratio}", f"{same} of {total} tokens, {heads} heads of 90 differ")
                print(f"{text}: {name}, {ratio}: {same} of {total} tokens, {heads} heads of 90 differ")
                assert same >= LEAST * total
