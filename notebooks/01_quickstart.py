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
# A KV cache grows with the prompt. At some length it does not fit on the GPU. ShadowKV keeps low-rank keys, chunk
# landmarks and a few exact outlier chunks on the device, and moves the values to host memory. Each step scores the
# landmarks and fetches a few chunks. This notebook asks one question about one document, first with full attention and
# then with ShadowKV. The report of each run shows which tokens were attended and how many bytes were kept and moved.
#
# The notebook runs on a CPU with SmolLM2-135M (`make demo` downloads the checkpoint). On a CPU, host memory and device
# memory are the same memory, so offloading costs time there. The byte counts are those of a GPU.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = None  # the path of a text file; None: pages of Python's documentation with one planted fact
QUESTION = "What is this text about?"  # asked about TEXT; the planted fact has its own question

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import jshadow
from jshadow.evaluation.tasks import make

params = jshadow.load(MODEL, dtype="float32")
config = params.config
print(f"{config.num_layers} layers, {config.kv_heads} KV heads of width {config.head_dim}, context {config.context:,}")

# %% [markdown]
# ## A document and a question
#
# The task `needle_docs` takes pages of Python's documentation and puts one sentence into them. The answer is known, so
# we can see whether a compressed cache still finds it.

# %%
if TEXT is None:
    case = make("needle_docs", params.tokenizer, length=1024, depth=0.4, seed=3)
    prompt = list(case.prompt)
    print(case.samples[0].question, "->", case.samples[0].answer)
else:
    chat = [{"role": "user", "content": f"{Path(TEXT).read_text(encoding='utf-8')}\n\n{QUESTION}"}]
    prompt = params.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
print(len(prompt), "tokens")

# %% [markdown]
# ## The same question twice
#
# `rank` is the number of columns that the low-rank keys keep. The paper keeps 160 of the 1,024 key columns of
# Llama-3.1-8B. A sixth of this model's columns is about the same share. `budget` is the number of tokens that a step
# fetches. With `fetch="device_put"` the values lie in host memory, as they would beside a GPU.

# %%
shadowkv = jshadow.ShadowKV(rank=config.key_columns // 6, budget=128, outlier_chunks=16)
policies = {"full": jshadow.Full(), "shadowkv": shadowkv}
options = {"max_new_tokens": 12, "capacity": len(prompt) + 64, "fetch": "device_put"}
runs = {name: jshadow.generate(params, prompt, policy, **options) for name, policy in policies.items()}
for name, out in runs.items():
    print(f"{name:>9}: {out.text!r}, fallback: {out.report.fallback}")

# %% [markdown]
# ## Bytes and attended tokens
#
# Every generation has a report. The left picture shows the bytes of the allocated arrays, by the memory in which they
# lie. The right picture shows the tokens that the last query attended to. The fetched tokens are only one part of them.
# This is one run of one prompt, so the bars have no error bars.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
device = [out.report.device_bytes / 2**20 for out in runs.values()]
host = [out.report.host_bytes / 2**20 for out in runs.values()]
left.bar(list(runs), device, label="device")
left.bar(list(runs), host, bottom=device, label="host")
left.set_ylabel("KV cache, MiB")
left.set_ylim(top=1.3 * max(map(sum, zip(device, host, strict=True))))
left.legend()
below = np.zeros(len(runs))
for part in dict.fromkeys(part for out in runs.values() for part in out.report.attended_parts):
    attended = np.array([out.report.attended_parts.get(part, 0) for out in runs.values()])
    right.bar(list(runs), attended, bottom=below, label=part)
    below += attended
right.legend(loc="upper right")
right.set_ylabel("tokens that the last query attended to")
plt.show()
report = runs["shadowkv"].report
print("attended tokens:", {part: round(tokens) for part, tokens in report.attended_parts.items()})
print(f"device bytes of full attention / of ShadowKV: {report.full_bytes / report.device_bytes:.2f}")
print(f"selected chunks that the step before selected too: {report.hit_rate:.0%}")
print(f"bytes fetched: {report.bytes_fetched:,}")

# %% [markdown]
# ## What is approximate
#
# The settings are the approximation. The code around them is exact. At full rank, and with a budget for the whole
# prompt, ShadowKV gives the same tokens as full attention, offloaded or not. `lossless` returns those settings for any
# policy that has them.

# %%
exact = jshadow.ShadowKV.lossless(options["capacity"], config)
same = jshadow.generate(params, prompt, exact, **options)
assert same.report.fallback is None
assert same.tokens == runs["full"].tokens
print(f"rank {exact.rank}, budget {exact.budget} tokens")
print("the same", len(same.tokens), "tokens as full attention")

# %% [markdown]
# ## Streaming
#
# `stream` takes the same arguments and yields pieces of text. This prompt is so short that ShadowKV has nothing to
# select. `generate` and `stream` then use a dense cache, and `report.fallback` says so.

# %%
chat = [{"role": "user", "content": "Name the three primary colors."}]
for piece in jshadow.stream(params, chat, max_new_tokens=24):
    print(piece, end="", flush=True)
