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
# # Key codes, and the frontier of bytes and quality
#
# ShadowKV keeps the keys of the prompt on the device in a code. The paper's code is low rank, with 16 bits a number.
# The transform code keeps the same keys in their eigenbasis, with 8, 4 or 2 bits a column. This notebook measures both
# at two sizes on SmolLM2-135M, and draws the divergence from full attention against the device bytes. The last 32
# tokens of each sample are fed after the others.

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
from jshadow.policies.shadowkv import TransformCode

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
# ## Low rank and transform
#
# All settings have 8 outlier chunks, landmarks of 8 tokens, values in 16 bits and a budget of 256. So only the code
# differs. The numbers after ± are standard errors over the samples.

# %%
columns = params.config.key_columns
base = {"budget": 256, "outlier_chunks": 8}
ranks, bits = (columns // 6, columns // 3), (4 / 3, 8 / 3)
low = [jshadow.ShadowKV(rank=rank, **base) for rank in ranks]
coded = [jshadow.ShadowKV(keys=TransformCode(bits=each, weights="queries"), **base) for each in bits]
names = [f"low rank {rank}" for rank in ranks] + [f"transform, {each:.2f} bits a column" for each in bits]
rows = analysis.sweep(params, samples, [*low, *coded], steps=32)[1:]
show(names, rows)

# %% [markdown]
# ## The frontier
#
# A point further left and lower is better. Bytes are those of one request in bfloat16 with its values in host memory.

# %%
plots.plot_memory(rows, measure="kl")

# %% [markdown]
# `ShadowKV.packed()` uses the transform code, with landmarks and values in four bits too. On short prompts the basis of
# the keys takes much of the bytes, so measure at the length of your prompts.
