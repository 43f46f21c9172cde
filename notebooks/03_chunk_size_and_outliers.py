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
# # Chunk size and outliers
#
# A step does not look at all keys: it scores one landmark for each chunk of the prompt, the mean of the chunk's keys
# after RoPE, and fetches the chunks with the best scores. That is right as far as a chunk's keys are like their mean.
# Section 3.2 of the paper (arXiv 2410.21465) finds that most are, and that the few chunks that are not (the outliers)
# can be kept exactly. This page measures both on SmolLM2-135M, and what chunk size and outliers do to the output.

# %%
# %matplotlib inline
import itertools
import random

import numpy as np

import jshadow
from jshadow.evaluation import analysis, plots, tasks

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
tokens = 1024
text = list(itertools.islice(tasks.documentation(params.tokenizer, random.Random(0)), tokens))
tensors = list(analysis.prompt_tensors(params, text))

# %% [markdown]
# ## How well a mean stands for its chunk
#
# Of each chunk, the least cosine between a key and the chunk's mean. On the left the share of chunks below a value, on
# a logarithmic axis that shows the few bad ones; on the right the median by layer, and a band from the first to the
# 99th percentile.

# %%
sizes = (4, 8, 16)
found = {size: analysis.chunk_similarity(tensors, size) for size in sizes}
for size, similarity in found.items():
    below = 100 * similarity.share_below(0.5).mean()
    print(f"{size:>2} tokens: median {np.median(similarity.least):.3f}, {below:.2f} % of the chunks below 0.5")
plots.plot_least_cosines({f"chunks of {size} tokens": similarity.least for size, similarity in found.items()})

# %% [markdown]
# ## Outliers
#
# ShadowKV keeps the chunks with the least cosine exactly, so that landmarks need not represent them. How bad is the
# worst chunk that is left in a head, when so many are kept? Both keys and values of an outlier stay on the device, so
# that the last column is memory.

# %%
similarity = found[8]
chunks = similarity.least.shape[2]
print(f"{chunks} chunks of 8 tokens in each head")
for count in (0, 1, 4, 8, 24, 48):
    worst = similarity.without_outliers(count)
    share = 100 * count / chunks
    print(
        f"{count:>2} outliers: worst left {worst.min():6.3f}, median head {np.median(worst):.3f}, {share:4.1f} % kept"
    )

# %% [markdown]
# Where do they lie? A chunk that is an outlier in many heads is one that no head sums up well.

# %%
outliers = similarity.outliers(4)
where = np.bincount(outliers.ravel(), minlength=chunks)
heads = similarity.least.shape[0] * similarity.least.shape[1]
for chunk in np.argsort(-where, kind="stable")[:4]:
    shown = params.tokenizer.decode(text[8 * chunk : 8 * chunk + 8])
    print(f"chunk {chunk:>3}: among the 4 worst in {where[chunk]} of {heads} heads: {shown!r}")

# %% [markdown]
# ## What they do to the output
#
# The last 32 tokens of the text are forced behind the others, and each position's next token distribution is compared
# with full attention's. Rank and budget stay the same.

# %%
base = {"rank": 32, "budget": 128}
by_size = [jshadow.ShadowKV(chunk_size=size, outlier_chunks=64 // size, **base) for size in sizes]
without = jshadow.ShadowKV(outlier_chunks=0, **base)
rows = analysis.sweep(params, [text], [without, *by_size], steps=32)
for row in rows[1:]:
    share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
    setting = f"chunks of {row['settings']['chunk_size']:>2} tokens, {row['settings']['outlier_chunks']:>2} outliers"
    told = f"KL {row['kl']:.4f} nats, same next token {row['top1']:.1f} %, device bytes {share:.1f} % of full's"
    print(f"{setting}: {told}, hit rate {100 * row['hit_rate']:.1f} %")

# %% [markdown]
# The chunk size alone, with the same number of tokens in outliers:

# %%
plots.plot_sweep([row for row in rows if row["settings"].get("outlier_chunks")], "chunk_size")

# %% [markdown]
# ## What stays selected
#
# A chunk that the step before has selected too need not be fetched again (`fetch="zero_copy"` leaves it where it is).
# Step by step, and by layer:

# %%
rates = analysis.hit_rates(params, text, by_size[1], 32)
print(f"hit rate over {len(rates.rates)} steps: {100 * rates.mean:.1f} %")
plots.plot_hit_rates({f"chunks of {rates.policy.chunk_size} tokens": rates.rates})
