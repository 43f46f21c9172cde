"""The search for a pattern of sparse prefill against brute force."""

import dataclasses

import numpy as np
import pytest
import sparse_oracle as oracle
from cases import CAPACITY, LENGTHS, PROMPT, TINY, model, random_tokens
from sparse_runs import run_attention

from jshadow.cache.prompt_walk import prompts_of
from jshadow.engine import decode
from jshadow.engine.sparse_prefill import VerticalSlash
from jshadow.engine.sparse_prefill.search import search_pattern
from jshadow.errors import ConfigError, PromptError
from jshadow.policies import Full

# Small settings, of which a prompt of some 100 tokens leaves most keys out.
SMALL = VerticalSlash(vertical=9, slash=11, last_queries=8, first_columns=3, local_diagonals=5, block=16)


def test_the_search_agrees_with_brute_force():
    """Mass from dense masks; cost from dense masks too; and one diagonal more would cost too much."""
    config, block, share = dataclasses.replace(TINY, num_layers=2), 8, 0.5
    settings = VerticalSlash(last_queries=8, first_columns=3, local_diagonals=5, block=block)
    text = random_tokens(131, seed=3)  # cut to 128
    found = search_pattern(model(config), text, share=share, settings=settings)
    count, budget = 16, int(share * 16 * 17 / 2)
    assert found.recovered.shape == found.tiles.shape == (2, 4, len(found.names))
    for layer, prompt in enumerate(prompts_of(model(config), text[:128])):
        q, k = (np.asarray(x[0], np.float64) for x in (prompt.q_post, prompt.k_post))
        for head in range(4):
            own, theirs = q[:, head], k[:, head // 2]
            probs = oracle.softmax(np.where(oracle.causal(128), own @ theirs.T * config.attention_scale, -np.inf))
            masses = []
            for name, mass in zip(found.names, found.recovered[layer, head], strict=True):
                kind, size = name.split()
                slash = most_diagonals(kind, int(size), own, theirs, config.attention_scale, settings, budget)
                if kind == "vertical_slash":
                    mask = oracle.vertical_slash(own, theirs, config.attention_scale, int(size), slash, 8, 3, 5)
                else:
                    mask = (
                        oracle.a_shape(128, int(size), slash)
                        if kind == "a_shape"
                        else oracle.block_sparse(own, theirs, int(size), block)
                    )
                want = (probs * mask)[64:].sum(1).mean()
                masses.append(want)
                np.testing.assert_allclose(mass, want, atol=1e-5, err_msg=f"{layer} {head} {name}")
                if name == found.names[found.best[layer, head]] and kind != "block_sparse":
                    assert found.pattern.heads[layer][head].sizes == (int(size), slash)
            assert masses[found.best[layer, head]] >= max(masses) - 1e-6
    assert (found.tiles <= budget / (count * (count + 1) / 2)).all()


def most_diagonals(kind, columns, q, k, scale, settings, budget):
    """The largest number of diagonals whose tiles, with those of the columns, keep to the budget; one after another."""
    n, block = len(q), settings.block
    if kind == "block_sparse":
        return None
    by_column, by_diagonal = oracle.line_sums(q, k, scale, settings.last_queries)
    by_column[: settings.first_columns], by_diagonal[: settings.local_diagonals] = np.inf, np.inf
    chosen = oracle.largest(by_column, columns) if kind == "vertical_slash" else np.arange(n) < columns
    taken = sum(-(-int(chosen[:at].sum()) // block) for at in range(0, n, block))
    distance = np.arange(n)[:, None] - np.arange(n)
    for slash in range(1, n + 1):
        diagonals = oracle.largest(by_diagonal, slash) if kind == "vertical_slash" else np.arange(n) < slash
        mask = oracle.causal(n) & diagonals[np.abs(distance)]
        tiles = mask.reshape(n // block, block, n // block, block).any((1, 3)).sum()
        if taken + tiles > budget:
            return slash - 1
    return n


def test_a_pattern_s_tiles_are_what_the_search_says():
    """At most: a column in a block that is computed anyway costs nothing."""
    config = dataclasses.replace(TINY, num_layers=1)
    settings = VerticalSlash(last_queries=8, first_columns=3, local_diagonals=5, block=8)
    text = random_tokens(256, seed=3)
    found = search_pattern(model(config), text, share=0.4, settings=settings)
    [prompt] = prompts_of(model(config), text)
    attention = dataclasses.replace(settings, pattern=found.pattern)
    out, aux = run_attention(attention, config, prompt.q_post, prompt.k_post, prompt.v, [256])
    counted = np.asarray(aux.tiles)[0] / (32 * 33 / 2)
    said = np.take_along_axis(found.tiles[0], found.best[0][:, None], axis=1)[:, 0]
    assert (counted <= said + 1e-9).all()
    assert (counted > 0.5 * said).all()
    assert np.isfinite(np.asarray(out)).all()


def test_a_pattern_of_a_model_with_windows():
    config = dataclasses.replace(TINY, sliding_window=6, sliding_layers=(0, 2))
    found = search_pattern(model(config), random_tokens(128), settings=SMALL)
    assert np.isnan(found.recovered[[0, 2]]).all()
    assert (found.best >= 0).sum() == 4
    assert found.summary()[-1]["heads"] == 4
    attention = dataclasses.replace(SMALL, pattern=found.pattern)
    logits, _ = decode.prefill(model(config), PROMPT, LENGTHS, Full(), capacity=CAPACITY, attention=attention)
    assert np.isfinite(np.asarray(logits)).all()


def test_a_search_refuses():
    with pytest.raises(ConfigError, match="share must be above 0"):
        search_pattern(model(), random_tokens(128), share=0)
    with pytest.raises(ConfigError, match="share must leave room"):
        search_pattern(model(), random_tokens(128), share=0.01)
    with pytest.raises(PromptError, match="tokens must be"):
        search_pattern(model(), random_tokens(100))
