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
# A KV cache can be made smaller by evicting tokens, by attending to a few of them, by fewer bits, or as ShadowKV does
# it: low-rank keys on the device, values on the host. Which of them is closest to full attention depends on how much
# memory each is given, so that the comparison is at equal memory: every method gets the largest setting within a share
# of full attention's device bytes.
#
# Two samples of one length are enough to see how such a comparison is made, and too few to rank methods by.

# %%
# %matplotlib inline
import tempfile
from pathlib import Path

import jshadow
from jshadow.evaluation import html, plots
from jshadow.evaluation.runner import evaluate
from jshadow.policies import Quest, ShadowKV, SnapKV

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")

# %% [markdown]
# ## One evaluation
#
# SnapKV keeps what the end of the prompt attends to, Quest attends to a few pages. In the task `agreement` 64 tokens of
# documentation are forced behind the prompt; the measure is how far each next token distribution is from full
# attention's. All policies share one prefill a sample, and bytes are those of bfloat16 with offloaded values on the
# host. The other policies of `jshadow policies` go into the list likewise.

# %%
policies = [SnapKV(), Quest(budget=128), ShadowKV(budget=128)]
rows = evaluate(params, ["agreement"], [1024], policies, samples=2, shares=[0.5, 0.25])
for row in rows:
    if row["infeasible"]:
        print(f"{row['name']:>13}: {row['infeasible']}")
        continue
    share = 100 * row["served_device_bytes"] / row["served_full_bytes"]
    size = f"{row['served_device_bytes'] / 1e6:5.1f} MB, {share:5.1f} %"
    print(f"{row['name']:>13}: {size}   same next token {row['top1']:5.1f} %, KL {row['kl']:.4f} nats")

# %% [markdown]
# ## Accuracy against memory
#
# A line is a method, a mark one share, and a bar the standard error over the samples. Left is less memory; in the
# first picture up is closer to full attention, in the second down.

# %%
plots.plot_memory(rows, measure="top1")

# %%
plots.plot_memory(rows, measure="kl")

# %% [markdown]
# ## What a setting really is
#
# `shares` decide all settings that take memory. What was resolved stands in the rows:

# %%
for row in rows:
    if row["share"] == 0.25 and not row["infeasible"]:
        print(f"{row['name']:>13}: attends to {row['attended_tokens']:.0f} tokens; {row['settings']}")

# %% [markdown]
# ## A report to keep
#
# `jshadow eval` does all of this on the command line. `write_report` makes one HTML file of the rows, with tables,
# pictures, the machine and the versions, that loads nothing.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.html"
    html.write_report(rows, path, command="notebooks/04_methods_side_by_side")
    print(f"{path.name}: {path.stat().st_size:,} bytes, {path.read_text(encoding='utf-8').count('<img')} pictures")
