"""The measurements of ShadowKV's paper on tensors with known results, and on a tiny model compared with NumPy."""

import dataclasses

import analysis
import numpy as np
import pytest
from analysis import Spectra
from cases import TINY, model, random_tokens

from jshadow.cache.prompt_walk import prompts_of
from jshadow.engine import decode
from jshadow.errors import ConfigError, PromptError
from jshadow.policies import Full, Quest, ShadowKV

TEXT = random_tokens(72, seed=5)
POLICY = ShadowKV(rank=8, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=1)


@pytest.fixture(scope="module")
def layers() -> list[analysis.LayerTensors]:
    return list(analysis.prompt_tensors(model(), TEXT))


def tensors(**given: np.ndarray) -> analysis.LayerTensors:
    """A layer with these tensors. All other tensors are ones."""
    parts = {field.name: np.ones((4, 2)) for field in dataclasses.fields(analysis.LayerTensors)}
    return analysis.LayerTensors(**parts | given)


def matrix(tensor: np.ndarray) -> np.ndarray:
    return tensor.reshape(tensor.shape[0], -1).astype(np.float64)


def prefilled(policy, tokens, length):
    sizes = {"capacity": 72, "fetch": "resident"}
    return decode.prefill(model(), tokens[None, :length], np.array([length]), policy, **sizes)[1]


def orthonormal(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0]


def test_tensors_are_those_that_policies_learn_from_and_come_layer_by_layer():
    seen: list[tuple[int, int]] = []
    layers = list(analysis.prompt_tensors(model(), TEXT, progress=lambda *done: seen.append(done)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for index, (mine, prompt) in enumerate(zip(layers, prompts_of(model(), TEXT), strict=True)):
        for name in ("k_pre", "k_post", "v"):
            np.testing.assert_allclose(getattr(mine, name), np.asarray(getattr(prompt, name))[0], atol=1e-5)
        assert mine.x_in.shape == (len(TEXT), TINY.model_dim)
        # keys are projected from the hidden states
        found = np.linalg.lstsq(mine.x_in.astype(np.float64), matrix(mine.k_pre), rcond=None)[0]
        np.testing.assert_allclose(mine.x_in @ found, matrix(mine.k_pre), atol=1e-4)
        assert np.abs(mine.k_pre - mine.k_post).max() > 0.1, index


# Spectra


def test_a_hand_made_spectrum_comes_back():
    given = np.array([5.0, 4.0, 2.0, 0.5, 0.25, 0.0])
    keys = orthonormal(40, 6, 0) * given @ orthonormal(6, 6, 1).T
    spectra = analysis.singular_values([tensors(k_pre=keys.reshape(40, 2, 3))], ["k_pre"])
    np.testing.assert_allclose(spectra.values["k_pre"], [given / 5], atol=1e-7)
    squares = given**2
    for rank in range(7):
        np.testing.assert_allclose(spectra.energy("k_pre", rank), squares[:rank].sum() / squares.sum(), rtol=1e-12)
    assert [spectra.rank_for("k_pre", share).tolist() for share in (0.5, 0.9, 1.0)] == [[1], [2], [5]]
    few = analysis.singular_values([tensors(v=np.eye(2, 6)), tensors(v=np.zeros((9, 6)))], ["v"])  # rows; zeros
    assert few.values["v"].tolist() == [[1, 1, 0, 0, 0, 0], [0] * 6]
    assert few.energy("v", 1).tolist() == [0.5, 1.0]
    assert few.rank_for("v", 1.0).tolist() == [2, 0]


def test_spectra_are_numpy_s_and_energy_is_what_a_truncation_keeps(layers):
    spectra = analysis.singular_values(layers)
    assert set(spectra.values) == set(analysis.KINDS)
    for name, values in spectra.values.items():
        for row, layer in zip(values, layers, strict=True):
            found = np.linalg.svd(matrix(getattr(layer, name)), compute_uv=False)
            np.testing.assert_allclose(row, found / found[0], atol=1e-7)
    for share, layer in zip(spectra.energy("v", 5), layers, strict=True):
        u, s, vt = np.linalg.svd(matrix(layer.v), full_matrices=False)
        lost = np.linalg.norm(matrix(layer.v) - u[:, :5] * s[:5] @ vt[:5]) ** 2
        assert 1 - share == pytest.approx(lost / np.linalg.norm(matrix(layer.v)) ** 2, rel=1e-9)


# Subspaces


def test_d_is_the_frobenius_product_of_the_projections(layers):
    def projection(tensor: np.ndarray, rank: int) -> np.ndarray:
        vt = np.linalg.svd(matrix(tensor))[2][:rank]
        return vt.T @ vt

    first, second = layers[0].k_pre, layers[1].k_pre[:50]
    for rank in (1, 7, 32):
        want = np.trace(projection(first, rank).T @ projection(second, rank)) / rank
        assert analysis.subspace_similarity(first, second, rank) == pytest.approx(want, abs=1e-7)
        assert analysis.subspace_similarity(second, first, rank) == pytest.approx(want, abs=1e-7)


def test_a_context_is_compared_with_its_extension_and_another_text(layers):
    other = list(analysis.prompt_tensors(model(), random_tokens(72, seed=6)))
    found = analysis.compare_subspaces(layers, other, 48, 8)
    assert found.chance == 8 / TINY.key_columns
    for index, layer in enumerate(layers):
        base = layer.k_pre[:48]
        assert found.extended[index] == analysis.subspace_similarity(base, layer.k_pre, 8)
        assert found.continuation[index] == analysis.subspace_similarity(base, layer.k_pre[48:], 8)
        assert found.other[index] == analysis.subspace_similarity(base, other[index].k_pre, 8)
    assert (found.extended > found.other).all()


# Chunks


def test_least_cosines_are_numpy_s(layers):
    found = analysis.chunk_similarity(layers, 5)
    assert found.least.shape == (3, TINY.kv_heads, 14)  # 72 = 14 * 5 + 2
    for index, head, chunk in np.ndindex(found.least.shape):
        keys = layers[index].k_post[5 * chunk : 5 * chunk + 5, head].astype(np.float64)
        mean = keys.mean(axis=0)
        cosines = keys @ mean / np.linalg.norm(keys, axis=1) / np.linalg.norm(mean)
        assert found.least[index, head, chunk] == pytest.approx(cosines.min(), abs=1e-5)


def test_outliers_are_those_that_shadowkv_keeps(layers):
    found = analysis.chunk_similarity(layers, 4)
    whole = analysis.ChunkSimilarity(found.least[:, :, :14], 4)  # 15 chunks of 60 tokens, the last of which is local
    outliers = whole.outliers(2)
    for index, layer in enumerate(prefilled(POLICY, TEXT, 60).layers):
        candidates = np.asarray(layer.frozen.candidates)[0, :, :14]
        for head in range(TINY.kv_heads):
            assert set(np.flatnonzero(~candidates[head])) == set(outliers[index, head].tolist())


COSINES = analysis.ChunkSimilarity(np.array([[[0.9, 0.1, 0.5, 0.1]]], np.float32), 8)
ALIKE = tensors(k_post=np.ones((5, 2, 3), np.float32))


def test_a_distribution_of_cosines():
    assert COSINES.outliers(3).tolist() == [[[1, 3, 2]]]
    assert COSINES.share_below(0.5).tolist() == [0.5]
    np.testing.assert_allclose(COSINES.without_outliers(2), [[0.5]])
    np.testing.assert_allclose(COSINES.quantiles([0.0, 0.5, 1.0]), [[0.1, 0.3, 0.9]], rtol=1e-6)
    np.testing.assert_allclose(analysis.chunk_similarity([ALIKE], 5).least, 1, rtol=1e-6)


# Decoding


def test_hit_rates_are_what_the_state_counts():
    found = analysis.hit_rates(model(), TEXT, POLICY, 12)
    assert found.rates.shape == (11, TINY.num_layers)
    assert found.prompt_tokens == 60
    assert (found.selected == 4 * TINY.kv_heads).all()  # a budget of 16 tokens, in chunks of 4
    assert 0 < found.mean < 1
    assert found.mean == pytest.approx(found.rates.mean())
    state, counted = prefilled(POLICY, TEXT, 60), []
    for token in TEXT[60:]:
        _, state = decode.decode_step(model(), np.array([token]), state)
        counted.append(int(np.asarray(state.counters.hits)[0]))
    assert counted[0] == 0
    assert np.diff(counted).tolist() == found.hits.sum(axis=1).tolist()


@pytest.mark.slow
def test_a_sweep_is_teacher_forced_agreement():
    """Also step by step, with a log-softmax of SciPy's."""
    from scipy.special import log_softmax, rel_entr

    texts = [TEXT, random_tokens(72, seed=7)]
    lossless = dataclasses.replace(ShadowKV.lossless(72, TINY), chunk_size=4, outlier_chunks=0, local_chunks=1)
    seen: list[tuple[int, int]] = []
    rows = analysis.sweep(model(), texts, [POLICY, lossless], steps=8, progress=lambda *done: seen.append(done))
    assert seen == [(1, 2), (2, 2)]
    assert [row["name"] for row in rows] == ["full", "shadowkv", "shadowkv"]
    assert rows[1]["settings"]["rank"] == 8
    assert [row["samples"] for row in rows] == [2, 2, 2]
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[2]["kl"] == pytest.approx(0, abs=1e-6)
    assert rows[2]["top1"] == 100
    assert rows[1]["device_bytes"] < rows[2]["device_bytes"]
    divergences = []
    for text in texts:
        both = []
        for policy in (Full(), POLICY):
            state, logits = prefilled(policy, text, 64), []
            for token in text[64:]:
                out, state = decode.decode_step(model(), np.array([token]), state)
                logits.append(np.exp(log_softmax(np.asarray(out[0], np.float64))))
            both.append(np.array(logits))
        divergences.append(rel_entr(*both).sum(axis=1).mean())
    assert rows[1]["kl"] == pytest.approx(np.mean(divergences), rel=1e-3)
    assert rows[1]["kl"] > 1e-5


# Refusals

SPECTRA = Spectra({"v": np.ones((1, 4))})
NARROW = tensors(k_pre=np.ones((9, 2, 4)))


def hit_rates(*given):
    analysis.hit_rates(model(), TEXT, *given)


def sweep(texts, policies, steps=8):
    analysis.sweep(model(), texts, policies, steps=steps)


REFUSED = [
    (SPECTRA.energy, ("v", 5), "rank"),
    (SPECTRA.energy, ("v", -1), "rank"),
    (SPECTRA.energy, ("q", 1), "must be"),
    (SPECTRA.rank_for, ("q", 0.5), "must be"),
    (SPECTRA.rank_for, ("v", 0.0), "must be"),
    (analysis.singular_values, ([],), "must be"),
    (analysis.singular_values, ([tensors()], ["q"]), "must be"),
    (analysis.singular_values, ([tensors(v=np.ones((2, 2, 2, 2)))],), "must be"),
    *((analysis.compare_subspaces, ([NARROW], [NARROW], length, 2), "must be an integer in") for length in (9, 1)),
    *((analysis.compare_subspaces, ([NARROW], [NARROW], 8, rank), "must be an integer in") for rank in (9, 0)),
    (analysis.compare_subspaces, ([NARROW] * 2, [NARROW], 6, 2), "as many layers"),
    (analysis.subspace_similarity, (NARROW.k_pre, NARROW.v, 2), "as many columns"),
    (COSINES.outliers, (5,), r"chunk_similarity\.count"),
    (COSINES.outliers, (-1,), r"chunk_similarity\.count"),
    (COSINES.without_outliers, (4,), r"chunk_similarity\.count"),
    (analysis.chunk_similarity, ([ALIKE], 0), "chunk_size"),
    (analysis.chunk_similarity, ([ALIKE], 6), "chunk_size"),
    (hit_rates, (Full(), 4), "must be a ShadowKV"),
    (hit_rates, (Quest(), 4), "must be a ShadowKV"),
    (hit_rates, (POLICY, 1), "hit_rates.steps"),
    (hit_rates, (POLICY, 72), "hit_rates.steps"),
    (hit_rates, (POLICY, 64), "nothing to select"),
    (sweep, ([], [POLICY]), "texts must be"),
    (sweep, ([TEXT, TEXT[:9]], [POLICY]), "texts must be"),
    (sweep, ([TEXT], []), "policies must be"),
    (sweep, ([TEXT], ["shadowkv"]), "policies must be"),
    (sweep, ([TEXT], [POLICY], 72), "sweep.steps"),
    (sweep, ([TEXT], [ShadowKV(rank=33)]), "shadowkv.rank"),
]


@pytest.mark.parametrize(("call", "given", "told"), REFUSED)
def test_bad_questions_are_refused(call, given, told):
    with pytest.raises(ConfigError, match=told):
        call(*given)


@pytest.mark.parametrize(
    "tokens", [[], [[1, 2], [3, 4]], [1.5], [TINY.vocab_size], [-1], [1] * (TINY.context + 1)], ids=str
)
def test_what_is_no_text_is_refused_at_the_call(tokens):
    with pytest.raises(PromptError, match="tokens must"):
        analysis.prompt_tensors(model(), tokens)
