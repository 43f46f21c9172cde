"""Reading rows of local data sets (JSONL, JSON or parquet) as cases, and writing cases as rows.

The columns are those that kvpress reads. A row has context, question, answer_prefix, answer and max_new_tokens. These
columns are optional:

- task and scorer: names. choices: the answers of a multiple-choice question.
- depth: place of the fact in the context, from 0 to 1.
- length: requested number of tokens of the prompt.
- instruction: the first part of the context, which is an instruction and not a text to ask about.
- turn: 0 for the first question of a conversation. 1, 2, ... continue the conversation of the previous row.
- prompt_ids: token ids of the prompt, if encoding its text gives different ids.

Files of LongBench v1 and v2, InfiniteBench and RULER are recognized by their columns. Scorers and token limits are
those of the suites (`scorers` names the papers). The prompts have different wording. So scores are close to published
ones, but the experiment is not the same. Tasks in Chinese are refused, because their scores need word segmentation.
"""

import contextlib
import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jshadow.errors import ConfigError, check_integer, check_one_of
from jshadow.evaluation.scorers import LETTERS, SCORERS
from jshadow.evaluation.tasks.framing import Case, Sample, case_of
from jshadow.weights.tokenizer import decode, encode, read_text


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` when the block ends. If it fails, the file is removed.

    Raises:
        ConfigError: the file cannot be written. The message begins with `what`.
    """
    target = Path(path)
    part = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        yield part
        part.replace(target)
    except OSError as error:
        raise ConfigError(f"{what} must be a file that can be written, got {str(path)!r}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class _SuiteTask:
    """One task of a suite. In the question `ask`, {input} is the input of the row, and {options} its choices.

    `prefix` is the beginning of the answer, which is given to the model. If the prompt is not a `chat`, the model
    continues a text, such as examples or code.
    """

    scorer: str
    new_tokens: int
    ask: str = "{input}"
    prefix: str = ""
    chat: bool = True


_SHORT = "Answer the question from the text above alone, in as few words as you can. Question: {input}"
_SUMMARY = "Write a summary of the text above."
_PARAGRAPH = "Which paragraph is this summary made from? Answer with its number. Summary: {input}"
_DIFFERENT = "How many different paragraphs are there above, if the same one counts once? Answer with the number."
_CHOICE = "{input}\n\n{options}\n\nAnswer with the letter of the right choice."
_BROKEN = "One of these functions has a deliberate error. Which? Answer with the letter.\n\n{options}"

_LONGBENCH = {
    "narrativeqa": _SuiteTask("f1", 128, _SHORT),
    "qasper": _SuiteTask("f1", 128, _SHORT),
    "multifieldqa_en": _SuiteTask("f1", 64, _SHORT),
    "hotpotqa": _SuiteTask("f1", 32, _SHORT),
    "2wikimqa": _SuiteTask("f1", 32, _SHORT),
    "musique": _SuiteTask("f1", 32, _SHORT),
    "gov_report": _SuiteTask("rouge_l", 512, _SUMMARY),
    "qmsum": _SuiteTask("rouge_l", 512, "Answer from the text above in a few sentences: {input}"),
    "multi_news": _SuiteTask("rouge_l", 512, _SUMMARY),
    "trec": _SuiteTask("classes", 64, chat=False),
    "triviaqa": _SuiteTask("f1_line", 32, chat=False),
    "samsum": _SuiteTask("rouge_l_line", 128, chat=False),
    "passage_count": _SuiteTask("number_share", 32, _DIFFERENT),
    "passage_retrieval_en": _SuiteTask("number_share", 32, _PARAGRAPH),
    "lcc": _SuiteTask("edit_similarity", 64, chat=False),
    "repobench-p": _SuiteTask("edit_similarity", 64, chat=False),
}
_LONGBENCH_V2 = _SuiteTask("letter", 128, _CHOICE, "The correct answer is")
_INFINITEBENCH = {
    "passkey": _SuiteTask("first_number", 6, prefix="The pass key is"),
    "number_string": _SuiteTask("first_number", 12, prefix="The sequence of digits is"),
    "kv_retrieval": _SuiteTask("string_match_part", 50),
    "longdialogue_qa_eng": _SuiteTask("string_match_part", 40, "Which name stands for $$MASK$$ in the text above?"),
    "longbook_sum_eng": _SuiteTask("rouge_l", 1200, _SUMMARY),
    "longbook_choice_eng": _SuiteTask("letter", 40, _CHOICE),
    "longbook_qa_eng": _SuiteTask("f1", 40, _SHORT),
    "math_find": _SuiteTask("decimal", 3),
    "math_calc": _SuiteTask("leading_numbers", 30000),
    "code_run": _SuiteTask("last_number", 5),
    "code_debug": _SuiteTask("letter", 5, _BROKEN, "The letter is"),
}
_NIAH = "single_1 single_2 single_3 multikey_1 multikey_2 multikey_3 multivalue multiquery"
_RULER = {f"niah_{name}": _SuiteTask("string_match_all", 128, chat=False) for name in _NIAH.split()} | {
    "vt": _SuiteTask("string_match_all", 30, chat=False),
    "cwe": _SuiteTask("string_match_all", 120, chat=False),
    "fwe": _SuiteTask("string_match_all", 50, chat=False),
    "qa_1": _SuiteTask("string_match_part", 32, chat=False),
    "qa_2": _SuiteTask("string_match_part", 32, chat=False),
}
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh", "longbook_qa_chn")
_ALIASES = {"repobench_p": "repobench-p"}
_GIVEN = ("context", "question", "answer_prefix", "answer", "max_new_tokens")  # the columns of kvpress


def _kind_of(suite: str, kinds: Mapping[str, _SuiteTask], task: str) -> _SuiteTask:
    name = _ALIASES.get(task, task).removesuffix("_e")
    if name in _CHINESE:
        raise ConfigError(f"task {task} of {suite} is in Chinese, and its score needs a segmentation of words")
    if name not in kinds:
        raise ConfigError(f"task must be one of {suite}'s, {sorted(kinds)}, got {task!r}")
    return kinds[name]


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def sample_of(
    kind: _SuiteTask, context: str, answers: tuple[str, ...], *, asked: Any = "", options: Any = ()
) -> Sample:
    """Build the sample of a row. `asked` replaces {input} and `options` replaces {options} in the question."""
    choices = "\n".join(f"{name}. {option}" for name, option in zip(LETTERS, options, strict=True)) if options else ""
    question = kind.ask.format(input=asked or "", options=choices)
    return Sample(context, question, kind.prefix, answers, kind.new_tokens, kind.scorer)


def _of_longbench(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of LongBench v1 (input, context, answers, all_classes)."""
    task = str(row.get("dataset") or task)
    kind = _kind_of("LongBench", _LONGBENCH, task)
    sample = sample_of(kind, row["context"], _texts(row["answers"]), asked=row["input"])
    return dataclasses.replace(sample, choices=_texts(row.get("all_classes") or ())), kind.chat


def _of_longbench_v2(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of LongBench v2 (question, choice_A to choice_D, answer, context). Returns as `_of_longbench`."""
    options = [row[f"choice_{name}"] for name in LETTERS]
    sample = sample_of(_LONGBENCH_V2, row["context"], _texts(row["answer"]), asked=row["question"], options=options)
    return sample, _LONGBENCH_V2.chat


def _of_infinitebench(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of InfiniteBench (context, input, answer, options). Returns as `_of_longbench`."""
    kind = _kind_of("InfiniteBench", _INFINITEBENCH, task)
    answers, options = _texts(row["answer"]), list(row.get("options") or ())
    if kind.scorer == "letter":
        if len(options) != len(LETTERS):
            raise ConfigError(f"options must be {len(LETTERS)}, got {len(options)}")
        answers = tuple(LETTERS[options.index(one)] if one in options else one for one in answers)
        answers = tuple(one for one in answers if one in LETTERS)
    return sample_of(kind, row["context"], answers, asked=row["input"], options=options), kind.chat


def _of_ruler(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row of RULER (input, outputs). The input is the whole prompt. Returns as `_of_longbench`."""
    kind = _kind_of("_RULER", _RULER, task)
    sample = Sample(
        row["input"], "", row.get("answer_prefix") or "", _texts(row["outputs"]), kind.new_tokens, kind.scorer
    )
    return sample, kind.chat


def _of_kvpress(row: Mapping[str, Any], task: str) -> tuple[Sample, bool]:
    """Read a row with the columns of kvpress. Returns as `_of_longbench`."""
    answers = row["answer"]
    answers = str(answers) if isinstance(answers, str | int | float) else _texts(answers)
    known = _RULER | _LONGBENCH | _INFINITEBENCH
    usual = "string_match_part" if isinstance(answers, str) else "string_match_all"
    scorer = row.get("scorer") or (known[task].scorer if task in known else usual)
    most = row["max_new_tokens"]
    check_integer("max_new_tokens", most, least=1)
    choices = _texts(row.get("choices") or row.get("all_classes") or ())
    sample = Sample(row["context"], row["question"], row["answer_prefix"] or "", answers, most, str(scorer), choices)
    return sample, True


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, Any], str], tuple[Sample, bool]]], ...] = (
    (("question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "context"), _of_longbench_v2),
    (_GIVEN, _of_kvpress),
    (("input", "context", "answers"), _of_longbench),
    (("input", "outputs"), _of_ruler),
    (("context", "input", "answer"), _of_infinitebench),
)


_SPLITS = ("validation", "test", "train", "data")  # for files of these names, the task is the name of the folder
_TRUNCATIONS = ("middle",)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One parsed row: its `Sample`, the optional columns, and `where` it stands, for error messages.

    If it is not a `chat`, the prompt does not use the chat template.
    """

    sample: Sample
    task: str
    where: str
    chat: bool = True
    length: int | None = None
    instruction: str = ""
    turn: int = 0
    depth: float | None = None
    prompt_ids: tuple[int, ...] = ()


class _DataTask(NamedTuple):
    """All cases of one task in the data, and the depth of each, or None if its first row has none."""

    task: str
    cases: tuple[Case, ...]
    depths: tuple[float | None, ...]


# Reading


def _read_objects(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) for the rows of a file, counted from 1. Raises ConfigError if it cannot be read."""
    try:
        if path.suffix == ".parquet":
            try:
                parquet = importlib.import_module("pyarrow.parquet")
            except ImportError as error:
                raise ConfigError(f"data {path} needs pyarrow: pip install pyarrow") from error
            yield from enumerate(parquet.read_table(path).to_pylist(), start=1)
        elif path.suffix == ".json":
            content = json.loads(read_text(path))
            yield from enumerate(content if isinstance(content, list) else [content], start=1)
        elif path.suffix == ".jsonl":
            for number, line in enumerate(read_text(path).split("\n"), start=1):
                if line.strip():
                    yield number, json.loads(line)
        else:
            raise ConfigError(f"data must be .jsonl, .json or .parquet files, got {str(path)!r}")
    except (OSError, ValueError) as error:  # errors of pyarrow are ValueErrors
        raise ConfigError(f"data {path} cannot be read: {error}") from error


def _read_row(row: Any, path: Path, number: int) -> _Row:
    """Parse row `number` (counted from 1) of the file `path`. Raises ConfigError that names the file and the row."""
    where = f"row {number} of {path}"
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r:.80}")
    reader = next((one for columns, one in _READERS if all(name in row for name in columns)), None)
    if reader is None:
        known = " or ".join("(" + ", ".join(columns) + ")" for columns, _ in _READERS)
        raise ConfigError(f"{where} must have the columns {known}, got {sorted(row)}")
    name = path.parent.name if path.stem in _SPLITS else path.stem
    task = str(row.get("task") or name)
    try:
        sample, chat = reader(row, task)
        # In other suites, the column `length` has a different meaning.
        length = row.get("length") if reader is _READERS[1][1] else None
        result = _Row(
            sample=sample,
            task=str(row.get("dataset") or task),
            where=where,
            chat=chat,
            length=None if length is None else int(length),
            instruction=str(row.get("instruction") or ""),
            turn=int(row.get("turn") or 0),
            depth=None if row.get("depth") is None else float(row["depth"]),
            prompt_ids=tuple(map(int, row.get("prompt_ids") or ())),
        )
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    return _checked(result)


def _checked(row: _Row) -> _Row:
    """Check a row, and remove the instruction from its context. Raises ConfigError if a column is missing or wrong."""
    sample = row.sample
    for name in ("context", "question", "answer_prefix"):
        if not isinstance(getattr(sample, name), str):
            raise ConfigError(f"{row.where}: {name} must be text, got {getattr(sample, name)!r:.80}")
    if not sample.context:
        raise ConfigError(f"{row.where}: context must have text, got {sample.context!r}")
    if not any(sample.answers):
        raise ConfigError(f"{row.where}: answer must be text or a list of texts, got {sample.answer!r}")
    check_one_of(f"{row.where}: scorer", sample.scorer, sorted(SCORERS))
    if not sample.context.startswith(row.instruction):
        raise ConfigError(f"{row.where}: context must begin with the instruction, got {sample.context!r:.80}")
    context = sample.context.removeprefix(row.instruction)
    return dataclasses.replace(row, sample=dataclasses.replace(sample, context=context))


def read_rows(paths: Sequence[str | os.PathLike[str]], limit: int | None = None) -> list[_Row]:
    """Read the first `limit` rows of each file, or all rows. Raises ConfigError for a bad limit, file or row."""
    if limit is not None:
        check_integer("limit", limit, least=1)
    rows: list[_Row] = []
    for path in map(Path, paths):
        of_file: list[_Row] = []
        for number, row in _read_objects(path):
            if len(of_file) == limit:
                break
            of_file.append(_read_row(row, path, number))
        if not of_file:
            raise ConfigError(f"data {path} must have rows, got none")
        rows += of_file
    return rows


def _groups_of(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Group consecutive rows that have the same context, task, length and instruction."""
    groups: list[list[_Row]] = []
    for row in rows:
        before = groups[-1][-1] if groups else None
        alike = before is not None and all(
            getattr(row, name) == getattr(before, name) for name in ("task", "length", "chat", "instruction")
        )
        if (
            before is not None
            and alike
            and row.sample.context == before.sample.context
            and (row.turn in (0, before.turn + 1) and (row.turn or not before.turn))
        ):
            groups[-1].append(row)
        elif row.turn:
            raise ConfigError(f"{row.where}: turn {row.turn} must follow turn {row.turn - 1} on the same context")
        else:
            groups.append([row])
    return groups


def read_cases(
    paths: Sequence[str | os.PathLike[str]],
    tokenizer: Any,
    room: int,
    *,
    truncate: str | None = None,
    limit: int | None = None,
) -> list[_DataTask]:
    """Read the cases of local files, grouped by task and length.

    Consecutive rows with the same context become one case, whose context is prefilled once. If a task has such a case,
    all questions of the task are asked on forks of their contexts, so that all are answered in the same way.

    Args:
        paths: .jsonl, .json or .parquet files.
        room: maximum number of tokens of prompt, questions and answers together: the model's context.
        truncate: "middle" removes tokens from the middle of a context that is too long, as LongBench does. None raises
            an error instead.
        limit: number of rows that are read from each file. None means all.

    Raises:
        ConfigError: a file or row cannot be read, or a prompt is too long.
    """
    if truncate is not None and truncate not in _TRUNCATIONS:
        raise ConfigError(f"truncate must be one of {_TRUNCATIONS}, or None, got {truncate!r}")
    if tokenizer is None:
        raise ConfigError("data needs a tokenizer, and the checkpoint has none")
    tasks: dict[tuple[str, int | None], list[list[_Row]]] = {}
    for group in _groups_of(read_rows(paths, limit)):
        tasks.setdefault((group[0].task, group[0].length), []).append(group)
    data_tasks = []
    for (task, _), groups in tasks.items():
        apart = any(len(group) > 1 and not group[1].turn for group in groups)
        cases = tuple(_fitted_case(tokenizer, group, apart, room, truncate) for group in groups)
        data_tasks.append(_DataTask(task, cases, tuple(group[0].depth for group in groups)))
    return data_tasks


def _fitted_case(tokenizer: Any, group: Sequence[_Row], apart: bool, room: int, truncate: str | None) -> Case:
    """Build one evaluation case from rows that share a context."""
    first = group[0]
    samples = [row.sample for row in group]
    options: dict[str, Any] = {
        "head": first.instruction,
        "apart": apart,
        "turns": len(group) > 1 and not apart,
        "chat": first.chat,
    }
    case = case_of(tokenizer, samples, **options)
    if first.prompt_ids and decode(tokenizer, first.prompt_ids) == decode(tokenizer, case.prompt):
        case = dataclasses.replace(case, prompt=first.prompt_ids)
    over = len(case.prompt) + case.growth - room
    if over <= 0:
        return case
    problem = f"{first.where} has {len(case.prompt):,} tokens and needs {case.growth:,} more, context={room:,}"
    if truncate is None:
        raise ConfigError(f"{problem}; --truncate middle cuts it")
    if over >= len(encode(tokenizer, samples[0].context)):
        raise ConfigError(f"{problem}: too little of it would be left")
    return case_of(tokenizer, samples, **options, drop=over)


# Writing


def rows_of(task: str, tokenizer: Any, length: int, case: Case, depth: float) -> list[dict[str, Any]]:
    """Turn a case into rows, one for each question. Raises ConfigError for a task without questions.

    `length` is the requested number of tokens of the prompt, and `depth` is the place of the fact, from 0 to 1.
    """
    if case.forced:
        raise ConfigError(f"task must have questions, got {task}")
    rows: list[dict[str, Any]] = []
    again = case_of(tokenizer, case.samples, head=case.instruction, apart=bool(case.questions), turns=bool(case.turns))
    for number, sample in enumerate(case.samples):
        row = dataclasses.asdict(sample) | {"context": case.instruction + sample.context}
        row |= {"task": task, "length": length, "depth": depth, "instruction": case.instruction}
        if not sample.choices:
            del row["choices"]
        if case.turns:
            row["turn"] = number
        if number == 0 and again.prompt != case.prompt:
            row["prompt_ids"] = case.prompt
        rows.append(row)
    return rows


def write_rows(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL, completely or not at all. Raises ConfigError if the file cannot be written."""
    with whole_file(path, "out") as part, part.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
