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
# A method is one class. It says what it keeps of a prompt and how a step attends. Sizes, offloading, forks, saving,
# batches and accounting come with the contract. Here is a small one, written whole: keep the tokens whose keys have the
# smallest norm. Devoto et al. (2024, arXiv 2406.11430) saw that such keys draw attention. The method needs no queries.

# %%
import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jshadow
from jshadow.evaluation import metrics
from jshadow.evaluation.laws import LAWS, run_laws, subject_of
from jshadow.evaluation.tasks import make
from jshadow.policies import EvictingPolicy, Falling, Sized, SnapKV, check_range, register
from jshadow.policies.sizing import at_share

# %% [markdown]
# ## The class
#
# `EvictingPolicy` is the skeleton of methods that cut a prompt down once and keep all that follows. Such a method only
# says how many tokens stay (`slots`) and which (`score`, and how many of the newest whatever their score). `resolve`
# checks the settings. `Sized` and its `candidates` let methods be compared at equal memory; they are optional.
#
# `@register` makes the method known by its name. `small` are settings that drop something on the laws' tiny prompts.
# `lossless` are settings that equal full attention. A cell that runs again replaces the class.


# %%
@register(
    small={"kept": 14, "recent": 4},
    lossless=lambda tokens, config: {"kept": max(tokens, SmallNorms.recent)},
)
@dataclasses.dataclass(frozen=True)
class SmallNorms(EvictingPolicy, Sized):
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

    def candidates(self, num_tokens, config):
        """All sizes, from the largest."""
        recent = SmallNorms.recent
        return [Falling(lambda kept: SmallNorms(kept=kept, recent=min(recent, kept)), 1, num_tokens)]


# %% [markdown]
# ## The laws
#
# Some facts hold for every policy, and a mistake in a mask or a size breaks one of them. They are checked on a tiny
# random model and one ragged batch. Here are a few; without `names`, all of them run, as `jshadow laws` does it.

# %%
names = ["lossless_is_full", "small_is_not_full", "split_turns_are_one_turn", "inactive_rows_do_not_change"]
for outcome in run_laws(subject_of(SmallNorms), names=names):
    print(f"{outcome.status:12}{outcome.law.statement}", *outcome.broken)
    assert not outcome.broken
print(f"{len(LAWS)} laws in all")

# %% [markdown]
# A method with a mistake: it writes the tokens of rows that take no part in a step. The law names the leaf of the state
# that changed.


# %%
@register(small={"kept": 14, "recent": 4})
@dataclasses.dataclass(frozen=True)
class Careless(SmallNorms):
    """It does not look at `step.valid`."""

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
print("at half of full attention's bytes:", at_share(SmallNorms(), 0.5, 704, params.config))

# %% [markdown]
# One text of one small model decides nothing; `jshadow eval --shares` compares methods at equal bytes over many cases.
#
# `docs/add_a_policy.md` goes the same way with files: a policy in a module of your own, in every command, as a package.
# The order of a step is at the top of `policies/base.py`. What only some methods do (learn arrays, guess the next
# token, fetch for later layers) is in `policies/capabilities.py`.
