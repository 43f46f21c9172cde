"""Reading rows of local data sets (JSONL, JSON or parquet) as cases, and writing cases as rows.

The columns are those that kvpress reads. A row has context, question, answer_prefix, answer and max_new_tokens. These
columns are optional:

- task and scorer: names. choices: the answers of a multiple-choice question.
- depth: place of the fact in the context, from 0 to 1.
- length: requested number of tokens of the prompt.
- instruction: the first part of the context, which is an instruction and not a text to ask about.
- turn: 0 for the first question of a conversation. 1, 2, ... continue the conversation of the previous row.
- prompt_ids: token ids of the prompt, if encoding its text gives different ids.

Files of LongBench v1 and v2, InfiniteBench and RULER are recognized by their columns (see `suites`).
"""

import dataclasses
import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.suites import READERS
from jshadow.evaluation.tasks.framing import Case, Sample, case_of
from jshadow.evaluation.text_metrics import SCORERS
from jshadow.evaluation.whole_file import whole_file
from jshadow.weights.tokenizer import decode, encode, read_text

SPLITS = ("validation", "test", "train", "data")  # for files of these names, the task is the name of the folder
TRUNCATIONS = ("middle",)


@dataclasses.dataclass(frozen=True)
class Row:
    """One parsed row.

    Attributes:
        sample: the question with its context and answers.
        task: name of the task.
        where: file and row number, for error messages.
        chat: whether the prompt uses the chat template.
        length: number of tokens of the prompt, or None if the row does not have it.
        instruction: text before the context.
        turn: index of the question in a conversation about one context.
        depth: place of the fact in the context, or None if the row does not have it.
        prompt_ids: token ids of the prompt, or () if the row does not have them.
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


@dataclasses.dataclass(frozen=True)
class DataTask:
    """All cases of one task in the data.

    Attributes:
        task: name of the task.
        cases: the cases.
        depths: the depth of each case, or None if its first row has none.
    """

    task: str
    cases: tuple[Case, ...]
    depths: tuple[float | None, ...]


# Reading


def read_objects(path: Path) -> Iterator[tuple[int, Any]]:
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


def read_row(row: Any, path: Path, number: int) -> Row:
    """Parse row `number` (counted from 1) of the file `path`. Raises ConfigError that names the file and the row."""
    where = f"row {number} of {path}"
    if not isinstance(row, dict):
        raise ConfigError(f"{where} must be an object, got {row!r:.80}")
    reader = next((one for columns, one in READERS if all(name in row for name in columns)), None)
    if reader is None:
        known = " or ".join("(" + ", ".join(columns) + ")" for columns, _ in READERS)
        raise ConfigError(f"{where} must have the columns {known}, got {sorted(row)}")
    name = path.parent.name if path.stem in SPLITS else path.stem
    task = str(row.get("task") or name)
    try:
        sample, chat = reader(row, task)
        # In other suites, the column `length` has a different meaning.
        length = row.get("length") if reader is READERS[1][1] else None
        result = Row(
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
    return checked(result)


def checked(row: Row) -> Row:
    """Check a row, and remove the instruction from its context. Raises ConfigError if a column is missing or wrong."""
    sample = row.sample
    for name in ("context", "question", "answer_prefix"):
        if not isinstance(getattr(sample, name), str):
            raise ConfigError(f"{row.where}: {name} must be text, got {getattr(sample, name)!r:.80}")
    if not sample.context:
        raise ConfigError(f"{row.where}: context must have text, got {sample.context!r}")
    if not any(sample.answers):
        raise ConfigError(f"{row.where}: answer must be text or a list of texts, got {sample.answer!r}")
    if sample.scorer not in SCORERS:
        raise ConfigError(f"{row.where}: scorer must be one of {sorted(SCORERS)}, got {sample.scorer!r}")
    if not sample.context.startswith(row.instruction):
        raise ConfigError(f"{row.where}: context must begin with the instruction, got {sample.context!r:.80}")
    context = sample.context.removeprefix(row.instruction)
    return dataclasses.replace(row, sample=dataclasses.replace(sample, context=context))


def read_rows(paths: Sequence[str | os.PathLike[str]], limit: int | None = None) -> list[Row]:
    """Read the first `limit` rows of each file, or all rows. Raises ConfigError for a bad limit, file or row."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit must be an integer of at least 1, got {limit!r}")
    rows: list[Row] = []
    for path in map(Path, paths):
        of_file: list[Row] = []
        for number, row in read_objects(path):
            if len(of_file) == limit:
                break
            of_file.append(read_row(row, path, number))
        if not of_file:
            raise ConfigError(f"data {path} must have rows, got none")
        rows += of_file
    return rows


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Group consecutive rows that have the same context, task, length and instruction.

    A group is a list of separate questions (turn 0), or the turns of one conversation. Raises ConfigError if a turn
    does not follow the previous turn on the same context.
    """
    groups: list[list[Row]] = []
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
) -> list[DataTask]:
    """Read the cases of local files, grouped by task and length.

    Consecutive rows with the same context become one case, whose context is prefilled once. If a task has such a case,
    all questions of the task are asked on forks of their contexts, so that all are answered in the same way.

    Args:
        paths: .jsonl, .json or .parquet files.
        tokenizer: tokenizer of the model.
        room: maximum number of tokens of prompt, questions and answers together: the model's context.
        truncate: "middle" removes tokens from the middle of a context that is too long, as LongBench does. None raises
            an error instead.
        limit: number of rows that are read from each file. None means all.

    Raises:
        ConfigError: a file or row cannot be read, or a prompt is too long.
    """
    if truncate is not None and truncate not in TRUNCATIONS:
        raise ConfigError(f"truncate must be one of {TRUNCATIONS}, or None, got {truncate!r}")
    if tokenizer is None:
        raise ConfigError("data needs a tokenizer, and the checkpoint has none")
    tasks: dict[tuple[str, int | None], list[list[Row]]] = {}
    for group in groups_of(read_rows(paths, limit)):
        tasks.setdefault((group[0].task, group[0].length), []).append(group)
    data_tasks = []
    for (task, _), groups in tasks.items():
        apart = any(len(group) > 1 and not group[1].turn for group in groups)
        cases = tuple(fitted_case(tokenizer, group, apart, room, truncate) for group in groups)
        data_tasks.append(DataTask(task, cases, tuple(group[0].depth for group in groups)))
    return data_tasks


def fitted_case(tokenizer: Any, group: Sequence[Row], apart: bool, room: int, truncate: str | None) -> Case:
    """Build one evaluation case from rows that share a context.

    `apart` asks the questions on separate forks of the context. If prompt and answers need more than `room` tokens,
    truncate="middle" removes tokens from the middle of the context.

    Raises:
        ConfigError: too little room and truncate=None, or nothing of the context would be left.
    """
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
