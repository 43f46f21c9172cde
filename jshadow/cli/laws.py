"""`jshadow laws`: check one policy by the laws that every policy keeps."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from jshadow.cli.compile_cache import add_cache_option
from jshadow.cli.options import JSON_HELP
from jshadow.cli.progress import waiting
from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.evaluation.laws import Outcome

ABOUT = """Run the laws that every policy keeps, on a tiny random model and one ragged batch. Each law is ok, not
claimed (it says nothing about this policy), or BROKEN, with the case and the difference. The exit status is 1 if a law
is broken. The policy is a name, or module:Class of a module that can be imported from here."""


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_laws_command)
    add.add_argument("policy", nargs="?", help="a policy's name, or module:Class")
    add.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting, in place of the one that the policy registers for the laws",
    )
    add.add_argument(
        "--fetch",
        help="comma list of resident, device_put and zero_copy (default: that in which the policy offloads)",
    )
    add.add_argument("--law", action="append", metavar="NAME", help="run this law only (repeatable; see --list)")
    add.add_argument("--list", action="store_true", help="list the laws and run none")
    add_cache_option(add)
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def run_laws_command(args: argparse.Namespace) -> int:
    """Run `jshadow laws`, and return 1 if a law is broken, else 0."""
    from jshadow.evaluation.laws import LAWS, compile_cheaply, run_laws, subject_of
    from jshadow.policies import find_policy, parse_settings
    from jshadow.policies.settings import policy_settings

    if args.list:
        return list_laws({name: law.statement for name, law in LAWS.items()}, args.json)
    if args.policy is None:
        raise ConfigError("policy must be a name or module:Class, got none")
    compile_cheaply()
    settings = parse_settings(args.policy, args.set)
    if wrappers := [name for name in settings if name]:
        raise ConfigError(f"--set must be a setting of {args.policy} itself, got one of {wrappers[0]}")
    subject = subject_of(find_policy(args.policy), settings.get("", {}))
    fetches = None if args.fetch is None else [part.strip() for part in args.fetch.split(",")]
    outcomes: list[tuple[Outcome, float]] = []
    ahead = run_laws(subject, fetches, args.law)
    while True:
        begin = time.perf_counter()
        with waiting(f"{subject.name}: law {len(outcomes) + 1} of {len(args.law or LAWS)}"):
            outcome = next(ahead, None)
        if outcome is None:
            break
        outcomes.append((outcome, time.perf_counter() - begin))
        if not args.json:
            print(line_of(*outcomes[-1]), flush=True)
    broken = [outcome.law.name for outcome, _ in outcomes if outcome.broken]
    if args.json:
        records = [record_of(*one) for one in outcomes]
        print(json.dumps({"policy": subject.name, "small": policy_settings(subject.small), "laws": records}))
    else:
        unclaimed = sum(outcome.unclaimed is not None for outcome, _ in outcomes)
        kept = len(outcomes) - unclaimed - len(broken)
        laws = "law" if kept == 1 else "laws"
        print(f"{subject.name}: {kept} {laws} kept, {unclaimed} not claimed, {len(broken)} broken")
    return 1 if broken else 0


def list_laws(statements: dict[str, str], as_json: bool) -> int:
    """Print the name and the statement of each law, and return 0."""
    if as_json:
        print(json.dumps({"laws": statements}))
    else:
        for name, statement in statements.items():
            print(f"{name}\n    {statement}")
    return 0


def line_of(outcome: "Outcome", seconds: float) -> str:
    """Return the line of a law with its time in seconds, and a line for each case that breaks it."""
    head = f"{outcome.status:11} {outcome.law.name}"
    if outcome.unclaimed is not None:
        return f"{head}: {outcome.unclaimed}"
    lines = [f"{head} ({outcome.cases} {'case' if outcome.cases == 1 else 'cases'}, {seconds:.1f} s)"]
    if outcome.broken:
        lines.append(f"    {outcome.law.statement}")
    return "\n".join(lines + [f"    {broken.case}: {broken.difference}" for broken in outcome.broken])


def record_of(outcome: "Outcome", seconds: float) -> dict[str, Any]:
    """Return the JSON object of a law."""
    broken = [
        {
            "case": str(error.case),
            "what": error.difference.place,
            "difference": error.difference.largest,
            "tolerance": error.difference.tolerance,
        }
        for error in outcome.broken
    ]
    return {
        "law": outcome.law.name,
        "statement": outcome.law.statement,
        "status": outcome.status.lower(),
        "cases": outcome.cases,
        "reason": outcome.unclaimed,
        "broken": broken,
        "seconds": round(seconds, 3),
    }
