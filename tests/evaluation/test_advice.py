"""Advice on a user's own documents: the probes, the choice, and the records of a tiny random model."""

import dataclasses
import json

import numpy as np
import pytest

from jshadow import Full, ShadowKV, StreamingLLM, load, prefill, save
from jshadow.cli.fields import command_of
from jshadow.cli.main import main, parser
from jshadow.cli.options import load_model, policy_of
from jshadow.engine import decode
from jshadow.errors import CapacityError, ConfigError
from jshadow.evaluation import advice
from jshadow.evaluation.advice import Advice, Judged, Kept, advise, candidates, cheapest
from jshadow.evaluation.metrics import log_softmax
from jshadow.evaluation.tasks.documents import LEAST, document_case
from jshadow.weights.tokenizer import decode as decoded

TEXT = " ".join(f"Fact {number} says that {number * number} is a square." for number in range(30))


def kept(share: float, low: float) -> Kept:
    return Kept(share, low, 1.0, 1, 2)


def judged(policy, size: int, low: float) -> Judged:
    return Judged(policy, size, 100, kept(0.99, low), kept(0.98, 0.9), {})


def said(params, ids) -> str:
    return decoded(params.tokenizer, ids)


# Probes


def test_passages_are_spread_over_the_document_and_its_end_is_left_out(params):
    case = document_case(params.tokenizer, "a.txt", TEXT, (), 2048)
    text = said(params, case.prompt)
    assert TEXT.startswith(text)
    *passages, (lead, after) = [(said(params, one), said(params, two)) for one, two in case.probes]
    assert text + lead + after == TEXT
    starts = [text.index(one.removeprefix("\n\n") + two) for one, two in passages]
    assert (len(passages), starts[0], starts[-1]) == (15, 0, len(text) - 48)
    np.testing.assert_allclose(np.diff(starts), (len(text) - 48) / 14, atol=1)
    assert case.growth >= max(len(one) + len(two) for one, two in case.probes)


def test_questions_follow_the_document_and_full_attention_answers_them(params):
    case = document_case(params.tokenizer, "a.txt", TEXT, ["What is 3 squared?", "Why?"], 2048)
    assert said(params, case.prompt).endswith(TEXT)
    assert [("squared?" in said(params, lead), after) for lead, after in case.probes] == [(True, ()), (False, ())]
    assert case.growth >= max(len(lead) for lead, _ in case.probes) + 64


@pytest.mark.parametrize(
    ("text", "room", "error", "told"),
    [
        (TEXT[: LEAST - 1], 2048, ConfigError, "document a.txt must have at least 512 tokens, got 511"),
        (
            TEXT,
            600,
            CapacityError,
            "document a.txt must fit the model's context=600 with its probes, got",
        ),
    ],
    ids=["short", "long"],
)
def test_documents_that_are_too_short_or_too_long_are_named(params, text, room, error, told):
    with pytest.raises(error, match=told):
        document_case(params.tokenizer, "a.txt", text, (), room)


# The choice


def test_what_is_kept_is_the_mean_divergence_with_an_interval_that_grows_with_the_spread():
    losses = np.array([0.0, 0.01, 0.02, 0.05])
    some = Kept.of([(loss, loss < 0.015) for loss in losses])
    np.testing.assert_allclose(some.share, np.exp(-losses.mean()))
    assert np.exp(-losses.max()) <= some.low < some.share < some.high <= 1
    assert (some.same, some.probes) == (2, 4)
    equal = Kept.of([(0.02, False)] * 4)
    np.testing.assert_allclose([equal.low, equal.share, equal.high], np.exp(-0.02))
    rng = np.random.default_rng(1)
    means = [losses[rng.integers(0, 4, 4)].mean() for _ in range(20000)]
    np.testing.assert_allclose([some.high, some.low], np.exp(-np.percentile(means, [2.5, 97.5])), atol=1e-3)


def test_the_cheapest_whose_interval_keeps_the_target_is_chosen_or_full_attention():
    rows = [judged(ShadowKV(), 10, 0.97), judged(StreamingLLM(), 20, 0.992), judged(ShadowKV.packed(), 30, 0.999)]
    rows.append(judged(Full(), 100, 1.0))
    assert [cheapest(rows, target).device_bytes for target in (0.9, 0.97, 0.98, 0.995, 1.0)] == [10, 10, 20, 30, 100]


def test_candidates_differ_in_budget_and_are_smaller_than_the_document():
    few, many = candidates(600), candidates(8192)
    budgets = {one.budget for one in many if isinstance(one, ShadowKV) and one.keys is not None} - {None}
    assert budgets == {256, 512, 1024, 2048}
    assert len(few) < len(many) == len(set(many))


@pytest.mark.parametrize(("loss", "groups"), [(0.0, 1), (0.02, 2), (9.0, 3)])
def test_settings_are_tried_from_the_cheapest_on_until_one_keeps_the_target(params, monkeypatch, loss, groups):
    """Ten settings of twelve are smaller than full attention. They run in groups of four."""
    runs, told = [], []

    def probes(evaluation, store, progress):
        policies = [entry.policy for entry in evaluation.plans[0].entries]
        runs.append(policies[1:])
        progress(1, 1)
        here = loss / 4 ** (len(runs) - 1)
        return {one: {"a": [[0.0 if one == Full() else here, True]] * 4} for one in policies}

    monkeypatch.setattr(advice, "_probes_of", probes)
    sizes = {one: (place, 100) for place, one in enumerate([*candidates(8192), Full()], 90)}
    monkeypatch.setattr(advice, "_bytes_of", lambda params, policy, plan: sizes.get(policy, (50, 100)))
    monkeypatch.setattr(advice, "candidates", lambda tokens: list(sizes)[:-1])
    found = advise(params, {"a": TEXT}, progress=lambda *place: told.append(place))
    assert [one for some in runs for one in some] == list(sizes)[: min(10, 4 * groups)]
    assert (found.best.policy == Full(), found.untried) == (loss > 1, 10 - min(10, 4 * groups))
    assert told == [(number + 1, 3) for number in range(groups)]
    assert len(found.judged) == min(10, 4 * groups) + 1


# The whole


@pytest.mark.slow
def test_the_records_are_those_of_each_probe_alone(params, tmp_path):
    """Beside the divergence of the logits of single forks. A second call reads what the first one stored."""
    policy, documents = StreamingLLM(sinks=4, window=64), {"a": TEXT, "b": TEXT[::-1][:700]}
    found = advise(params, documents, policies=[policy], out=tmp_path, target=1.0)
    assert [one.policy for one in found.judged] == [policy, Full()]
    streaming, full = found.judged
    assert (found.best, full.held_out) == (full, Kept(1.0, 1.0, 1.0, 16, 16))
    wanted = {}
    for name, text in documents.items():
        case = document_case(params.tokenizer, name, text, (), 2048)
        sizes = {"capacity": len(case.prompt) + case.growth, "fetch": "resident"}
        prompt = np.array([case.prompt], np.int32)
        states = [prefill(params, prompt, [prompt.shape[1]], one, **sizes)[1] for one in (Full(), policy)]
        wanted[name] = []
        for lead, after in case.probes:
            probe = [*lead, *after]
            row = np.array([[*probe, *[0] * (case.growth - len(probe))]], np.int32)  # all probes share a program
            logits = [decode.extend(params, row, [len(probe)], one.fork(), logits="all")[0] for one in states]
            p, q = (log_softmax(np.asarray(one)[0, len(lead) - 1 : len(probe)]) for one in logits)
            wanted[name].append((np.exp(p) * (p - q)).sum(axis=-1).mean())
    for name, losses in wanted.items():
        np.testing.assert_allclose(-np.log(streaming.documents[name].share), np.mean(losses), rtol=1e-3)
    everything = np.array([*wanted["a"], *wanted["b"]])
    halves = [-np.log(one.share) for one in (streaming.chosen_by, streaming.held_out)]
    np.testing.assert_allclose(halves, [everything[::2].mean(), everything[1::2].mean()], rtol=1e-3)
    assert streaming.chosen_by.share < 1
    again = advise(params, documents, policies=[policy], out=tmp_path, progress=None)
    assert again.judged == found.judged
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": 0.0}, "target must be above 0 and at most 1, got 0.0"),
        ({"target": 1.5}, "target must be above 0 and at most 1, got 1.5"),
        ({"documents": {}}, "documents must have at least one text, got none"),
        ({"questions": ["Why?"]}, "questions must be at least 2 for one document: one half of them judges, got 1"),
    ],
)
def test_bad_arguments_are_refused(params, change, told):
    with pytest.raises(ConfigError, match=told):
        advise(params, **{"documents": {"a": TEXT}, "target": 0.9} | change)


# The command


@pytest.fixture
def made(params, tmp_path, monkeypatch):
    """A model and a document, for which the advice is made up."""
    save(params, tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXT)
    best = judged(dataclasses.replace(ShadowKV.packed(small=True), budget=512), 45, 0.992)
    rows = (judged(ShadowKV(rank=8), 40, 0.9), best, judged(Full(), 100, 1.0))
    monkeypatch.setattr(advice, "advise", lambda *args, **options: Advice(options["target"], 700, rows, best))
    return tmp_path


def test_the_settings_that_are_written_are_those_of_the_choice_and_for_its_model_alone(made, capsys):
    words = ["advise", str(made / "model"), "--file", str(made / "a.txt"), "--out", str(made), "--gpu", "h200"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "is the cheapest that keeps 0.99, with 45.0 % of the device bytes." in " ".join(printed.split())
    for command in ("generate", "chat", "serve"):
        args = command_of(parser().parse_args([command, "model", "--settings", str(made / "settings.toml")]))
        assert policy_of(args) == dataclasses.replace(ShadowKV.packed(small=True), budget=512)
    args.model = str(made / "model")
    assert load_model(args).config == load(made / "model").config
    args.for_model = "llama-1x32-00000000"
    with pytest.raises(ConfigError, match=r"--for-model must be the mark of the model, llama-1x32-\w+, got 'llama-1x"):
        load_model(args)
    page = (made / "advice.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "budget=512" in page


def test_it_is_one_json_object_for_programs(made, capsys):
    assert main(["advise", str(made / "model"), "--file", str(made / "a.txt"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["best"]["device_bytes"], [one["name"] for one in told["judged"]]) == (45, ["shadowkv"] * 2 + ["full"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--file must be given at least once, got none"),
        (["--file", "a.txt", "--target", "0"], "--target must be above 0 and at most 1, got 0.0"),
        (["--file", "missing.txt"], "--file must be readable UTF-8 text"),
        (["--file", "binary"], "--file must be readable UTF-8 text, got a binary file"),
        (["--file", "empty"], "--file must have text in it"),
        (["--file", "a.txt", "--gpu", "h1"], "h1"),
    ],
)
def test_bad_options_end_with_2_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "empty").write_text(" \n")
    assert main(["advise", "no-model", *words]) == 2
    assert told in capsys.readouterr().err
