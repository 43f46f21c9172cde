"""A row of a sampled batch in plain NumPy: the changes of its logits, the tokens that its filters keep, its draw."""

import jax
import numpy as np
from jax import Array

from jshadow.engine.rows import RowSettings
from jshadow.engine.sampling import seed_key


def change(settings: RowSettings, logits: np.ndarray, prompt: list[int], drawn: list[int]) -> np.ndarray:
    """The logits [V] with penalties and bias, float32 as in the library."""
    scores = logits.astype(np.float32)
    for token in {*prompt, *drawn}:
        factor = np.float32(settings.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(drawn):
        scores[token] -= np.float32(settings.presence_penalty)
        scores[token] -= np.float32(settings.frequency_penalty) * drawn.count(token)
    for token, value in settings.logit_bias.items():
        scores[token] += np.float32(value)
    return scores


def cool(settings: RowSettings, scores: np.ndarray) -> np.ndarray:
    """Scores [V] divided by the temperature, and shifted so that the largest is 0."""
    return (scores - scores.max()) / np.float32(settings.sampler.temperature)


def keep(settings: RowSettings, cooled: np.ndarray) -> tuple[np.ndarray, bool]:
    """The tokens that the filters keep, bool [V], and whether rounding could change that."""
    sampler, order = settings.sampler, sorted(range(len(cooled)), key=lambda i: (-cooled[i], i))
    order = [i for i in order[: sampler.top_k] if cooled[i] > -np.inf]
    shares, gaps = np.exp(cooled[order].astype(np.float64)), [1.0]
    if sampler.top_p is not None and sampler.top_p < 1:
        probs = shares / shares.sum()
        before = np.cumsum(probs) - probs
        gaps += np.abs(before[1:] - sampler.top_p).tolist()
        order = [i for i, sum_before in zip(order, before, strict=True) if sum_before < sampler.top_p]
    if sampler.min_p is not None:
        shares = shares[: len(order)]
        gaps += np.abs(shares[1:] - sampler.min_p).tolist()
        order = [i for i, share in zip(order, shares, strict=True) if share >= sampler.min_p]
    kept = np.zeros(len(cooled), bool)
    kept[order] = True
    return kept, min(gaps) < 1e-5


def draw(settings: RowSettings, scores: np.ndarray, step: int) -> tuple[int, bool]:
    """The token of a row with changed logits [V], and whether rounding could change it."""
    if settings.sampler.temperature == 0:
        return int(np.argmax(scores)), False
    cooled = cool(settings, scores)
    kept, close = keep(settings, cooled)
    noisy = np.where(kept, cooled + np.asarray(noise(settings.seed, step, len(scores))), -np.inf)
    second, first = np.sort(noisy)[-2:] if len(noisy) > 1 else (-np.inf, noisy[0])
    return int(np.argmax(noisy)), close or bool(first - second < 1e-4)


def noise(seed: int, step: int, size: int) -> Array:
    """The random numbers [V] that `generate` adds to the logits of one prompt at a step."""
    return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(seed_key(seed), step), 0), (size,))
