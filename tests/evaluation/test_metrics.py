"""Metrics against NumPy: KL divergence, perplexity, means and standard errors."""

import numpy as np
import pytest

from jshadow.evaluation import metrics, results


def test_perplexity_against_numpy() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (5, 11))
    tokens = np.array([3, 0, 10, 3, 7])
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.prod(chances[np.arange(5), tokens]) ** (-1 / 5)
    assert metrics.perplexity(logits, tokens) == pytest.approx(wanted)
    records = [
        {"score": 1.0, "hits": [], "kl": 0.0, "attended_tokens": 1.0, "hit_rate": None, "ppl": x} for x in (2, 8)
    ]
    assert results.score_row(records, records)["ppl"] == pytest.approx(4)
    assert results.score_row([{**records[0], "ppl": None}], records[:1])["ppl"] is None


def test_divergence_against_numpy_and_far_from_overflow() -> None:
    rng = np.random.default_rng(0)
    full, other = rng.normal(0, 3, (2, 7, 50)).astype(np.float32)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (full, other))
    np.testing.assert_allclose(metrics.kl(full, other), (p * np.log(p / q)).sum(-1), rtol=1e-10)
    np.testing.assert_array_equal(metrics.kl(full, full), 0)
    np.testing.assert_array_equal(metrics.top1(full, other), p.argmax(-1) == q.argmax(-1))
    huge = full * np.float32(1e30)
    assert np.isfinite(metrics.log_softmax(huge)).all()
    np.testing.assert_allclose(metrics.kl(full + np.float32(1000), other), metrics.kl(full, other), atol=1e-3)


def test_mean_and_standard_error() -> None:
    values = [0.0, 100.0, 100.0, 50.0]
    mean, stderr = metrics.mean_stderr(values)
    assert mean == np.mean(values)
    assert stderr == pytest.approx(np.std(values, ddof=1) / 2)
    assert metrics.mean_stderr([3.0]) == (3.0, None)
    assert metrics.mean_known([None, 2.0]) == 2.0
    assert metrics.mean_known([None]) is None
