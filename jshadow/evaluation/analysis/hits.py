"""Measures how many selected chunks were also selected in the previous step (ShadowKV, 3.2 and figure 5, right)."""

import dataclasses
from typing import Any

import numpy as np

from jshadow.cache import offload
from jshadow.engine import decode
from jshadow.errors import ConfigError
from jshadow.evaluation.analysis.tensors import text_of
from jshadow.policies import ShadowKV
from jshadow.policies.checks import check_range


@dataclasses.dataclass(frozen=True)
class HitRates:
    """A comparison of the selections of consecutive decode steps. The first step has no previous one and is left out.

    Attributes:
        selected: int64 [steps - 1, layers], the number of selected chunks, summed over KV heads.
        hits: int64 [steps - 1, layers], how many of these were also selected in the previous step. If the policy has a
            pool, how many of these were in the pool.
        policy: the resolved policy.
        prompt_tokens: number of tokens before the first step.
    """

    selected: np.ndarray
    hits: np.ndarray
    policy: ShadowKV
    prompt_tokens: int

    @property
    def rates(self) -> np.ndarray:
        """The share of the selected chunks that are hits, float64 [steps - 1, layers]."""
        return self.hits / np.maximum(self.selected, 1)

    @property
    def mean(self) -> float:
        """The share of the selected chunks that are hits, over all steps and layers."""
        return float(self.hits.sum() / max(int(self.selected.sum()), 1))


def hit_rates(params: Any, tokens: Any, policy: ShadowKV, steps: int, *, fetch: str = "resident") -> HitRates:
    """Decode the last tokens of a text one by one, and compare each step's selection with that of the previous step.

    Args:
        params: the model's Params.
        tokens: token ids of the text, int32 [S]. All but the last `steps` tokens are prefilled. Then the last tokens
            are fed one by one. Feeding a text avoids the repetitions of greedy generation.
        policy: a ShadowKV (or ShadowKVPlus) that selects chunks at this length.
        steps: number of decode steps, at least 2.
        fetch: fetch mode. All modes give the same selections.

    Raises:
        PromptError: see `prompt_tensors`.
        ConfigError: the policy is not ShadowKV, steps is out of range, or the text is too short for a selection.
    """
    ids = text_of(params, tokens)
    if not isinstance(policy, ShadowKV):
        raise ConfigError(f"policy must be a ShadowKV, got {policy!r}")
    check_range("hit_rates", "steps", steps, 2, max(2, len(ids) - 1))
    resolved = policy.resolve(params.config, len(ids))
    prompt = len(ids) - steps
    if reason := resolved.fallback(params.config, prompt):
        raise ConfigError(f"tokens must leave chunks to select from: {reason}")
    _, state = decode.prefill(
        params,
        ids[None, :prompt],
        np.array([prompt], np.int32),
        resolved,
        capacity=len(ids),
        fetch=offload.resolve_fetch(fetch),
    )
    caches, chosen = [], []  # the chunks in the cache after each step [layers, h_kv, P], and which the step selected
    for token in ids[prompt:]:
        _, state = decode.decode_step(params, np.array([token], np.int32), state)
        lives = [layer.live for layer in state.layers]
        held = [np.asarray(live.resident)[0] for live in lives]
        ages = [None if live.ages is None else np.asarray(live.ages)[0] for live in lives]
        caches.append(np.stack(held))
        chosen.append(np.stack([at >= 0 if age is None else age == 0 for at, age in zip(held, ages, strict=True)]))
    now, before, selected = np.stack(caches[1:]), np.stack(caches[:-1]), np.stack(chosen[1:])
    repeated = (now[..., :, None] == before[..., None, :]).any(axis=-1) & selected
    return HitRates(selected.sum(axis=(2, 3)), repeated.sum(axis=(2, 3)), resolved, prompt)
