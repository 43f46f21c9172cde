"""`evaluate` with arrays that a policy has learned."""

import json

import jax
import numpy as np
import pytest
from tiny_text import byte_tokenizer

from jshadow import cli, load, save, save_fitted
from jshadow.errors import ConfigError
from jshadow.evaluation import results, runner
from jshadow.models.config import ModelConfig
from jshadow.policies import (
    LESS,
    Quest,
    StreamingLLM,
)
from jshadow.weights.params import Params, init_params

CONFIG = ModelConfig("llama", 512, 2, 32, 48, 4, 2, 16, 1e-5, 2048, eos_ids=(256,))
LENGTH = 420


@pytest.fixture(scope="module")
def params() -> Params:
    made = init_params(CONFIG, seed=1)
    return Params(made.weights, made.config, byte_tokenizer())


LEARNER = LESS(heavy=8, recent=8, state_rank=2, hidden=8)


@pytest.mark.slow
def test_learned_arrays_reach_their_policy_alone(params, tmp_path, capsys):
    learned = LEARNER.fit(params, np.random.default_rng(0).integers(0, 256, 96), steps=3)
    policies = [LEARNER, StreamingLLM(sinks=2, window=14)]
    plain = runner.evaluate(params, ["agreement"], [LENGTH], policies, samples=1, out=tmp_path / "out")
    taught = runner.evaluate(
        params, ["agreement"], [LENGTH], policies, samples=1, out=tmp_path / "out", fitted={"less": learned}
    )
    assert [row["fitted"] for row in plain] == [False] * 3
    assert [row["fitted"] for row in taught] == [False, True, False]
    kl = [[row["kl"] for row in rows] for rows in (plain, taught)]
    assert (kl[0][0], kl[0][2]) == (kl[1][0], kl[1][2])
    assert kl[0][1] != kl[1][1]

    save(params, tmp_path / "model")
    file = str(tmp_path / "less.safetensors")
    save_fitted(file, learned, LEARNER, load(tmp_path / "model", dtype="float32"))
    call = [
        "eval",
        str(tmp_path / "model"),
        "--tasks",
        "agreement",
        "--lengths",
        str(LENGTH),
        "--samples",
        "1",
        "--dtype",
        "float32",
        "--policies",
        results.label(LEARNER),
        "--fitted",
        file,
    ]
    assert cli.main([*call, "--json"]) == 0
    [_, row] = json.loads(capsys.readouterr().out)["results"]
    assert row["fitted"]
    assert row["kl"] == pytest.approx(kl[1][1], rel=1e-4)
    assert cli.main([*call[:-3], "quest", *call[-2:]]) == 2
    assert "fitted must be one file for a policy of --policies" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policies", "shares", "told"),
    [([Quest()], (), "got those of less"), ([LESS()], (), "the fit of less"), ([LESS()], (0.5,), "the fit of less")],
)
def test_learned_arrays_that_nobody_can_use_are_refused(params, policies, shares, told):
    shapes = LEARNER.fitted_shapes(CONFIG)
    learned = jax.tree.map(lambda shape: np.zeros(shape, np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple))
    with pytest.raises(ConfigError, match=told):
        runner.evaluate(params, ["agreement"], [LENGTH], policies, samples=1, shares=shares, fitted={"less": learned})
