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
# ShadowKV keeps two thin factors instead of the keys, and rebuilds the few keys that a step selects. That works as far
# as keys have a low rank. Section 3.1 of the paper (arXiv 2410.21465) looks at Llama-3.1-8B and finds that keys before
# RoPE have the fastest falling singular values of all tensors of a layer. Here the same questions are asked of
# SmolLM2-135M: which tensor has the lowest rank, whether the subspace that a prompt's keys span still holds for what
# follows it, and what a rank costs.
#
# The functions are `jshadow.analysis`, the pictures `jshadow.evaluation.plots`; this page only calls them.

# %%
# %matplotlib inline
import argparse
import itertools
import random
from pathlib import Path

import numpy as np

import jshadow
from jshadow.evaluation import analysis, plots, tasks

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
tokenizer = params.tokenizer

# %% [markdown]
# ## Two texts
#
# A stretch of Python's documentation, and the source of one module of its standard library.

# %%
tokens = 1024
documentation = list(itertools.islice(tasks.documentation(tokenizer, random.Random(0)), tokens))
source = tasks.encode(tokenizer, Path(argparse.__file__).read_text(encoding="utf-8")[:8000])[:tokens]
texts = {"documentation": documentation, "source code": source}
tensors = {name: list(analysis.prompt_tensors(params, text)) for name, text in texts.items()}
first = tensors["documentation"][0]
print(len(tensors["documentation"]), "layers; keys", first.k_pre.shape, "hidden states", first.x_in.shape)

# %% [markdown]
# ## Singular values
#
# Of each layer's tensors, all KV heads side by side: 192 columns of keys and values, 576 of hidden states (the input
# that keys and values are projected from). Lines are means over the layers, bands hold eight of ten of them. On the
# right, the share of the squared norm that the best approximation of a rank keeps.

# %%
spectra = {name: analysis.singular_values(layers) for name, layers in tensors.items()}
plots.plot_spectra({name: found.values for name, found in spectra.items()})

# %%
ranks = (1, 16, 32, 64, 128)
print(f"squared norm kept, mean over layers, %   rank: {' '.join(f'{rank:6d}' for rank in ranks)}")
for name, found in spectra.items():
    for kind in analysis.KINDS:
        kept = [100 * found.energy(kind, rank).mean() for rank in ranks]
        print(f"{name:>28} {plots.KIND_NAMES[kind]:>18} {' '.join(f'{share:6.1f}' for share in kept)}")

# %% [markdown]
# How much of it is the first column alone? A key's largest part is one that all tokens share, and any method that
# keeps it keeps that much of the norm. The fairer comparison is of what is left without it:

# %%
rank = 32
for name, found in spectra.items():
    for kind in analysis.KINDS:
        one, some = found.energy(kind, 1), found.energy(kind, rank)
        rest = 100 * ((some - one) / (1 - one)).mean()
        print(f"{name:>14} {plots.KIND_NAMES[kind]:>18}: {rest:5.1f} % of the rest in the next {rank - 1} columns")

# %% [markdown]
# ## One subspace a text?
#
# The factors are made of the prompt. Do later tokens' keys lie in the same subspace, and those of another text? `D`
# (section 3.1) is 1 for the same subspace and 0 for orthogonal ones; two subspaces drawn at random have rank / columns
# in the mean. The paper compares a context with the same context and its continuation, which share most of their
# tokens; the continuation alone is the harder question.

# %%
context = 768
found = analysis.compare_subspaces(tensors["documentation"], tensors["source code"], context, rank)
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
# Squared norms are not answers. Here the last 32 tokens of a text are forced behind the others, and each position's
# next token distribution is compared with full attention's. The budget, the outliers and the chunks stay the same.

# %%
policies = [jshadow.ShadowKV(rank=rank, budget=256, outlier_chunks=8) for rank in (8, 32, 192)]
rows = analysis.sweep(params, [documentation], policies, steps=32)
for row in rows[1:]:
    share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
    told = f"KL {row['kl']:.4f} nats, same next token {row['top1']:.1f} %, device bytes {share:.1f} % of full's"
    print(f"rank {row['settings']['rank']:>3}: {told}")
plots.plot_sweep(rows, "rank")

# %%
best = min(rows[1:], key=lambda row: row["kl"])
decays = {kind: spectra["documentation"].energy(kind, rank) for kind in analysis.KINDS}
fastest = sum(int(np.argmax(shares)) == 0 for shares in zip(*decays.values(), strict=True))
print(f"pre-RoPE keys keep the most at rank {rank} in {fastest} of {len(decays['k_pre'])} layers")
print(f"least divergence: rank {best['settings']['rank']}")
