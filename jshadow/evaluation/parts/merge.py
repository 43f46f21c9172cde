"""Merging the parts of an evaluation into the rows of one run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError, ConfigError
from jshadow.evaluation.parts.dealing import Part
from jshadow.evaluation.parts.record import PART_FILE, PartRecord, read_part
from jshadow.evaluation.rows import with_figures
from jshadow.evaluation.samples import SAMPLES_FILE, SampleStore, parse_samples

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
    parts = found_parts(folders)
    check_parts(parts)
    records = finished_records(parts)
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


def found_parts(folders: Folders) -> dict[Path, PartRecord]:
    """Return the parts of some folders, in the order of the parts. Raises as `merge_parts` does."""
    found: dict[Path, PartRecord] = {}
    for name in folders:
        folder = Path(name).expanduser()
        inside = [folder] if (folder / PART_FILE).exists() else [path.parent for path in folder.glob(f"*/{PART_FILE}")]
        if not inside:
            raise ConfigError(f"merge must name folders of parts (with a file {PART_FILE}), got {str(name)!r}")
        found |= {path.resolve(): read_part(path) for path in inside}
    return dict(sorted(found.items(), key=lambda item: (item[1].part, item[0])))


def check_parts(parts: Mapping[Path, PartRecord]) -> None:
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
            values = f"{brief(first.asked.get(name))} in {first_folder} and {brief(one.asked.get(name))} in {folder}"
            raise ConfigError(f"parts must be of one evaluation, but {name} is {values}")
        if one.part in seen:
            raise ConfigError(f"parts must be there once, got part {one.part} in {seen[one.part]} and in {folder}")
        seen[one.part] = folder
    everything = [Part(index, first.part.count) for index in range(1, first.part.count + 1)]
    if missing := [part for part in everything if part not in seen]:
        names = ", ".join(map(str, missing))
        commands = "".join(f"\n  {first.command_of(part)}" for part in missing)
        raise ConfigError(f"parts must be all {first.part.count}, but there is no part {names}. Run:{commands}")


def finished_records(parts: Mapping[Path, PartRecord]) -> dict[str, dict[str, Any]]:
    """Return the records of all samples by their keys.

    Raises:
        ConfigError: a part has samples without records.
        CheckpointError: a file of samples cannot be read.
    """
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


def brief(value: Any) -> str:
    """Return a value in at most 60 characters."""
    return f"{value!r:.60}"
