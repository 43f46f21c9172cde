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
# A policy is one class. It says which tokens of a prompt it keeps and how a step attends to them. The contract gives it
# sizes, offloading, forks, saved states, batches and byte counts. This notebook writes a small policy: keep the tokens
# whose keys have the smallest norm. Devoto et al. (2024, arXiv 2406.11430) observed that such keys get much attention.
# The method needs no queries.

# %%
MODEL = "../checkpoints/smollm2-135m-instruct"  # a directory in Hugging Face format, or a hub id
TEXT = "agreement"  # Python's documentation; "agreement_code": its source code

# %%
import dataclasses
from typing import Self

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import Array

import jshadow
from jshadow.evaluation import metrics
from jshadow.evaluation.laws import LAWS, run_laws, subject_of
from jshadow.evaluation.tasks import make
from jshadow.models.config import ModelConfig
from jshadow.policies import CacheSpec, KeepsBest, PromptKV, SnapKV, check_range, register
from jshadow.policies.sizing import at_share

# %% [markdown]
# ## The class
#
# `KeepsBest` is the base class of methods that evict tokens of the prompt once and keep all later tokens. Its setting
# `kept` is the number of tokens that stay. A subclass has a method `score`. It returns a score for each token, and the
# number of newest tokens that stay whatever their score. `resolve` checks the settings.
#
# `@register` makes the policy known by its name. `small` are settings that drop tokens on the tiny prompts of the laws.
# `lossless` are settings that equal full attention. If the cell runs again, the new class replaces the old one.


# %%
@register(small={"kept": 14, "recent": 4}, lossless=lambda tokens, config: {"kept": tokens})
@dataclasses.dataclass(frozen=True)
class SmallNorms(KeepsBest):
    """Keep the tokens whose keys have the smallest L2 norm, and the newest ones.

    Attributes:
        kept: tokens of a prompt that are kept, the newest ones included.
        recent: newest tokens that are kept whatever their norms.
    """

    kept: int = 256
    recent: int = 32

    name = "small_norms"
    source = "arXiv 2406.11430"

    def resolve(self, config: ModelConfig, capacity: int) -> Self:
        """Check the settings. Raises ConfigError where one is out of range."""
        check_range(self.name, "recent", self.recent, 0)
        return super().resolve(config, capacity)

    def score(self, spec: CacheSpec, prompt: PromptKV) -> tuple[Array, Array]:
        """Minus the norm of each key, float32 [B, h_kv, S], and how many of the newest tokens stay, int32 [B]."""
        norms = jnp.linalg.norm(prompt.k_post.astype(jnp.float32), axis=-1)
        return -norms.swapaxes(1, 2), jnp.full_like(prompt.lengths, self.recent)


# %% [markdown]
# ## The laws
#
# The laws are sentences that hold for every policy. A mistake in a mask or in a size breaks one of them. They are
# checked on a tiny random model and one ragged batch. The next cell runs four. Without `names` it would run all of
# them, as the command `jshadow laws` does.

# %%
names = ["lossless_is_full", "small_is_not_full", "split_turns_are_one_turn", "inactive_rows_do_not_change"]
for outcome in run_laws(subject_of(SmallNorms), names=names):
    print(f"{outcome.status:12}{outcome.law.statement}", *outcome.broken)
    assert not outcome.broken
print(f"{len(LAWS)} laws in all")

# %% [markdown]
# The next policy has a mistake. It writes tokens into rows that take no part in a step. The law names the array of the
# state that changed.


# %%
@register(small={"kept": 14, "recent": 4})
@dataclasses.dataclass(frozen=True)
class Careless(SmallNorms):
    """A policy with a mistake: it does not look at `step.valid`."""

    name = "careless"

    def append(self, spec, state, step):
        """Write every row's token."""
        return super().append(spec, state, step.replace(valid=jnp.ones_like(step.valid)))


[outcome] = run_laws(subject_of(Careless), names=["inactive_rows_do_not_change"])
print(outcome.status, *outcome.broken)
assert outcome.broken

# %% [markdown]
# ## Does it help?
#
# Now the real model. All policies share one exact prefill of a sample. Then the sample's own continuation is fed to
# each. The measure is the Kullback-Leibler divergence between the next-token distributions of full attention and of the
# policy, in nats. SnapKV chooses tokens by the attention of the prompt's last queries. It keeps as many tokens.

# %%
SAMPLES, PROMPT, FORCED = 4, 640, 32
params = jshadow.load(MODEL, dtype="float32")
sizes = (64, 256)
methods = {
    "small norms": [SmallNorms(kept=size) for size in sizes],
    "SnapKV": [SnapKV(max_capacity_prompt=size, observation_window=32) for size in sizes],
}
policies = [jshadow.Full(), *(policy for settings in methods.values() for policy in settings)]
divergence = {policy: [] for policy in policies}
for seed in range(SAMPLES):
    case = make(TEXT, params.tokenizer, PROMPT, 0.5, seed)
    prompt, forced = np.array([case.prompt]), np.array([case.forced[:FORCED]])
    results = jshadow.prefill_many(params, prompt, np.array([PROMPT]), policies, capacity=PROMPT + 64)
    logits = {}
    for policy, (_, state) in zip(policies, results, strict=True):
        out, _ = jshadow.extend(params, forced, np.array([FORCED]), state, logits="all")
        logits[policy] = np.asarray(out)[0]
        divergence[policy].append(metrics.kl(logits[policies[0]], logits[policy]).mean())

# %% [markdown]
# Bars are means over the samples, with their standard errors.

# %%
figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for number, (name, settings) in enumerate(methods.items()):
    table = np.array([divergence[policy] for policy in settings])
    mean, error = table.mean(axis=1), table.std(axis=1, ddof=1) / SAMPLES**0.5
    bars = axis.bar(np.arange(len(sizes)) + 0.4 * number, mean, yerr=error, width=0.38, label=name, capsize=3)
    axis.bar_label(bars, [f"{value:.3f}" for value in mean], padding=2)
    print(name, *(f"{size} tokens: {m:.3f} ± {e:.3f} nats;" for size, m, e in zip(sizes, mean, error, strict=True)))
axis.set_xticks(np.arange(len(sizes)) + 0.2, [f"{size} of {PROMPT} tokens kept" for size in sizes])
axis.set_ylabel("divergence from full attention, nats")
axis.margins(y=0.1)
axis.legend()
plt.show()
print("at half of full attention's bytes:", at_share(SmallNorms(), 0.5, PROMPT + 64, params.config))

# %% [markdown]
# Four samples of one small model decide nothing. `jshadow eval --shares` compares methods at equal bytes on many
# samples.
#
# ## From the notebook to a file
#
# Put the class and its imports into a module of your own. Then `module:SmallNorms` works in every command, and `jshadow
# laws module:SmallNorms` runs all laws. `docs/add_a_policy.md` shows this, and how to install it as a package.
#
# To propose a policy for jshadow itself, put the file into `jshadow/policies/`. Like its neighbors, the file imports
# from the modules of that folder (`jshadow.policies.eviction`, not `jshadow.policies`). Its methods need type
# annotations as above, because `make test` runs mypy. "Add a policy" in CONTRIBUTING.md lists all steps.
# `jshadow/policies/base.py` describes the order of a step, and `jshadow/policies/capabilities.py` the optional
# abilities.
