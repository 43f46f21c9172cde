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
# Reading a long document is the expensive part; a question is short. A KV state is a value, an immutable pytree:
# prefill the document once, fork the state for each question, save it for another day. A fork shares the prompt's half
# by reference and copies only what steps change, so that ten questions do not take ten caches.

# %%
import tempfile
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt

import jshadow

params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
facts = ["The bridge was closed in 1998.", "It was rebuilt in 2003.", "The ferry costs 7 crowns."]
document = "<|im_start|>user\nA report: " + " ".join(facts * 30)  # opens a chat turn and leaves it open
print(len(params.tokenizer.encode(document)), "tokens")

# %% [markdown]
# ## Prefill once
#
# `max_new_tokens=0` reads the document and stops. The capacity leaves room for a question and its answer; `read.state`
# is what everything below starts from.

# %%
policy = jshadow.ShadowKV(rank=64, budget=128, outlier_chunks=16)
read = jshadow.generate(params, document, policy, max_new_tokens=0, capacity=1024)
print(read.state.lengths, "tokens held,", read.report.fallback)

# %% [markdown]
# ## Ask forks of it
#
# Each question goes to a fork; the state itself stays as it was. A turn continues the text, so that the questions close
# the chat turn that the document opened. The first question compiles its steps, so it is asked once more before the
# clock runs.

# %%
questions = ["When was the bridge closed?", "When was it rebuilt?", "What does the ferry cost?"]


def ask(state, question, count=16):
    """The answer, on a fork."""
    turn = f"\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return jshadow.generate(params, turn, state=state.fork(), max_new_tokens=count)


ask(read.state, questions[0])
answers, seconds = [], []
for question in questions:
    start = time.perf_counter()
    answers.append(ask(read.state, question))
    seconds.append(time.perf_counter() - start)
    print(f"{question:<30} {answers[-1].text.strip()!r}")

# %% [markdown]
# ## What a question takes
#
# The bars compare the seconds of reading the document (without compiling) with those of each question, its answer
# included.

# %%
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
axis.barh(["the document", *questions], [read.report.prefill_seconds, *seconds], color=["C1"] + ["C0"] * len(questions))
axis.invert_yaxis()
axis.set_xlabel("seconds")
plt.show()

# %% [markdown]
# ## What forks share
#
# All states that are alive are counted here by the buffers that they really hold: what several share counts once.


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
# ## Another day, another process
#
# A saved state is one safetensors file with the digests of model and tokenizer. What is loaded is bit-equal, so that it
# gives the same answer; another model or policy is refused before anything reaches a device.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "report.state"
    jshadow.save_state(path, read.state, params)
    print(f"{path.stat().st_size / 2**20:.1f} MiB on disk")
    again = jshadow.load_state(path, params)
assert ask(again, questions[2]).tokens == answers[2].tokens
try:
    jshadow.generate(params, "?", jshadow.Full(), state=again)
except jshadow.errors.StateMismatch as error:
    print("StateMismatch:", str(error)[:80])

# %% [markdown]
# ## A conversation instead
#
# To keep what was said, hand on the state of the answer: the next question then knows the one before it.

# %%
first = ask(read.state, questions[0])
second = jshadow.generate(
    params, [{"role": "user", "content": "Say that once more."}], state=first.state, max_new_tokens=12
)
print(repr(first.text.strip()), "->", repr(second.text.strip()))
print(int(read.state.lengths[0]), "->", int(second.state.lengths[0]), "tokens")
