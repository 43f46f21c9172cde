"""The prompts of needle and agreement tasks, with three kinds of tokenizers, and what a real model finds."""

import warnings

import pytest
from tokenizers_by_kind import TOKENIZERS

from jshadow import ShadowKV, load
from jshadow.errors import ConfigError
from jshadow.evaluation import results, tasks
from jshadow.evaluation.results import pooled
from jshadow.evaluation.runner import evaluate
from jshadow.evaluation.tasks import agreement_texts
from jshadow.evaluation.tasks.needles import PHASE_TASKS, PHASES

NEEDLES = [name for name in tasks.TASKS if name.startswith("needle")]
AGREEMENT = [name for name in tasks.TASKS if name.startswith("agreement") and name not in agreement_texts.PACKAGE_TASKS]
each_kind = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


@each_kind
@pytest.mark.parametrize("task", NEEDLES + AGREEMENT)
def test_a_prompt_has_exactly_the_asked_length_and_follows_its_seed(task, tokenizer):
    for length, depth in ((600, 0.0), (601, 0.5), (1337, 1.0)):
        case = tasks.make(task, tokenizer, length, depth, seed=length)
        assert len(case.prompt) == length
        assert len(case.forced) == (tasks.FORCED if task in AGREEMENT else 0)
    one, again, other = (tasks.make(task, tokenizer, 700, 0.5, seed) for seed in (3, 3, 4))
    assert one == again
    assert one.prompt != other.prompt


@each_kind
@pytest.mark.parametrize("task", NEEDLES)
def test_the_facts_lie_where_they_were_asked_to(task, tokenizer):
    length = 3000
    for depth in (0.05, 0.5, 0.95):
        case = tasks.make(task, tokenizer, length, depth, seed=7)
        assert len(case.samples) == len(case.planted) == len(case.turns) + 1
        for turn, (sample, start) in enumerate(zip(case.samples, case.planted, strict=True)):
            city = sample.answer_prefix.removeprefix("The secret number of ").removesuffix(" is")
            fact = tasks.FACT.format(city=city, number=sample.answer)
            assert tokenizer.decode(list(case.prompt[start:])).lstrip().startswith(fact)
            assert sample.context.count(fact) == sample.context.count(sample.answer) == 1
            asked = (depth + turn / len(case.samples)) % 1
            assert abs(start / length - asked) < 0.15  # the frame and the other facts take some of the text


@each_kind
def test_a_prompt_reads_as_its_user_would_write_it(tokenizer):
    case = tasks.make("needle_docs", tokenizer, 900, 0.3, seed=1)
    sample, text = case.samples[0], tokenizer.decode(list(case.prompt))
    assert text.endswith(sample.answer_prefix)
    assert sample.context in text
    assert sample.question in text
    assert sample.answer not in text.replace(sample.context, "")
    assert case.text == f"{tasks.HEAD}{sample.context}\n\n{sample.question}"
    assert "<assistant>" not in case.text
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": case.text}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert text == rendered + sample.answer_prefix
    else:
        assert text.count("<s>") == (tokenizer is TOKENIZERS["merging"])
    assert tokenizer.eos_token_id not in case.prompt  # no end token is put after the prompt


@pytest.mark.parametrize(
    ("kind", "begin"),
    [("chat", "\n<user>{0.question}\n<assistant>{0.answer_prefix}"), ("plain", "\n\nQuestion: {0.question}")],
)
def test_a_later_question_goes_on_from_the_answer(kind, begin):
    case = tasks.make("needle_multiturn", TOKENIZERS[kind], 2500, 0.5, seed=1)
    second, begin = TOKENIZERS[kind].decode(list(case.turns[0])), begin.format(case.samples[1])
    assert second.startswith(begin)
    assert kind == "plain" or second == begin


def test_the_forced_text_is_what_follows_the_prompt():
    case, longer = (tasks.make("agreement", TOKENIZERS["plain"], 500 + n, 0.5, seed=5) for n in (0, tasks.FORCED))
    assert (*case.prompt, *case.forced) == longer.prompt


def test_long_texts_cause_no_warning(caplog):
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        for task in NEEDLES + AGREEMENT:
            tasks.make(task, TOKENIZERS["merging"], 5000, 0.5, seed=0)
    assert not caplog.records


BAD_CASES = [
    *({"length": length} for length in (20, 0, True)),
    *({"depth": depth} for depth in (-0.1, 1.5, float("nan"))),
    {"task": "needle"},
    {"seed": -1},
    {"tokenizer": None},
]


@pytest.mark.parametrize("change", BAD_CASES, ids=str)
def test_bad_cases_are_refused(change):
    good = {"task": "needle_docs", "tokenizer": TOKENIZERS["plain"], "length": 900, "depth": 0.5, "seed": 0}
    [word] = change
    with pytest.raises(ConfigError, match=word):
        tasks.make(**(good | change))


# Phases


@each_kind
@pytest.mark.parametrize("task", PHASE_TASKS)
def test_the_samples_go_through_all_phases(task, tokenizer):
    for index in range(PHASES + 3):
        case, depth = tasks.sample_of(task, tokenizer, 901, index, PHASES + 3, 5)
        [sample], [planted] = case.samples, case.planted
        assert len(case.prompt) == 901
        assert planted % PHASES == index % PHASES
        fact = tasks.FACT.format(city=sample.question.split(" of ")[1].split("?")[0], number=sample.answer)
        assert tokenizer.decode(list(case.prompt[planted:])).lstrip().startswith(fact)
        assert sample.context in tokenizer.decode(list(case.prompt))
        assert fact in sample.context
        assert abs(planted / 901 - depth) < 0.25


def test_figures_by_phase():
    common = {"kl": None, "attended_tokens": 1.0, "hit_rate": None, "outputs": [""]}
    records = [[common | {"score": 100.0 * (i % 3 == 0), "hits": [i % 3 == 0]}] for i in range(11)]
    head = {"task": "needle_noise_phases", "infeasible": None, "control_of": None}
    [row] = results.with_figures([head], [None] * 11, records)
    assert row["phase_asked"] == [2, 2, 2, 1, 1, 1, 1, 1]
    assert row["phase_found"] == [1, 1, 0, 1, 0, 0, 1, 0]
    [row] = results.with_figures([head | {"task": "needle_noise"}], [None] * 11, records)
    assert "phase_found" not in row


# A real model: with ShadowKV it finds the facts that it finds with full attention, and a control does not

POLICY = ShadowKV(rank=32, budget=256)
FOUND = ("needle_noise", "needle_docs")
SAMPLES = 6  # docs/benchmarks/quality.md has ten at three lengths


@pytest.fixture(scope="module")
def smollm2(smollm2_dir):
    return load(smollm2_dir, dtype="float32")


@pytest.mark.real
@pytest.mark.timeout(2400)
def test_rank_32_budget_256_finds_what_full_attention_finds(smollm2):
    made = evaluate(smollm2, FOUND, [2048], [POLICY], samples=SAMPLES, fetch="resident")
    for row in made:
        print(f"{row['task']:13} {row['length']:5} {row['policy']:32} {row['found']:2} / {row['asked']}")
    _, shadow, control = pooled(made)
    assert shadow["policy"].startswith("shadowkv")
    assert shadow["asked"] == len(FOUND) * SAMPLES
    assert shadow["found_by_full"] >= shadow["asked"] / 2, "full attention finds too little for this to mean anything"
    assert shadow["found_by_both"] >= 0.9 * shadow["found_by_full"]
    assert control["found"] < 0.6 * control["found_by_full"]
    assert control["control"].startswith("ok")


@pytest.mark.real
def test_offloaded_values_find_the_same(smollm2):
    fetches = ("resident", "device_put")
    resident, offloaded = (evaluate(smollm2, FOUND, [1024], [POLICY], samples=2, fetch=fetch) for fetch in fetches)
    assert [row["turns"] for row in offloaded] == [row["turns"] for row in resident]
    assert offloaded[1]["host_bytes"] > 0
    assert offloaded[1]["device_bytes"] < resident[1]["device_bytes"]
