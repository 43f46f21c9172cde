"""The tasks of NVIDIA's own RULER, made by the scripts and data of an installed package (extra `ruler`)."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError, check_integer, check_one_of
from jshadow.evaluation.scorers import SCORERS
from jshadow.evaluation.tasks import ruler_scripts
from jshadow.evaluation.tasks.framing import Case, Sample, case_of
from jshadow.weights.tokenizer import opening

DISTRIBUTION, MODULE, VERSION = "nvidia-long-context-eval", "long_context_eval", "26.3"
INSTALL = "pip install 'jshadow[ruler]'"
NEEDED = ("nltk", "scipy", "tenacity", "tqdm", "wonderwords", "yaml")  # what the scripts import beside transformers
_SENTENCES = "tokenizers/punkt_tab/english/"  # the data by which nltk splits a text into sentences
ESSAYS = "PaulGrahamEssays.json"


@dataclasses.dataclass(frozen=True)
class _RulerTask:
    """The settings of one task, as they are in the package: `script` makes its samples with the options `settings`.

    `template` is the prompt, with the beginning of the answer at its end. `scorer` is a name in `scorers.SCORERS`.
    """

    name: str
    script: Path
    template: str
    new_tokens: int
    scorer: str
    settings: dict[str, Any]

    @property
    def data(self) -> tuple[Path, ...]:
        """The files that the script reads."""
        folder = self.script.parent / "json"
        if self.reads_essays:
            return (folder / ESSAYS,)
        return (folder / f"{self.settings['dataset']}.json",) if "dataset" in self.settings else ()

    @property
    def reads_essays(self) -> bool:
        """Whether the needles are put into essays. Then the script splits the essays into sentences."""
        return self.settings.get("type_haystack") == "essay"


def _package_folder() -> Path:
    """Return the folder of the package's modules."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"the tasks of RULER need the package {DISTRIBUTION}: {INSTALL}") from error
    if version != VERSION:
        raise ConfigError(f"{DISTRIBUTION} must have the version {VERSION}, got {version}: {INSTALL}")
    if missing := [name for name in (MODULE, *NEEDED) if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the tasks of RULER need the module {missing[0]}: {INSTALL}")
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def read_tasks(names: Sequence[str]) -> list[_RulerTask]:
    """Return what the package says about some tasks, by their names in the package.

    Raises:
        ConfigError: as `_package_folder`, the package lacks a task, or the data of a task is missing.
    """
    folder = _package_folder()
    yaml = importlib.import_module("yaml")
    try:
        listed = yaml.safe_load((folder / "synthetic.yaml").read_text(encoding="utf-8"))
        prompts = importlib.import_module(f"{MODULE}.data.synthetic.constants").TASKS
        scores = importlib.import_module(f"{MODULE}.eval.synthetic.constants").TASKS
        model_template = importlib.import_module(f"{MODULE}.data.template").Templates["base"]
        tasks = []
        for name in names:
            kind, settings = listed[name]["task"], listed[name]["args"]
            prompt = prompts[kind]
            template = model_template.format(task_template=prompt["template"]) + prompt.get("answer_prefix", "")
            script = folder / "data" / "synthetic" / f"{kind}.py"
            scorer = scores[kind]["metric_fn"].__name__
            check_one_of(f"the scorer of ruler_{name}", scorer, sorted(SCORERS))
            tasks.append(_RulerTask(name, script, template, prompt["tokens_to_generate"], scorer, settings))
    except (ImportError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{DISTRIBUTION} in {folder} cannot be read ({error!r}): {INSTALL}") from error
    for task in tasks:
        _check_data(task)
    return tasks


def _check_data(task: _RulerTask) -> None:
    """Raise ConfigError if a file that a task reads is missing."""
    if missing := [path for path in (task.script, *task.data) if not path.is_file()]:
        raise ConfigError(f"ruler_{task.name} needs the file {missing[0]}, which is missing: {INSTALL}")
    if not task.reads_essays:
        return
    try:
        importlib.import_module("nltk.data").find(_SENTENCES)
    except LookupError as error:
        command = "python -m nltk.downloader punkt_tab"
        raise ConfigError(f"ruler_{task.name} needs the sentence data of nltk: {command}") from error


PREFIX = "ruler_"
RULER_TASKS = tuple(
    PREFIX + name
    for name in (
        *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
    )
)
SUITES = {"ruler": RULER_TASKS}
_SHORTEST = 512  # no task can be made with fewer tokens
_ATTEMPTS = 1000  # a script is stuck if it tries more often than this to make one sample
_FIRST_SEED = 42  # the package's own seed, which is our seed 0


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
        if isinstance(length, bool) or not isinstance(length, int) or length < _SHORTEST:
            raise ConfigError(f"lengths must be integers of at least {_SHORTEST} for {names[0]}, got {length!r}")
        if context is not None and length > context:
            raise ConfigError(f"lengths must be within the model's context={context} for {names[0]}, got {length}")


def cases_at(tasks: Sequence[str], tokenizer: Any, length: int, samples: int, seed: int) -> dict[str, list[Case]]:
    """Make the cases of some tasks at one length.

    A prompt and its answer have at most `length` tokens together, as in RULER. Some scripts make prompts that are a few
    tokens longer. They run again with a smaller length.

    Args:
        tasks: names in RULER_TASKS.
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
    check_integer("seed", seed, least=0)
    check_tasks(tasks, [length])
    cases: dict[str, list[Case]] = {}
    rooms = {task: length - len(opening(tokenizer)) for task in tasks}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(Path(folder) / "tokenizer")
        scale = 1
        while rooms:
            rows = _generate(rooms, Path(folder), samples, seed)
            made = {task: [_case_of_row(tokenizer, *pair) for pair in rows[task]] for task in rooms}
            excess = {task: max(len(case.prompt) + case.growth for case in made[task]) - length for task in rooms}
            cases |= {task: made[task] for task in rooms if excess[task] <= 0}
            rooms = {task: room - scale * excess[task] for task, room in rooms.items() if excess[task] > 0}
            scale *= 2
    return {task: cases[task] for task in tasks}


def _case_of_row(tokenizer: Any, task: _RulerTask, row: Mapping[str, Any]) -> Case:
    """Build a case from a task and a row of its file."""
    answers = tuple(row["outputs"])
    return case_of(tokenizer, [Sample(row["input"], "", "", answers, task.new_tokens, task.scorer)], chat=False)


def _generate(
    rooms: Mapping[str, int], folder: Path, samples: int, seed: int
) -> dict[str, list[tuple[_RulerTask, dict[str, Any]]]]:
    """Run the scripts of some tasks."""
    told = dict(zip(rooms, read_tasks([name.removeprefix(PREFIX) for name in rooms]), strict=True))
    jobs = []
    for name, task in told.items():
        options = {"save_dir": folder, "save_name": name, "tokenizer_path": folder / "tokenizer"}
        options |= {"tokenizer_type": "hf", "max_seq_length": rooms[name], "tokens_to_generate": task.new_tokens}
        options |= {"num_samples": samples, "random_seed": _FIRST_SEED + seed, "template": task.template}
        words = [f"--{option}={value}" for option, value in (options | task.settings).items()]
        jobs.append({"task": name, "script": str(task.script), "options": words})
    asked = json.dumps({"jobs": jobs, "attempts": samples + _ATTEMPTS})
    root = next(iter(told.values())).script.parents[3]
    paths = [str(root), *(path for path in sys.path if path)]
    result = subprocess.run(
        [sys.executable, "-P", ruler_scripts.__file__],
        input=asked,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        if result.returncode == ruler_scripts.STUCK:
            name = reason.partition(":")[0]
            raise ConfigError(
                f"lengths must be longer or samples fewer for {name}, "
                f"because not all of {samples} samples fit into {rooms[name]} tokens"
            )
        raise ConfigError(f"a script of RULER failed with status {result.returncode}: {reason}")
    return {name: [(task, row) for row in _rows_of(folder, name, samples)] for name, task in told.items()}


def _rows_of(folder: Path, name: str, samples: int) -> list[dict[str, Any]]:
    """Read the file of a task. Raises ConfigError if a row is missing or has no answer."""
    text = (folder / name / "validation.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    if len(rows) != samples or not all(row["outputs"] for row in rows):
        raise ConfigError(f"lengths must be longer for {name}, because the samples have no answers")
    return rows
