"""Compare the prefill of a whole model with exact and with sparse attention: seconds, and the KL divergence.

    python benchmarks/sparse_prefill_whole.py [TOKENS [RUNS]]

The model is SmolLM2 in float32, and the text is the Python language reference. The variants alternate in one process.
The KL divergence is that of the logits of every 64th token from those of exact attention, in nats.
"""

import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import numpy as np

import jshadow
from jshadow.engine.sparse_prefill import AShape, VerticalSlash
from jshadow.policies import Full

MODEL = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct"
ATTENTIONS = {
    "exact": None,
    "vertical_slash:vertical=500:slash=700": VerticalSlash(vertical=500, slash=700),
    "vertical_slash:vertical=100:slash=200": VerticalSlash(vertical=100, slash=200),
    "vertical_slash:vertical=500:slash=350": VerticalSlash(vertical=500, slash=350),
    "vertical_slash:vertical=1000:slash=200": VerticalSlash(vertical=1000, slash=200),
    "a_shape:initial=100:local=1000": AShape(initial=100, local=1000),
}


def main(tokens: int = 8192, runs: int = 3) -> None:
    """Print a Markdown table."""
    params = jshadow.load(MODEL, dtype="float32")
    text = "".join(topics[name] for name in sorted(topics))
    ids = np.array([params.tokenizer.encode(text)[:tokens]], np.int32)

    def prefill(attention, logits="last"):
        out, _ = jshadow.prefill(
            params, ids, [tokens], Full(), capacity=tokens, attention=attention, logits=logits, fetch="resident"
        )
        return jax.block_until_ready(out)

    some = {
        name: np.asarray(jax.nn.log_softmax(prefill(attention, lambda x: x[:, ::64])))
        for name, attention in ATTENTIONS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    for _ in range(runs + 1):  # the first run compiles
        for name, attention in ATTENTIONS.items():
            start = time.perf_counter()
            prefill(attention)
            seconds[name].append(time.perf_counter() - start)
    print("| attention | seconds, median (least to most) | exact / this | KL, mean | KL, second half |")
    print("|---|---|---|---|---|")
    base = np.median(seconds["exact"][1:])
    for name, taken in seconds.items():
        kl = (np.exp(some["exact"]) * (some["exact"] - some[name])).sum(-1)[0]
        least, middle, most = np.quantile(taken[1:], [0, 0.5, 1])
        half = kl[len(kl) // 2 :].mean()
        spread, ratio = f"{middle:.1f} ({least:.1f} to {most:.1f})", base / middle
        print(f"| {name} | {spread} | {ratio:.2f} | {kl.mean():.3f} | {half:.3f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
