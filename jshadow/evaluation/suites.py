"""The tasks of published long-context suites: their scorers, token limits and prompts.

Scorers and token limits are those of the suites (`text_metrics` names the papers). The prompts have different wording.
So scores are close to published ones, but the experiment is not the same. Tasks in Chinese are refused, because their
scores need word segmentation.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import Sample
from jshadow.evaluation.text_metrics import LETTERS


@dataclasses.dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        scorer: a name in `text_metrics.SCORERS`.
        new_tokens: maximum number of tokens of an answer.
        ask: the question. {input} is replaced by the input of the row, and {options} by its choices.
        prefix: the beginning of the answer, which is given to the model.
        chat: whether the prompt is a chat. Otherwise the model continues a text, such as examples or code.
    """

    scorer: str
    new_tokens: int
    ask: str = "{input}"
    prefix: str = ""
    chat: bool = True


SHORT = "Answer the question from the text above alone, in as few words as you can. Question: {input}"
SUMMARY = "Write a summary of the text above."
PARAGRAPH = "Which paragraph is this summary made from? Answer with its number. Summary: {input}"
DIFFERENT = "How many different paragraphs are there above, if the same one counts once? Answer with the number."
CHOICE = "{input}\n\n{options}\n\nAnswer with the letter of the right choice."
BROKEN = "One of these functions has a deliberate error. Which? Answer with the letter.\n\n{options}"

LONGBENCH = {
    "narrativeqa": SuiteTask("f1", 128, SHORT),
    "qasper": SuiteTask("f1", 128, SHORT),
    "multifieldqa_en": SuiteTask("f1", 64, SHORT),
    "hotpotqa": SuiteTask("f1", 32, SHORT),
    "2wikimqa": SuiteTask("f1", 32, SHORT),
    "musique": SuiteTask("f1", 32, SHORT),
    "gov_report": SuiteTask("rouge_l", 512, SUMMARY),
    "qmsum": SuiteTask("rouge_l", 512, "Answer from the text above in a few sentences: {input}"),
    "multi_news": SuiteTask("rouge_l", 512, SUMMARY),
    "trec": SuiteTask("classes", 64, chat=False),
    "triviaqa": SuiteTask("f1_line", 32, chat=False),
    "samsum": SuiteTask("rouge_l_line", 128, chat=False),
    "passage_count": SuiteTask("number_share", 32, DIFFERENT),
    "passage_retrieval_en": SuiteTask("number_share", 32, PARAGRAPH),
    "lcc": SuiteTask("edit_similarity", 64, chat=False),
    "repobench-p": SuiteTask("edit_similarity", 64, chat=False),
}
LONGBENCH_V2 = SuiteTask("letter", 128, CHOICE, "The correct answer is")
INFINITEBENCH = {
    "passkey": SuiteTask("first_number", 6, prefix="The pass key is"),
    "number_string": SuiteTask("first_number", 12, prefix="The sequence of digits is"),
    "kv_retrieval": SuiteTask("string_match_part", 50),
    "longdialogue_qa_eng": SuiteTask("string_match_part", 40, "Which name stands for $$MASK$$ in the text above?"),
    "longbook_sum_eng": SuiteTask("rouge_l", 1200, SUMMARY),
    "longbook_choice_eng": SuiteTask("letter", 40, CHOICE),
    "longbook_qa_eng": SuiteTask("f1", 40, SHORT),
    "math_find": SuiteTask("decimal", 3),
    "math_calc": SuiteTask("leading_numbers", 30000),
    "code_run": SuiteTask("last_number", 5),
    "code_debug": SuiteTask("letter", 5, BROKEN, "The letter is"),
}
RULER = {
    **{
        name: SuiteTask("string_match_all", 128, chat=False)
        for name in (
            "niah_single_1",
            "niah_single_2",
            "niah_single_3",
            "niah_multikey_1",
            "niah_multikey_2",
            "niah_multikey_3",
            "niah_multivalue",
            "niah_multiquery",
        )
    },
    "vt": SuiteTask("string_match_all", 30, chat=False),
    "cwe": SuiteTask("string_match_all", 120, chat=False),
    "fwe": SuiteTask("string_match_all", 50, chat=False),
    "qa_1": SuiteTask("string_match_part", 32, chat=False),
    "qa_2": SuiteTask("string_match_part", 32, chat=False),
}
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh", "longbook_qa_chn")
ALIASES = {"repobench_p": "repobench-p"}
GIVEN = ("context", "question", "answer_prefix", "answer", "max_new_tokens")  # the columns of kvpress


def kind_of(suite: str, kinds: Mapping[str, SuiteTask], task: str) -> SuiteTask:
    """Return the SuiteTask of a task. Raises ConfigError if the suite lacks it, or if it is in Chinese."""
    name = ALIASES.get(task, task).removesuffix("_e")
    if name in CHINESE:
        raise ConfigError(f"task {task} of {suite} is in Chinese, and its score needs a segmentation of words")
    if name not in kinds:
        raise ConfigError(f"task must be one of {suite}'s, {sorted(kinds)}, got {task!r}")
    return kinds[name]


def texts(value: Any) -> tuple[str, ...]:
    """Convert one answer or a list of answers to a tuple of strings."""
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def listed(options: Any) -> str:
    """Format choices with their letters, one on each line."""
    return "\n".join(f"{name}. {option}" for name, option in zip(LETTERS, options, strict=True))


def sample_of(kind: SuiteTask, context: str, answers: tuple[str, ...], *, asked: Any = "", options: Any = ()) -> Sample:
    """Build the sample of a row. `asked` replaces {input} and `options` replaces {options} in the question."""
    question = kind.ask.format(input=asked or "", options=listed(options) if options else "")
    return Sample(context, question, kind.prefix, answers, kind.new_tokens, kind.scorer)


def of_longbench(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of LongBench v1 (input, context, answers, all_classes).

    Returns:
        The sample, and whether its prompt is a chat.
    """
    task = str(row.get("dataset") or task)
    kind = kind_of("LongBench", LONGBENCH, task)
    sample = sample_of(kind, row["context"], texts(row["answers"]), asked=row["input"])
    return dataclasses.replace(sample, choices=texts(row.get("all_classes") or ())), kind.chat


def of_longbench_v2(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of LongBench v2 (question, choice_A to choice_D, answer, context). Returns as `of_longbench`."""
    options = [row[f"choice_{name}"] for name in LETTERS]
    sample = sample_of(LONGBENCH_V2, row["context"], texts(row["answer"]), asked=row["question"], options=options)
    return sample, LONGBENCH_V2.chat


def of_infinitebench(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of InfiniteBench (context, input, answer, options). Returns as `of_longbench`.

    An answer is a letter or the text of a choice.
    """
    kind = kind_of("InfiniteBench", INFINITEBENCH, task)
    answers, options = texts(row["answer"]), list(row.get("options") or ())
    if kind.scorer == "letter":
        if len(options) != len(LETTERS):
            raise ConfigError(f"options must be {len(LETTERS)}, got {len(options)}")
        answers = tuple(LETTERS[options.index(one)] if one in options else one for one in answers)
        answers = tuple(one for one in answers if one in LETTERS)
    return sample_of(kind, row["context"], answers, asked=row["input"], options=options), kind.chat


def of_ruler(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of RULER (input, outputs). The input is the whole prompt. Returns as `of_longbench`."""
    kind = kind_of("RULER", RULER, task)
    sample = Sample(
        row["input"], "", row.get("answer_prefix") or "", texts(row["outputs"]), kind.new_tokens, kind.scorer
    )
    return sample, kind.chat


def of_kvpress(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row with the columns of kvpress. Returns as `of_longbench`.

    The scorer is that of the row, or that of the task if it is known. Otherwise one answer is scored by
    "string_match_part", and a list of answers by "string_match_all".
    """
    answers = row["answer"]
    answers = str(answers) if isinstance(answers, str | int | float) else texts(answers)
    known = RULER | LONGBENCH | INFINITEBENCH
    usual = "string_match_part" if isinstance(answers, str) else "string_match_all"
    scorer = row.get("scorer") or (known[task].scorer if task in known else usual)
    most = row["max_new_tokens"]
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"max_new_tokens must be an integer of at least 1, got {most!r}")
    choices = texts(row.get("choices") or row.get("all_classes") or ())
    sample = Sample(row["context"], row["question"], row["answer_prefix"] or "", answers, most, str(scorer), choices)
    return sample, True


READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], tuple[Sample, bool]]], ...] = (
    (("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context"), of_longbench_v2),
    (GIVEN, of_kvpress),
    (("input", "context", "answers"), of_longbench),
    (("input", "outputs"), of_ruler),
    (("context", "input", "answer"), of_infinitebench),
)
