# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which chunks are selected
#
# A step of ShadowKV attends to a budget of the prompt's tokens. It finds them by landmarks, which are means of keys.
# This notebook changes the budget, the landmarks and the number of rounds, one at a time, on SmolLM2-135M. The rank and
# the outliers stay the same. The last 32 tokens of each sample are fed after the others, and the next-token
# distribution at each position is compared with that of full attention.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = None  # the path of a text file of at least 3,072 tokens; None: Python's documentation

# %%
# %matplotlib inline
import itertools
import random
import sys
from pathlib import Path

import jshadow
from jshadow.evaluation import tasks
from jshadow.policies.shadowkv import Choice, Landmarks

sys.path.append("../benchmarks")
import analysis
import plots

params = jshadow.load(MODEL, dtype="float32")
LENGTH, SAMPLES = 1024, 3
if TEXT is None:
    tokens = list(itertools.islice(tasks.documentation(params.tokenizer, random.Random(0)), LENGTH * SAMPLES))
else:
    tokens = tasks.encode(params.tokenizer, Path(TEXT).read_text(encoding="utf-8"))[: LENGTH * SAMPLES]
samples = [tokens[start : start + LENGTH] for start in range(0, LENGTH * SAMPLES, LENGTH)]


def show(names, rows):
    """Print a line for each setting: divergence, and what it takes."""
    for name, row in zip(names, rows, strict=True):
        share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
        divergence = f"KL {row['kl']:.4f} ± {row['kl_stderr']:.4f} nats"
        print(f"{name:>34}: {divergence}, {row['attended_tokens']:4.0f} tokens attended, device bytes {share:.1f} %")


# %% [markdown]
# ## The budget
#
# The budget costs no device bytes where values lie in host memory. It costs the fetch of a step. The numbers after ±
# are standard errors over the samples.

# %%
base = {"rank": params.config.key_columns // 3, "outlier_chunks": 8}
budgets = (64, 128, 256)
rows = analysis.sweep(params, samples, [jshadow.ShadowKV(budget=budget, **base) for budget in budgets], steps=32)[1:]
show([f"budget {budget}" for budget in budgets], rows)
plots.plot_sweep(rows, "budget")

# %% [markdown]
# ## The landmarks, and a second round
#
# With a budget of 128, a chunk of 8 tokens has one landmark (the paper) or one for every 2 tokens. With two rounds, the
# landmarks select twice the chunks, and the rebuilt keys choose half of them.

# %%
settings = {
    "one landmark for 8 tokens": {},
    "one landmark for 2 tokens": {"landmarks": Landmarks(tokens=2)},
    "one for 8, variance": {"landmarks": Landmarks(order=2)},
    "one for 8, two rounds": {"choice": Choice(rounds=2)},
}
policies = [jshadow.ShadowKV(budget=128, **base, **more) for more in settings.values()]
show(settings, analysis.sweep(params, samples, policies, steps=32)[1:])
