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
# A step does not score all keys. ShadowKV keeps one landmark for each chunk of the prompt: the mean of the chunk's keys
# after RoPE. A step scores the landmarks and fetches the chunks with the highest scores. This is accurate if the keys
# of a chunk are close to their mean. Section 3.2 of the paper (arXiv 2410.21465) finds that most chunks are like this.
# The few others, the outliers, can be kept exactly. This notebook measures both on SmolLM2-135M. It then measures the
# effect of the chunk size and of the outliers on the output.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = None  # the path of a text file of at least 3,072 tokens; None: Python's documentation

# %%
# %matplotlib inline
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
LENGTH, SAMPLES = 1024, 3
if TEXT is None:
    tokens = list(itertools.islice(tasks.documentation(params.tokenizer, random.Random(0)), LENGTH * SAMPLES))
else:
    tokens = tasks.encode(params.tokenizer, Path(TEXT).read_text(encoding="utf-8"))[: LENGTH * SAMPLES]
samples = [tokens[start : start + LENGTH] for start in range(0, LENGTH * SAMPLES, LENGTH)]
text = samples[0]
tensors = list(analysis.prompt_tensors(params, text))

# %% [markdown]
# ## How well a mean represents its chunk
#
# For each chunk we take the least cosine between one of its keys and its mean. The left picture shows the share of
# chunks below a value. Its logarithmic axis makes the few bad chunks visible. The right picture shows the median by
# layer, with a band from the 1st to the 99th percentile.

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
# ShadowKV keeps the chunks with the least cosine exactly, so no landmark has to represent them. The table shows the
# worst of the remaining chunks for several numbers of outliers. The keys and values of an outlier stay on the device,
# so the last column is a share of the device memory.

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
# Where are the outliers? The next cell shows the chunks that are outliers in the most heads.

# %%
outliers = similarity.outliers(4)
where = np.bincount(outliers.ravel(), minlength=chunks)
heads = similarity.least.shape[0] * similarity.least.shape[1]
for chunk in np.argsort(-where, kind="stable")[:4]:
    shown = params.tokenizer.decode(text[8 * chunk : 8 * chunk + 8])
    print(f"chunk {chunk:>3}: among the 4 worst in {where[chunk]} of {heads} heads: {shown!r}")

# %% [markdown]
# ## The effect on the output
#
# The last 32 tokens of each sample are fed after the others, and the next-token distribution at each position is
# compared with that of full attention. The rank and the budget stay the same. The numbers after ± are standard errors
# over the three samples.

# %%
base = {"rank": params.config.key_columns // 6, "budget": 128}
by_size = [jshadow.ShadowKV(chunk_size=size, outlier_chunks=64 // size, **base) for size in sizes]
without = jshadow.ShadowKV(outlier_chunks=0, **base)
rows = analysis.sweep(params, samples, [without, *by_size], steps=32)
for row in rows[1:]:
    share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
    setting = f"chunks of {row['settings']['chunk_size']:>2} tokens, {row['settings']['outlier_chunks']:>2} outliers"
    divergence = f"KL {row['kl']:.4f} ± {row['kl_stderr']:.4f} nats"
    print(f"{setting}: {divergence}, device bytes {share:.1f} %, hit rate {100 * row['hit_rate']:.1f} %")

# %% [markdown]
# The next picture varies the chunk size alone. The outliers have the same number of tokens in all settings. Bars are
# standard errors over the samples.

# %%
plots.plot_sweep([row for row in rows if row["settings"].get("outlier_chunks")], "chunk_size")

# %% [markdown]
# ## Which chunks stay selected
#
# A chunk that the step before selected too need not be fetched again (`fetch="zero_copy"` leaves it in its place). The
# picture shows the share of such chunks by step and by layer. The band holds eight of ten layers.

# %%
rates = analysis.hit_rates(params, text, by_size[1], 32)
print(f"hit rate over {len(rates.rates)} steps: {100 * rates.mean:.1f} %")
plots.plot_hit_rates({f"chunks of {rates.policy.chunk_size} tokens": rates.rates})
