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
# For many prompts at once you may want your own loop: your own sampling, your own stop rule, rows that come and go. The
# step behind `decode_step` is a plain traceable function, `jshadow.decode.step(weights, config, token, state)`; this
# notebook puts a jit around it, line by line.

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

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
config, tokenizer = params.config, params.tokenizer

# %% [markdown]
# ## A ragged batch
#
# Rows need not be equally long: tokens are padded on the right, and `lengths` says what is real. Each row masks its own
# share, so that it gets the same result as alone. Two prompts start, three more wait for a row to become free.

# %%
texts = [
    "The three primary colours are",
    "def add(a, b):\n    return",
    "Water boils at",
    "The capital of France is",
    "One, two, three, four,",
]
prompts = [tokenizer.encode(text) for text in texts]
policy = jshadow.ShadowKV(rank=32, budget=64)
WIDTH, CAPACITY, ROWS = 16, 128, 2


def prefill(some):
    """First tokens and the state of some prompts, padded to one width so that they share a compiled program."""
    tokens = np.zeros((len(some), WIDTH), np.int32)
    for row, prompt in enumerate(some):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in some])
    logits, state = jshadow.prefill(params, tokens, lengths, policy, capacity=CAPACITY, fetch="device_put")
    return np.asarray(logits.argmax(-1), np.int32), state


token, state = prefill(prompts[:ROWS])
print(state.lengths, "tokens,", state.batch, "rows, capacity", state.capacity)

# %% [markdown]
# ## The jitted step
#
# A state has two halves. The step reads the first (the prompt: never returned, so never copied) and consumes the
# second, which is donated: its buffers become those of the new state. `split` and `join` take the state apart and put
# it together. `COMPILER_OPTIONS` lets the host's gather overlap the rebuilding of keys on a GPU; other backends take it
# and do nothing. Rows whose `active` is False do not change.


# %%
@functools.partial(jax.jit, donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def next_tokens(weights, token, reads, writes, active):
    """One greedy step of all active rows: tokens int32 [B], and the new changing half."""
    logits, state = step(weights, config, token, KVState.of(reads, writes), active)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state.split()[1]


def advance(token, state, active):
    """A step on a state; the state that is given is gone afterwards."""
    reads, writes = state.split()
    token, writes = next_tokens(params.weights, token, reads, writes, active)
    return np.asarray(token), state.join(writes)


# %% [markdown]
# ## Rows that join
#
# Each row answers with `LIMITS` tokens and is then free. The next prompt is prefilled alone and takes its place with
# `insert`: shapes stay, so nothing is compiled again. The other rows never notice.

# %%
LIMITS = [8, 12, 10, 6, 9]
answers = [[] for _ in prompts]
waiting, serving = list(range(ROWS, len(prompts))), list(range(ROWS))
history, seconds = [], []
while any(one is not None for one in serving):
    for row, one in enumerate(serving):
        if one is None:
            continue
        answers[one].append(int(token[row]))
        if len(answers[one]) < LIMITS[one]:
            continue
        serving[row] = waiting.pop(0) if waiting else None
        if serving[row] is not None:
            first, alone = prefill([prompts[serving[row]]])
            state = state.insert(row, alone)
            token = np.where(np.arange(ROWS) == row, first[0], token)
            answers[serving[row]].append(int(first[0]))
    history.append(list(serving))
    start = time.perf_counter()
    token, state = advance(token, state, np.array([one is not None for one in serving]))
    seconds.append(time.perf_counter() - start)
print("compiled steps:", next_tokens._cache_size())
for text, answer in zip(texts, answers, strict=True):
    print(repr(text + tokenizer.decode(answer)))

# %% [markdown]
# Which prompt each row served, step by step. The first step's time is that of compiling.

# %%
figure, axis = plt.subplots(figsize=(8, 1.8), layout="constrained")
served = np.array([[-1 if one is None else one for one in now] for now in history]).T
axis.imshow(np.where(served < 0, np.nan, served), aspect="auto", cmap="tab10", vmin=0, vmax=9, interpolation="none")
for row, some in enumerate(served):
    for one in dict.fromkeys(some[some >= 0].tolist()):
        at = np.flatnonzero(some == one)
        axis.text(at.mean(), row, texts[one][:14], ha="center", va="center", color="white", fontsize=7)
axis.set_yticks(range(ROWS), [f"row {row}" for row in range(ROWS)])
axis.set_xlabel("step")
plt.show()
print(f"first step {seconds[0]:.1f} s, median of the others {1000 * np.median(seconds[1:]):.0f} ms for {ROWS} rows")

# %% [markdown]
# ## The same as alone
#
# `decode_steps` is such a loop in one compiled scan. Each prompt alone gives the tokens that it gave in the batch,
# whoever shared it and whenever it joined.

# %%
for prompt, answer in zip(prompts, answers, strict=True):
    first, alone = prefill([prompt])
    rest, _ = jshadow.decode_steps(params, first, alone, max(LIMITS) - 1)
    assert [int(first[0]), *np.asarray(rest)[0].tolist()][: len(answer)] == answer
print("every row equals its prompt alone")

# %% [markdown]
# ## Where the time goes
#
# A profiler trace of a few warm steps, for TensorBoard's profile plug-in or Perfetto. On a GPU it shows whether the
# host's gather runs beside the rebuilding of keys.

# %%
token, state = prefill(prompts[:ROWS])
active = np.ones(ROWS, bool)
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
        for _ in range(4):
            token, state = advance(token, state, active)
    written = [path for path in Path(folder).rglob("*") if path.is_file()]
    assert written
    for path in written:
        print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB")
