"""`jshadow fit`, `jshadow calibrate` and `jshadow generate --fitted` as a user calls them."""

import dataclasses
import itertools

import numpy as np
import pytest
from byte_models import CONFIG
from command_line import LENGTH, TEXT
from few import slow
from oracle import Oracle
from oracle_maths import softmax
from tiny_text import byte_tokenizer

import jshadow
from jshadow.engine.saved.fitted import read_fitted_info
from jshadow.errors import ConfigError, PromptError
from jshadow.policies import Loki, OmniKV, parse_policy
from jshadow.policies.omnikv import FilterMasses, choose_filters, dense_share, filter_masses
from jshadow.weights.params import init_params

LESS_SETTINGS = ["--set", "heavy=8", "--set", "recent=8", "--set", "hidden=16", "--steps", "30"]
DEEP = dataclasses.replace(CONFIG, num_layers=6)


@pytest.fixture(scope="module")
def place(tiny_model, tmp_path_factory):
    """The tiny model, another of other weights, and texts."""
    path = tmp_path_factory.mktemp("fit")
    (path / "tiny").symlink_to(tiny_model)
    jshadow.save(dataclasses.replace(init_params(CONFIG, seed=1), tokenizer=byte_tokenizer()), path / "other")
    (path / "text.txt").write_text("".join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 26, 400)))
    (path / "empty.txt").write_text(" \n")
    (path / "long.txt").write_text("a" * 700)
    return path


@pytest.fixture
def fit(place):
    """The words of a fit."""

    def fit(policy, out, *more):
        text = ["--text", place / "text.txt", "--tokens", "160"]
        return ["fit", place / "tiny", "--policy", policy, *text, "--dtype", "float32", "--out", out, *more]

    return fit


@pytest.fixture
def zeros(monkeypatch):
    """Loki learns zeros at once. Gives what it was to learn from."""
    given = []

    def learn(policy, params, tokens, **options):
        given.append(tokens)
        shapes = policy.fitted_shapes(params.config)
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    monkeypatch.setattr(Loki, "fit", learn)
    return given


def generate(model, *more):
    return ["generate", model, "--prompt", TEXT, *LENGTH, *more]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["loki", "less"])
def test_fit_and_generate(place, fit, policy, answer, printed, tmp_path):
    out = tmp_path / "deep" / "a.safetensors"
    more = LESS_SETTINGS if policy == "less" else []
    told = answer(*fit(policy, out, *more))
    assert (told["policy"], told["tokens"], told["nbytes"]) == (policy, 160, out.stat().st_size)
    if policy == "less":
        assert [row["layer"] for row in told["errors"]] == [0, 1]
        assert all(row["fitted"] < row["sparse"] for row in told["errors"])
        table = printed(*fit(policy, out, *more))
        for words in ("learned from 160 tokens", "h2o's error", "less's error", "held out, the next 160 tokens"):
            assert words in table
    else:
        assert told["errors"] is None
    # without --policy, the file's own policy and settings; --set goes on top of them
    fitted = generate(place / "tiny", "--fitted", out)
    [result] = answer(*fitted)["results"]
    assert result["report"]["policy"]["name"] == policy
    assert result["report"]["policy"].get("calibration", "offline") == "offline"
    settings = ["--set", "calibration=offline"] if policy != "less" else LESS_SETTINGS[:6]
    baseline, again = answer(*fitted, "--policy", policy, *settings, "--baseline", "full")["results"]
    assert (baseline["report"]["policy"]["name"], again["tokens"]) == ("full", result["tokens"])
    if policy == "less":
        [other] = answer(*fitted, "--set", "recent=20")["results"]
        assert (other["report"]["policy"]["recent"], other["report"]["policy"]["heavy"]) == (20, 8)


def test_fit_prints_what_it_learned_and_other_models_refuse_it(place, fit, printed, refused, zeros, tmp_path):
    out, cut = tmp_path / "a", tmp_path / "cut"
    out.write_text("what was there before")
    assert "learned from 160 tokens" in printed(*fit("loki", out))
    assert [np.size(tokens) for tokens in zeros] == [160]
    assert read_fitted_info(out)["policy"]["name"] == "loki"
    cut.write_bytes(out.read_bytes()[:-9])
    for model, more, error, told in (
        ("other", ["--fitted", out], "StateMismatch", "weights: file has"),
        ("tiny", ["--fitted", out, "--policy", "less"], "StateMismatch", "policy.name: file has 'loki'"),
        ("tiny", ["--fitted", out, "--set", "calibration=online"], "ConfigError", "use learned arrays"),
        ("tiny", ["--fitted", tmp_path / "none"], "CheckpointError", "no such file"),
        ("tiny", ["--fitted", cut], "CheckpointError", "truncated"),
        ("tiny", ["--fitted", place / "text.txt"], "CheckpointError", "must be a file of fitted arrays"),
        ("tiny", ["--fitted", out, "--load-state", "x"], "ConfigError", "--fitted must be left out"),
    ):
        err = refused(told, *generate(place / model, *more))
        assert error in err
        assert "Traceback" not in err


BAD = [
    (["--policy", "h2o"], "must be one that learns"),
    (["--policy", "magic"], "policy must be one of"),
    (["--steps", "3"], "--steps must be left out for loki"),
    (["--policy", "less", *LESS_SETTINGS[:6], "--steps", "0"], "fit's steps must be"),
    (["--set", "colums=3"], "--set must be KEY=VALUE"),
    (["--set", "columns=99"], "loki.columns"),
    (["--tokens", "0"], "--tokens must be at least 1"),
    (["--tokens", "600", "--text", "long.txt"], "context=512"),
    (["--text", "none.txt"], "--text must be readable"),
    (["--text", "empty.txt"], "--text must have text"),
    (["--policy", "less", "--tokens", "9", "--set", "heavy=5", "--set", "recent=5"], "nothing is evicted"),
    (["--out", "/dev/null/a"], "cannot be written"),
    (["--out", "tiny"], "in a directory that can be"),
]


@pytest.mark.parametrize(("more", "told"), BAD)
def test_bad_fits_are_told(place, fit, more, told, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    assert refused(told, *fit("loki", tmp_path / "a", *more)).count("\n") == 1  # no traceback
    assert not (tmp_path / "a").exists()


# OmniKV's filters


def test_calibrate_tells_filters_that_omnikv_takes(place, answer, printed, refused, tmp_path):
    jshadow.save(dataclasses.replace(init_params(DEEP), tokenizer=byte_tokenizer()), tmp_path / "deep")
    asked = ["calibrate", tmp_path / "deep", "--text", place / "text.txt", "--dtype", "float32"]
    asked += ["--tokens", "60", "--filters", "2"]
    told = answer(*asked)
    assert (told["tokens"], told["budget"], len(told["scores"])) == (60, 3, 5)
    assert all(0 < row["score"] < 1 for row in told["scores"])
    policy = parse_policy("omnikv", [told["set"]])
    assert policy.filter_layers == tuple(told["filter_layers"])
    assert policy.resolve(DEEP, 256).filter_layers == policy.filter_layers
    out = printed(*asked)
    assert f"--policy omnikv --set {told['set']}" in out
    assert "dense layers" in out
    refused("--filters must be", *asked, "--filters", "0")
    refused("--budget must be", *asked, "--budget", "0")
    refused("tokens must be more than budget=500", *asked, "--budget", "500")


class Listener(Oracle):
    """An oracle that keeps every layer's queries and keys."""

    def remember(self, layer, cache, q):
        self.kept = [] if layer == 0 else self.kept
        self.kept.append((q, cache.k_post))


def probabilities(q, k, at):
    """Attention [h_q, at + 1] of one query of a text."""
    return softmax(np.stack([k[: at + 1, h // 2] @ q[at, h] / 4.0 for h in range(4)]))


@pytest.mark.parametrize(("rows", "budget"), [(1, 3), slow((2, 1)), slow((2, 59))])
def test_masses_against_brute_force(rows, budget):
    params = init_params(DEEP)
    tokens = np.random.default_rng(3).integers(0, 257, (rows, 60), dtype=np.int32)
    found = filter_masses(params, tokens, budget=budget, queries=1000)
    want = np.zeros((rows, 6, 6))
    for row in range(rows):
        oracle = Listener(params.weights, DEEP, None)
        oracle.prefill(tokens[row].tolist())
        for (i, (q, k)), at in itertools.product(enumerate(oracle.kept), range(budget, 60)):
            top = np.argsort(-probabilities(q, k, at).max(axis=0), kind="stable")[:budget]
            for j, later in enumerate(oracle.kept):
                want[row, i, j] += probabilities(*later, at).mean(axis=0)[top].sum() / (60 - budget)
    upper = np.triu_indices(6, 1)
    np.testing.assert_allclose(found.masses[upper], want.mean(axis=0)[upper], atol=1e-5)
    assert np.isnan(found.masses[np.tril_indices(6)]).all()
    np.testing.assert_allclose(found.scores[0], want.mean(axis=0)[0, 1:].mean(), atol=1e-5)
    assert np.isnan(found.scores[-1])


@pytest.mark.slow
def test_fewer_queries_are_a_sample():
    tokens = np.random.default_rng(3).integers(0, 257, 90, dtype=np.int32)
    few, whole = (filter_masses(init_params(DEEP), tokens, budget=9, queries=n) for n in (40, 1000))
    np.testing.assert_allclose(few.scores[:-1], whole.scores[:-1], atol=0.02)


def found_of(scores, layers=None):
    """Masses whose means are the scores given."""
    n = len(scores) + 1
    masses = np.where(np.arange(n) > np.arange(n)[:, None], np.array([*scores, 0.0])[:, None], np.nan)
    return FilterMasses(tuple(layers or range(n)), masses, 4)


def test_filters_are_peaks_apart():
    scores = [0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.8, 0.85, 0.1, 0.2, 0.1, 0.95, 0.2, 0.1, 0.99]
    assert choose_filters(found_of(scores), 3) == (2, 7, 11)
    assert choose_filters(found_of(scores), 1) == (11,)  # 14 would serve no sparse layer
    assert choose_filters(found_of(scores, [2 * i + 1 for i in range(16)]), 3) == (5, 15, 23)
    assert choose_filters(found_of([0.5] * 15), 2) == (0, 7)  # ties go to the lower layer
    for depth, count in itertools.product(range(1, 40), (1, 2, 3, 7)):
        chosen = choose_filters(found_of(np.random.default_rng(depth).random(depth)), count)
        assert 1 <= len(chosen) <= count
        assert all(b - a >= 3 for a, b in itertools.pairwise(chosen))
        config = dataclasses.replace(CONFIG, num_layers=depth + 1)
        assert OmniKV(filter_layers=chosen).resolve(config, 64).filter_layers == chosen
    with pytest.raises(ConfigError, match="count"):
        choose_filters(found_of(scores), 0)
    assert dense_share((2, 6), dataclasses.replace(CONFIG, num_layers=12)) == 6 / 12


def test_layers_with_a_window_do_not_choose():
    tokens = np.random.default_rng(3).integers(0, 257, 60, dtype=np.int32)
    config = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=(0, 2, 4))
    found = filter_masses(init_params(config), tokens, budget=3)
    assert found.layers == (1, 3, 5)
    assert choose_filters(found, 3) == (1,)
    everywhere = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=tuple(range(6)))
    with pytest.raises(ConfigError, match="all see a window"):
        choose_filters(filter_masses(init_params(everywhere), tokens, budget=3), 3)
    with pytest.raises(PromptError, match="more than budget"):
        filter_masses(init_params(config), tokens, budget=60)


def test_a_setting_of_several_numbers():
    for text in ("2,8,18", "[2, 8, 18]", "(2,8,18)", "2+8+18"):
        assert parse_policy("omnikv", [f"filter_layers={text}"]) == OmniKV(filter_layers=(2, 8, 18))
    assert parse_policy("omnikv", ["filter_layers=3"]).filter_layers == (3,)
    assert parse_policy("omnikv", ["filter_layers=null"]).filter_layers is None
    for bad in ("a,b", "1.5", "", "true", "8,2"):
        with pytest.raises(ConfigError, match=r"omnikv\.filter_layers"):
            parse_policy("omnikv", [f"filter_layers={bad}"]).resolve(dataclasses.replace(CONFIG, num_layers=20), 64)
    for worse in (3, "03", [[1]], (True,)):
        with pytest.raises(ConfigError, match=r"omnikv\.filter_layers"):
            OmniKV(filter_layers=worse).resolve(CONFIG, 64)
