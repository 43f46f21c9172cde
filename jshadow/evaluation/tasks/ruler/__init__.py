"""The tasks of RULER (arXiv 2404.06654) with NVIDIA's own scripts, texts and templates.

The scripts and the data are those of an installed package (`package.DISTRIBUTION`). Nothing of it is in jshadow. Each
script runs in a process of its own and writes a file of prompts. A prompt is a plain text that ends with the beginning
of the answer, so no chat template is used.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks.framing import Case, Sample, case_of
from jshadow.evaluation.tasks.ruler import generator
from jshadow.evaluation.tasks.ruler.package import RulerTask, read_tasks
from jshadow.weights.tokenizer import opening

PREFIX = "ruler_"
RULER_TASKS = tuple(
    PREFIX + name
    for name in (
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )
)
SUITES = {"ruler": RULER_TASKS}
SHORTEST = 512  # no task can be made with fewer tokens
ATTEMPTS = 1000  # a script is stuck if it tries more often than this to make one sample
FIRST_SEED = 42  # the package's own seed, which is our seed 0


def among(tasks: Any) -> list[str]:
    """Return the tasks that are RULER's, without duplicates. The result is empty if `tasks` is not a list of names."""
    if isinstance(tasks, str) or not isinstance(tasks, Sequence):
        return []
    return [task for task in RULER_TASKS if task in tasks]


def check_tasks(tasks: Sequence[str], lengths: Sequence[Any] = (), context: int | None = None) -> None:
    """Check those of the tasks that are RULER's, and their lengths. Other tasks are ignored.

    Args:
        tasks: names of tasks.
        lengths: numbers of tokens of a prompt and its answer together.
        context: the model's context, or None if it is not known.

    Raises:
        ConfigError: the package is not installed, has another version or lacks the data of a task. Or a length is too
            short, or exceeds the context.
    """
    names = among(tasks)
    if not names:
        return
    read_tasks([name.removeprefix(PREFIX) for name in names])
    for length in lengths:
        if isinstance(length, bool) or not isinstance(length, int) or length < SHORTEST:
            raise ConfigError(f"lengths must be integers of at least {SHORTEST} for {names[0]}, got {length!r}")
        if context is not None and length > context:
            raise ConfigError(f"lengths must be within the model's context={context} for {names[0]}, got {length}")


def cases_at(tasks: Sequence[str], tokenizer: Any, length: int, samples: int, seed: int) -> dict[str, list[Case]]:
    """Make the cases of some tasks at one length.

    A prompt and its answer have at most `length` tokens together, as in RULER. Some scripts make prompts that are a few
    tokens longer. They run again with a smaller length.

    Args:
        tasks: names in RULER_TASKS.
        tokenizer: a transformers tokenizer.
        length: number of tokens of a prompt and its answer.
        samples: number of cases of each task.
        seed: seed of the cases. Seed 0 is the seed that the package uses by itself.

    Returns:
        The cases of each task.

    Raises:
        ConfigError: as `check_tasks`, there is no tokenizer, or a script fails or cannot make a sample.
    """
    if tokenizer is None:
        raise ConfigError(f"task {tasks[0]} needs a tokenizer, and the checkpoint has none")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be an integer of at least 0, got {seed!r}")
    check_tasks(tasks, [length])
    cases: dict[str, list[Case]] = {}
    rooms = {task: length - len(opening(tokenizer)) for task in tasks}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(Path(folder) / "tokenizer")
        scale = 1
        while rooms:
            rows = generate(rooms, Path(folder), samples, seed)
            made = {task: [case_of_row(tokenizer, *pair) for pair in rows[task]] for task in rooms}
            excess = {task: max(len(case.prompt) + case.growth for case in made[task]) - length for task in rooms}
            cases |= {task: made[task] for task in rooms if excess[task] <= 0}
            rooms = {task: room - scale * excess[task] for task, room in rooms.items() if excess[task] > 0}
            scale *= 2
    return {task: cases[task] for task in tasks}


def case_of_row(tokenizer: Any, task: RulerTask, row: Mapping[str, Any]) -> Case:
    """Build a case from a task and a row of its file."""
    answers = tuple(row["outputs"])
    return case_of(tokenizer, [Sample(row["input"], "", "", answers, task.new_tokens, task.scorer)], chat=False)


def generate(
    rooms: Mapping[str, int], folder: Path, samples: int, seed: int
) -> dict[str, list[tuple[RulerTask, dict[str, Any]]]]:
    """Run the scripts of some tasks.

    Args:
        rooms: the number of tokens that the script of each task fills.
        folder: a folder for the files. It has the tokenizer in `tokenizer`.
        samples: number of rows of each task.
        seed: see `cases_at`.

    Returns:
        For each task, its rows, each with the task.

    Raises:
        ConfigError: a script fails or cannot make a sample.
    """
    told = dict(zip(rooms, read_tasks([name.removeprefix(PREFIX) for name in rooms]), strict=True))
    jobs = []
    for name, task in told.items():
        options = {"save_dir": folder, "save_name": name, "tokenizer_path": folder / "tokenizer"}
        options |= {"tokenizer_type": "hf", "max_seq_length": rooms[name], "tokens_to_generate": task.new_tokens}
        options |= {"num_samples": samples, "random_seed": FIRST_SEED + seed, "template": task.template}
        words = [f"--{option}={value}" for option, value in (options | task.settings).items()]
        jobs.append({"task": name, "script": str(task.script), "options": words})
    asked = json.dumps({"jobs": jobs, "attempts": samples + ATTEMPTS})
    root = next(iter(told.values())).script.parents[3]
    paths = [str(root), *(path for path in sys.path if path)]
    result = subprocess.run(
        [sys.executable, "-P", generator.__file__],
        input=asked,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        if result.returncode == generator.STUCK:
            name = reason.partition(":")[0]
            raise ConfigError(
                f"lengths must be longer or samples fewer for {name}, "
                f"because not all of {samples} samples fit into {rooms[name]} tokens"
            )
        raise ConfigError(f"a script of RULER failed with status {result.returncode}: {reason}")
    return {name: [(task, row) for row in rows_of(folder, name, samples)] for name, task in told.items()}


def rows_of(folder: Path, name: str, samples: int) -> list[dict[str, Any]]:
    """Read the file of a task. Raises ConfigError if a row is missing or has no answer."""
    text = (folder / name / "validation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    if len(rows) != samples or not all(row["outputs"] for row in rows):
        raise ConfigError(f"lengths must be longer for {name}, because the samples have no answers")
    return rows
