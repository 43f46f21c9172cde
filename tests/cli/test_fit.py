"""`jshadow fit`, `jshadow calibrate` and `jshadow generate --fitted` as a user calls them."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from byte_models import CONFIG
from command_line import LENGTH, TEXT
from oracle import Oracle
from oracle_maths import softmax
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli.main import main
from jshadow.engine.saved.fitted import read_fitted_info
from jshadow.errors import ConfigError, PromptError
from jshadow.policies import OmniKV, parse_policy
from jshadow.policies.omnikv.calibration import FilterMasses, choose_filters, dense_share, filter_masses
from jshadow.weights.params import init_params

LESS_SETTINGS = ["--set", "heavy=8", "--set", "recent=8", "--set", "hidden=16", "--steps", "30"]
DEEP = dataclasses.replace(CONFIG, num_layers=6)


@pytest.fixture(scope="module")
def place(tiny_model, tmp_path_factory):
    """The tiny model, another of other weights, and a text."""
    path = tmp_path_factory.mktemp("fit")
    (path / "tiny").symlink_to(tiny_model)
    jshadow.save(dataclasses.replace(init_params(CONFIG, seed=1), tokenizer=byte_tokenizer()), path / "other")
    (path / "text.txt").write_text("".join(chr(97 + i) for i in np.random.default_rng(0).integers(0, 26, 400)))
    (path / "empty.txt").write_text(" \n")
    return path


def fit(place, policy, out, *more, text="text.txt"):
    """The exit status."""
    words = ["fit", str(place / "tiny"), "--policy", policy, "--text", str(place / text), "--tokens", "160"]
    return main([*words, "--dtype", "float32", "--out", str(out), *more])


def generate(model, *more):
    return main(["generate", str(model), "--prompt", TEXT, *LENGTH, "--json", *more])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["loki", "infinigen", "less"])
def test_fit_and_generate(place, policy, capsys, tmp_path):
    out = tmp_path / "deep" / "a.safetensors"
    more = LESS_SETTINGS if policy == "less" else []
    assert fit(place, policy, out, *more, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["policy"], told["tokens"], told["nbytes"]) == (policy, 160, out.stat().st_size)
    if policy == "less":
        assert [row["layer"] for row in told["errors"]] == [0, 1]
        assert all(row["fitted"] < row["sparse"] for row in told["errors"])
    else:
        assert told["errors"] is None
    # without --policy, the file's own policy and settings; --set goes on top of them
    assert generate(place / "tiny", "--fitted", str(out)) == 0
    [result] = json.loads(capsys.readouterr().out)["results"]
    assert result["report"]["policy"]["name"] == policy
    assert result["report"]["policy"].get("calibration", "offline") == "offline"
    settings = ["--set", "calibration=offline"] if policy != "less" else LESS_SETTINGS[:6]
    assert generate(place / "tiny", "--fitted", str(out), "--policy", policy, *settings, "--baseline", "full") == 0
    baseline, again = json.loads(capsys.readouterr().out)["results"]
    assert (baseline["report"]["policy"]["name"], again["tokens"]) == ("full", result["tokens"])
    if policy == "less":
        assert generate(place / "tiny", "--fitted", str(out), "--set", "recent=20") == 0
        [other] = json.loads(capsys.readouterr().out)["results"]
        assert (other["report"]["policy"]["recent"], other["report"]["policy"]["heavy"]) == (20, 8)


def test_fit_prints_what_it_learned(place, capsys, tmp_path):
    (tmp_path / "a").write_text("what was there before")
    assert fit(place, "loki", tmp_path / "a") == 0
    assert "learned from 160 tokens" in capsys.readouterr().out
    assert read_fitted_info(tmp_path / "a")["policy"]["name"] == "loki"


@pytest.mark.slow
def test_fit_prints_the_errors_of_less(place, capsys, tmp_path):
    assert fit(place, "less", tmp_path / "a", *LESS_SETTINGS) == 0
    out = capsys.readouterr().out
    for told in ("learned from 160 tokens", "h2o's error", "less's error", "held out, the next 160 tokens"):
        assert told in out


def test_bad_fits_are_told(place, capsys, tmp_path):
    out = tmp_path / "a"
    good = ["fit", str(place / "tiny"), "--policy", "loki", "--text", str(place / "text.txt"), "--out", str(out)]
    cases = {
        "must be one that learns": [*good, "--policy", "h2o"],
        "policy must be one of": [*good, "--policy", "magic"],
        "--steps must be left out for loki": [*good, "--steps", "3"],
        "fit's steps must be": [*good, "--policy", "less", *LESS_SETTINGS[:6], "--steps", "0"],
        "--set must be KEY=VALUE": [*good, "--set", "colums=3"],
        "loki.columns": [*good, "--set", "columns=99"],
        "--tokens must be at least 1": [*good, "--tokens", "0"],
        "context=512": [*good, "--tokens", "600", "--text", str(place / "long.txt")],
        "--text must be readable": [*good, "--text", str(place / "none.txt")],
        "--text must have text": [*good, "--text", str(place / "empty.txt")],
        "nothing is evicted": [*good, "--policy", "less", "--tokens", "9", "--set", "heavy=5", "--set", "recent=5"],
        "cannot be written": [*good, "--out", "/dev/null/a"],
        "in a directory that can be": [*good, "--out", str(tmp_path)],
    }
    (place / "long.txt").write_text("a" * 700)
    for told, arguments in cases.items():
        assert main(arguments) == 2, told
        captured = capsys.readouterr()
        assert told in captured.err, captured.err
        assert captured.out == ""
        assert captured.err.count("\n") == 1  # no traceback
    assert not out.exists()


def test_bad_fitted_files_are_told(place, capsys, tmp_path):
    out, cut = tmp_path / "a", tmp_path / "cut"
    assert fit(place, "loki", out) == 0
    capsys.readouterr()
    cut.write_bytes(out.read_bytes()[:-9])
    cases = [
        (place / "other", ["--fitted", str(out)], "StateMismatch", "weights: file has"),
        (place / "tiny", ["--fitted", str(out), "--policy", "less"], "StateMismatch", "policy.name: file has 'loki'"),
        (place / "tiny", ["--fitted", str(out), "--set", "calibration=online"], "ConfigError", "use learned arrays"),
        (place / "tiny", ["--fitted", str(tmp_path / "none")], "CheckpointError", "no such file"),
        (place / "tiny", ["--fitted", str(cut)], "CheckpointError", "truncated"),
        (place / "tiny", ["--fitted", str(place / "text.txt")], "CheckpointError", "must be a file of fitted arrays"),
        (place / "tiny", ["--fitted", str(out), "--load-state", "x"], "ConfigError", "--fitted must be left out"),
    ]
    for model, more, error, told in cases:
        assert generate(model, *more) == 2
        captured = capsys.readouterr()
        assert error in captured.err, captured.err
        assert told in captured.err, captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err


# OmniKV's filters


def test_calibrate_tells_filters_that_omnikv_takes(place, capsys, tmp_path):
    jshadow.save(dataclasses.replace(init_params(DEEP), tokenizer=byte_tokenizer()), tmp_path / "deep")
    asked = ["calibrate", str(tmp_path / "deep"), "--text", str(place / "text.txt"), "--dtype", "float32"]
    asked += ["--tokens", "200", "--filters", "2"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tokens"], told["budget"], len(told["scores"])) == (200, 12, 5)
    assert all(0 < row["score"] < 1 for row in told["scores"])
    policy = parse_policy("omnikv", [told["set"]])
    assert policy.filter_layers == tuple(told["filter_layers"])
    assert policy.resolve(DEEP, 256).filter_layers == policy.filter_layers
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert f"--policy omnikv --set {told['set']}" in out
    assert "dense layers" in out
    for more, error in (
        (["--filters", "0"], "--filters must be"),
        (["--budget", "0"], "--budget must be"),
        (["--budget", "500"], "tokens must be more than budget=500"),
    ):
        assert main([*asked, *more]) == 2
        assert error in capsys.readouterr().err


class Listener(Oracle):
    """An oracle that keeps every layer's queries and keys."""

    def remember(self, layer, cache, q):
        self.kept = [] if layer == 0 else self.kept
        self.kept.append((q, cache.k_post))


@pytest.mark.parametrize("budget", [7, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (1, 59))])
def test_masses_against_brute_force(budget):
    params = init_params(DEEP)
    tokens = np.random.default_rng(3).integers(0, 257, (2, 60), dtype=np.int32)
    found = filter_masses(params, tokens, budget=budget, queries=1000)
    want = np.zeros((2, 6, 6))
    for row in range(2):
        oracle = Listener(params.weights, DEEP, None)
        oracle.prefill(tokens[row].tolist())
        for i, (q, k) in enumerate(oracle.kept):
            for at in range(budget, 60):
                top = np.argsort(-probabilities(q, k, at).max(axis=0), kind="stable")[:budget]
                for j, later in enumerate(oracle.kept):
                    want[row, i, j] += probabilities(*later, at).mean(axis=0)[top].sum() / (60 - budget)
    upper = np.triu_indices(6, 1)
    np.testing.assert_allclose(found.masses[upper], want.mean(axis=0)[upper], atol=1e-5)
    assert np.isnan(found.masses[np.tril_indices(6)]).all()
    np.testing.assert_allclose(found.scores[0], want.mean(axis=0)[0, 1:].mean(), atol=1e-5)
    assert np.isnan(found.scores[-1])


def probabilities(q, k, at):
    """Attention [h_q, at + 1] of one query of a text."""
    return softmax(np.stack([k[: at + 1, h // 2] @ q[at, h] / 4.0 for h in range(4)]))


@pytest.mark.slow
def test_fewer_queries_are_a_sample():
    params = init_params(DEEP)
    tokens = np.random.default_rng(3).integers(0, 257, 90, dtype=np.int32)
    few, all_of_them = (filter_masses(params, tokens, budget=9, queries=n) for n in (40, 1000))
    np.testing.assert_allclose(few.scores[:-1], all_of_them.scores[:-1], atol=0.02)


def found_of(scores, layers=None):
    """Masses whose means are the scores given."""
    n = len(scores) + 1
    masses = np.where(np.arange(n) > np.arange(n)[:, None], np.array([*scores, 0.0])[:, None], np.nan)
    return FilterMasses(tuple(layers or range(n)), masses, 4)


def test_filters_are_peaks_apart():
    scores = [0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.8, 0.85, 0.1, 0.2, 0.1, 0.95, 0.2, 0.1, 0.99]
    assert choose_filters(found_of(scores), 3) == (2, 7, 11)
    assert choose_filters(found_of(scores), 1) == (11,)  # 14 would serve no sparse layer
    layers = [2 * i + 1 for i in range(16)]
    assert choose_filters(found_of(scores, layers), 3) == (5, 15, 23)
    assert choose_filters(found_of([0.5] * 15), 2) == (0, 7)  # ties go to the lower layer
    for depth in range(1, 40):
        for count in (1, 2, 3, 7):
            chosen = choose_filters(found_of(np.random.default_rng(depth).random(depth)), count)
            assert 1 <= len(chosen) <= count
            assert all(b - a >= 3 for a, b in itertools.pairwise(chosen))
            config = dataclasses.replace(CONFIG, num_layers=depth + 1)
            assert OmniKV(filter_layers=chosen).resolve(config, 64).filter_layers == chosen
    with pytest.raises(ConfigError, match="count"):
        choose_filters(found_of(scores), 0)
    assert dense_share((2, 6), dataclasses.replace(CONFIG, num_layers=12)) == 6 / 12


def test_layers_with_a_window_do_not_choose():
    config = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=(0, 2, 4))
    tokens = np.random.default_rng(3).integers(0, 257, 60, dtype=np.int32)
    found = filter_masses(init_params(config), tokens, budget=5)
    assert found.layers == (1, 3, 5)
    assert choose_filters(found, 3) == (1,)
    everywhere = dataclasses.replace(DEEP, sliding_window=16, sliding_layers=tuple(range(6)))
    with pytest.raises(ConfigError, match="all see a window"):
        choose_filters(filter_masses(init_params(everywhere), tokens, budget=5), 3)
    with pytest.raises(PromptError, match="more than budget"):
        filter_masses(init_params(config), tokens, budget=60)


@pytest.mark.parametrize("text", ["2,8,18", "[2, 8, 18]", "(2,8,18)", "2+8+18"])
def test_a_setting_of_several_numbers(text):
    assert parse_policy("omnikv", [f"filter_layers={text}"]) == OmniKV(filter_layers=(2, 8, 18))
    assert parse_policy("omnikv", ["filter_layers=3"]).filter_layers == (3,)
    assert parse_policy("omnikv", ["filter_layers=null"]).filter_layers is None
    for bad in ("a,b", "1.5", "", "true", "8,2"):
        with pytest.raises(ConfigError, match=r"omnikv\.filter_layers"):
            parse_policy("omnikv", [f"filter_layers={bad}"]).resolve(dataclasses.replace(CONFIG, num_layers=20), 64)
    for worse in (3, "03", [[1]], (True,)):
        with pytest.raises(ConfigError, match=r"omnikv\.filter_layers"):
            OmniKV(filter_layers=worse).resolve(CONFIG, 64)
