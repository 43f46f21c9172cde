"""Measure what codes of later keys lose: `python benchmarks/later_keys.py MODEL`.

The keys before RoPE of a text are split in two halves. The first half is the prompt of a code, and the keys of the
second half are stored in that code. The figure of a layer is the squared error of these keys over their variance. The
table has the mean over layers and samples, the standard error over samples, and the bytes of a key for each head in
bfloat16.
"""

import argparse
import itertools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

import jshadow
from jshadow.evaluation import metrics
from jshadow.evaluation.tasks import documentation
from jshadow.policies.shadowkv import ExactKeys
from jshadow.policies.shadowkv.key_codecs import LowRankCodec, Sizes, TokenCodec

CHUNK = 8


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--rank", type=int, default=32)
    args = parser.parse_args()
    params = jshadow.load(args.model, dtype="float32")
    lost: dict[str, list[float]] = {}
    for sample in range(args.samples):
        text = list(itertools.islice(documentation(params.tokenizer, random.Random(sample)), args.tokens))
        layers: dict[str, list[float]] = {}
        for keys in keys_of(params, text):
            for name, error in errors(keys, args.rank).items():
                layers.setdefault(name, []).append(error)
        for name, values in layers.items():
            lost.setdefault(name, []).append(float(np.mean(values)))
    sizes = Sizes(params.config.kv_heads, params.config.head_dim, "bfloat16")
    projected = LowRankCodec(args.rank).read_bytes(sizes) / sizes.heads
    print("| code | squared error / variance | bytes of a key and head |\n| --- | --- | --- |")
    for name, values in lost.items():
        mean, stderr = metrics.mean_stderr(values)
        size = TokenCodec(int(name[0])).read_bytes(sizes) if name[0].isdigit() else projected
        print(f"| {name} | {mean:.4f} ({stderr or 0:.4f}) | {size:.1f} |")


def keys_of(params: Any, text: list[int]) -> list[np.ndarray]:
    """Return the keys before RoPE of a text in each layer, [tokens, h_kv, d]."""
    policy = jshadow.ShadowKV(keys=ExactKeys(), local_chunks=0, budget=CHUNK, chunk_size=CHUNK)
    _, state = jshadow.prefill(params, np.array([text]), [len(text)], policy, capacity=len(text), fetch="resident")
    keys = [np.asarray(layer.frozen.left)[0] for layer in state.layers]
    return [x.reshape(x.shape[0], -1, params.config.head_dim).swapaxes(0, 1) for x in keys]


def errors(keys: np.ndarray, rank: int) -> dict[str, float]:
    """Return the relative squared error of the second half of keys [tokens, h_kv, d] in each code."""
    prompt, later = (jnp.asarray(half)[None] for half in np.split(keys, 2))
    length = jnp.array([prompt.shape[1]])
    variance = float(((later - later.mean(axis=1, keepdims=True)) ** 2).mean())

    def lost(codec: Any, right: Any, real: Any) -> float:
        rebuilt = codec.expand(codec.project(real, right).swapaxes(1, 2), right)
        return float(((rebuilt.swapaxes(1, 2) - real) ** 2).mean()) / variance

    basis = LowRankCodec(rank).encode(prompt, length, 0, CHUNK).right
    units = TokenCodec(4).encode(prompt, length, 0, CHUNK).right
    mean = units.replace(unit=jnp.ones_like(units.unit))
    return {
        f"projected, rank {rank}": lost(LowRankCodec(rank), basis, later),
        f"projected, rank {rank}, the prompt's own keys": lost(LowRankCodec(rank), basis, prompt),
        "4 bits, without mean and units": lost(TokenCodec(4), mean.replace(mean=jnp.zeros_like(mean.mean)), later),
        "4 bits, without units": lost(TokenCodec(4), mean, later),
        "4 bits": lost(TokenCodec(4), units, later),
        "6 bits, without units": lost(TokenCodec(6), mean, later),
        "6 bits": lost(TokenCodec(6), units, later),
    }


if __name__ == "__main__":
    main()
