"""Compare exact and sparse attention of one layer over a prompt by computed tiles of scores and by CPU seconds.

    python benchmarks/sparse_prefill.py [TOKENS [LAYER]]

The model is SmolLM2 in float32, and the text is the Python language reference. Keys and queries come from a prefill
with exact attention. The variants alternate in one process.
"""

import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

from jshadow.cache.prompt_walk import prompts_of
from jshadow.engine.sparse_prefill import AShape, VerticalSlash
from jshadow.ops.attention import causal_attention
from jshadow.policies.prefill_attention import PrefillPiece
from jshadow.weights.params import load

MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct"
ATTENTIONS = [
    VerticalSlash(vertical=500, slash=700),
    VerticalSlash(vertical=30, slash=800),
    AShape(initial=100, local=1000),
]


def main(tokens: int = 8192, layer: int = 2) -> None:
    """Print a Markdown table."""
    params = load(MODEL, dtype="float32")
    config, text = params.config, "".join(topics[name] for name in sorted(topics))
    ids = np.array(params.tokenizer.encode(text)[:tokens])
    prompt = next(one for index, one in enumerate(prompts_of(params, ids)) if index == layer)
    kind = config.attention_kind(layer)

    def sparse(attention):
        def run(prompt):
            aux = attention.begin(config, kind, prompt, prompt.q_post[:, -64:], None)
            piece = PrefillPiece(prompt.q_post, prompt.q_post, jnp.int32(0), jnp.zeros(1))
            return attention.attend(config, kind, piece, prompt, aux)

        return jax.jit(run)

    def exact(prompt):
        return causal_attention(prompt.q_post, prompt.k_post, prompt.v, config.attention_scale)[0], None

    runs = {"exact": jax.jit(exact)} | {attention.label(): sparse(attention) for attention in ATTENTIONS}
    counted = {name: jax.block_until_ready(run(prompt))[1] for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(5):
        for name, run in runs.items():
            start = time.process_time()
            jax.block_until_ready(run(prompt))
            seconds[name].append(time.process_time() - start)
    count = tokens // 64
    print("| attention | tiles that heads need, % | tiles computed, % | CPU seconds, least |\n|---|---|---|---|")
    for name, aux in counted.items():
        shares = (
            [1.0, 1.0] if aux is None else [float(x.mean()) / (count * (count + 1) / 2) for x in (aux.tiles, aux.ran)]
        )
        print(f"| {name} | {100 * shares[0]:.1f} | {100 * shares[1]:.1f} | {min(seconds[name]):.2f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
