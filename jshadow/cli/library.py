"""`jshadow library`: adds documents to a library, lists them, asks about one, and removes one."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.options import (
    JSON_HELP,
    add_sampling_options,
    check_fetch,
    check_fitted_file,
    load_model,
    policy_of,
    sampler_of,
)
from jshadow.cli.processes import add_process_options, check_same, joined
from jshadow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from jshadow.library import Library, Stored

ABOUT = """Documents that a model reads once. Their KV states lie in a directory, or in an object store, and can be
asked about at any time."""
ABOUT_ADD = """Read documents, and store their states. A document that is stored already is not read again. Without
--policy, --capacity, --fetch and --dtype, they are those of the states in DIR, if all of these have the same."""
ABOUT_LIST = "List all stored states, the newest last, and the files that cannot be used."
ABOUT_ASK = """Answer a question about a stored document. In a directory, the policy, the capacity, the fetch mode and
the dtype are those of the stored state."""
ABOUT_REMOVE = "Remove a stored state. A damaged one can be removed too."
KEY_HELP = "a key, the beginning of one, or a title"
SHOWN = 12  # digits of a key in a line of text
MOST_CAPACITY = 32_768  # of the model's context, unless --capacity says otherwise
DEFAULT_DTYPE = "bfloat16"


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the four commands and their options."""
    actions = add.add_subparsers(dest="action", required=True, metavar="ACTION")
    one = actions.add_parser("add", help="read documents", description=ABOUT_ADD)
    one.set_defaults(run=run_add)
    add_place(one, model_required=True)
    one.add_argument("files", nargs="+", metavar="FILE", help="a .txt, .md or .pdf file")
    one.add_argument("--part", metavar="I/N", help="read only part I of N parts of the files")
    add_process_options(one)

    one = actions.add_parser("list", help="list the documents", description=ABOUT_LIST)
    one.set_defaults(run=run_list)
    add_place(one, model_required=False)

    one = actions.add_parser("ask", help="ask about a document", description=ABOUT_ASK)
    one.set_defaults(run=run_ask)
    add_place(one, model_required=True)
    one.add_argument("key", metavar="KEY", help=KEY_HELP)
    one.add_argument("question", metavar="QUESTION", help="the question")
    one.add_argument("--max-new-tokens", type=int, default=128, help="default: %(default)s")
    one.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text (repeatable)")
    one.add_argument("--store", action="store_true", help="store the state at the end of the answer too")
    add_sampling_options(one)

    one = actions.add_parser("remove", help="remove a document", description=ABOUT_REMOVE)
    one.set_defaults(run=run_remove)
    add_place(one, model_required=False)
    one.add_argument("key", metavar="KEY", help=KEY_HELP)


def add_place(add: argparse.ArgumentParser, *, model_required: bool) -> None:
    """Add DIR and the options that say which library it is."""
    add.add_argument("place", metavar="DIR", help="a directory, or the URL of an object store")
    needed = "" if model_required else " (only for an object store)"
    add.add_argument("--model", required=model_required, help=f"HF directory, or hub id{needed}")
    add.add_argument("--policy", help="policy name, or module:Class (default: that of DIR, or shadowkv)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument("--fitted", metavar="FILE", help="arrays that `jshadow fit` wrote")
    add.add_argument("--fetch", help="auto, resident, device_put or zero_copy (default: that of DIR, or auto)")
    add.add_argument(
        "--capacity",
        type=int,
        help="tokens that a document with its questions and answers can have (default: that of DIR, or the model's "
        f"context, at most {MOST_CAPACITY:,})",
    )
    add.add_argument("--dtype", help=f"dtype of weights, keys and values (default: that of DIR, or {DEFAULT_DTYPE})")
    add.add_argument("--quantize", help="int8: keep the projections' weights in int8")
    add.add_argument("--disk-bytes", type=int, metavar="N", help="bytes of all files in DIR (default: no limit)")
    add.add_argument("--disk-folder", metavar="FOLDER", help="folder for copies of objects of an object store")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


@dataclasses.dataclass(frozen=True)
class Found:
    """A stored state of a directory: its description, its file, and its record, which is empty if it is damaged."""

    stored: "Stored"
    path: Path
    record: dict[str, Any]


def run_add(args: argparse.Namespace) -> int:
    """Run `jshadow library add`, and return 0 when all documents are stored."""
    from jshadow.cli.progress import SlowProgress
    from jshadow.library.sources import paths_of_part, read_document

    paths = paths_of_part([Path(name).expanduser() for name in args.files], args.part)
    for path in paths:
        read_document(path)  # A wrong file raises an error here, before the model is loaded.
    if not paths:
        print(json.dumps({"documents": []}) if args.json else f"part {args.part} has no file")
        return 0
    added = []
    found = found_in(args.place)
    with joined(args), open_library(args, [one.record for one in found]) as library:
        keys = "".join(sorted(one.path.stem for one in found)).encode()
        check_same(args, library.params, {"files": paths, "fitted": args.fitted, "stored keys": keys})
        for path in paths:
            with SlowProgress(path.name) as progress:
                added.append(library.add(path, progress=progress.prefill))
            if not args.json:
                print(line(added[-1]), flush=True)
    if args.json:
        print(json.dumps({"documents": [dataclasses.asdict(stored) for stored in added]}))
    return 0


def run_list(args: argparse.Namespace) -> int:
    """Run `jshadow library list`, and return 0."""
    if is_url(args.place):
        with open_library(args, []) as library:
            documents = library.documents()
    else:
        documents = [one.stored for one in found_in(args.place, missing=False)]
    if args.json:
        print(json.dumps({"documents": [dataclasses.asdict(stored) for stored in documents]}))
    else:
        for stored in documents:
            print(line(stored))
    return 0


def run_ask(args: argparse.Namespace) -> int:
    """Run `jshadow library ask`, and return 0 when the answer is complete."""
    from jshadow.cli.console import console
    from jshadow.cli.generate import to_json, write_answer
    from jshadow.cli.progress import SlowProgress
    from jshadow.cli.report_table import figures, notes
    from jshadow.library.asking import Asking

    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {args.max_new_tokens}")
    options = {"max_new_tokens": args.max_new_tokens, "sampler": sampler_of(args), "seed": args.seed}
    options["stop"] = args.stop or None
    records = []
    if not is_url(args.place):
        found = found_in(args.place, missing=False)
        stored = chosen([one.stored for one in found], args.key)
        records = [one.record for one in found if one.stored is stored]
    with open_library(args, records) as library:
        if is_url(args.place):
            stored = chosen(library.documents(), args.key)
        with SlowProgress("prefill of the question") as progress:
            asking = Asking(library, stored.key, args.question, options, store=args.store)
            write_answer(asking.loop, progress, "", silent=args.json)
            reply = library.finish(asking)
    if args.json:
        print(json.dumps(to_json(reply, None) | {"key": reply.key}))
        return 0
    out = console(100)
    out.print(figures([reply], None))
    for sentence in notes([reply]):
        out.print(sentence, highlight=False)
    if reply.key is not None:
        print(f"stored as {reply.key[:SHOWN]}")
    return 0


def run_remove(args: argparse.Namespace) -> int:
    """Run `jshadow library remove`, and return 0 when the state is removed."""
    if is_url(args.place):
        with open_library(args, []) as library:
            stored = chosen(library.documents(), args.key, usable=False)
            library.remove(stored.key)
    else:
        found = found_in(args.place, missing=False)
        stored = chosen([one.stored for one in found], args.key, usable=False)
        [path] = [one.path for one in found if one.stored is stored]
        try:
            path.unlink()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be removed: {error}") from error
    print(json.dumps({"removed": stored.key}) if args.json else f"removed {line(stored)}")
    return 0


def open_library(args: argparse.Namespace, records: list[dict[str, Any]]) -> "Library":
    """Load the model, and return the library that the options name.

    Each state has its file, and one command needs no state twice. So the memory tiers are off.

    Args:
        args: the options. Those that are absent are taken from the records.
        records: records of stored states. If they differ, none is used.

    Raises:
        ConfigError: an option is out of range, or --model is absent.

    The other errors are those of `load` and `Library`.
    """
    from jshadow.engine.saved.fitted import load_fitted
    from jshadow.engine.saved.record import recorded_policy
    from jshadow.library import Library, TierLimits

    if args.model is None:
        raise ConfigError(f"--model must be given for the object store {args.place}")
    known = common([record for record in records if record])
    if args.policy is not None or args.set or args.fitted is not None or not known:
        policy = policy_of(args)
    else:
        policy = recorded_policy(known["policy"]["name"], known["policy"]["settings"])
    fetch = args.fetch or known.get("fetch", "auto")
    check_fetch(fetch)
    check_fitted_file(args.fitted)
    limits = TierLimits(device=0, host=0, disk=args.disk_bytes, disk_folder=args.disk_folder)
    args.dtype = args.dtype or known.get("dtype", DEFAULT_DTYPE)
    params = load_model(args)
    capacity = args.capacity
    if capacity is None:
        capacity = known.get("capacity", min(params.config.context, MOST_CAPACITY))
    fitted = None if args.fitted is None else load_fitted(args.fitted, params, policy)
    return Library(args.place, params, policy, capacity=capacity, fetch=fetch, limits=limits, fitted=fitted)


def common(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the policy, the capacity, the fetch mode and the dtype of records, or {} if they differ."""
    values = [{name: record[name] for name in ("policy", "capacity", "fetch", "dtype")} for record in records]
    return values[0] if values and all(one == values[0] for one in values) else {}


def is_url(place: str) -> bool:
    """Return whether DIR is the URL of an object store."""
    return "://" in place


def found_in(place: str, *, missing: bool = True) -> list[Found]:
    """Return the stored states of a directory, the newest last. No model is needed. An object store has none here.

    Args:
        place: DIR.
        missing: whether the directory may be missing.

    Raises:
        CheckpointError: DIR is not a directory.
    """
    from jshadow.engine.saved.state import read_state_info
    from jshadow.library import Stored

    if is_url(place):
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
        found.append(Found(Stored(path.stem, len(ids), size, "disk", **texts, problem=problem), path, info))
    return found


def chosen(documents: list["Stored"], key: str, *, usable: bool = True) -> "Stored":
    """Return the stored state of a key, of the only key that begins so, or of a title that only one has.

    Raises:
        CheckpointError: there is none or more than one, or `usable` is set and the state is damaged.
    """
    found = [stored for stored in documents if stored.key == key]
    found = found or [stored for stored in documents if key and (stored.key.startswith(key) or stored.title == key)]
    if len(found) != 1:
        keys = ", ".join(stored.key[:SHOWN] for stored in found)
        what = f"which is that of {keys}" if found else "which no stored state has"
        raise CheckpointError(f"KEY must be the beginning of one key, or one title, got {key!r:.80}, {what}")
    if usable and found[0].problem is not None:
        raise CheckpointError(found[0].problem)
    return found[0]


def line(stored: "Stored") -> str:
    """Return the description of a stored state in one line, with its problem if it has one."""
    ending = f"  (cannot be used: {stored.problem})" if stored.problem else ""
    title = stored.title or f"({stored.ends or 'no title'})"
    if stored.ends == "answer":
        title += " with an answer"
    return f"{stored.key[:SHOWN]}  {title}  {stored.tokens:,} tokens  {stored.bytes:,} bytes  {stored.tier}{ending}"
