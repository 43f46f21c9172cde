"""`jshadow plan`: bytes of one request by part, or what a GPU can hold and how fast a step can be there."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from jshadow.cache.host_memory import POOL_VARIABLE, pool_gib
from jshadow.errors import ConfigError
from jshadow.planner.gpu_specs import GIB, GPUS, gpu_named
from jshadow.policies import Policy, ShadowKV, parse_policy
from jshadow.policies.shadowkv import LowRank, TransformCode

if TYPE_CHECKING:
    from jshadow.models.config import ModelConfig
    from jshadow.planner.gpu import CapacityPlan, PolicyPlan

LENGTHS = "2048,4096,8192"
XLA_SHARE = 0.75  # of a GPU's memory, which XLA takes when it starts
ABOUT = """Count KV bytes by part (--lengths), or plan a GPU (--context): the largest batch that fits, the host bytes it
needs, the bytes that a step moves, and from these and the data sheet's bandwidths the tokens a second that no step can
exceed. Beside ShadowKV as published stand its keys in the transform code, at equal bytes of keys and at about half of
them, with landmarks and host values in four bits. Reads a config.json alone, allocates nothing. XLA takes 75 % of a
GPU's memory when it starts: for a planned batch that needs more, set XLA_PYTHON_CLIENT_MEM_FRACTION to the share that
the table names."""


def add_options(add: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add.set_defaults(run=run_plan)
    add.add_argument("model", help="HF directory, hub id, path of a config.json, or a published model (llama-3.1-8b)")
    add.add_argument("--lengths", help=f"prompt tokens, comma list (default, without --context: {LENGTHS})")
    add.add_argument("--context", type=int, metavar="TOKENS", help="plan a GPU for prompts of that many tokens")
    add.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (default: each of them)")
    add.add_argument("--count", type=int, help="GPUs that share weights and KV heads (default: 1)")
    add.add_argument("--batch", type=int, help="requests (default: as many as fit)")
    add.add_argument("--host-gib", type=float, metavar="GIB", help="host memory for all requests (default: no limit)")
    add.add_argument(
        "--repeat-share", type=float, metavar="SHARE",
        help="share of the selected units that the step before had too, in a fetch mode that keeps them on the device "
        "(default there: 0.6, as the ShadowKV paper reports; device_put moves every unit)",
    )  # fmt: skip
    add.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    add.add_argument("--policy", default="shadowkv", help="policy name (default: %(default)s)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument(
        "--fetch", default="device_put", help="auto, resident, device_put or zero_copy (default: %(default)s)"
    )
    add.add_argument("--dtype", default="bfloat16", help="of weights, keys and values (default: %(default)s)")
    add.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run_plan(args: argparse.Namespace) -> int:
    """`jshadow plan`."""
    from jshadow.weights.convert.safetensors_file import check_dtype

    check_dtype(args.dtype)
    policy = parse_policy(args.policy, args.set)
    if args.context is None:
        given = {"--gpu": args.gpu, "--count": args.count, "--batch": args.batch, "--host-gib": args.host_gib,
                 "--repeat-share": args.repeat_share}  # fmt: skip
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise ConfigError(f"{wrong[0]} must come with --context, got no --context")
        return count_bytes(args, policy)
    if args.lengths is not None:
        raise ConfigError(f"--lengths must be left out with --context, got {args.lengths!r}")
    return plan_gpus(args, policy)


def config_of(model: str) -> "ModelConfig":
    """The config of a published model, of a directory, of a hub id, or of a lone config.json."""
    from jshadow.models.published import published_config, published_names
    from jshadow.models.registry import family_of
    from jshadow.weights.convert.huggingface import locate, read_config, read_config_file

    if model in published_names() and not Path(model).exists():
        hf = published_config(model)
        return family_of(hf).config_from_hf(hf)
    return (read_config_file(Path(model)) if model.endswith(".json") else read_config(locate(model)))[2]


# What is shown beside the paper's setting


def packed_beside(policy: Policy, config: "ModelConfig") -> dict[str, Policy]:
    """ShadowKV's low rank in packed codes: at equal bytes, and small. Nothing for other policies or codes."""
    if not isinstance(policy, ShadowKV) or not isinstance(policy.keys, LowRank):
        return {}
    rank = policy.resolve(config, config.context).rank
    assert rank is not None
    made: dict[str, Policy] = {}
    size, columns = policy.chunk_size, config.key_columns
    if size % 2 or config.head_dim % 2:
        return {}
    for name, small in (("packed", False), ("packed_small", True)):
        code = type(policy).packed(small=small)
        keys = code.keys
        assert isinstance(keys, TransformCode)
        if not small:
            if size & (size - 1):
                continue  # no levels of landmarks
            # What the chunks' means have more than four bits, keys have less.
            keys = dataclasses.replace(keys, bits=min(8.0, max(16 * rank / columns - 4 / size, 8 / columns)))
        choice = dataclasses.replace(policy.choice, outlier_rule=code.choice.outlier_rule)
        made[name] = dataclasses.replace(
            policy, rank=None, keys=keys, landmarks=code.landmarks, values=code.values, choice=choice
        )
    return made


def with_kernel(policies: dict[str, Policy], config: "ModelConfig", context: int, args: argparse.Namespace) -> Any:
    """Those of the policies that the fetch mode can serve on a GPU."""
    from jshadow.planner.bytes import cache_specs

    if args.fetch != "zero_copy":
        return policies
    layouts = {
        name: [spec.policy.host_layout(spec) for spec in cache_specs(
            config, policy.resolve(config, context), 1, context, context, args.dtype, args.fetch)]
        for name, policy in policies.items()
    }  # fmt: skip
    return {name: policies[name] for name, rows in layouts.items() if not any(row and row.no_kernel for row in rows)}


# Bytes by part


def count_bytes(args: argparse.Namespace, policy: Policy) -> int:
    """One request's bytes at several lengths."""
    from jshadow.planner.bytes import footprint

    text = LENGTHS if args.lengths is None else args.lengths
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"--lengths must be a comma list of token counts, got {text!r}")
    config, rows = config_of(args.model), []
    for length in map(int, text.split(",")):
        capacity = length + args.max_new_tokens
        sizes: dict[str, Any] = {"capacity": capacity, "prompt": length, "dtype": args.dtype, "fetch": args.fetch}
        others = with_kernel(packed_beside(policy, config), config, capacity, args)
        told = {name: footprint(config, other, **sizes) for name, other in others.items()}
        rows.append({"length": length, "capacity": capacity, **footprint(config, policy, **sizes), "beside": told})
    if args.json:
        print(json.dumps({"policy": policy.name, "dtype": args.dtype, "plans": rows}))
        return 0
    table = Table("bytes of one request", *(f"{row['length']:,} tokens" for row in rows))
    for part in rows[0]["parts"]:
        table.add_row(part, *(bytes_text(*row["parts"][part]) for row in rows))
    table.add_row("device, all parts", *(f"{row['device_bytes']:,}" for row in rows))
    table.add_row("full attention", *(f"{row['full_bytes']:,}" for row in rows))
    table.add_row("full / this", *(f"{row['full_bytes'] / row['device_bytes']:.2f}" for row in rows))
    for name in rows[0]["beside"]:
        sides = [row["beside"][name] for row in rows]
        table.add_row(f"{name}, device", *(f"{side['device_bytes']:,}" for side in sides))
        table.add_row(f"{name}, host", *(f"{side['host_bytes']:,}" for side in sides))
        table.add_row(f"full / {name}", *(f"{side['full_bytes'] / side['device_bytes']:.2f}" for side in sides))
    console().print(table)
    return 0


def bytes_text(device: int, host: int) -> str:
    """Device bytes, or host bytes marked so."""
    return (f"{device:,}" if device else "") + (f"{host:,} (host)" if host else "") or "0"


# GPUs


def plan_gpus(args: argparse.Namespace, policy: Policy) -> int:
    """One or all GPUs at one context."""
    from jshadow.planner.gpu import capacity_plan

    gpus = list(GPUS.values()) if args.gpu is None else [gpu_named(args.gpu)]
    config = config_of(args.model)
    if args.host_gib is not None and not 0 < args.host_gib < 1e6:
        raise ConfigError(f"--host-gib must be above 0 and finite, got {args.host_gib}")
    beside = with_kernel(packed_beside(policy, config), config, min(args.context, config.context), args)
    plans = [
        capacity_plan(
            config, policy, gpu, context=args.context, max_new_tokens=args.max_new_tokens,
            count=1 if args.count is None else args.count, batch=args.batch, dtype=args.dtype, fetch=args.fetch,
            repeat_share=args.repeat_share, beside=beside,
            host_limit=None if args.host_gib is None else int(args.host_gib * GIB),
        )
        for gpu in gpus
    ]  # fmt: skip
    if args.json:
        print(json.dumps({"plans": [plan.to_json() for plan in plans]}))
        return 0
    out = console()
    out.print(parts_table(plans[0]))
    for plan in plans:
        out.print(plan_table(plan))
    for line in notes(plans):
        out.print(line, highlight=False)
    return 0


def sides_of(plan: "CapacityPlan") -> dict[str, "PolicyPlan"]:
    """What is planned, by the heads of its columns."""
    name = plan.chosen.policy.name
    beside = {f"{name}\n{other}": side for other, side in plan.beside.items()}
    return {name: plan.chosen} | beside | ({"full": plan.full} if name != "full" else {})


def parts_table(plan: "CapacityPlan") -> Table:
    """Bytes of one request, which do not depend on the GPU."""
    where = "" if plan.count == 1 else f", on one of {plan.count} GPUs"
    sides = sides_of(plan)
    table = Table(f"bytes of one request of {plan.context:,} tokens{where}", *sides)
    for part in dict.fromkeys(part for side in sides.values() for part in side.row_parts):
        sizes = (side.row_parts.get(part) for side in sides.values())
        table.add_row(part, *("" if size is None else bytes_text(*size) for size in sizes))
    table.add_row("device, all parts", *(f"{side.row_bytes[0]:,}" for side in sides.values()))
    return table


def plan_table(plan: "CapacityPlan") -> Table:
    """One GPU, or one of several: a column for each policy and one for full attention."""
    count, sides = plan.count, sides_of(plan)
    table = Table(plan.gpu.name if count == 1 else f"each of {count} {plan.gpu.name}")
    for name in sides:
        table.add_column(name, justify="right")

    def row(label: str, value: "Callable[[CapacityPlan, PolicyPlan], str]") -> None:
        table.add_row(label, *(value(plan, side) for side in sides.values()))

    def step(label: str, value: Callable[[Any], str]) -> None:
        row(label, lambda plan, side: "-" if side.step is None else value(side.step))

    row("memory, GiB", lambda plan, side: f"{plan.gpu.memory_bytes / GIB:.1f}")
    row("largest batch", lambda plan, side: f"{side.largest_batch:,}")
    row("prefilled in one call", lambda plan, side: "-" if side.prefill_batch is None else f"{side.prefill_batch:,}")
    row("batch planned", lambda plan, side: f"{side.batch:,}" + ("" if side.fits else " (no fit)"))
    row("weights, GiB", lambda plan, side: gib(plan.weights_bytes))
    row("states, GiB", lambda plan, side: gib(side.batch * side.row_bytes[0]))
    row("temporaries, GiB", lambda plan, side: gib(sum(side.temporaries.values())))
    row("reserve, GiB", lambda plan, side: gib(plan.reserve_bytes))
    row("device in all, GiB", lambda plan, side: gib(side.device_bytes))
    row("XLA memory fraction", lambda plan, side: fraction(plan, side))
    row("host, GiB" + (" (all GPUs)" if count > 1 else ""), lambda plan, side: gib(side.host_bytes))
    reads = [side.step.hbm_bytes for side in sides.values() if side.step is not None]
    for part in {part: None for bytes_read in reads for part in bytes_read}:  # in order; those that show no digit not
        if max(bytes_read.get(part, 0) for bytes_read in reads) >= 5e6:
            step(f"step reads {part}, GB", lambda bound, part=part: gb(bound.hbm_bytes.get(part, 0)))  # type: ignore[misc]
    step("step reads, all, GB", lambda bound: gb(sum(bound.hbm_bytes.values())))
    step("step moves over PCIe, GB", lambda bound: gb(bound.pcie_bytes))
    step("step, TFLOP", lambda bound: f"{bound.flops / 1e12:.2f}")
    for label, field in (("HBM", "hbm_seconds"), ("PCIe", "pcie_seconds"), ("arithmetic", "flop_seconds")):
        step(f"{label}, ms", lambda bound, field=field: f"{getattr(bound, field) * 1e3:.1f}")  # type: ignore[misc]
    step("tokens/s, overlapped", lambda bound: f"{bound.tokens_per_second:,.0f}")
    step("tokens/s, in turn", lambda bound: f"{bound.serial_tokens_per_second:,.0f}")
    row("to full attention", lambda plan, side: "-" if side is plan.full else ratio_text(plan.ratio_of(side)))
    return table


def ratio_text(ratio: float | None) -> str:
    """A ratio, if there is one."""
    return "-" if ratio is None else f"{ratio:.2f}"


def fraction(plan: "CapacityPlan", side: "PolicyPlan") -> str:
    """What XLA_PYTHON_CLIENT_MEM_FRACTION must be at least."""
    needed = math.ceil((side.device_bytes - plan.reserve_bytes) / plan.gpu.memory_bytes * 1000) / 1000
    return "default" if needed <= XLA_SHARE else f"{needed:.3f}" if side.fits else "-"


def notes(plans: list["CapacityPlan"]) -> list[str]:
    """What the figures stand on."""
    first = plans[0]
    rates = [(plan.gpu, plan.gpu.hbm_bytes_per_second / 1e9, plan.gpu.pcie_bytes_per_second / 1e9) for plan in plans]
    told = [
        f"{gpu.name} {hbm:,.0f} GB/s HBM, {pcie:g} GB/s PCIe, {gpu.flops / 1e12:g} TFLOP/s" for gpu, hbm, pcie in rates
    ]
    lines = [f"Bounds from data sheets, nothing measured: {'; '.join(told)}.",
             f"fetch {first.fetch}: {first.repeat_share:.0%} of the selected units taken as on the device already.",
             "XLA memory fraction: set XLA_PYTHON_CLIENT_MEM_FRACTION to it; XLA takes 0.75 by itself."]  # fmt: skip
    host = max(side.host_bytes for plan in plans for side in (plan.chosen, *plan.beside.values()))
    pool = pool_gib()
    if host > pool * GIB:
        lines.append(f"{POOL_VARIABLE}: {pool} here, {math.ceil(host / GIB)} for the largest of these.")
    if first.chosen.fallback:
        lines.append(f"generate falls back: {first.chosen.fallback}.")
    return lines


def gib(size: int) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:.2f}"


def gb(size: int) -> str:
    """Bytes as GB."""
    return f"{size / 1e9:.2f}"


def console() -> Console:
    """As wide as the terminal, or 120 columns."""
    return Console(width=None if sys.stdout.isatty() else 120)
