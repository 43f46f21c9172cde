"""`jshadow library`: adds documents to a library, lists them, asks about one, and removes one."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.fields import Command, option
from jshadow.cli.options import (
    PolicyOptions,
    SamplingOptions,
    check_least,
    check_method,
    fitted_of,
    load_model,
    policy_of,
    sampler_of,
)
from jshadow.cli.processes import ProcessOptions, check_same, joined
from jshadow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jshadow.library import Library, Stored

ABOUT = """Documents that a model reads once. Their KV states lie in a directory, or in an object store, and can be
asked about at any time."""
_KEY_HELP = "a key, the beginning of one, or a title"
_SHOWN = 12  # digits of a key in a line of text
_MOST_CAPACITY = 32_768  # of the model's context, unless --capacity says otherwise
_DEFAULT_DTYPE = "bfloat16"


@dataclasses.dataclass(kw_only=True)
class _LibraryCommand(PolicyOptions, CacheOptions, Command):
    """Which library it is."""

    title: ClassVar[str] = "library"
    place: str = option("a directory, or the URL of an object store", metavar="DIR", positional=True, required=True)
    model: str | None = option("HF directory, .gguf file, or hub id (only for an object store)")
    policy: str | None = option("policy name, or module:Class (default: that of DIR, or shadowkv)")
    set: Sequence[str] = option("a setting of the policy (repeatable)", (), metavar="KEY=VALUE")
    fitted: str | None = option("arrays that `jshadow fit` wrote", metavar="FILE")
    fetch: str | None = option("auto, resident, device_put or zero_copy (default: that of DIR, or auto)")
    capacity: int | None = option(
        "tokens that a document with its questions and answers can have (default: that of DIR, or the model's context, "
        f"at most {_MOST_CAPACITY:,})",
    )
    dtype: str | None = option(f"dtype of weights, keys and values (default: that of DIR, or {_DEFAULT_DTYPE})")
    quantize: str | None = option("int8, fp8 or int4: keep the projections' weights in that type")
    disk_bytes: int | None = option("bytes of all files in DIR (default: no limit)")
    disk_folder: str | None = option("folder for copies of objects of an object store", metavar="FOLDER")


@dataclasses.dataclass(kw_only=True)
class Add(_LibraryCommand, ProcessOptions):
    """Read documents, and store their states.

    A document that is stored already is not read again. Without --policy, --capacity, --fetch and --dtype, they are
    those of the states in DIR, if all of these have the same.
    """

    model: str | None = option("HF directory, .gguf file, or hub id", required=True)
    files: Sequence[str] = option("a .txt, .md or .pdf file", (), metavar="FILE", positional=True, required=True)
    part: str | None = option("read only part I of N parts of the files", metavar="I/N")

    def run(self) -> int:
        """Return 0 when all documents are stored."""
        from jshadow.cli.console import SlowProgress
        from jshadow.library.library import paths_of_part, read_document

        paths = paths_of_part([Path(name).expanduser() for name in self.files], self.part)
        for path in paths:
            read_document(path)  # A wrong file raises an error here, before the model is loaded.
        if not paths:
            print(json.dumps({"documents": []}) if self.json else f"part {self.part} has no file")
            return 0
        added = []
        found = _found_in(self.place)
        with joined(self), _open_library(self, [one.record for one in found]) as library:
            keys = "".join(sorted(one.path.stem for one in found)).encode()
            check_same(self, library.params, {"files": paths, "fitted": self.fitted, "stored keys": keys})
            for path in paths:
                with SlowProgress(path.name) as progress:
                    added.append(library.add(path, progress=progress.prefill))
                if not self.json:
                    print(_line(added[-1]), flush=True)
        if self.json:
            print(json.dumps({"documents": [dataclasses.asdict(stored) for stored in added]}))
        return 0


@dataclasses.dataclass(kw_only=True)
class List(_LibraryCommand):
    """List all stored states, the newest last, and the files that cannot be used."""

    def run(self) -> int:
        """Return 0 when they are listed."""
        if _is_url(self.place):
            with _open_library(self, []) as library:
                documents = library.documents()
        else:
            documents = [one.stored for one in _found_in(self.place, missing=False)]
        if self.json:
            print(json.dumps({"documents": [dataclasses.asdict(stored) for stored in documents]}))
        else:
            for stored in documents:
                print(_line(stored))
        return 0


@dataclasses.dataclass(kw_only=True)
class Ask(_LibraryCommand, SamplingOptions):
    """Answer a question about a stored document.

    In a directory, the policy, the capacity, the fetch mode and the dtype are those of the stored state.
    """

    model: str | None = option("HF directory, .gguf file, or hub id", required=True)
    key: str = option(_KEY_HELP, metavar="KEY", positional=True, required=True)
    question: str = option("the question", metavar="QUESTION", positional=True, required=True)
    max_new_tokens: int = option("of the answer, at most", 128)
    stop: Sequence[str] = option("end at this text (repeatable)", (), metavar="TEXT")
    store: bool = option("store the state at the end of the answer too", False)

    def run(self) -> int:
        """Return 0 when the answer is complete."""
        from jshadow.cli.console import SlowProgress
        from jshadow.cli.generate import show_figures, to_json, write_answer
        from jshadow.library.library import Asking

        check_least(self, 1, "max_new_tokens")
        options = {"max_new_tokens": self.max_new_tokens, "sampler": sampler_of(self), "seed": self.seed}
        options["stop"] = self.stop or None
        records = []
        if not _is_url(self.place):
            found = _found_in(self.place, missing=False)
            stored = _chosen([one.stored for one in found], self.key)
            records = [one.record for one in found if one.stored is stored]
        with _open_library(self, records) as library:
            if _is_url(self.place):
                stored = _chosen(library.documents(), self.key)
            with SlowProgress("prefill of the question") as progress:
                asking = Asking(library, stored.key, self.question, options, store=self.store)
                write_answer(asking.loop, progress, "", silent=self.json)
                reply = library.finish(asking)
        if self.json:
            told = {"key": reply.key, "stored_tokens": reply.stored_tokens, "read_tokens": reply.read_tokens}
            print(json.dumps(to_json(reply, None) | told))
            return 0
        show_figures([reply])
        if reply.stored_tokens < stored.tokens:
            known, read = reply.stored_tokens, reply.read_tokens
            print(f"the chat template changes the last answer: {known} tokens were stored, {read} were read")
        if reply.key is not None:
            print(f"stored as {reply.key[:_SHOWN]}")
        return 0


@dataclasses.dataclass(kw_only=True)
class Remove(_LibraryCommand):
    """Remove a stored state. A damaged one can be removed too."""

    key: str = option(_KEY_HELP, metavar="KEY", positional=True, required=True)

    def run(self) -> int:
        """Return 0 when the state is removed."""
        if _is_url(self.place):
            with _open_library(self, []) as library:
                stored = _chosen(library.documents(), self.key, usable=False)
                library.remove(stored.key)
        else:
            found = _found_in(self.place, missing=False)
            stored = _chosen([one.stored for one in found], self.key, usable=False)
            [path] = [one.path for one in found if one.stored is stored]
            try:
                path.unlink()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be removed: {error}") from error
        print(json.dumps({"removed": stored.key}) if self.json else f"removed {_line(stored)}")
        return 0


@dataclasses.dataclass(frozen=True)
class _Found:
    """A stored state of a directory: its description, its file, and its record, which is empty if it is damaged."""

    stored: "Stored"
    path: Path
    record: dict[str, Any]


def _open_library(args: _LibraryCommand, records: list[dict[str, Any]]) -> "Library":
    """Load the model, and return the library that the options name. Absent options are those of equal records."""
    from jshadow.engine.saved.record import recorded_policy
    from jshadow.library import Library, TierLimits

    if args.model is None:
        raise ConfigError(f"--model must be given for the object store {args.place}")
    known = _common([record for record in records if record])
    if args.policy is not None or args.set or args.fitted is not None or not known:
        policy = policy_of(args)
    else:
        policy = recorded_policy(known["policy"]["name"], known["policy"]["settings"])
    fetch = args.fetch or known.get("fetch", "auto")
    check_method(fetch, args.fitted)
    limits = TierLimits(device=0, host=0, disk=args.disk_bytes, disk_folder=args.disk_folder)
    args.dtype = args.dtype or known.get("dtype", _DEFAULT_DTYPE)
    params = load_model(args)
    capacity = args.capacity
    if capacity is None:
        capacity = known.get("capacity", min(params.config.context, _MOST_CAPACITY))
    fitted = fitted_of(args, params, policy)
    return Library(args.place, params, policy, capacity=capacity, fetch=fetch, limits=limits, fitted=fitted)


def _common(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the policy, the capacity, the fetch mode and the dtype of records, or {} if they differ."""
    values = [{name: record[name] for name in ("policy", "capacity", "fetch", "dtype")} for record in records]
    return values[0] if values and all(one == values[0] for one in values) else {}


def _is_url(place: str) -> bool:
    return "://" in place


def _found_in(place: str, *, missing: bool = True) -> list[_Found]:
    """Return the stored states of a directory, the newest last. No model is needed. An object store has none here."""
    from jshadow.engine.saved.state import read_state_info
    from jshadow.library import Stored

    if _is_url(place):
        return []
    root, found = Path(place).expanduser(), []
    if root.exists() != root.is_dir() or not (missing or root.exists()):
        raise CheckpointError(f"library {root} must be a directory")
    for path in sorted(root.glob("*/*.safetensors"), key=lambda path: (path.stat().st_mtime_ns, path.stem)):
        info: dict[str, Any] = {}
        ids, note, problem = [], {}, None
        try:
            info = read_state_info(path)
            ids, note = (info["tokens"] or [[]])[0], info["note"]
        except CheckpointError as error:
            problem = str(error)
        texts = {name: note.get(name, "") for name in ("title", "ends")}
        size = path.stat().st_size
        found.append(_Found(Stored(path.stem, len(ids), size, "disk", **texts, problem=problem), path, info))
    return found


def _chosen(documents: list["Stored"], key: str, *, usable: bool = True) -> "Stored":
    """Return the stored state of a key, of the only key that begins so, or of a title that only one has."""
    found = [stored for stored in documents if stored.key == key]
    found = found or [stored for stored in documents if key and (stored.key.startswith(key) or stored.title == key)]
    if len(found) != 1:
        keys = ", ".join(stored.key[:_SHOWN] for stored in found)
        what = f"which is that of {keys}" if found else "which no stored state has"
        raise CheckpointError(f"KEY must be the beginning of one key, or one title, got {key!r:.80}, {what}")
    if usable and found[0].problem is not None:
        raise CheckpointError(found[0].problem)
    return found[0]


def _line(stored: "Stored") -> str:
    """Return the description of a stored state in one line, with its problem if it has one."""
    ending = f"  (cannot be used: {stored.problem})" if stored.problem else ""
    title = stored.title or f"({stored.ends or 'no title'})"
    if stored.ends == "answer":
        title += " with an answer"
    return f"{stored.key[:_SHOWN]}  {title}  {stored.tokens:,} tokens  {stored.bytes:,} bytes  {stored.tier}{ending}"
