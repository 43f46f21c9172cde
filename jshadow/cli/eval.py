"""`jshadow eval`: measure policies against full attention."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import SlowProgress, console
from jshadow.cli.fields import Command, option
from jshadow.cli.options import FETCH_HELP, MODEL_HELP, PREFILL_HELP, WeightOptions, load_model
from jshadow.cli.processes import MeshOptions, ProcessOptions, check_same, joined
from jshadow.errors import ConfigError
from jshadow.evaluation.tasks import TASKS
from jshadow.evaluation.tasks.ruler import RULER_TASKS, SUITES, check_tasks

if TYPE_CHECKING:
    from jshadow.ops.parts import Part
    from jshadow.policies import Policy

USUAL_TASKS, USUAL_LENGTHS, SUITE_LENGTHS = "needle_noise,needle_docs", "1024,2048", "4096"


@dataclasses.dataclass(kw_only=True)
class Eval(WeightOptions, MeshOptions, ProcessOptions, CacheOptions, Command):
    """Measure policies against full attention, on generated tasks with known answers and on local data."""

    epilog: ClassVar[str] = (
        f"""Tasks: {", ".join(TASKS)}. NVIDIA's own RULER (extra `ruler`): {", ".join(RULER_TASKS)}."""
    )
    model: str | None = option(MODEL_HELP, positional=True)
    tasks: str | None = option(f"comma list (default: {USUAL_TASKS}; none with --data or --suite)")
    suite: str | None = option("ruler: all 13 tasks of NVIDIA's own RULER, beside --tasks (extra `ruler`)")
    lengths: str | None = option(
        f"prompt tokens of the tasks, comma list (default: {USUAL_LENGTHS}; {SUITE_LENGTHS} with --suite)"
    )
    data: str | None = option(
        "local .jsonl, .json or .parquet files, comma list: kvpress's columns, or the files of LongBench v1 and v2, "
        "InfiniteBench or RULER",
        metavar="FILES",
    )
    truncate: str | None = option("middle: cut rows of --data that exceed the context, and mark them")
    limit: int | None = option("rows of each file of --data (default: all)")
    policies: str = option("NAME or NAME:key=value:..., comma list", "full,shadowkv")
    shares: str | None = option("run each policy at these shares of full attention's device bytes, comma list")
    sweep: Sequence[str] = option(
        "also run each of these settings of a policy, beside those at --shares; again for another setting",
        (),
        metavar="NAME:KEY=A|B",
    )
    prefill: str | None = option(PREFILL_HELP, metavar="NAME[:KEY=VALUE...]")
    fitted: str | None = option("arrays of `jshadow fit`, a file a policy, comma list", metavar="FILES")
    samples: int = option("samples of each task and length", 10)
    together: int = option("samples that run as one batch", 1)
    seed: int = option("seed of the tasks", 0)
    cases: str | None = option("read the prompts of the tasks from FILE, or write it if it is new", metavar="FILE")
    fetch: str = option(FETCH_HELP, "auto")
    out: str | None = option("directory for the result of every sample and of all (results.json)", metavar="DIR")
    part: str | None = option("run only part I of N parts of the samples; it needs --out", metavar="I/N")
    merge: Sequence[str] = option(
        "merge the parts in these directories; without MODEL", (), metavar="DIR", together=True
    )

    def run(self) -> int:
        """Return 0 when all samples are evaluated, or the rows of the parts are printed."""
        from jshadow.cache import offload
        from jshadow.engine.sparse_prefill import parse_prefill
        from jshadow.ops.parts import parse_part
        from jshadow.policies import parse_policy, split_policy

        if self.merge:
            return _merge(self)
        if self.model is None:
            raise ConfigError("MODEL must be given, except with --merge")
        part = None if self.part is None else parse_part(self.part)
        if part is not None and self.out is None:
            raise ConfigError("--part must come with --out, because --merge reads the parts there")
        asked = _asked_for(self)
        asked["policies"] = [parse_policy(*split_policy(text)) for text in split_policies(self.policies)]
        prefill = parse_prefill(self.prefill or "exact")
        offload.check_fetch(self.fetch)
        settings: dict[str, Any] = {"shares": _parse_shares(self.shares), "sweeps": parse_sweeps(self.sweep)}
        settings |= {"prefill": prefill, "samples": self.samples, "seed": self.seed, "fetch": self.fetch}
        settings |= {"together": self.together, "cases": self.cases}
        settings |= {name: asked.pop(name) for name in ("data", "truncate", "limit")}
        files = _split_list(self.fitted, "fitted") if self.fitted is not None else []
        with joined(self):
            params = load_model(self)
            check_same(self, params, {"data": settings["data"], "fitted": files})
            settings |= {"fitted": _read_fitted(files, asked["policies"], params)}
            return _evaluate(self, params, part, asked, settings)


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


def _asked_for(args: Eval) -> dict[str, Any]:
    """Return the arguments of `evaluate` for tasks, lengths and data."""
    files = _split_list(args.data, "data") if args.data is not None else []
    if args.suite is not None and args.suite not in SUITES:
        raise ConfigError(f"suite must be one of {sorted(SUITES)}, got {args.suite!r}")
    usual = USUAL_TASKS if not files and args.suite is None else None
    names = args.tasks if args.tasks is not None else usual
    tasks = _split_list(names, "tasks") if names is not None else []
    if unknown := [task for task in tasks if task not in TASKS and task not in RULER_TASKS]:
        raise ConfigError(f"tasks must be among {sorted([*TASKS, *RULER_TASKS])}, got {unknown[0]!r}")
    tasks = list(dict.fromkeys([*tasks, *SUITES.get(args.suite or "", ())]))
    if args.cases is None or not Path(args.cases).exists():
        check_tasks(tasks)
    usual_lengths = USUAL_LENGTHS if args.suite is None else SUITE_LENGTHS
    lengths = _parse_lengths(args.lengths if args.lengths is not None else usual_lengths)
    return {"tasks": tasks, "lengths": lengths, "data": files, "truncate": args.truncate, "limit": args.limit}


def _evaluate(args: Eval, params: Any, part: "Part | None", asked: dict[str, Any], settings: dict[str, Any]) -> int:
    """Evaluate all samples or those of a part, print the results, and return 0."""
    from jshadow.evaluation.parts import evaluate_part, part_folder
    from jshadow.evaluation.plan import EvalSettings
    from jshadow.evaluation.runner import evaluate, plan_evaluation

    if part is None:
        with SlowProgress("evaluating") as progress:
            rows = evaluate(params, **asked, out=args.out, progress=progress, **settings)
        return _tell(args, rows)
    assert args.out is not None
    with SlowProgress(f"evaluating part {part}") as progress:
        evaluation = plan_evaluation(params, **asked, asked=EvalSettings(**settings))
        record = evaluate_part(evaluation, part, args.out, command=args.command_line, progress=progress)
    done: dict[str, Any] = {"part": part.index, "parts": part.count, "samples": len(record.own)}
    done |= {"folder": str(part_folder(args.out, part))}
    print(json.dumps(done) if args.json else "part {part}/{parts}: {samples} samples are in {folder}".format(**done))
    return 0


def _merge(args: Eval) -> int:
    """Print the rows of the parts, and return 0. Raises ConfigError for an option that the parts have decided."""
    from jshadow.evaluation.parts import merge_parts

    for field in dataclasses.fields(args):
        own = field.name in ("merge", "out", "compile_cache", "json", "settings")
        if not own and getattr(args, field.name) != field.default:
            given = "MODEL" if field.name == "model" else f"--{field.name.replace('_', '-')}"
            raise ConfigError(f"--merge must come without {given}, because the parts have decided it")
    return _tell(args, merge_parts(args.merge, out=args.out))


def _tell(args: Eval, rows: list[dict[str, Any]]) -> int:
    """Write results.json if there is an --out, print the rows, and return 0."""
    from jshadow.evaluation import results
    from jshadow.evaluation.machine import machine

    if args.out is not None:
        results.write_results(rows, args.out, {"command": args.command_line, "machine": machine()})
    if args.json:
        print(json.dumps({"results": rows, "pooled": results.pooled(rows)}))
    else:
        compared = any(row["share"] is not None or row.get("sweeps") for row in rows)
        shown = results.show_shares if compared else results.show
        shown(rows, console(160))
    return 0
