"""The file of finished samples. An interrupted run continues from it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jshadow.errors import ConfigError

SAMPLES_FILE = "samples.jsonl"
FIELDS = frozenset({"key", "score", "hits", "kl", "outputs", "attended_tokens", "hit_rate"})


def parse_samples(data: bytes) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the records of a file of samples by key, and the number of lines that are damaged."""
    records, damaged = {}, 0
    for line in filter(bytes.strip, data.split(b"\n")):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and record.keys() >= FIELDS:
            records[record["key"]] = record
        else:
            damaged += 1
    return records, damaged


def check_model(out: str | os.PathLike[str] | None, model: str) -> None:
    """Raise ConfigError if a directory has samples of another model. Nothing is written.

    Args:
        out: directory of finished samples. It need not exist. None is no directory.
        model: the config of the model, and the digest of its weights.
    """
    path = None if out is None else Path(out) / SAMPLES_FILE
    if path is None or not path.is_file():
        return
    try:
        records, _ = parse_samples(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"out must be a directory that can be read, got {str(out)!r}: {error}") from error
    others = sorted({record["model"] for record in records.values() if record.get("model", model) != model})
    if others:
        digests = " instead of ".join(name.rpartition(" ")[2] for name in (others[0], model))
        raise ConfigError(f"out must be a directory of this model, but {path} has samples of {digests}")


class SampleStore:
    """The records of finished samples by key, stored in a JSONL file.

    A key is a digest of the model's weights, the prompt's token ids, the capacity, the fetch mode and the policy's
    settings. A damaged line is skipped, so that its sample runs again.

    Attributes:
        records: the record of each key.
        path: the file. None means that the records are kept only in memory.
        damaged: number of lines that could not be read.
    """

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self.records: dict[str, dict[str, Any]] = {}
        self.path: Path | None = None
        self.damaged = 0
        if out is None:
            return
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            self.path = Path(out) / SAMPLES_FILE
            data = self.path.read_bytes() if self.path.exists() else b""
            if data and not data.endswith(b"\n"):
                self._write(b"\n")
        except OSError as error:
            raise ConfigError(f"out must be a directory that can be written, got {str(out)!r}: {error}") from error
        self.records, self.damaged = parse_samples(data)

    def add(self, key: str, record: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        """Store the record of one sample. It is synced to disk before this returns."""
        self.records[key] = {"key": key, **context, **record}
        if self.path is not None:
            self._write(json.dumps(self.records[key]).encode() + b"\n")

    def _write(self, data: bytes) -> None:
        """Append data in one write, so that only the last line of the file can be incomplete."""
        assert self.path is not None
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
