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
# # Quickstart: a long prompt under ShadowKV
#
# A KV cache grows with the prompt, and at some length it no longer fits on the GPU. ShadowKV keeps low-rank keys, chunk
# landmarks and a few exact outliers on the device and moves the values to host memory; each step fetches the few chunks
# that its landmarks choose. This notebook asks one question about one document, first with full attention and then with
# ShadowKV, and reads off the report what was really kept, attended and moved.
#
# It runs on a CPU with SmolLM2-135M (`make demo` brings the checkpoint). On a CPU host and device memory are the same,
# so that offloading costs time there; the bytes are those of a GPU.

# %%
import matplotlib.pyplot as plt

import jshadow
from jshadow.evaluation.tasks import make

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
print(params)

# %% [markdown]
# ## A document with one planted fact
#
# `needle_docs` takes pages of Python's documentation and puts one sentence into them. The answer is known, so that we
# can see whether a compressed cache still finds it.

# %%
case = make("needle_docs", params.tokenizer, length=1024, depth=0.4, seed=3)
print(len(case.prompt), "tokens;", case.samples[0].question, "->", case.samples[0].answer)

# %% [markdown]
# ## The same question twice
#
# `rank=32` of this model's 192 key columns is the share that the paper takes; `budget` counts the tokens that a step
# fetches. With `fetch="device_put"` values lie in the host tier, as they would beside a GPU.

# %%
policies = {"full": jshadow.Full(), "shadowkv": jshadow.ShadowKV(rank=32, budget=128, outlier_chunks=16)}
options = {"max_new_tokens": 12, "capacity": 1088, "fetch": "device_put"}
made = {name: jshadow.generate(params, list(case.prompt), policy, **options) for name, policy in policies.items()}
for name, out in made.items():
    print(f"{name:>9}: {out.text!r}, fallback: {out.report.fallback}")

# %% [markdown]
# ## What it took
#
# Every generation has a report. Bytes are those of the allocated arrays, by the memory that they lie in. Attended
# tokens are what the last query really saw: the budget is only one part of it.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
device = [out.report.device_bytes / 2**20 for out in made.values()]
host = [out.report.host_bytes / 2**20 for out in made.values()]
left.bar(list(made), device, label="device")
left.bar(list(made), host, bottom=device, label="host")
left.set_ylabel("KV cache, MiB")
left.legend()
for name, out in made.items():
    below = 0.0
    for part, tokens in out.report.attended_parts.items():
        right.bar(name, tokens, bottom=below)
        if tokens > 30:
            right.text(name, below + tokens / 2, f"{part}: {tokens:.0f}", ha="center", va="center")
        below += tokens
right.set_ylabel("tokens that the last query attended to")
plt.show()
report = made["shadowkv"].report
print(f"device bytes, full / this: {report.full_bytes / report.device_bytes:.2f}")
print(f"repeat share of selected chunks: {report.hit_rate:.0%}, bytes fetched: {report.bytes_fetched:,}")

# %% [markdown]
# ## What is approximate, and what is not
#
# The settings are the approximation; the machinery around them is exact. At full rank, with a budget for the whole
# prompt, ShadowKV gives the same tokens as full attention, offloaded or not. `lossless` names that setting of every
# policy.

# %%
exact = jshadow.ShadowKV.lossless(options["capacity"], params.config)
same = jshadow.generate(params, list(case.prompt), exact, **options)
assert same.report.fallback is None
assert same.tokens == made["full"].tokens
print(exact)
print("the same", len(same.tokens), "tokens as full attention")

# %% [markdown]
# ## Streaming
#
# `stream` takes the same arguments and yields text as it becomes final. A prompt this short leaves ShadowKV nothing to
# select: `generate` says so in `report.fallback` and uses a dense cache, never silently.

# %%
chat = [{"role": "user", "content": "Name the three primary colours."}]
for piece in jshadow.stream(params, chat, max_new_tokens=24):
    print(piece, end="", flush=True)
