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
# # Methods side by side
#
# A KV cache becomes smaller if tokens are evicted, if a step attends to a few of them, or if numbers have fewer bits.
# ShadowKV keeps low-rank keys on the device and values in host memory. The distance from full attention depends on the
# memory that a method gets. So we compare methods at equal memory: each gets its largest setting within a share of full
# attention's device bytes.
#
# Four samples of one length show how such a comparison works. They are too few to rank the methods.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = "agreement"  # Python's documentation; "agreement_code": its source code

# %%
# %matplotlib inline
import sys
import tempfile
from pathlib import Path

import jshadow
from jshadow.evaluation.runner import evaluate
from jshadow.policies import Quest, ShadowKV, SnapKV

sys.path.append("../benchmarks")
import plots
import report

params = jshadow.load(MODEL, dtype="float32")

# %% [markdown]
# ## One evaluation
#
# SnapKV keeps the tokens that the end of the prompt attends to. Quest attends to a few pages of tokens. In these tasks
# 64 tokens of the text are fed after the prompt. We measure how far each next-token distribution is from that of full
# attention. All policies share the prefill of a sample. Bytes are counted in bfloat16, with offloaded rows in host
# memory. Any policy of `jshadow policies` can be added to the list.
#
# Quest keeps two vectors for each page, and its pages have 2, 4, 8, ... tokens. So its bytes fall by almost a half from
# one setting to the next. With a share of 50 % Quest would use only 28 %, and the comparison would not be at equal
# memory. The shares below are slightly above the bytes of pages of 2 and 4 tokens, so all methods use almost their
# whole share. The column "used" shows this.

# %%
SHARES = [0.55, 0.28]
policies = [SnapKV(), Quest(budget=128), ShadowKV(budget=128)]
rows = evaluate(params, [TEXT], [1024], policies, samples=4, shares=SHARES)
print("policy          share    used   same next token, %        KL, nats")
for row in rows:
    if row["infeasible"]:
        print(f"{row['name']:<12} {row['infeasible']}")
        continue
    share = f"{100 * (row['share'] or 1):6.0f} %"
    used = f"{100 * row['served_device_bytes'] / row['served_full_bytes']:5.1f} %"
    top1, kl = f"{row['top1']:6.1f} ± {row['top1_stderr']:3.1f}", f"{row['kl']:.4f} ± {row['kl_stderr']:.4f}"
    print(f"{row['name']:<12} {share} {used} {top1:>20} {kl:>20}")

# %% [markdown]
# ## Accuracy against memory
#
# A line is a method and a mark is a share. A bar is the standard error over the four samples. In the first picture
# higher is closer to full attention, in the second lower is closer.

# %%
plots.plot_memory(rows, measure="top1")

# %%
plots.plot_memory(rows, measure="kl")

# %% [markdown]
# ## The settings of a share
#
# A share decides all settings that take memory. The rows contain the resolved settings. Device memory is equal here,
# but traffic is not: a method that keeps tokens in host memory moves some of them in every step.

# %%
for row in rows:
    if row["share"] == SHARES[-1] and not row["infeasible"]:
        moved = f"moves {row['served_moved_bytes'] / 1e6:.1f} MB a step"
        print(f"{row['name']:<12} attends to {row['attended_tokens']:.0f} tokens, {moved}; {row['settings']}")

# %% [markdown]
# ## A report
#
# `jshadow eval --out DIR` and `python benchmarks/report.py DIR` do all of this on the command line. `write_report`
# makes one HTML file from the rows. It contains the tables, the pictures, the machine and the versions, and loads
# nothing from elsewhere.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.html"
    report.write_report(rows, path, command="notebooks/04_methods_side_by_side")
    print(f"{path.name}: {path.stat().st_size:,} bytes, {path.read_text(encoding='utf-8').count('<img')} pictures")
