"""The tokens that NVIDIA's kvpress keeps of prompts, and a short form of them.

A head keeps a set of positions. Its short form is the exclusive or of one random number of 64 bits for each of them. So
a reader with a set that differs from the original by one or two positions can tell which they are.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

RATIOS = (0.5, 0.75)  # the share of the tokens that is dropped
TEXTS = ("documentation", "code", "diary")
# The press and its settings.
PRESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "tova": ("TOVAPress", {}),
    "keydiff": ("KeyDiffPress", {}),
    "expected_attention": ("ExpectedAttentionPress", {}),
    "expected_attention, epsilon": (
        "ExpectedAttentionPress",
        {"n_sink": 7, "n_future_positions": 64, "epsilon": 0.01},
    ),
    "snapkv": ("SnapKVPress", {}),
    "adakv, keydiff": ("KeyDiffPress", {}),
    "adakv, expected_attention": ("ExpectedAttentionPress", {}),
}
SAFEGUARDS = {"adakv, keydiff": 0.2, "adakv, expected_attention": 0.4}  # of those that share a budget
TWICE = {"kvzip": False, "kvzip, normalized": True}  # those that read a prompt twice, in chunks of CHUNK tokens
CHUNK = 400
WHOLE = "snapkv"  # its sets are kept as bits too: other settings of jshadow share most of them only
NUMBERS = np.random.RandomState(0).randint(0, 2**63 - 1, 4096, dtype=np.int64)
Sets = list[list[int]]  # the positions that each head keeps


def short(positions: Iterable[int]) -> int:
    """The short form of a set of positions."""
    return int(np.bitwise_xor.reduce(NUMBERS[list(positions)], initial=0))


def told_by(form: int, near: Iterable[int], count: int) -> set[int] | None:
    """The set of positions below `count` with a short form that differs from `near` by at most two positions."""
    near = set(near)
    left = short(near) ^ form
    place = {int(number): position for position, number in enumerate(NUMBERS[:count])}
    if left == 0:
        return near
    if left in place:
        return near ^ {place[left]}
    for number, position in place.items():
        if left ^ number in place:
            return near ^ {position, place[left ^ number]}
    return None


def kvpress(folder: Path, texts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
    """The short forms of all sets, and the bits of some."""
    import torch
    from transformers import AutoModelForCausalLM

    model, arrays = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), {}
    for text in TEXTS:
        tokens = texts[text]
        found = once(model, tokens) | twice(model, folder, tokens)
        for (name, ratio), layers in found.items():
            arrays[f"{text}/{name}/{ratio}"] = np.array([[short(head) for head in heads] for heads in layers])
            sizes = [[len(head) for head in heads] for heads in layers]
            arrays[f"{text}/{name}/{ratio}/kept"] = np.array(sizes, np.int16)
            if name == WHOLE:
                bits = np.array([[np.isin(np.arange(len(tokens)), head) for head in heads] for heads in layers])
                arrays[f"{text}/{name}/{ratio}/bits"] = np.packbits(bits, axis=-1)
    return {"told": {}, "arrays": arrays}


def places(kept: np.ndarray, every: np.ndarray) -> Sets:
    """For each head, the positions of its kept keys [n, d] among all keys [S, d]. Kept keys are exact copies."""
    found = []
    for some, all_of_them in zip(kept, every, strict=True):
        position = {key.tobytes(): at for at, key in enumerate(all_of_them)}
        found.append(sorted(position[key.tobytes()] for key in some))
    return found


def unmasked(masked: Any, shape: tuple[int, int]) -> Sets:
    """For each head, the positions that kvpress did not mask, of `shape` heads and tokens."""
    there = np.ones(shape, bool)
    there[tuple(index.numpy() for index in masked[1:])] = False
    return [np.flatnonzero(head).tolist() for head in there]


def once(model: Any, tokens: list[int]) -> dict[tuple[str, float], list[Sets]]:
    """The sets of all layers, by method and ratio; in one pass, because a press changes no prefill."""
    import kvpress
    import torch
    from transformers import DynamicCache

    presses: dict[tuple[str, float], Any] = {}
    for name, (press, settings) in PRESSES.items():
        for ratio in RATIOS:
            made = getattr(kvpress, press)(compression_ratio=ratio, **settings)
            presses[name, ratio] = kvpress.AdaKVPress(made, SAFEGUARDS[name]) if name in SAFEGUARDS else made
    found: dict[tuple[str, float], list[Sets]] = {key: [] for key in presses}

    class Every(kvpress.BasePress):
        """Lets each press compress, and keeps all keys and values. The layers come in their order."""

        def compress(self, module, hidden_states, keys, values, attentions, kwargs):
            for key, press in presses.items():
                kept, _ = press.compress(module, hidden_states, keys, values, attentions, kwargs)
                masked = getattr(module, "masked_key_indices", None)
                if masked is None:
                    found[key].append(places(kept[0].numpy(), keys[0].numpy()))
                    continue
                module.masked_key_indices = None  # so that it changes no attention
                found[key].append(unmasked(masked, keys.shape[1:3]))
            return keys, values

    with torch.no_grad(), Every()(model):
        model(torch.tensor([tokens]), past_key_values=DynamicCache())
    return found


def twice(model: Any, folder: Path, tokens: list[int]) -> dict[tuple[str, float], list[Sets]]:
    """The sets of KVzip. Its tokenizer has no chat template, as ours needs none."""
    import kvpress
    import torch
    from kvpress.presses import kvzip_press
    from transformers import AutoTokenizer, DynamicCache

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    original, found = kvzip_press.AutoTokenizer, {}
    kvzip_press.AutoTokenizer = type("Without", (), {"from_pretrained": staticmethod(lambda _: tokenizer)})
    try:
        for name, normalized in TWICE.items():
            for ratio in RATIOS:
                press = kvpress.KVzipPress(ratio, layerwise=True, kvzip_plus_normalization=normalized, chunk_size=CHUNK)
                with torch.no_grad(), press(model):
                    model(input_ids=torch.tensor([tokens]), past_key_values=DynamicCache())
                shape = (model.config.num_key_value_heads, len(tokens))
                found[name, ratio] = []
                for layer in model.model.layers:
                    found[name, ratio].append(unmasked(layer.self_attn.masked_key_indices, shape))
                    layer.self_attn.masked_key_indices = None
    finally:
        kvzip_press.AutoTokenizer = original
    return found
