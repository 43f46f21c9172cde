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
# # How low is the rank of keys?
#
# ShadowKV keeps two thin factors instead of the keys, and rebuilds the few keys that a step selects. This is accurate
# if the keys have a low rank. Section 3.1 of the paper (arXiv 2410.21465) examines Llama-3.1-8B. It finds that the
# singular values of keys before RoPE fall faster than those of any other tensor of a layer. This notebook asks three
# questions about SmolLM2-135M. Which tensor has the lowest rank? Do later tokens' keys lie in the subspace of the
# prompt's keys? What does a rank cost?
#
# The functions are in `benchmarks/analysis.py` and the pictures in `benchmarks/plots.py`.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = None  # the path of a text file of at least 3,072 tokens; None: Python's documentation

# %%
# %matplotlib inline
import argparse
import itertools
import random
import sys
from pathlib import Path

import numpy as np

import jshadow
from jshadow.evaluation import tasks

sys.path.append("../benchmarks")
import analysis
import plots

params = jshadow.load(MODEL, dtype="float32")
tokenizer = params.tokenizer

# %% [markdown]
# ## Texts
#
# Three samples of 1,024 tokens of the text, and the source code of one module of Python's standard library.

# %%
LENGTH, SAMPLES = 1024, 3
if TEXT is None:
    tokens = list(itertools.islice(tasks.documentation(tokenizer, random.Random(0)), LENGTH * SAMPLES))
else:
    tokens = tasks.encode(tokenizer, Path(TEXT).read_text(encoding="utf-8"))[: LENGTH * SAMPLES]
samples = [tokens[start : start + LENGTH] for start in range(0, LENGTH * SAMPLES, LENGTH)]
source = tasks.encode(tokenizer, Path(argparse.__file__).read_text(encoding="utf-8")[:8000])[:LENGTH]
texts = {"text": samples[0], "source code": source}
tensors = {name: list(analysis.prompt_tensors(params, text)) for name, text in texts.items()}
first = tensors["text"][0]
print(len(tensors["text"]), "layers; keys", first.k_pre.shape, "hidden states", first.x_in.shape)

# %% [markdown]
# ## Singular values
#
# The tensors of all KV heads of a layer are put side by side. Keys and values have 192 columns, and hidden states, from
# which keys and values are projected, have 576. Lines are means over the layers. Bands hold eight of ten layers. The
# right side shows the share of the squared norm that the best approximation of a rank keeps.

# %%
spectra = {name: analysis.singular_values(layers) for name, layers in tensors.items()}
plots.plot_spectra({"text": spectra["text"].values})

# %%
ranks = (1, 16, 32, 64, 128)
print(f"squared norm kept, mean over layers, %   rank: {' '.join(f'{rank:6d}' for rank in ranks)}")
for name, found in spectra.items():
    for kind in analysis.KINDS:
        kept = [100 * found.energy(kind, rank).mean() for rank in ranks]
        print(f"{name:>28} {plots.KIND_NAMES[kind]:>18} {' '.join(f'{share:6.1f}' for share in kept)}")

# %% [markdown]
# How much of this is the first column alone? Most of a key's norm is a part that all tokens share, and every method
# that keeps this part keeps most of the norm. So it is fairer to compare what remains without it:

# %%
rank = 32
for name, found in spectra.items():
    for kind in analysis.KINDS:
        one, some = found.energy(kind, 1), found.energy(kind, rank)
        rest = 100 * ((some - one) / (1 - one)).mean()
        print(f"{name:>14} {plots.KIND_NAMES[kind]:>18}: {rest:5.1f} % of the rest in the next {rank - 1} columns")

# %% [markdown]
# ## Does one subspace serve a whole text?
#
# The factors are computed from the prompt. Do the keys of later tokens lie in the same subspace? Do those of another
# text? `D` (section 3.1) is 1 for the same subspace and 0 for orthogonal ones. For two random subspaces its mean is
# rank / columns. The paper compares a context with the same context and its continuation. These two share most of their
# tokens, so the continuation alone is the harder test.

# %%
context = 768
found = analysis.compare_subspaces(tensors["text"], tensors["source code"], context, rank)
lines = {
    "context with its continuation": found.extended,
    "continuation alone": found.continuation,
    "another text": found.other,
}
for name, values in lines.items():
    print(f"{name:>30}: D = {values.mean():.3f} (by chance {found.chance:.3f})")
plots.plot_subspaces(lines, found.chance)

# %% [markdown]
# ## What a rank costs
#
# The squared norm says little about the output. Here the last 32 tokens of each sample are fed after the others, and
# the next-token distribution at each position is compared with that of full attention. The budget, the outlier chunks
# and the chunk size stay the same. Bars are standard errors over the three samples.

# %%
policies = [jshadow.ShadowKV(rank=rank, budget=256, outlier_chunks=8) for rank in (8, 32, 96, 192)]
rows = analysis.sweep(params, samples, policies, steps=32)
for row in rows[1:]:
    share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
    divergence = f"KL {row['kl']:.4f} ± {row['kl_stderr']:.4f} nats"
    same = f"same next token {row['top1']:.1f} %"
    print(f"rank {row['settings']['rank']:>3}: {divergence}, {same}, device bytes {share:.1f} % of full attention's")
plots.plot_sweep(rows, "rank")

# %%
best = min(rows[1:], key=lambda row: row["kl"])
shares = {kind: spectra["text"].energy(kind, rank) for kind in analysis.KINDS}
fastest = sum(int(np.argmax(layer)) == 0 for layer in zip(*shares.values(), strict=True))
print(f"pre-RoPE keys keep the largest share at rank {rank} in {fastest} of {len(shares['k_pre'])} layers")
print(f"least divergence: rank {best['settings']['rank']}")
