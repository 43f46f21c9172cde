"""Evaluations in parts: several processes run some of the samples each, and the parts are merged into one table."""

import dataclasses
import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError, ConfigError
from jshadow.evaluation.data import whole_file
from jshadow.evaluation.plan import Evaluation, label
from jshadow.evaluation.results import row_heads, with_figures
from jshadow.evaluation.runner import (
    SAMPLES_FILE,
    Progress,
    SampleStore,
    check_model,
    finish_samples,
    parse_samples,
    sample_key,
)
from jshadow.evaluation.tasks.ruler import among
from jshadow.ops.parts import Part, deal
from jshadow.policies import Full
from jshadow.weights.digest import sha256, tree_digest

PART_FILE = "part.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class _Table:
    """The rows of one task at one length, as `row_heads` returns them, without the figures of its samples.

    `depths` has the place of each sample's fact, or None; it is empty without facts.
    """

    heads: list[dict[str, Any]]
    depths: list[float | None]
    samples: int


@dataclasses.dataclass(frozen=True)
class _SampleKeys:
    """The keys of the records of one sample of a table, one for each head that is not infeasible, in their order."""

    table: int
    sample: int
    keys: list[str]


@dataclasses.dataclass(frozen=True)
class _PartRecord:
    """What one part has to do, and what all parts of the evaluation have in common.

    `asked` has the model and the settings by name, in the order in which a difference is told. `own` are the samples of
    this part, and `command` the words of the command line that ran it, or none.
    """

    part: Part
    asked: dict[str, Any]
    tables: list[_Table]
    own: list[_SampleKeys]
    command: list[str]

    def write(self, folder: Path) -> None:
        """Write the record to a folder, completely or not at all. Raises ConfigError if that is impossible."""
        content = dataclasses.asdict(self)
        text = json.dumps({"format": _FORMAT, "sha256": _digest_of(content), "record": content})
        with whole_file(folder / PART_FILE, "part") as path:
            path.write_text(text, encoding="utf-8")

    def command_of(self, part: Part) -> str:
        """Return what to do to run a part of this evaluation again."""
        words = []
        given = iter(self.command)
        for word in given:
            if word == "--part":
                next(given, None)
            elif not word.startswith("--part="):
                words.append(word)
        return shlex.join([*words, "--part", str(part)]) if words else f"the same evaluation with part {part}"


def _digest_of(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def _read_part(folder: Path) -> _PartRecord:
    """Read the record of a part from its folder."""
    path = folder / PART_FILE
    damaged = f"{path} must be the record of a part, but it is damaged"
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{damaged}: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        form = fields.get("format") if isinstance(fields, dict) else None
        raise CheckpointError(f"{path} must be the record of a part in format {_FORMAT}, got format {form!r}")
    record = fields.get("record")
    if not isinstance(record, dict) or fields.get("sha256") != _digest_of(record):
        raise CheckpointError(f"{damaged}: its SHA-256 is not {fields.get('sha256')!r}")
    part, tables, own = (record.pop(name) for name in ("part", "tables", "own"))
    lists = [_Table(**table) for table in tables], [_SampleKeys(**sample) for sample in own]
    return _PartRecord(Part(**part), record.pop("asked"), *lists, **record)


def part_folder(out: str | os.PathLike[str], part: Part) -> Path:
    """Return the folder of a part: `out`/part-2-of-3."""
    return Path(out) / f"part-{part.index}-of-{part.count}"


def evaluate_part(
    evaluation: Evaluation,
    part: Part,
    out: str | os.PathLike[str],
    *,
    command: Sequence[str] = (),
    progress: Progress | None = None,
) -> _PartRecord:
    """Run one part of an evaluation.

    The samples of all tasks and lengths are dealt to the parts as `deal` says, by their tokens. A sample runs as it
    does in one run: its capacity and its padding are those of the whole evaluation. If the part was killed, it goes on
    where it stopped.

    Args:
        evaluation: the whole evaluation, as `plan_evaluation` returns it. It is the same for all parts.
        part: which part to run.
        out: directory of the evaluation. The part writes only to its folder in it, `part_folder(out, part)`: the
            file part.json, which says what there is to do, and the finished samples (samples.jsonl).
        command: the words of the command line, for the messages of `merge_parts`.
        progress: called with (number of this part's samples done, number of this part's samples).

    Raises:
        ConfigError: there are more parts than samples, or the folder cannot be written. Or there is a task of RULER,
            and the folder has samples of another model.
    """
    plans = evaluation.plans
    places = [(place, index) for place, plan in enumerate(plans) for index in range(len(plan.cases))]
    if part.count > len(places):
        raise ConfigError(f"part must be I/N with N at most the number of samples={len(places)}, got {part}")
    cases = [plans[place].cases[index] for place, index in places]
    mine = [places[one] for one in deal([len(case.prompt) + case.growth for case in cases], part)]
    tables = [_Table(row_heads(evaluation.setup, plan), list(plan.depths), len(plan.cases)) for plan in plans]
    own = [_SampleKeys(place, index, _keys_of(evaluation, place, index)) for place, index in mine]
    folder = part_folder(out, part)
    if among([plan.task for plan in plans]):
        check_model(folder, evaluation.model)
    store = SampleStore(folder)
    record = _PartRecord(part, _asked_of(evaluation, tables, places), tables, own, list(command))
    record.write(folder)
    finish_samples(evaluation, mine, store, progress)
    return record


def _keys_of(evaluation: Evaluation, place: int, index: int) -> list[str]:
    """Return the keys of a sample's records, one for each entry of its plan that runs."""
    plan = evaluation.plans[place]
    policies = [entry.policy for entry in plan.entries if entry.policy is not None]
    return [sample_key(evaluation.setup, evaluation.model, plan, index, policy) for policy in policies]


def _asked_of(evaluation: Evaluation, tables: Sequence[_Table], places: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return what all parts of an evaluation have in common, by name. JSON can hold it."""
    setup, plans, settings = evaluation.setup, evaluation.plans, evaluation.settings
    heads = [head for table in tables for head in table.heads]
    asked: dict[str, Any] = {"model": setup.params.digest, "dtype": setup.params.dtype.name}
    asked |= {"seed": settings.seed, "samples": settings.samples}
    asked |= {"tasks": list(dict.fromkeys(plan.task for plan in plans))}
    asked |= {"lengths": list(dict.fromkeys(plan.length for plan in plans))}
    asked |= {"data": [Path(path).name for path in settings.data]}
    asked |= {"truncate": settings.truncate, "limit": settings.limit}
    asked |= {"policies": list(dict.fromkeys(head["policy"] for head in heads)), "shares": list(settings.shares)}
    sweeps = settings.sweeps or {}
    asked |= {"sweeps": {name: [label(policy) for policy in policies] for name, policies in sweeps.items()}}
    asked |= {"prefill": setup.prefill.label() if setup.prefill else "exact", "fetch": setup.fetch}
    asked |= {"fitted": {name: tree_digest(arrays) for name, arrays in setup.fitted.items()}}
    asked |= {"Python": ".".join(platform.python_version_tuple()[:2])}  # its texts are in the prompts
    prompts = [sample_key(setup, evaluation.model, plans[place], index, Full()) for place, index in places]
    rows = [dataclasses.asdict(table) for table in tables]
    return asked | {"plan": sha256(json.dumps([rows, prompts], sort_keys=True).encode())}


Folders = Sequence[str | os.PathLike[str]]


def merge_parts(folders: Folders, *, out: str | os.PathLike[str] | None = None) -> list[dict[str, Any]]:
    """Return the rows of an evaluation whose parts were run one by one. No model is needed, and nothing is computed.

    Args:
        folders: folders of parts, or folders that hold them, such as `out` of `evaluate_part`.
        out: directory for the samples of all parts (samples.jsonl). `evaluate` with the same `out` reuses them. None
            stores nothing.

    Returns:
        The rows that `evaluate` returns, after a way through JSON (a tuple is a list).

    Raises:
        ConfigError: the parts are not of one evaluation, a part is there twice, is missing or is not finished, a folder
            has no part, or `out` cannot be written. For a part that must run again, the message has the command.
        CheckpointError: a file cannot be read or is damaged.
    """
    parts = _found_parts(folders)
    _check_parts(parts)
    records = _finished_records(parts)
    [first, *_] = parts.values()
    tables: list[list[list[Mapping[str, Any]]]] = [[[] for _ in range(table.samples)] for table in first.tables]
    for part in parts.values():
        for sample in part.own:
            tables[sample.table][sample.sample] = [records[key] for key in sample.keys]
    if out is not None:
        store = SampleStore(out)
        for record in (record for table in tables for sample in table for record in sample):
            if record["key"] not in store.records:
                store.add(record["key"], record, {})
    pairs = zip(first.tables, tables, strict=True)
    return [row for table, samples in pairs for row in with_figures(table.heads, table.depths, samples)]


def _found_parts(folders: Folders) -> dict[Path, _PartRecord]:
    """Return the parts of some folders, in the order of the parts. Raises as `merge_parts` does."""
    found: dict[Path, _PartRecord] = {}
    for name in folders:
        folder = Path(name).expanduser()
        inside = [folder] if (folder / PART_FILE).exists() else [path.parent for path in folder.glob(f"*/{PART_FILE}")]
        if not inside:
            raise ConfigError(f"merge must name folders of parts (with a file {PART_FILE}), got {str(name)!r}")
        found |= {path.resolve(): _read_part(path) for path in inside}
    return dict(sorted(found.items(), key=lambda item: (item[1].part, item[0])))


def _check_parts(parts: Mapping[Path, _PartRecord]) -> None:
    """Raise ConfigError unless these are all parts of one evaluation, each of them once."""
    (first_folder, first), *others = parts.items()
    seen = {first.part: first_folder}
    for folder, one in others:
        if one.part.count != first.part.count:
            counts = f"{first.part.count} in {first_folder} and {one.part.count} in {folder}"
            raise ConfigError(f"parts must be of one evaluation, but the number of parts is {counts}")
        differing = [name for name in [*first.asked, *one.asked] if first.asked.get(name) != one.asked.get(name)]
        if differing:
            name = differing[0]
            values = f"{_brief(first.asked.get(name))} in {first_folder} and {_brief(one.asked.get(name))} in {folder}"
            raise ConfigError(f"parts must be of one evaluation, but {name} is {values}")
        if one.part in seen:
            raise ConfigError(f"parts must be there once, got part {one.part} in {seen[one.part]} and in {folder}")
        seen[one.part] = folder
    everything = [Part(index, first.part.count) for index in range(1, first.part.count + 1)]
    if missing := [part for part in everything if part not in seen]:
        names = ", ".join(map(str, missing))
        commands = "".join(f"\n  {first.command_of(part)}" for part in missing)
        raise ConfigError(f"parts must be all {first.part.count}, but there is no part {names}. Run:{commands}")


def _finished_records(parts: Mapping[Path, _PartRecord]) -> dict[str, dict[str, Any]]:
    """Return the records of all samples by their keys."""
    records: dict[str, dict[str, Any]] = {}
    unfinished = []
    for folder, one in parts.items():
        path = folder / SAMPLES_FILE
        try:
            found, _ = parse_samples(path.read_bytes() if path.exists() else b"")
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        done = sum(all(key in found for key in sample.keys) for sample in one.own)
        if done < len(one.own):
            counts = f"part {one.part} in {folder} has {done} of {len(one.own)}"
            unfinished.append(f"{counts}. It goes on with:\n  {one.command_of(one.part)}")
        records |= found
    if unfinished:
        raise ConfigError("parts must have all of their samples, but " + "\n".join(unfinished))
    return records


def _brief(value: Any) -> str:
    return f"{value!r:.60}"
