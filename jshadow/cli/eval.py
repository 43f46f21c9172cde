"""`jshadow eval`: measure policies against full attention."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli import fields
from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.console import SlowProgress, console
from jshadow.cli.fields import JSON_HELP
from jshadow.cli.options import FETCH_HELP, PREFILL_HELP, WeightOptions, load_model
from jshadow.cli.processes import MeshOptions, ProcessOptions, check_same, joined
from jshadow.errors import ConfigError
from jshadow.evaluation.tasks import TASKS
from jshadow.evaluation.tasks.ruler import RULER_TASKS, SUITES, check_tasks

if TYPE_CHECKING:
    from jshadow.ops.parts import Part
    from jshadow.policies import Policy

ABOUT = f"""Measure policies against full attention, on generated tasks with known answers and on local data. Tasks:
{", ".join(TASKS)}. NVIDIA's own RULER (extra `ruler`): {", ".join(RULER_TASKS)}."""
USUAL_TASKS, USUAL_LENGTHS, SUITE_LENGTHS = "needle_noise,needle_docs", "1024,2048", "4096"


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=_run_eval)
    add.add_argument("model", nargs="?", help="HF directory, or hub id")
    add.add_argument("--tasks", help=f"comma list (default: {USUAL_TASKS}; none with --data or --suite)")
    add.add_argument("--suite", help="ruler: all 13 tasks of NVIDIA's own RULER, beside --tasks (extra `ruler`)")
    add.add_argument(
        "--lengths",
        help=f"prompt tokens of the tasks, comma list (default: {USUAL_LENGTHS}; {SUITE_LENGTHS} with --suite)",
    )
    add.add_argument(
        "--data",
        metavar="FILES",
        help="local .jsonl, .json or .parquet files, comma list: kvpress's "
        "columns, or the files of LongBench v1 and v2, InfiniteBench or RULER",
    )
    add.add_argument(
        "--truncate",
        help="middle: cut rows of --data that exceed the context, and mark them",
    )
    add.add_argument("--limit", type=int, help="rows of each file of --data (default: all)")
    add.add_argument("--policies", default="full,shadowkv", help="NAME or NAME:key=value:..., comma list")
    add.add_argument("--shares", help="run each policy at these shares of full attention's device bytes, comma list")
    add.add_argument(
        "--sweep",
        action="append",
        metavar="NAME:KEY=A|B",
        help="also run each of these settings of a policy, beside those at --shares; again for another setting",
    )
    add.add_argument("--prefill", metavar="NAME[:KEY=VALUE...]", help=PREFILL_HELP)
    add.add_argument("--fitted", metavar="FILES", help="arrays of `jshadow fit`, a file a policy, comma list")
    add.add_argument("--samples", type=int, default=10, help="samples of each task and length (default: %(default)s)")
    add.add_argument("--together", type=int, default=1, help="samples that run as one batch (default: %(default)s)")
    add.add_argument("--seed", type=int, default=0, help="seed of the tasks (default: %(default)s)")
    add.add_argument(
        "--cases", metavar="FILE", help="read the prompts of the tasks from FILE, or write it if it is new"
    )
    add.add_argument("--fetch", default="auto", help=FETCH_HELP)
    fields.add_options(add, WeightOptions)
    add_cache_option(add)
    add.add_argument("--out", metavar="DIR", help="directory for the result of every sample and of all (results.json)")
    add.add_argument("--part", metavar="I/N", help="run only part I of N parts of the samples; it needs --out")
    add.add_argument("--merge", nargs="+", metavar="DIR", help="merge the parts in these directories; without MODEL")
    fields.add_options(add, MeshOptions, ProcessOptions)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def _split_list(text: str, name: str) -> list[str]:
    """Return the parts of a comma list."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{name} must be a comma list without empty parts, got {text!r}")
    return parts


def split_policies(text: str) -> list[str]:
    """Return the policies of a comma list as texts.

    A part that does not begin with a letter belongs to the tuple before it, as in "omnikv:filter_layers=2,8,18".

    Raises:
        ConfigError: as `_split_list`.
    """
    parts: list[str] = []
    for part in _split_list(text, "policies"):
        if parts and not part[0].isalpha():
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _parse_lengths(text: str) -> list[int]:
    """Return the prompt lengths of a comma list. Raises ConfigError if a part is not an integer."""
    parts = _split_list(text, "lengths")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"lengths must be a comma list of integers, got {text!r}")
    return [int(part) for part in parts]


def _parse_shares(text: str | None) -> list[float]:
    """Return the shares of full attention's bytes of a comma list, or [] for None."""
    if text is None:
        return []
    try:
        return [float(part) for part in _split_list(text, "shares")]
    except ValueError as error:
        raise ConfigError(f"shares must be a comma list of numbers, got {text!r}") from error


def parse_sweeps(texts: Sequence[str]) -> dict[str, list["Policy"]]:
    """Return the policies of sweeps, by the name of the swept setting.

    Args:
        texts: texts such as "NAME:key=a|b:other=value". Each has one setting with several values.

    Raises:
        ConfigError: a text has no such setting or several, or a policy or setting is unknown.
    """
    from jshadow.policies import parse_policy, split_policy

    sweeps: dict[str, list[Policy]] = {}
    for text in texts:
        name, settings = split_policy(text)
        swept = [setting for setting in settings if "|" in setting]
        key, _, values = swept[0].partition("=") if len(swept) == 1 else ("", "", "")
        if not all(values.split("|")):
            raise ConfigError(f"sweep must be NAME:KEY=A|B with one such setting, got {text!r}")
        at = settings.index(swept[0])
        sweeps.setdefault(key, []).extend(
            parse_policy(name, [*settings[:at], f"{key}={value}", *settings[at + 1 :]]) for value in values.split("|")
        )
    return sweeps


def _read_fitted(paths: Sequence[str], policies: Sequence["Policy"], params: Any) -> dict[str, Any]:
    """Return learned arrays by the name of their policy."""
    from jshadow.engine.saved.fitted import load_fitted, read_fitted_info
    from jshadow.policies.base import innermost
    from jshadow.policies.capabilities import with_fitted

    arrays: dict[str, Any] = {}
    for path in paths:
        name = read_fitted_info(path)["policy"]["name"]
        readers = [policy for policy in policies if innermost(policy).name == name]
        if not readers or name in arrays:
            raise ConfigError(f"fitted must be one file for a policy of --policies, got {path} of {name}")
        arrays[name] = load_fitted(path, params, with_fitted(readers[0]))
    return arrays


def _asked_for(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `evaluate` for tasks, lengths and data."""
    files = _split_list(args.data, "data") if args.data is not None else []
    if args.suite is not None and args.suite not in SUITES:
        raise ConfigError(f"suite must be one of {sorted(SUITES)}, got {args.suite!r}")
    usual = USUAL_TASKS if not files and args.suite is None else None
    names = args.tasks if args.tasks is not None else usual
    tasks = _split_list(names, "tasks") if names is not None else []
    if unknown := [task for task in tasks if task not in TASKS and task not in RULER_TASKS]:
        raise ConfigError(f"tasks must be among {sorted([*TASKS, *RULER_TASKS])}, got {unknown[0]!r}")
    tasks = list(dict.fromkeys([*tasks, *SUITES.get(args.suite, ())]))
    if args.cases is None or not Path(args.cases).exists():
        check_tasks(tasks)
    usual_lengths = USUAL_LENGTHS if args.suite is None else SUITE_LENGTHS
    lengths = _parse_lengths(args.lengths if args.lengths is not None else usual_lengths)
    return {"tasks": tasks, "lengths": lengths, "data": files, "truncate": args.truncate, "limit": args.limit}


def _run_eval(args: argparse.Namespace) -> int:
    """Run `jshadow eval`, and return 0 when all samples are evaluated."""

    from jshadow.cache import offload
    from jshadow.engine.sparse_prefill import parse_prefill
    from jshadow.ops.parts import parse_part
    from jshadow.policies import parse_policy, split_policy

    if args.merge is not None:
        return _run_merge(args)
    if args.model is None:
        raise ConfigError("MODEL must be given, except with --merge")
    part = None if args.part is None else parse_part(args.part)
    if part is not None and args.out is None:
        raise ConfigError("--part must come with --out, because --merge reads the parts there")
    asked = _asked_for(args)
    policies = [parse_policy(*split_policy(part)) for part in split_policies(args.policies)]
    prefill = parse_prefill(args.prefill or "exact")
    offload.check_fetch(args.fetch)
    settings: dict[str, Any] = {"shares": _parse_shares(args.shares), "sweeps": parse_sweeps(args.sweep or [])}
    settings |= {"prefill": prefill, "samples": args.samples, "seed": args.seed, "fetch": args.fetch}
    settings |= {"together": args.together, "cases": args.cases}
    settings |= {name: asked.pop(name) for name in ("data", "truncate", "limit")}
    files = _split_list(args.fitted, "fitted") if args.fitted is not None else []
    with joined(args):
        params = load_model(args)
        check_same(args, params, {"data": settings["data"], "fitted": files})
        settings |= {"fitted": _read_fitted(files, policies, params)}
        return _evaluate_all(args, params, part, asked | {"policies": policies}, settings)


def _evaluate_all(
    args: argparse.Namespace, params: Any, part: "Part | None", asked: dict[str, Any], settings: dict[str, Any]
) -> int:
    """Evaluate all samples or those of a part, print the results, and return 0."""
    from jshadow.evaluation.parts import evaluate_part, part_folder
    from jshadow.evaluation.plan import EvalSettings
    from jshadow.evaluation.runner import evaluate, plan_evaluation

    with SlowProgress("evaluating" if part is None else f"evaluating part {part}") as progress:
        if part is None:
            rows = evaluate(params, **asked, out=args.out, progress=progress, **settings)
        else:
            evaluation = plan_evaluation(params, **asked, asked=EvalSettings(**settings))
            record = evaluate_part(evaluation, part, args.out, command=args.command_line, progress=progress)
    if part is None:
        return _tell(args, rows)
    done: dict[str, Any] = {"part": part.index, "parts": part.count, "samples": len(record.own)}
    done |= {"folder": str(part_folder(args.out, part))}
    print(json.dumps(done) if args.json else "part {part}/{parts}: {samples} samples are in {folder}".format(**done))
    return 0


def _run_merge(args: argparse.Namespace) -> int:
    """Run `jshadow eval --merge`, and return 0 when the rows are printed."""

    from jshadow.evaluation.parts import merge_parts

    options = argparse.ArgumentParser()
    add_options(options)
    for action in options._actions:
        name = action.dest
        if name not in ("help", "merge", "out", "compile_cache", "json") and getattr(args, name) != action.default:
            given = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigError(f"--merge must come without {given}, because the parts have decided it")
    return _tell(args, merge_parts(args.merge, out=args.out))


def _tell(args: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    """Write results.json if there is an --out, print the rows, and return 0."""
    from jshadow.evaluation import results
    from jshadow.evaluation.speed import machine

    if args.out is not None:
        results.write_results(rows, args.out, {"command": args.command_line, "machine": machine()})
    if args.json:
        print(json.dumps({"results": rows, "pooled": results.pooled(rows)}))
    else:
        compared = any(row["share"] is not None or row.get("sweeps") for row in rows)
        shown = results.show_shares if compared else results.show
        shown(rows, console(160))
    return 0
