"""`jshadow plan --speculate N --acceptance A`: the predicted speed of exact attention with speculation."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jshadow.cli.console import console, print_table
from jshadow.errors import ConfigError
from jshadow.planner.gpu_specs import GIB, Gpu

if TYPE_CHECKING:
    from jshadow.models.config import ModelConfig
    from jshadow.planner.bytes import Workload
    from jshadow.policies import Policy

SELF = "self"


def add_speculation_options(add: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.add_argument("--speculate", type=int, metavar="N", help="plan exact attention that checks N drafts at once")
    add.add_argument("--acceptance", type=float, metavar="SHARE", help="share of the drafts that are accepted")
    add.add_argument(
        "--drafter",
        help="self or compressed, NAME:POLICY:key=value:..., or prompt_lookup, whose drafts take no time (default: "
        "self, or compressed with --policy offloaded)",
    )


def check_given(args: argparse.Namespace) -> None:
    """Raise ConfigError if one of the options comes without the others that it needs."""
    if (args.speculate is None) != (args.acceptance is None):
        raise ConfigError("--speculate and --acceptance must come together")
    if args.drafter is not None and args.speculate is None:
        raise ConfigError(f"--drafter must come with --speculate, got {args.drafter!r} alone")


def print_speculation(
    args: argparse.Namespace, gpus: Sequence[Gpu], config: "ModelConfig", workload: "Workload", policy: "Policy"
) -> int:
    """Print the plans of exact attention with speculation on the GPUs, and return 0.

    Full attention is planned if `policy` does not have all keys and values.
    """
    from rich.table import Table

    from jshadow.engine.speculation import CompressedDraft, PromptLookup, SelfDraft, parse_drafter
    from jshadow.planner.machine import abstract_state
    from jshadow.planner.speculation import Drafting, speculation_plan
    from jshadow.policies import Full, Offloaded
    from jshadow.policies.base import innermost

    if policy != innermost(policy) and isinstance(innermost(policy), Offloaded):
        raise ConfigError(f"--policy must be offloaded without a wrapper to plan a speculation, got {policy}")
    target = policy if isinstance(policy, Offloaded) else Full()
    drafter = parse_drafter(args.drafter or (SelfDraft.name if isinstance(target, Full) else CompressedDraft.name))
    if not isinstance(drafter, SelfDraft | CompressedDraft | PromptLookup):
        raise ConfigError(f"--drafter must be self, compressed or prompt_lookup, got {args.drafter!r}")
    drafter = dataclasses.replace(drafter, tokens=args.speculate)
    shape: dict[str, Any] = {"batch": 1, "capacity": workload.capacity, "prompt": workload.context}
    drafter.check_target(config, abstract_state(config, target, **shape, dtype=workload.dtype, fetch="resident"))
    own = drafter.policy if isinstance(drafter, SelfDraft | CompressedDraft) else None
    drafting = Drafting(args.speculate, args.acceptance, own, isinstance(drafter, CompressedDraft))
    plans = [speculation_plan(config, gpu, workload, drafting, target) for gpu in gpus]
    if args.json:
        print(json.dumps({"plans": [plan.to_json() for plan in plans]}))
        return 0
    table = Table(f"{target.name}, {args.speculate} drafts of {drafter.name}, {workload.context:,} tokens")
    for plan in plans:
        table.add_column(plan.gpu, justify="right")
    for label, cells in (
        ("requests", [f"{plan.batch:,}" for plan in plans]),
        ("fetch", [plan.fetch for plan in plans]),
        ("tokens a cycle", [f"{plan.tokens_a_cycle:.2f}" for plan in plans]),
        ("drafts, ms", [f"{plan.draft_seconds * 1e3:.1f}" for plan in plans]),
        ("check, ms", [f"{plan.check_seconds * 1e3:.1f}" for plan in plans]),
        ("a plain step, ms", [f"{plan.step_seconds * 1e3:.1f}" for plan in plans]),
        ("keys and values, GiB", [sizes(plan.target_bytes) for plan in plans]),
        ("beside them for drafts, GiB", [sizes(plan.draft_bytes) for plan in plans]),
        ("predicted tokens/s", [f"{plan.tokens_per_second:,.3g}" for plan in plans]),
        ("this / plain", [f"{plan.ratio:.2f}" for plan in plans]),
    ):
        table.add_row(label, *cells)
    print_table(table, console())
    return 0


def sizes(device_and_host: tuple[int, int]) -> str:
    """Return bytes of the device and of the host as text."""
    device, host = (f"{size / GIB:.2f}" for size in device_and_host)
    return f"{device} + {host} in host memory" if device_and_host[1] else device
