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
# # A batch decode script
#
# For many prompts at once you may want your own loop, with your own sampling and your own stop rule, and with rows that
# come and go. The step behind `decode_step` is a plain traceable function: `jshadow.decode.step(weights, config, token,
# state)`. This notebook puts a `jit` around it.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = [
    "The three primary colors are",
    "def add(a, b):\n    return",
    "Water boils at",
    "The capital of France is",
    "One, two, three, four,",
]

# %%
import functools
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jshadow
from jshadow.cache.state import KVState
from jshadow.engine.decode import COMPILER_OPTIONS, step

params = jshadow.load(MODEL, dtype="float32")
config, tokenizer = params.config, params.tokenizer

# %% [markdown]
# ## A ragged batch
#
# Rows may have different lengths. Tokens are padded on the right, and `lengths` counts the real ones. Each row masks
# its own padding, so it gets the same result as alone. Two prompts start, and three more wait for a free row.

# %%
prompts = [tokenizer.encode(text) for text in TEXT]
policy = jshadow.ShadowKV(rank=config.key_columns // 6, budget=64)
WIDTH, CAPACITY, ROWS = max(map(len, prompts)), 128, 2


def prefill(batch):
    """First tokens and the state of some prompts, padded to one width so that they share a compiled program."""
    tokens = np.zeros((len(batch), WIDTH), np.int32)
    for row, prompt in enumerate(batch):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in batch])
    logits, state = jshadow.prefill(params, tokens, lengths, policy, capacity=CAPACITY, fetch="device_put")
    return np.asarray(logits.argmax(-1), np.int32), state


token, state = prefill(prompts[:ROWS])
print(state.lengths, "tokens,", state.batch, "rows, capacity", state.capacity)

# %% [markdown]
# ## The jitted step
#
# A state has two halves. The step reads the first half, which holds the prompt. It does not return that half, so it
# does not copy it. The second half is donated: its buffers become those of the new state. `split` takes a state apart
# and `join` puts it together. On a GPU, `COMPILER_OPTIONS` lets the gather in host memory overlap the reconstruction of
# the keys. Other backends ignore them. Rows whose `active` is False do not change.


# %%
@functools.partial(jax.jit, donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def next_tokens(weights, token, reads, writes, active):
    """One greedy step of all active rows: tokens int32 [B], and the new changing half."""
    logits, state = step(weights, config, token, KVState.of(reads, writes), active)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state.split()[1]


def advance(token, state, active):
    """A step on a state. The state that is passed in is consumed."""
    reads, writes = state.split()
    token, writes = next_tokens(params.weights, token, reads, writes, active)
    return np.asarray(token), state.join(writes)


# %% [markdown]
# ## Rows that join
#
# Each prompt gets an answer of `LIMITS` tokens, and its row is then free. The next prompt is prefilled alone, and
# `insert` puts it into the free row. The shapes stay the same, so nothing is compiled again. The other rows do not
# change.

# %%
LIMITS = [(8, 12, 10, 6, 9)[index % 5] for index in range(len(prompts))]
answers = [[] for _ in prompts]
waiting, serving = list(range(ROWS, len(prompts))), list(range(ROWS))
history, seconds = [], []
while any(index is not None for index in serving):
    for row, index in enumerate(serving):
        if index is None:
            continue
        answers[index].append(int(token[row]))
        if len(answers[index]) < LIMITS[index]:
            continue
        serving[row] = waiting.pop(0) if waiting else None
        if serving[row] is not None:
            first, alone = prefill([prompts[serving[row]]])
            state = state.insert(row, alone)
            token = np.where(np.arange(ROWS) == row, first[0], token)
            answers[serving[row]].append(int(first[0]))
    history.append(list(serving))
    start = time.perf_counter()
    token, state = advance(token, state, np.array([index is not None for index in serving]))
    seconds.append(time.perf_counter() - start)
print("compiled steps:", next_tokens._cache_size())
for text, answer in zip(TEXT, answers, strict=True):
    print(repr(text + tokenizer.decode(answer)))

# %% [markdown]
# The left picture shows which prompt each row served. The right picture shows the time of a step: the median of all
# steps after the first, which compiles, with a bar from the 10th to the 90th percentile.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 1.9), width_ratios=(5, 1), layout="constrained")
served = np.array([[-1 if index is None else index for index in rows] for rows in history]).T
left.imshow(np.where(served < 0, np.nan, served), aspect="auto", cmap="tab10", vmin=0, vmax=9, interpolation="none")
for row, indices in enumerate(served):
    for index in dict.fromkeys(indices[indices >= 0].tolist()):
        at = np.flatnonzero(indices == index)
        left.text(at.mean(), row, TEXT[index][:14].split("\n")[0], ha="center", va="center", color="white", fontsize=7)
left.set_yticks(range(ROWS), [f"row {row}" for row in range(ROWS)])
left.set_xlabel("step")
low, median, high = 1000 * np.quantile(seconds[1:], (0.1, 0.5, 0.9))
right.bar([f"{ROWS} rows"], [median], yerr=[[median - low], [high - median]], capsize=3)
right.set_ylabel("ms a step")
plt.show()
print(f"first step {seconds[0]:.1f} s, median of the others {median:.0f} ms for {ROWS} rows")

# %% [markdown]
# ## The same as alone
#
# `decode_steps` runs such a loop in one compiled scan. Each prompt alone gives the tokens that it gave in the batch. It
# does not matter which rows shared the batch, or when the prompt joined.

# %%
for prompt, answer in zip(prompts, answers, strict=True):
    first, alone = prefill([prompt])
    rest, _ = jshadow.decode_steps(params, first, alone, max(LIMITS) - 1)
    assert [int(first[0]), *np.asarray(rest)[0].tolist()][: len(answer)] == answer
print("every row equals its prompt alone")

# %% [markdown]
# ## A profiler trace
#
# The next cell writes a profiler trace of four warm steps, for TensorBoard's profile plug-in or Perfetto. On a GPU it
# shows whether the gather in host memory overlaps the reconstruction of the keys.

# %%
token, state = prefill(prompts[:ROWS])
active = np.ones(ROWS, bool)
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        for _ in range(4):
            token, state = advance(token, state, active)
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    for path in files:
        print(f"{path.suffix}: {path.stat().st_size / 2**10:.0f} KiB")
