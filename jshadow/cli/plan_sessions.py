"""`jshadow plan --shared` and `--group-rows`: how many sessions a serving engine holds on a GPU."""

import argparse
import json
from collections.abc import Callable

from rich.table import Table

from jshadow.cli.console import console, print_table
from jshadow.cli.plan_mesh import given
from jshadow.cli.plan_tables import gib
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GIB, Gpu
from jshadow.planner.sessions import ClassPlan, MemoryLimits, SessionClass, SessionPlan, session_plan, total
from jshadow.policies import Full, Policy

NOTES = (
    "A session is a row of a group. Groups are stepped one after another, so temporaries are those of one group.",
    "A prompt being read counts once, with its state. Sessions in any spread: however many each document has.",
    "Not counted: compiled programs, the workspace of cuDNN, fragmentation, copies between memories, and host memory "
    "beyond states.",
)


def print_sessions(args: argparse.Namespace, gpus: list[Gpu], config: ModelConfig, policies: dict[str, Policy]) -> int:
    """Print the plans of the sessions on each GPU, and return 0.

    Args:
        args: the options.
        gpus: the GPUs.
        config: the model.
        policies: the chosen policy as "", and those beside it by name. Full attention is added.

    Raises:
        ConfigError: an option does not apply to sessions.
    """
    for option, value in (
        *given(args).items(),
        ("--batch", args.batch),
        ("--gather", args.gather),
        ("--repeat-share", args.repeat_share),
    ):
        if value is not None:
            raise ConfigError(f"{option} must be left out with --shared and --group-rows, got {value}")
    if args.shared is not None and args.shared < 1:
        raise ConfigError(f"--shared must be at least 1, got {args.shared}")
    name = policies[""].name
    named = {f"{name} {other}".strip(): policy for other, policy in policies.items()} | {"full": Full()}
    sizes = SessionClass(
        args.context,
        args.max_new_tokens if args.room is None else args.room,
        documents=args.shared or 0,
        **({} if args.group_rows is None else {"group_rows": args.group_rows}),
    )
    host = None if args.host_gib is None else int(args.host_gib * GIB)
    out, plans = console(), []
    for gpu in gpus:
        limits = MemoryLimits(gpu.memory_bytes, host, CONTEXT_RESERVE)
        sides = {
            side: session_plan(config, policy, [sizes], limits, dtype=args.dtype, fetch=args.fetch)
            for side, policy in named.items()
        }
        plans.append({"gpu": gpu.name, "plans": {side: plan.to_json() for side, plan in sides.items()}})
        if not args.json:
            print_table(session_table(gpu, sides), out)
    if args.json:
        print(json.dumps({"sessions": plans}))
        return 0
    for line in NOTES:
        out.print(line, highlight=False)
    return 0


def session_table(gpu: Gpu, sides: dict[str, SessionPlan]) -> Table:
    """Return the table of one GPU, with a column for each policy."""
    sizes = next(iter(sides.values())).classes[0].sizes
    table = Table(f"{gpu.name}, {sizes.prompt:,} + {sizes.room:,} tokens")
    for name in sides:
        table.add_column(name.replace(" ", "\n"), justify="right")

    def row(label: str, value: Callable[[SessionPlan, ClassPlan], str]) -> None:
        table.add_row(label, *(value(plan, plan.classes[0]) for plan in sides.values()))

    row("fetch", lambda plan, side: side.fetch)
    row("sessions", lambda plan, side: f"{plan.sessions:,}" + ("" if plan.fits else " (no fit)"))
    if sizes.documents:
        row("sessions in any spread", lambda plan, side: f"{side.sessions_any_spread:,}")
        row("documents", lambda plan, side: f"{sizes.documents:,}")
    row(f"groups of {sizes.group_rows:,} rows", lambda plan, side: f"{side.sizes.groups:,}")
    row("prompt half, GiB", lambda plan, side: gib(total(side.prompt_parts)[0]))
    row("prompt half in host, GiB", lambda plan, side: gib(total(side.prompt_parts)[1]))
    row("live half, GiB", lambda plan, side: f"{total(side.live_parts)[0] / GIB:.3f}")
    row("weights, GiB", lambda plan, side: gib(plan.weights_bytes))
    if sizes.documents:
        row("documents, GiB", lambda plan, side: gib(side.documents_bytes[0]))
    row("groups, GiB", lambda plan, side: gib((side.sizes.groups or 0) * side.group_bytes[0]))
    row("temporaries, GiB", lambda plan, side: gib(plan.temporaries_bytes))
    row("one prefill, GiB", lambda plan, side: gib(plan.prefill_bytes[0]))
    row("reserve, GiB", lambda plan, side: gib(plan.limits.reserve))
    row("device in all, GiB", lambda plan, side: f"{gib(plan.device_bytes)} of {gib(gpu.memory_bytes)}")
    limit = next(iter(sides.values())).limits.host
    row("host in all, GiB", lambda plan, side: gib(plan.host_bytes) + ("" if limit is None else f" of {gib(limit)}"))
    return table
