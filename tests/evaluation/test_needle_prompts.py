"""The prompts of needle and agreement tasks, with three kinds of tokenizers."""

import warnings
from typing import Any

import pytest
from tokenizers_by_kind import TOKENIZERS

from jshadow.errors import ConfigError
from jshadow.evaluation import rows, tasks
from jshadow.evaluation.tasks import package_texts
from jshadow.evaluation.tasks.needle_phases import PHASE_TASKS, PHASES

OLD = [
    name for name in tasks.TASKS if name.startswith(("needle", "agreement")) and name not in package_texts.PACKAGE_TASKS
]
NEEDLES = [name for name in tasks.TASKS if name.startswith("needle")]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", OLD)
def test_a_prompt_has_exactly_the_asked_length(task, kind):
    for length, depth in ((600, 0.0), (601, 0.5), (1337, 1.0)):
        case = tasks.make(task, TOKENIZERS[kind], length, depth, seed=length)
        assert len(case.prompt) == length
        assert len(case.forced) == (tasks.FORCED if task.startswith("agreement") else 0)


@pytest.mark.parametrize("task", OLD)
def test_the_seed_decides_everything(task):
    for tokenizer in TOKENIZERS.values():
        one, again, other = (tasks.make(task, tokenizer, 700, 0.5, seed) for seed in (3, 3, 4))
        assert one == again
        assert one.prompt != other.prompt


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", NEEDLES)
def test_the_facts_lie_where_they_were_asked_to(task, kind):
    tokenizer = TOKENIZERS[kind]
    length = 3000
    for depth in (0.05, 0.5, 0.95):
        case = tasks.make(task, tokenizer, length, depth, seed=7)
        assert len(case.samples) == len(case.planted) == len(case.turns) + 1
        for turn, (sample, start) in enumerate(zip(case.samples, case.planted, strict=True)):
            city = sample.answer_prefix.removeprefix("The secret number of ").removesuffix(" is")
            fact = tasks.FACT.format(city=city, number=sample.answer)
            assert tokenizer.decode(list(case.prompt[start:])).lstrip().startswith(fact)
            assert sample.context.count(fact) == 1
            assert sample.context.count(sample.answer) == 1
            asked = (depth + turn / len(case.samples)) % 1
            assert abs(start / length - asked) < 0.15  # the frame and the other facts take some of the text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_prompt_reads_as_its_user_would_write_it(kind):
    tokenizer = TOKENIZERS[kind]
    case = tasks.make("needle_docs", tokenizer, 900, 0.3, seed=1)
    sample, text = case.samples[0], tokenizer.decode(list(case.prompt))
    assert text.endswith(sample.answer_prefix)
    assert sample.context in text
    assert sample.question in text
    assert sample.answer not in text.replace(sample.context, "")
    assert case.text == f"{tasks.HEAD}{sample.context}\n\n{sample.question}"
    assert "<assistant>" not in case.text
    if kind == "chat":
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": case.text}], tokenize=False, add_generation_prompt=True
        )
        assert text == rendered + sample.answer_prefix
    else:
        assert text.count("<s>") == (kind == "merging")  # no end token is put after the prompt
    assert not any(token in case.prompt for token in (tokenizer.eos_token_id,))


def test_a_later_question_goes_on_from_the_answer():
    case = tasks.make("needle_multiturn", TOKENIZERS["chat"], 2500, 0.5, seed=1)
    second = TOKENIZERS["chat"].decode(list(case.turns[0]))
    assert second == f"\n<user>{case.samples[1].question}\n<assistant>{case.samples[1].answer_prefix}"
    plain = tasks.make("needle_multiturn", TOKENIZERS["plain"], 2500, 0.5, seed=1)
    assert TOKENIZERS["plain"].decode(list(plain.turns[0])).startswith("\n\nQuestion: ")


def test_the_forced_text_is_what_follows_the_prompt():
    tokenizer = TOKENIZERS["plain"]
    case = tasks.make("agreement", tokenizer, 500, 0.5, seed=5)
    longer = tasks.make("agreement", tokenizer, 500 + tasks.FORCED, 0.5, seed=5)
    assert (*case.prompt, *case.forced) == longer.prompt


def test_long_texts_cause_no_warning(caplog):
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        for task in OLD:
            tasks.make(task, TOKENIZERS["merging"], 5000, 0.5, seed=0)
    assert not caplog.records


BAD_CASES: list[tuple[str, dict[str, Any]]] = [
    ("task", {"task": "needle"}),
    ("length", {"length": 20}),
    ("length", {"length": 0}),
    ("length", {"length": True}),
    ("depth", {"depth": -0.1}),
    ("depth", {"depth": 1.5}),
    ("depth", {"depth": float("nan")}),
    ("seed", {"seed": -1}),
    ("tokenizer", {"tokenizer": None}),
]


@pytest.mark.parametrize(("word", "change"), BAD_CASES)
def test_bad_cases_are_refused(word, change):
    good = {"task": "needle_docs", "tokenizer": TOKENIZERS["plain"], "length": 900, "depth": 0.5, "seed": 0}
    with pytest.raises(ConfigError, match=word):
        tasks.make(**(good | change))


# Phases


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("task", PHASE_TASKS)
def test_the_samples_go_through_all_phases(task, kind):
    tokenizer = TOKENIZERS[kind]
    for index in range(PHASES + 3):
        case, depth = tasks.sample_of(task, tokenizer, 901, index, PHASES + 3, 5)
        [sample], [planted] = case.samples, case.planted
        assert len(case.prompt) == 901
        assert planted % PHASES == index % PHASES
        text = tokenizer.decode(list(case.prompt[planted:]))
        fact = tasks.FACT.format(city=sample.question.split(" of ")[1].split("?")[0], number=sample.answer)
        assert text.lstrip().startswith(fact)
        assert sample.context in tokenizer.decode(list(case.prompt))
        assert fact in sample.context
        assert abs(planted / 901 - depth) < 0.25


def test_figures_by_phase():
    hits = [index % 3 == 0 for index in range(11)]
    records = [
        {"score": 100.0 * hit, "hits": [hit], "kl": None, "attended_tokens": 1.0, "hit_rate": None, "outputs": [""]}
        for hit in hits
    ]
    heads = [{"task": "needle_noise_phases", "infeasible": None, "control_of": None}]
    [row] = rows.with_figures(heads, [None] * 11, [[record] for record in records])
    assert row["phase_asked"] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert row["phase_found"] == [1, 1, 0, 1, 0, 0, 1, 0]
    [row] = rows.with_figures([heads[0] | {"task": "needle_noise"}], [None] * 11, [[record] for record in records])
    assert "phase_found" not in row
