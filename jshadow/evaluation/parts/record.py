"""The file that describes a part of an evaluation. It is written before the samples run."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

from jshadow.errors import CheckpointError
from jshadow.evaluation.parts.dealing import Part
from jshadow.evaluation.whole_file import whole_file
from jshadow.weights.digest import sha256

PART_FILE = "part.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of one task at one length, without the figures of its samples.

    Attributes:
        heads: the beginnings of the rows, as `rows.row_heads` returns them.
        depths: place of the fact of each sample, from 0 to 1, or None if a sample has none. It is empty without facts.
        samples: number of samples.
    """

    heads: list[dict[str, Any]]
    depths: list[float | None]
    samples: int


@dataclasses.dataclass(frozen=True)
class SampleKeys:
    """The keys of one sample's records.

    Attributes:
        table: which table the sample belongs to, from 0.
        sample: which sample of the table, from 0.
        keys: a key for each head that is not infeasible, in their order.
    """

    table: int
    sample: int
    keys: list[str]


@dataclasses.dataclass(frozen=True)
class PartRecord:
    """What one part has to do, and what all parts of the evaluation have in common.

    Attributes:
        part: which part it is.
        asked: the model and the settings by name, in the order in which a difference is told.
        tables: all tables of the evaluation.
        own: the samples of this part.
        command: the words of the command line that ran it, or none.
    """

    part: Part
    asked: dict[str, Any]
    tables: list[Table]
    own: list[SampleKeys]
    command: list[str]

    def write(self, folder: Path) -> None:
        """Write the record to a folder, completely or not at all. Raises ConfigError if that is impossible."""
        content = dataclasses.asdict(self)
        text = json.dumps({"format": FORMAT, "sha256": digest_of(content), "record": content})
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


def digest_of(content: Any) -> str:
    """Return the SHA-256 of a value that JSON can hold."""
    return sha256(json.dumps(content, sort_keys=True).encode())


def read_part(folder: Path) -> PartRecord:
    """Read the record of a part from its folder.

    Raises:
        CheckpointError: there is none, it cannot be read, it is damaged, or it is of another version.
    """
    path = folder / PART_FILE
    damaged = f"{path} must be the record of a part, but it is damaged"
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{damaged}: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        form = fields.get("format") if isinstance(fields, dict) else None
        raise CheckpointError(f"{path} must be the record of a part in format {FORMAT}, got format {form!r}")
    record = fields.get("record")
    if not isinstance(record, dict) or fields.get("sha256") != digest_of(record):
        raise CheckpointError(f"{damaged}: its SHA-256 is not {fields.get('sha256')!r}")
    part, tables, own = (record.pop(name) for name in ("part", "tables", "own"))
    lists = [Table(**table) for table in tables], [SampleKeys(**sample) for sample in own]
    return PartRecord(Part(**part), record.pop("asked"), *lists, **record)
