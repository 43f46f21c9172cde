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
# # Add a policy
#
# A method is one class. It says what it keeps of a prompt and how a step attends; sizes, offloading, forks, saving,
# batches and accounting come with the contract. Here is a small one, written whole: keep the tokens whose keys have the
# smallest norm. Devoto et al. (2024, arXiv 2406.11430) saw that such keys draw attention; it needs neither queries nor
# scores.

# %%
import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jshadow
from jshadow.evaluation import metrics
from jshadow.evaluation.tasks import make
from jshadow.models.config import ModelConfig
from jshadow.policies import SnapKV
from jshadow.policies.checks import check_range
from jshadow.policies.eviction import EvictingPolicy
from jshadow.policies.sizing import largest
from jshadow.weights.params import init_params

# %% [markdown]
# ## The class
#
# `EvictingPolicy` is the skeleton of methods that cut a prompt down once and keep all that follows. Such a method only
# says how many tokens stay (`slots`) and which (`score`, and how many of the newest whatever their score). `resolve`
# checks the settings. `lossless` names the setting that must equal full attention, where the laws below start;
# `nominal` the largest one within a share of full attention's bytes, so that methods can be compared at equal memory.


# %%
@dataclasses.dataclass(frozen=True)
class SmallNorms(EvictingPolicy):
    """Keep the tokens whose keys have the smallest L2 norm, and the newest ones."""

    kept: int = 256
    recent: int = 32

    name = "small_norms"
    source = "arXiv 2406.11430"

    def resolve(self, config, capacity):
        """Check the settings."""
        check_range(self.name, "recent", self.recent, 0)
        check_range(self.name, "kept", self.kept, max(1, self.recent))
        return self

    def slots(self, capacity):
        """Never more than the capacity."""
        return min(self.kept, capacity)

    def score(self, spec, prompt):
        """Minus the norm of each key, [B, h_kv, S]; rotation does not change it."""
        norms = jnp.linalg.norm(prompt.k_post.astype(jnp.float32), axis=-1)
        return -norms.swapaxes(1, 2), jnp.full_like(prompt.lengths, self.recent)

    @classmethod
    def lossless(cls, num_tokens, config):
        """All of the prompt."""
        return cls(kept=max(num_tokens, cls.recent))

    @classmethod
    def nominal(cls, fraction, num_tokens, config):
        """The largest setting within a share of full attention's device bytes."""

        def make(kept):
            return cls(kept=kept, recent=min(cls.recent, kept))

        return largest(make, 1, num_tokens, fraction, num_tokens, config)


# %% [markdown]
# ## The laws
#
# Three facts hold for every policy, and a mistake in a mask or a size breaks one of them. A tiny random model is enough
# to check them. First: with everything kept, the logits are those of full attention.

# %%
tiny = init_params(ModelConfig("llama", 101, 2, 32, 48, 4, 2, 16, 1e-5, 256), seed=0)
random = np.random.default_rng(0)
tokens, lengths = random.integers(0, 101, (3, 61)), np.array([61, 40, 5])
turn, new = random.integers(0, 101, (3, 6)), np.array([6, 6, 6])


def run(policy, rows=(0, 1, 2), splits=((0, 6),)):
    """Prefill some rows, then feed the turn in pieces: float32 logits [B, 6, V]."""
    rows = list(rows)
    _, state = jshadow.prefill(tiny, tokens[rows], lengths[rows], policy, capacity=96)
    parts = []
    for start, end in splits:
        logits, state = jshadow.extend(
            tiny, turn[rows, start:end], np.full(len(rows), end - start), state, logits="all"
        )  # fmt: skip
        parts.append(np.asarray(logits))
    return np.concatenate(parts, axis=1)


full = run(jshadow.Full())
assert np.abs(run(SmallNorms.lossless(96, tiny.config)) - full).max() < 1e-4
small = SmallNorms(kept=16, recent=4)
print("with 16 of the prompt's tokens kept, logits move by up to", np.abs(run(small) - full).max())

# %% [markdown]
# Second and third: a row alone is the row in a batch, and a turn in two pieces is the turn at once.

# %%
whole = run(small)
for row in range(3):
    assert np.abs(run(small, rows=[row])[0] - whole[row]).max() < 1e-4
assert np.abs(run(small, splits=((0, 2), (2, 6))) - whole).max() < 1e-4
print("rows are independent, and turns may be split")

# %% [markdown]
# The suite holds these laws and more (forks, fetch modes, bytes, idle rows) for all policies that are listed in
# `policies/__init__.py` and `tests/cases.py`; a policy that is missing from the table fails.
#
# ## Does it help?
#
# Now the real model. All policies share one exact prefill of the same text; then the text's own continuation is forced
# through each, and the distance of its predictions from full attention's is the Kullback-Leibler divergence in nats.
# SnapKV, which asks the prompt's last queries what to keep, is given as many tokens.

# %%
params = jshadow.load("../checkpoints/smollm2-135m-instruct", dtype="float32")
case = make("agreement", params.tokenizer, 640, 0.5, 1)
forced = np.array([case.forced[:32]])
sizes = (64, 256)
entries = {
    "small norms": [SmallNorms(kept=size) for size in sizes],
    "SnapKV": [SnapKV(max_capacity_prompt=size, observation_window=32) for size in sizes],
}
policies = [jshadow.Full(), *(policy for some in entries.values() for policy in some)]
made = jshadow.prefill_many(params, np.array([case.prompt]), np.array([640]), policies, capacity=704)
logits = {}
for policy, (_, state) in zip(policies, made, strict=True):
    out, _ = jshadow.extend(params, forced, np.array([forced.shape[1]]), state, logits="all")
    logits[policy] = np.asarray(out)[0]

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for number, (name, some) in enumerate(entries.items()):
    distances = [metrics.kl(logits[policies[0]], logits[one]).mean() for one in some]
    bars = axis.bar(np.arange(len(sizes)) + 0.4 * number, distances, width=0.38, label=name)
    axis.bar_label(bars, fmt="%.3f")
axis.set_xticks(np.arange(len(sizes)) + 0.2, [f"{size} of 640 tokens kept" for size in sizes])
axis.set_ylabel("divergence from full attention, nats")
axis.legend()
plt.show()
share = made[1][1].policy.nominal(0.5, 704, params.config)
print("at half of full attention's bytes:", share)

# %% [markdown]
# One text of one small model decides nothing; `jshadow eval --shares` compares methods at equal bytes over many cases.
#
# What else a policy can do (offload rows and fetch them, choose for later layers, learn arrays, act after a step) is in
# the docstring of `policies/base.py`, in the order of a step; CONTRIBUTING.md lists what a new file needs.
