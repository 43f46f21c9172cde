"""A file with the prompts of an evaluation, so that they need not be made again, or are made on another machine.

The file is gzipped JSON. It has the digest of the tokenizer, the number of samples, the seed, and the cases of each
task at each length. The cases of a file have the records that they have without the file.
"""

import dataclasses
import gzip
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError
from jshadow.evaluation.tasks import Case, Sample
from jshadow.evaluation.whole_file import whole_file

# The cases of a task, each with the place of its fact, from 0 to 1, or None.
Cases = list[tuple[Case, float | None]]
VERSION = 1


@dataclasses.dataclass(frozen=True)
class CaseFile:
    """The cases of a file.

    Attributes:
        path: the file. None: there is no file, and all cases must be made.
        made: the cases of each length and task. It is empty if no file was read.
    """

    path: Path | None
    made: Mapping[int, Mapping[str, Cases]]


def read_case_file(
    path: str | os.PathLike[str] | None,
    digest: str | None,
    samples: int,
    seed: int,
    wanted: Mapping[int, Sequence[str]],
) -> CaseFile:
    """Read the cases of a file. It need not exist.

    Args:
        path: the file, or None for no file.
        digest: digest of the tokenizer.
        samples: number of cases of each task.
        seed: seed of the cases.
        wanted: the tasks of each length.

    Raises:
        ConfigError: the file cannot be read, is no file of cases, was made with another tokenizer, number of samples or
            seed, or lacks a task or length.
    """
    if path is None or not Path(path).exists():
        return CaseFile(None if path is None else Path(path), {})
    try:
        content = json.loads(gzip.decompress(Path(path).read_bytes()))
        rule = {"version": VERSION, "tokenizer": digest, "samples": samples, "seed": seed}
        for name, value in rule.items():
            if content[name] != value:
                raise ConfigError(f"cases must be a file with {name}={value!r}, got {content[name]!r} in {path}")
        made = {
            int(length): {task: [case_of(*pair) for pair in pairs] for task, pairs in tasks.items()}
            for length, tasks in content["cases"].items()
        }
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cases must be a file that --cases wrote, got {path}: {error!r}") from error
    for length, tasks in wanted.items():
        if missing := [task for task in tasks if task not in made.get(length, {})]:
            raise ConfigError(f"cases must be a file with {missing[0]} at {length} tokens, but {path} has none")
    return CaseFile(Path(path), made)


def case_of(case: Mapping[str, Any], depth: float | None) -> tuple[Case, float | None]:
    """Return a case and the place of its fact from their JSON form."""
    samples = tuple(Sample(**{name: as_tuple(value) for name, value in one.items()}) for one in case["samples"])
    others = {name: as_tuple(value) for name, value in case.items() if name != "samples"}
    return Case(samples, **others), depth


def as_tuple(value: Any) -> Any:
    """Return a value with all lists replaced by tuples."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def write_case_file(
    path: Path, digest: str | None, samples: int, seed: int, made: Mapping[int, Mapping[str, Cases]]
) -> None:
    """Write the cases to a file. It appears only when it is complete.

    Args:
        path: the file.
        digest: digest of the tokenizer.
        samples: number of cases of each task.
        seed: seed of the cases.
        made: the cases of each length and task.

    Raises:
        ConfigError: the file cannot be written.
    """
    cases = {
        length: {task: [(dataclasses.asdict(case), depth) for case, depth in pairs] for task, pairs in tasks.items()}
        for length, tasks in made.items()
    }
    content = {"version": VERSION, "tokenizer": digest, "samples": samples, "seed": seed, "cases": cases}
    with whole_file(path, "cases") as part:
        part.write_bytes(gzip.compress(json.dumps(content).encode(), mtime=0))
