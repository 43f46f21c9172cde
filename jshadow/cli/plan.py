"""`jshadow plan`: the bytes of one request by part, or how many requests a GPU can hold and how fast a step can be."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.console import console, print_table
from jshadow.cli.options import JSON_HELP
from jshadow.cli.plan_mesh import add_mesh_options, given, mesh_of
from jshadow.cli.plan_speculation import add_speculation_options, check_given, print_speculation
from jshadow.errors import ConfigError
from jshadow.planner.gpu_specs import DEFAULT_GPUS, GIB, GPUS, HOST_GATHER, Gpu, custom_gpu, gpu_named

if TYPE_CHECKING:
    from jshadow.models.config import ModelConfig
    from jshadow.policies import Policy

LENGTHS = "2048,4096,8192"
GROUP_ROWS = 8
ABOUT = """Count KV bytes by part (--lengths), or plan a GPU (--context). A plan has the fetch mode, the largest batch
that fits, the host bytes it needs, the bytes that a step moves, and the predicted tokens a second. The prediction adds
the times of reading, moving and computing, at the rates of the data sheet. The columns beside the published ShadowKV
keep its keys in the transform code, at equal bytes and at about half of them, with landmarks and host values in four
bits. The command reads a config.json alone and allocates nothing. XLA takes 75 % of a GPU's memory when it starts. If a
planned batch needs more, set XLA_PYTHON_CLIENT_MEM_FRACTION to the share in the table."""


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_plan)
    add.add_argument("model", help="HF directory, hub id, path of a config.json, or a published model (llama-3.1-8b)")
    add.add_argument("--lengths", help=f"prompt tokens, comma list (default, without --context: {LENGTHS})")
    add.add_argument("--context", type=int, metavar="TOKENS", help="plan a GPU for prompts of that many tokens")
    add.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (default: {', '.join(DEFAULT_GPUS)})")
    add.add_argument("--gpu-gib", type=float, metavar="GIB", help="memory of another GPU, or in place of --gpu's")
    add.add_argument("--bandwidth", type=float, metavar="GB/S", help="bandwidth of its memory")
    add.add_argument("--link", type=float, metavar="GB/S", help="bandwidth from the host to it, one way")
    add.add_argument("--tflops", type=float, metavar="TFLOP/S", help="its dense bfloat16 operations a second")
    add_mesh_options(add)
    add.add_argument("--batch", type=int, help="requests (default: as many as fit)")
    add.add_argument("--host-gib", type=float, metavar="GIB", help="host memory of a process (default: no limit)")
    add.add_argument(
        "--gather",
        type=float,
        metavar="GB/S",
        help="rate at which the host gathers rows for device_put "
        f"(default: {HOST_GATHER / 1e9:g}, for four threads, which XLA takes on 16 cores)",
    )
    add.add_argument(
        "--repeat-share",
        type=float,
        metavar="SHARE",
        help="share of the selected units that the previous step had selected too, for the fetch modes zero_copy and "
        "resident, which keep them as they are (default there: 0.6, as the ShadowKV paper reports)",
    )
    add.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    add.add_argument(
        "--group-rows",
        type=int,
        metavar="ROWS",
        help=f"plan the sessions of a serving engine, whose program steps that many (default: {GROUP_ROWS})",
    )
    add.add_argument("--shared", type=int, metavar="N", help="plan sessions over N documents, each held once")
    add_speculation_options(add)
    add.add_argument(
        "--room",
        type=int,
        metavar="TOKENS",
        help="new tokens of a request for which exact keys have space, after a prompt of any length (default: all new "
        "tokens, after a prompt of this length)",
    )
    add.add_argument("--policy", default="shadowkv", help="policy name (default: %(default)s)")
    add.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the policy")
    add.add_argument(
        "--fetch",
        help="auto (the fastest, as predicted), resident, device_put or zero_copy (default: auto with --context, "
        "device_put with --lengths)",
    )
    add.add_argument("--dtype", default="bfloat16", help="of weights, keys and values (default: %(default)s)")
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def run_plan(args: argparse.Namespace) -> int:
    """Run `jshadow plan`, and return 0 when the tables are printed."""
    from jshadow.policies import parse_policy
    from jshadow.weights.convert.safetensors_file import check_dtype

    check_dtype(args.dtype)
    check_given(args)
    policy = parse_policy(args.policy, args.set)
    if args.context is None:
        gpu_options = {
            "--gpu": args.gpu,
            "--gpu-gib": args.gpu_gib,
            "--bandwidth": args.bandwidth,
            "--link": args.link,
            "--tflops": args.tflops,
            "--batch": args.batch,
            "--host-gib": args.host_gib,
            "--gather": args.gather,
            "--repeat-share": args.repeat_share,
            "--group-rows": args.group_rows,
            "--shared": args.shared,
            "--speculate": args.speculate,
            **given(args),
        }
        wrong = [name for name, value in gpu_options.items() if value is not None]
        if wrong:
            raise ConfigError(f"{wrong[0]} must come with --context, got no --context")
        args.fetch = args.fetch or "device_put"
        return count_bytes(args, policy)
    if args.lengths is not None:
        raise ConfigError(f"--lengths must be left out with --context, got {args.lengths!r}")
    args.fetch = args.fetch or "auto"
    return plan_gpus(args, policy)


def config_of(model: str) -> "ModelConfig":
    """Return the config of a published model, of a directory, of a hub id, or of a single config.json."""
    from jshadow.models.published import published_config, published_names
    from jshadow.models.registry import family_of
    from jshadow.weights.convert.huggingface import locate, read_config, read_config_file

    if model in published_names() and not Path(model).exists():
        hf = published_config(model)
        return family_of(hf).config_from_hf(hf)
    return (read_config_file(Path(model)) if model.endswith(".json") else read_config(locate(model)))[2]


def packed_beside(policy: "Policy", config: "ModelConfig") -> dict[str, "Policy"]:
    """Return packed codes that are planned beside ShadowKV with low-rank keys: of equal bytes, and of about half.

    Returns:
        {"packed": ..., "packed_small": ...}, without those that cannot pack this model's keys. {} for another policy or
        key code.
    """
    from jshadow.policies import ShadowKV
    from jshadow.policies.shadowkv import LowRank, TransformCode

    if not isinstance(policy, ShadowKV) or not isinstance(policy.keys, LowRank):
        return {}
    rank = policy.resolve(config, config.context).rank
    assert rank is not None
    packed: dict[str, Policy] = {}
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
            # Landmarks in levels store a chunk's means with four bits more a number. Keys get as many bits less.
            keys = dataclasses.replace(keys, bits=min(8.0, max(16 * rank / columns - 4 / size, 8 / columns)))
        choice = dataclasses.replace(policy.choice, outlier_rule=code.choice.outlier_rule)
        packed[name] = dataclasses.replace(
            policy, rank=None, keys=keys, landmarks=code.landmarks, values=code.values, choice=choice
        )
    return packed


def with_kernel(policies: dict[str, "Policy"], config: "ModelConfig", context: int, args: argparse.Namespace) -> Any:
    """Return the policies that the fetch mode can serve on a GPU.

    With "zero_copy", these are the policies for which a GPU kernel can read the rows in host memory.
    """
    from jshadow.planner.bytes import cache_specs

    if args.fetch != "zero_copy":
        return policies
    layouts = {
        name: [
            spec.policy.host_layout(spec)
            for spec in cache_specs(
                config, policy.resolve(config, context), 1, context, context, args.dtype, args.fetch
            )
        ]
        for name, policy in policies.items()
    }
    return {name: policies[name] for name, rows in layouts.items() if not any(row and row.no_kernel for row in rows)}


def count_bytes(args: argparse.Namespace, policy: "Policy") -> int:
    """Print the bytes of one request at several lengths, and return 0."""
    from rich.table import Table

    from jshadow.cli.plan_tables import bytes_text
    from jshadow.planner.machine import footprint

    text = LENGTHS if args.lengths is None else args.lengths
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"--lengths must be a comma list of token counts, got {text!r}")
    config, rows = config_of(args.model), []
    for length in map(int, text.split(",")):
        capacity = length + args.max_new_tokens
        sizes: dict[str, Any] = {"capacity": capacity, "prompt": length, "dtype": args.dtype, "fetch": args.fetch}
        sizes["room"] = args.room
        others = with_kernel(packed_beside(policy, config), config, capacity, args)
        beside = {name: footprint(config, other, **sizes) for name, other in others.items()}
        rows.append({"length": length, "capacity": capacity, **footprint(config, policy, **sizes), "beside": beside})
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
    print_table(table, console())
    return 0


def gpus_of(args: argparse.Namespace) -> list[Gpu]:
    """Return the GPUs that the options name. Raises ConfigError for an unknown GPU or a figure out of range."""
    figures = {"gib": args.gpu_gib, "bandwidth": args.bandwidth, "link": args.link, "tflops": args.tflops}
    figures["nvlink"] = args.nvlink
    base = None if args.gpu is None else gpu_named(args.gpu)
    if any(value is not None for value in figures.values()):
        return [custom_gpu(base, **figures)]
    return [gpu_named(name) for name in DEFAULT_GPUS] if base is None else [base]


def plan_gpus(args: argparse.Namespace, policy: "Policy") -> int:
    """Print the plans of the GPUs that the options name, at one context length, and return 0."""
    from jshadow.cli.plan_tables import notes, parts_table, plan_table
    from jshadow.planner.bytes import Workload
    from jshadow.planner.gpu import capacity_plan

    gpus = gpus_of(args)
    config = config_of(args.model)
    for option, value in (("--host-gib", args.host_gib), ("--gather", args.gather)):
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{option} must be above 0 and finite, got {value}")
    beside = with_kernel(packed_beside(policy, config), config, min(args.context, config.context), args)
    if args.shared is not None or args.group_rows is not None:
        from jshadow.cli.plan_sessions import print_sessions

        return print_sessions(args, gpus, config, {"": policy} | beside)
    limit = None if args.host_gib is None else int(args.host_gib * GIB)
    gather = HOST_GATHER if args.gather is None else args.gather * 1e9
    gpus = [dataclasses.replace(gpu, host_limit=limit, gather_bytes_per_second=gather) for gpu in gpus]
    workload = Workload(
        args.context,
        args.max_new_tokens,
        args.batch,
        args.dtype,
        args.fetch,
        repeat_share=args.repeat_share,
        room=args.room,
        shards=mesh_of(args),
    )
    if args.speculate is not None:
        return print_speculation(args, gpus, config, workload, policy)
    plans = [capacity_plan(config, policy, gpu, workload, beside=beside) for gpu in gpus]
    if args.json:
        print(json.dumps({"plans": [plan.to_json() for plan in plans]}))
        return 0
    out = console()
    print_table(parts_table(plans[0]), out)
    for plan in plans:
        print_table(plan_table(plan), out)
    for line in notes(plans):
        out.print(line, highlight=False)
    return 0
