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
# # One document, many questions
#
# The prefill of a long document is expensive, and a question is short. A KV state is a value, an immutable pytree. You
# can prefill the document once, fork the state for each question, and save it to a file. A fork shares the prompt's
# half of the state by reference and copies only the half that steps change. So ten questions do not take ten caches.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = "The bridge was closed in 1998. It was rebuilt in 2003. The ferry costs 7 crowns. " * 30
QUESTIONS = ["When was the bridge closed?", "When was it rebuilt?", "What does the ferry cost?"]

# %%
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import jshadow

params = jshadow.load(MODEL, dtype="float32")
document = [{"role": "user", "content": f"Here is a report.\n\n{TEXT}\n\nI will ask you about it."}]

# %% [markdown]
# ## Prefill once
#
# With `max_new_tokens=0`, `generate` prefills the document and stops. The capacity leaves room for a question and its
# answer. All cells below start from `read.state`.

# %%
capacity = len(params.tokenizer.encode(TEXT)) + 192
policy = jshadow.ShadowKV(rank=params.config.key_columns // 3, budget=128, outlier_chunks=16)
read = jshadow.generate(params, document, policy, max_new_tokens=0, capacity=capacity)
print(read.state.lengths, "tokens held, fallback:", read.report.fallback)

# %% [markdown]
# ## Ask forks of it
#
# Each question goes to a fork, and the state itself does not change. A first call may compile a step, so each question
# is asked once before the measurement, and then three times.

# %%
REPEATS = 3


def ask(state, question, count=16):
    """The result of a question on a fork of a state."""
    turn = [{"role": "user", "content": question}]
    return jshadow.generate(params, turn, state=state.fork(), max_new_tokens=count)


for question in QUESTIONS:
    ask(read.state, question)
answers, seconds = [], np.zeros((len(QUESTIONS), REPEATS))
for number, question in enumerate(QUESTIONS):
    for repeat in range(REPEATS):
        start = time.perf_counter()
        out = ask(read.state, question)
        seconds[number, repeat] = time.perf_counter() - start
    answers.append(out)
    print(f"{question:<30} {out.text.strip()!r}")

# %% [markdown]
# ## Seconds of a question
#
# The bars compare the prefill of the document, without compilation, with a question and its answer. Bars of questions
# are means of three runs, with their standard errors. The document is prefilled once.

# %%
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.barh("the document", read.report.prefill_seconds, color="C1")
axis.barh(QUESTIONS, seconds.mean(axis=1), xerr=seconds.std(axis=1, ddof=1) / REPEATS**0.5, color="C0", capsize=3)
axis.invert_yaxis()
axis.set_xlabel("seconds")
plt.show()

# %% [markdown]
# ## What forks share
#
# The next cell counts the bytes of all states that are alive. A buffer that several states share counts once.


# %%
def held_bytes(states):
    """Bytes of the distinct buffers of some states, and of all their arrays as if nothing were shared."""
    leaves = [leaf for state in states for leaf in jax.tree.leaves(state.layers)]
    buffers = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in leaves if leaf.nbytes}
    return sum(buffers.values()), sum(leaf.nbytes for leaf in leaves)


states = [read.state, *(answer.state for answer in answers)]
shared, apart = held_bytes(states)
one, _ = held_bytes(states[:1])
print(f"one state: {one / 2**20:.1f} MiB; {len(states)} states: {shared / 2**20:.1f} MiB, {apart / 2**20:.1f} unshared")
assert shared < apart

# %% [markdown]
# ## Save the state
#
# A saved state is one safetensors file. It contains the digests of the model and of the tokenizer. The loaded state is
# equal bit by bit, so it gives the same answer in another process. `jshadow.load_state` and `jshadow.generate` refuse
# another model or policy before anything reaches a device.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.state"
    jshadow.save_state(path, read.state, params)
    print(f"{path.stat().st_size / 2**20:.1f} MiB on disk")
    again = jshadow.load_state(path, params)
assert ask(again, QUESTIONS[-1]).tokens == answers[-1].tokens
try:
    jshadow.generate(params, "?", jshadow.Full(), state=again)
except jshadow.errors.StateMismatch as error:
    print("StateMismatch:", str(error)[:80])

# %% [markdown]
# ## A conversation
#
# For a conversation, pass on the state of the answer. The next turn then knows the turn before it.

# %%
first = ask(read.state, QUESTIONS[0])
turn = [{"role": "user", "content": "Say that once more."}]
second = jshadow.generate(params, turn, state=first.state, max_new_tokens=12)
print(repr(first.text.strip()), "->", repr(second.text.strip()))
print(int(read.state.lengths[0]), "->", int(second.state.lengths[0]), "tokens")
