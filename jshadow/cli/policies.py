"""`jshadow policies`: list the policies; with --model and --context, the bytes that each takes."""

import argparse
import json
from typing import Any

from jshadow.cli.console import console, print_table
from jshadow.cli.options import JSON_HELP
from jshadow.errors import ConfigError

# ShadowKV with keys in the transform code, landmarks and host values in four bits. No paper has these settings.
PACKED = "keys=transform:landmarks.order=2:landmarks.dtype=int4:values.dtype=int4"
# NAME:key=value:... and the fetch mode of each row: as the papers run the policies, then packed codes.
PAPERS_SETTINGS = (
    ("full", "resident"),
    ("streaming_llm:sinks=4:window=2000", "resident"),
    ("h2o", "resident"),
    ("less", "resident"),
    ("snapkv:max_capacity_prompt=2048", "resident"),
    ("snapkv:max_capacity_prompt=2048:granularity=q_head", "resident"),
    ("quest:budget=2048:dense_layers=0", "resident"),
    ("quest:budget=2048:dense_layers=0", "device_put"),
    ("loki", "resident"),
    ("loki", "device_put"),
    ("infinigen:columns=25", "device_put"),
    ("infinigen:columns=16", "device_put"),
    ("omnikv:budget=2048", "device_put"),
    ("quantized:dtype=fp8", "resident"),
    ("quantized:dtype=int4", "resident"),
    ("kivi:bits=2:group=32", "resident"),
    ("kivi:bits=2:group=64", "resident"),
    ("specache:bits=2:group=64", "device_put"),
    ("specache:bits=1:group=64", "device_put"),
    ("infllm", "device_put"),
    ("shadowkv:rank=160:budget=2048", "device_put"),
    ("shadowkv_plus:rank=160:budget=2048", "device_put"),
    (f"shadowkv:{PACKED}:keys.bits=2:landmarks.tokens=2:landmarks.levels=2:budget=2048", "device_put"),
    (f"shadowkv:{PACKED}:keys.bits=1.333:budget=2048", "device_put"),
)
ABOUT = """List the policies with their settings and sources, or explain each setting of one policy. With --model and
--context, count the bytes of one request's keys and values on the device and on the host, and the bytes that a decode
step moves from the host. Nothing is loaded or allocated."""


def add_options(add: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add.set_defaults(run=run_policies)
    add.add_argument("name", nargs="?", metavar="NAME", help="explain the settings of this policy (or of module:Class)")
    add.add_argument("--model", help="HF directory, hub id, path of a config.json, or a published model (llama-3.1-8b)")
    add.add_argument("--context", type=int, metavar="TOKENS", help="prompt tokens of the request")
    add.add_argument("--policies", help="NAME or NAME:key=value:..., comma list (default: as the papers run them)")
    add.add_argument("--fetch", help="with --policies: resident, device_put or zero_copy (default: device_put)")
    add.add_argument("--dtype", default="bfloat16", help="of keys and values (default: %(default)s)")
    add.add_argument("--json", action="store_true", help=JSON_HELP)


def run_policies(args: argparse.Namespace) -> int:
    """Run `jshadow policies`, and return 0 when the table is printed."""
    if args.name is not None:
        for name in ("model", "context", "policies", "fetch"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} must be left out with the name of a policy, got {getattr(args, name)!r}")
        from jshadow.cli.policy_settings import show_settings

        return show_settings(args.name, as_json=args.json)
    if (args.model is None) != (args.context is None):
        raise ConfigError(f"--model and --context must come together, got {args.model!r} and {args.context!r}")
    if args.model is not None:
        return show_bytes(args)
    for name in ("policies", "fetch"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} must come with --model and --context, got {getattr(args, name)!r}")
    from rich.table import Table

    from jshadow.policies import POLICIES
    from jshadow.policies.settings import policy_settings

    rows: list[dict[str, Any]] = [
        {"name": name, "paper": policy.source, "settings": policy_settings(policy())}
        for name, policy in POLICIES.items()
    ]
    if args.json:
        print(json.dumps({"policies": rows}))
        return 0
    table = Table("policy", "settings", "source")
    table.columns[0].no_wrap = True
    for row in rows:
        settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
        table.add_row(str(row["name"]), settings or "-", str(row["paper"]))
    console().print(table)
    return 0


def show_bytes(args: argparse.Namespace) -> int:
    """Print the bytes of one request of --context tokens for each policy, and return 0."""
    from rich.table import Table

    from jshadow.cli.plan import config_of
    from jshadow.weights.convert.safetensors_file import check_dtype

    check_dtype(args.dtype)
    if args.context < 1:
        raise ConfigError(f"--context must be at least 1, got {args.context}")
    config = config_of(args.model)
    asked = rows_of_bytes()
    if args.policies is not None:
        asked = [(text, args.fetch or "device_put") for text in args.policies.split(",")]
    elif args.fetch is not None:
        raise ConfigError(f"--fetch must come with --policies, got {args.fetch!r}")
    rows = [byte_row(config, text, fetch, args.context, args.dtype) for text, fetch in asked]
    if args.json:
        print(json.dumps({"context": args.context, "policies": rows}))
        return 0
    # Settings have no blanks to wrap at, and two may differ only at their ends. `print_table` folds them.
    table = Table("policy", "fetch", "device GiB", "of full", "moved MiB a step", "host GiB")
    for row in rows:
        table.add_row(
            row["setting"],
            row["fetch"],
            f"{row['bytes_device'] / 2**30:.3f}",
            f"{row['bytes_device'] / row['bytes_full']:.3f}",
            f"{row['bytes_moved'] / 2**20:.1f}",
            f"{row['bytes_host'] / 2**30:.2f}",
        )
    print_table(table, console())
    return 0


def rows_of_bytes() -> list[tuple[str, str]]:
    """Return the setting and the fetch mode of each row: PAPERS_SETTINGS, then other policies with their defaults."""
    from jshadow.policies import POLICIES

    listed = {text.partition(":")[0] for text, _ in PAPERS_SETTINGS}
    return [*PAPERS_SETTINGS, *((name, "device_put") for name in POLICIES if name not in listed)]


def byte_row(config: Any, text: str, fetch: str, context: int, dtype: str) -> dict[str, Any]:
    """Return the bytes of one policy, as the JSON output has them.

    Args:
        config: the model.
        text: NAME:key=value:...
        fetch: fetch mode.
        context: number of tokens of the prompt, which is also the capacity.
        dtype: dtype of keys and values.
    """
    from jshadow.planner.machine import footprint, step_footprint
    from jshadow.policies import parse_policy, split_policy

    name, settings = split_policy(text)
    policy = parse_policy(name, settings)
    sizes: dict[str, Any] = {"capacity": context, "prompt": context, "dtype": dtype, "fetch": fetch}
    used = footprint(config, policy, **sizes)
    return {
        "policy": name,
        "setting": text,
        "fetch": fetch,
        "bytes_device": used["device_bytes"],
        "bytes_host": used["host_bytes"],
        "bytes_full": used["full_bytes"],
        "bytes_moved": step_footprint(config, policy, **sizes)["bytes_moved"],
        "parts": {part: list(sizes) for part, sizes in used["parts"].items()},
    }
