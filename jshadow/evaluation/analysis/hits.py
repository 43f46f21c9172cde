"""How many of the selected chunks were selected in the step before (ShadowKV, section 3.2 and figure 5, right)."""

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
    """Selections of consecutive decode steps, compared; of the first step nothing is known.

    Attributes:
        selected: chunks selected, summed over KV heads, int64 [steps - 1, layers].
        hits: those of them that the step before had selected too, int64 [steps - 1, layers].
        policy: the resolved policy.
        prompt_tokens: tokens before the first step.
    """

    selected: np.ndarray
    hits: np.ndarray
    policy: ShadowKV
    prompt_tokens: int

    @property
    def rates(self) -> np.ndarray:
        """Share of the selected chunks that were hits, float64 [steps - 1, layers]."""
        return self.hits / np.maximum(self.selected, 1)

    @property
    def mean(self) -> float:
        """The same over all steps and layers."""
        return float(self.hits.sum() / max(int(self.selected.sum()), 1))


def hit_rates(params: Any, tokens: Any, policy: ShadowKV, steps: int, *, fetch: str = "resident") -> HitRates:
    """Feed the end of a text step by step, and compare what each step selects with the step before.

    Args:
        params: Params.
        tokens: int32 [S]; the last `steps` of them are fed one by one behind the others' prefill, so that the text
            and not the model's own greedy loops decides what is asked.
        policy: a ShadowKV (or ShadowKVPlus) that selects something at this length.
        steps: decode steps, at least 2.
        fetch: fetch mode; selections are the same in all of them.

    Raises:
        PromptError: as `prompt_tensors`.
        ConfigError: another policy, steps out of range, or a text too short to select from.
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
    selected = []
    for token in ids[prompt:]:
        _, state = decode.decode_step(params, np.array([token], np.int32), state)
        selected.append(np.stack([np.asarray(layer.live.resident[0]) for layer in state.layers]))
    now, before = np.stack(selected[1:]), np.stack(selected[:-1])  # [steps - 1, layers, h_kv, k]; -1: nothing
    repeated = (now[..., :, None] == before[..., None, :]).any(axis=-1) & (now >= 0)
    return HitRates((now >= 0).sum(axis=(2, 3)), repeated.sum(axis=(2, 3)), resolved, prompt)
