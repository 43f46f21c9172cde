"""`jshadow plan`: the bytes of one request by part, or how many requests a GPU can hold and how fast a step can be."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jshadow.cli.console import show_sentences, show_table
from jshadow.cli.fields import Command, option
from jshadow.cli.options import check_least
from jshadow.errors import ConfigError
from jshadow.planner.gpu_specs import (
    DEFAULT_GPUS,
    GIB,
    GPUS,
    HOST_GATHER,
    XLA_SHARE,
    Gpu,
    custom_gpu,
    gpu_named,
)

if TYPE_CHECKING:
    from jshadow.cache.spec import Shards
    from jshadow.models.config import ModelConfig
    from jshadow.planner.bytes import Workload
    from jshadow.planner.gpu import CapacityPlan, PolicyPlan
    from jshadow.planner.sessions import SessionPlan
    from jshadow.policies import Policy

_LENGTHS = "2048,4096,8192"
_GROUP_ROWS = 8
# Options that must come with --context.
OF_A_GPU = ["gpu", "gpu_gib", "bandwidth", "link", "tflops", "batch", "host_gib", "gather", "repeat_share"]
OF_A_GPU += ["group_rows", "shared", "speculate"]
OF_A_GPU += ["quantize"]
_OF_A_MESH = ["tp", "left", "nvlink"]
_SESSION_NOTES = (
    "A session is a row of a group. Groups are stepped one after another, so temporaries are those of one group.",
    "A prompt being read counts once, with its state. Sessions in any spread: however many each document has.",
    "Not counted: compiled programs, the workspace of cuDNN, fragmentation, copies between memories, and host memory "
    "beyond states.",
)


@dataclasses.dataclass(kw_only=True)
class Plan(Command):
    """Count KV bytes by part (--lengths), or plan a GPU (--context).

    A plan has the fetch mode, the largest batch that fits, the host bytes it needs, the bytes that a step moves,
    and the predicted tokens a second. The prediction adds the times of reading, moving and computing, at the rates
    of the data sheet. The columns beside the published ShadowKV keep its keys in the transform code, at equal bytes
    and at about half of them, with landmarks and host values in four bits. The command reads a config.json alone
    and allocates nothing. XLA takes 75 % of a GPU's memory when it starts. If a planned batch needs more, set
    XLA_PYTHON_CLIENT_MEM_FRACTION to the share in the table.
    """

    model: str = option(
        "HF directory, .gguf file, hub id, path of a config.json, or a published model (llama-3.1-8b)",
        positional=True,
        required=True,
    )
    lengths: str | None = option(f"prompt tokens, comma list (default, without --context: {_LENGTHS})")
    context: int | None = option("plan a GPU for prompts of that many tokens", metavar="TOKENS")
    gpu: str | None = option(f"one of {', '.join(GPUS)} (default: {', '.join(DEFAULT_GPUS)})")
    gpu_gib: float | None = option("memory of another GPU, or in place of --gpu's", metavar="GIB")
    bandwidth: float | None = option("bandwidth of its memory", metavar="GB/S")
    link: float | None = option("bandwidth from the host to it, one way", metavar="GB/S")
    tflops: float | None = option("its dense bfloat16 operations a second", metavar="TFLOP/S")
    tp: int | None = option("split heads, MLP and vocabulary over N GPUs (default: 1)")
    left: str | None = option(
        "split: the left rows of ShadowKV's keys are split over the GPUs of --tp; everywhere: each of them has all "
        "(default: split)"
    )
    nvlink: float | None = option("bandwidth between GPUs of a host, one way", metavar="GB/S")
    batch: int | None = option("requests (default: as many as fit)")
    host_gib: float | None = option("host memory of a process (default: no limit)", metavar="GIB")
    gather: float | None = option(
        f"rate at which the host gathers rows for device_put (default: {HOST_GATHER / 1e9:g}, for four threads, which "
        "XLA takes on 16 cores)",
        metavar="GB/S",
    )
    repeat_share: float | None = option(
        "share of the selected units that the previous step had selected too, for the fetch modes zero_copy and "
        "resident, which keep them as they are (default there: 0.6, as the ShadowKV paper reports)",
        metavar="SHARE",
    )
    max_new_tokens: int = option("new tokens of a request", 64)
    group_rows: int | None = option(
        f"plan the sessions of a serving engine, whose program steps that many (default: {_GROUP_ROWS})", metavar="ROWS"
    )
    shared: int | None = option("plan sessions over N documents, each held once")
    speculate: int | None = option("plan exact attention that checks N drafts at once")
    acceptance: float | None = option("share of the drafts that are accepted", metavar="SHARE")
    drafter: str | None = option(
        "self or compressed, NAME:POLICY:key=value:..., or prompt_lookup, whose drafts take no time (default: self, or "
        "compressed with --policy offloaded)"
    )
    room: int | None = option(
        "new tokens of a request for which exact keys have space, after a prompt of any length (default: all new "
        "tokens, after a prompt of this length)",
        metavar="TOKENS",
    )
    policy: str = option("policy name", "shadowkv")
    set: Sequence[str] = option("a setting of the policy (repeatable)", (), metavar="KEY=VALUE")
    fetch: str | None = option(
        "auto (the fastest, as predicted), resident, device_put or zero_copy (default: auto with --context, "
        "device_put with --lengths)"
    )
    dtype: str = option("of weights, keys and values", "bfloat16")
    quantize: str | None = option("int8, fp8 or int4: the type of the projections' weights")

    def run(self) -> int:
        """Return 0 when the tables are printed."""
        from jshadow.models.quantization import check_quantize
        from jshadow.policies import parse_policy
        from jshadow.weights.convert.safetensors_file import check_dtype

        check_dtype(self.dtype)
        check_quantize(self.quantize)
        if (self.speculate is None) != (self.acceptance is None):
            raise ConfigError("--speculate and --acceptance must come together")
        if self.drafter is not None and self.speculate is None:
            raise ConfigError(f"--drafter must come with --speculate, got {self.drafter!r} alone")
        policy = parse_policy(self.policy, self.set)
        if self.context is None:
            self._check_absent([*OF_A_GPU, *_OF_A_MESH], "must come with --context, got no --context")
            self.fetch = self.fetch or "device_put"
            return _count_bytes(self, policy)
        if self.lengths is not None:
            raise ConfigError(f"--lengths must be left out with --context, got {self.lengths!r}")
        self.fetch = self.fetch or "auto"
        return _plan_gpus(self, policy)

    def _check_absent(self, names: Sequence[str], told: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} {told.format(value)}")

    def gpus(self) -> list[Gpu]:
        """Return the GPUs of the options. Raises ConfigError for an unknown GPU or a figure out of range."""
        figures = {"gib": self.gpu_gib, "bandwidth": self.bandwidth, "link": self.link, "tflops": self.tflops}
        figures["nvlink"] = self.nvlink
        base = None if self.gpu is None else gpu_named(self.gpu)
        if any(value is not None for value in figures.values()):
            return [custom_gpu(base, **figures)]
        return [gpu_named(name) for name in DEFAULT_GPUS] if base is None else [base]

    def mesh(self) -> "Shards | None":
        """Return the mesh of the options, or None for one GPU."""
        from jshadow.planner.mesh import mesh_shards

        sizes: dict[str, Any] = {"tp": self.tp, "left": self.left}
        return mesh_shards(**{name: value for name, value in sizes.items() if value is not None})


def config_of(model: str) -> "ModelConfig":
    """Return the config of a published model, of a checkpoint, or of a single config.json."""
    from jshadow.models.published import published_config, published_names
    from jshadow.models.registry import family_of
    from jshadow.weights.convert import config_of as stored_config

    if model in published_names() and not Path(model).exists():
        hf = published_config(model)
        return family_of(hf).config_from_hf(hf)
    return stored_config(model)


def _packed_beside(policy: "Policy", config: "ModelConfig") -> dict[str, "Policy"]:
    """Return the packed codes that are planned beside ShadowKV with low-rank keys: of equal and of half the bytes."""
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


def _with_kernel(policies: dict[str, "Policy"], config: "ModelConfig", context: int, args: Plan) -> Any:
    """Return the policies whose rows in host memory a GPU kernel can read, or all if the mode is not "zero_copy"."""
    from jshadow.planner.bytes import cache_specs
    from jshadow.planner.fetch_choice import kernel_refusal

    if args.fetch != "zero_copy":
        return policies
    sizes = (1, context, context, args.dtype, args.fetch)
    read = {name: cache_specs(config, policy.resolve(config, context), *sizes) for name, policy in policies.items()}
    return {name: policies[name] for name, specs in read.items() if not kernel_refusal(specs)}


def _count_bytes(args: Plan, policy: "Policy") -> int:
    """Print the bytes of one request at several lengths, and return 0."""
    from jshadow.planner.machine import footprint

    text = _LENGTHS if args.lengths is None else args.lengths
    if not all(part.strip().isdigit() for part in text.split(",")):
        raise ConfigError(f"--lengths must be a comma list of token counts, got {text!r}")
    config = config_of(args.model)
    rows: list[dict[str, Any]] = []
    for length in map(int, text.split(",")):
        capacity = length + args.max_new_tokens
        sizes: dict[str, Any] = {"capacity": capacity, "prompt": length, "dtype": args.dtype, "fetch": args.fetch}
        sizes["room"] = args.room
        others = _with_kernel(_packed_beside(policy, config), config, capacity, args)
        beside = {name: footprint(config, other, **sizes) for name, other in others.items()}
        rows.append({"length": length, "capacity": capacity, **footprint(config, policy, **sizes), "beside": beside})
    if args.json:
        print(json.dumps({"policy": policy.name, "dtype": args.dtype, "plans": rows}))
        return 0
    table = [(part, *(_bytes_text(*row["parts"][part]) for row in rows)) for part in rows[0]["parts"]]
    table += [
        ("device, all parts", *(f"{row['device_bytes']:,}" for row in rows)),
        ("full attention", *(f"{row['full_bytes']:,}" for row in rows)),
        ("full / this", *(f"{row['full_bytes'] / row['device_bytes']:.2f}" for row in rows)),
    ]
    for name in rows[0]["beside"]:
        sides = [row["beside"][name] for row in rows]
        table.append((f"{name}, device", *(f"{side['device_bytes']:,}" for side in sides)))
        table.append((f"{name}, host", *(f"{side['host_bytes']:,}" for side in sides)))
        table.append((f"full / {name}", *(f"{side['full_bytes'] / side['device_bytes']:.2f}" for side in sides)))
    show_table(["bytes of one request", *(f"{row['length']:,} tokens" for row in rows)], table)
    return 0


def _plan_gpus(args: Plan, policy: "Policy") -> int:
    """Print the plans of the GPUs that the options name, at one context length, and return 0."""
    from jshadow.planner.bytes import Workload
    from jshadow.planner.gpu import capacity_plan

    assert args.context is not None
    assert args.fetch is not None
    gpus = args.gpus()
    config = config_of(args.model)
    for name, value in (("--host-gib", args.host_gib), ("--gather", args.gather)):
        if value is not None and not 0 < value < 1e6:
            raise ConfigError(f"{name} must be above 0 and finite, got {value}")
    beside = _with_kernel(_packed_beside(policy, config), config, min(args.context, config.context), args)
    limit = None if args.host_gib is None else int(args.host_gib * GIB)
    gather = HOST_GATHER if args.gather is None else args.gather * 1e9
    gpus = [dataclasses.replace(gpu, host_limit=limit, gather_bytes_per_second=gather) for gpu in gpus]
    if args.shared is not None or args.group_rows is not None:
        return _plan_sessions(args, gpus, config, {"": policy} | beside)
    workload = Workload(
        args.context,
        args.max_new_tokens,
        args.batch,
        args.dtype,
        args.fetch,
        repeat_share=args.repeat_share,
        room=args.room,
        shards=args.mesh(),
        quantize=args.quantize,
    )
    if args.speculate is not None:
        return _plan_speculation(args, gpus, config, workload, policy)
    plans = [capacity_plan(config, policy, gpu, workload, beside=beside) for gpu in gpus]
    if args.json:
        print(json.dumps({"plans": [plan.to_json() for plan in plans]}))
        return 0
    _show_parts(plans[0])
    for plan in plans:
        _show_plan(plan)
    show_sentences(_notes(plans))
    return 0


def _plan_sessions(args: Plan, gpus: list[Gpu], config: "ModelConfig", policies: dict[str, "Policy"]) -> int:
    """Print how many sessions of a serving engine each GPU holds, and return 0."""
    from jshadow.planner.sessions import SessionClass, session_plan
    from jshadow.policies import Full

    args._check_absent(
        [*_OF_A_MESH, "batch", "gather", "repeat_share"], "must be left out with --shared and --group-rows, got {}"
    )
    check_least(args, 1, "shared")
    assert args.context is not None
    assert args.fetch is not None
    name = policies[""].name
    named = {f"{name} {other}".strip(): policy for other, policy in policies.items()} | {"full": Full()}
    sizes = SessionClass(
        args.context,
        args.max_new_tokens if args.room is None else args.room,
        documents=args.shared or 0,
        group_rows=_GROUP_ROWS if args.group_rows is None else args.group_rows,
    )
    plans = []
    for gpu in gpus:
        kinds: dict[str, Any] = {"dtype": args.dtype, "fetch": args.fetch, "quantize": args.quantize}
        sides = {side: session_plan(config, policy, [sizes], gpu.limits, **kinds) for side, policy in named.items()}
        plans.append({"gpu": gpu.name, "plans": {side: plan.to_json() for side, plan in sides.items()}})
        if not args.json:
            _show_sessions(gpu, sides)
    if args.json:
        print(json.dumps({"sessions": plans}))
        return 0
    show_sentences(_SESSION_NOTES)
    return 0


def _show_sessions(gpu: Gpu, sides: dict[str, "SessionPlan"]) -> None:
    """Print the table of one GPU, with a column for each policy."""
    from jshadow.cache.accounting import total

    sizes = next(iter(sides.values())).classes[0].sizes
    table: list[Sequence[str]] = []

    def row(label: str, value: Callable[[Any, Any], str]) -> None:
        table.append((label, *(value(plan, plan.classes[0]) for plan in sides.values())))

    row("fetch", lambda plan, side: side.fetch)
    row("sessions", lambda plan, side: f"{plan.sessions:,}" + ("" if plan.fits else " (no fit)"))
    if sizes.documents:
        row("sessions in any spread", lambda plan, side: f"{side.sessions_any_spread:,}")
        row("documents", lambda plan, side: f"{sizes.documents:,}")
    row(f"groups of {sizes.group_rows:,} rows", lambda plan, side: f"{side.sizes.groups:,}")
    row("prompt half, GiB", lambda plan, side: _gib(total(side.prompt_parts.values()).device))
    row("prompt half in host, GiB", lambda plan, side: _gib(total(side.prompt_parts.values()).host))
    row("live half, GiB", lambda plan, side: f"{total(side.live_parts.values()).device / GIB:.3f}")
    row("weights, GiB", lambda plan, side: _gib(plan.weights_bytes))
    if sizes.documents:
        row("documents, GiB", lambda plan, side: _gib(side.documents_bytes[0]))
    row("groups, GiB", lambda plan, side: _gib((side.sizes.groups or 0) * side.group_bytes[0]))
    row("temporaries, GiB", lambda plan, side: _gib(plan.temporaries_bytes))
    row("one prefill, GiB", lambda plan, side: _gib(plan.prefill_bytes[0]))
    row("reserve, GiB", lambda plan, side: _gib(plan.limits.reserve))
    row("device in all, GiB", lambda plan, side: f"{_gib(plan.device_bytes)} of {_gib(gpu.memory_bytes)}")
    limit = next(iter(sides.values())).limits.host
    row("host in all, GiB", lambda plan, side: _gib(plan.host_bytes) + ("" if limit is None else f" of {_gib(limit)}"))
    names = [name.replace(" ", "\n") for name in sides]
    show_table([f"{gpu.name}, {sizes.prompt:,} + {sizes.room:,} tokens", *names], table, right=True)


def _plan_speculation(
    args: Plan, gpus: Sequence[Gpu], config: "ModelConfig", workload: "Workload", policy: "Policy"
) -> int:
    """Print the plans of exact attention with speculation on the GPUs, and return 0."""
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
    assert args.speculate is not None
    assert args.acceptance is not None
    drafter = dataclasses.replace(drafter, tokens=args.speculate)
    shape: dict[str, Any] = {"batch": 1, "capacity": workload.capacity, "prompt": workload.context}
    drafter.check_target(config, abstract_state(config, target, **shape, dtype=workload.dtype, fetch="resident"))
    own = drafter.policy if isinstance(drafter, SelfDraft | CompressedDraft) else None
    drafting = Drafting(args.speculate, args.acceptance, own, isinstance(drafter, CompressedDraft))
    plans = [speculation_plan(config, gpu, workload, drafting, target) for gpu in gpus]
    if args.json:
        print(json.dumps({"plans": [plan.to_json() for plan in plans]}))
        return 0
    title = f"{target.name}, {args.speculate} drafts of {drafter.name}, {workload.context:,} tokens"
    rows = [
        ("requests", *(f"{plan.batch:,}" for plan in plans)),
        ("fetch", *(plan.fetch for plan in plans)),
        ("tokens a cycle", *(f"{plan.tokens_a_cycle:.2f}" for plan in plans)),
        ("drafts, ms", *(f"{plan.draft_seconds * 1e3:.1f}" for plan in plans)),
        ("check, ms", *(f"{plan.check_seconds * 1e3:.1f}" for plan in plans)),
        ("a plain step, ms", *(f"{plan.step_seconds * 1e3:.1f}" for plan in plans)),
        ("keys and values, GiB", *(_both(plan.target_bytes) for plan in plans)),
        ("beside them for drafts, GiB", *(_both(plan.draft_bytes) for plan in plans)),
        ("predicted tokens/s", *(f"{plan.tokens_per_second:,.3g}" for plan in plans)),
        ("this / plain", *(f"{plan.ratio:.2f}" for plan in plans)),
    ]
    show_table([title, *(plan.gpu for plan in plans)], rows, right=True)
    return 0


def _both(device_and_host: tuple[int, int]) -> str:
    """Return bytes of the device and of the host as text."""
    device, host = (f"{size / GIB:.2f}" for size in device_and_host)
    return f"{device} + {host} in host memory" if device_and_host[1] else device


def _bytes_text(device: int, host: int) -> str:
    """Return a text of device bytes, and of host bytes with a mark, or "0" if there are none."""
    return (f"{device:,}" if device else "") + (f"{host:,} (host)" if host else "") or "0"


def _sides_of(plan: "CapacityPlan") -> dict[str, "PolicyPlan"]:
    """Return the planned policies by their column titles: the chosen one, those beside it, and full attention."""
    name = plan.chosen.policy.name
    beside = {f"{name}\n{other}": side for other, side in plan.beside.items()}
    return {name: plan.chosen} | beside | ({"full": plan.full} if name != "full" else {})


def _show_parts(plan: "CapacityPlan") -> None:
    """Print the table of the bytes of one request by part. These bytes do not depend on the GPU."""
    where = "" if plan.count == 1 else f", on one of {plan.count} GPUs"
    sides, rows = _sides_of(plan), []
    for part in dict.fromkeys(part for side in sides.values() for part in side.row_parts):
        sizes = (side.row_parts.get(part) for side in sides.values())
        rows.append((part, *("" if size is None else _bytes_text(*size) for size in sizes)))
    rows.append(("device, all parts", *(f"{side.row_bytes[0]:,}" for side in sides.values())))
    show_table([f"bytes of one request of {plan.workload.context:,} tokens{where}", *sides], rows)


def _show_plan(plan: "CapacityPlan") -> None:
    """Print the table of one GPU, or of each of several equal ones, with a column for each policy."""
    count, sides = plan.count, _sides_of(plan)
    table: list[Sequence[str]] = []

    def row(label: str, value: Callable[["CapacityPlan", "PolicyPlan"], str]) -> None:
        table.append((label, *(value(plan, side) for side in sides.values())))

    def step(label: str, value: Callable[[Any], str]) -> None:
        row(label, lambda plan, side: "-" if side.step is None else value(side.step))

    row("memory, GiB", lambda plan, side: f"{plan.gpu.memory_bytes / GIB:.1f}")
    row("fetch", lambda plan, side: side.fetch)
    row("largest batch", lambda plan, side: f"{side.largest_batch:,}")
    row("prefilled in one call", lambda plan, side: "-" if side.prefill_batch is None else f"{side.prefill_batch:,}")
    row("batch planned", lambda plan, side: f"{side.batch:,}" + ("" if side.fits else " (no fit)"))
    row("weights, GiB", lambda plan, side: _gib(plan.weights_bytes))
    row("states, GiB", lambda plan, side: _gib(side.batch * side.row_bytes[0]))
    row("temporaries, GiB", lambda plan, side: _gib(sum(side.temporaries.values())))
    row("reserve, GiB", lambda plan, side: _gib(plan.reserve_bytes))
    row("device in all, GiB", lambda plan, side: _gib(side.device_bytes))
    row("XLA memory fraction", lambda plan, side: _fraction(plan, side))
    row("host, GiB" + (" (all GPUs)" if count > 1 else ""), lambda plan, side: _gib(side.host_bytes))
    reads = [side.step.hbm_bytes for side in sides.values() if side.step is not None]
    for part in {part: None for bytes_read in reads for part in bytes_read}:  # without parts that round to 0.00
        if max(bytes_read.get(part, 0) for bytes_read in reads) >= 5e6:
            step(f"HBM, {part}, GB", lambda bound, part=part: _gb(bound.hbm_bytes.get(part, 0)))  # type: ignore[misc]
    step("HBM, all, GB", lambda bound: _gb(sum(bound.hbm_bytes.values())))
    step("PCIe, GB", lambda bound: _gb(bound.pcie_bytes))
    if count > 1:
        step("links, GB", lambda bound: _gb(bound.sent))
        row("PCIe a token, MB", lambda plan, side: "-" if side.step is None else _mb(side.step.pcie_bytes, side.batch))
        row("links a token, MB", lambda plan, side: "-" if side.step is None else _mb(side.step.sent, side.batch))
    step("step, TFLOP", lambda bound: f"{bound.flops / 1e12:.2f}")
    row("kept from the last step", lambda plan, side: f"{side.repeat_share:.0%}")
    for label, field in (
        ("HBM", "hbm_seconds"),
        ("host gather", "gather_seconds"),
        ("PCIe", "pcie_seconds"),
        ("arithmetic", "flop_seconds"),
        *([("links", "link_seconds")] if count > 1 else []),
    ):
        step(f"{label}, ms", lambda bound, field=field: f"{getattr(bound, field) * 1e3:.1f}")  # type: ignore[misc]
    step("tokens/s, predicted", lambda bound: f"{bound.tokens_per_second:,.0f}")
    step("tokens/s, at most", lambda bound: f"{bound.bound_tokens_per_second:,.0f}")
    row("prefill, s", lambda plan, side: f"{side.prefill.seconds:.2f}")
    if count > 1:
        row("prefill, links, s", lambda plan, side: f"{side.prefill.link_seconds:.2f}")
    row("compression, s", lambda plan, side: f"{side.prefill.compress_seconds:.3f}")
    row("first token of a stored state, ms", lambda plan, side: f"{side.prefill.first_token_seconds * 1e3:.0f}")
    ratio = {name: None if side is plan.full else plan.ratio_of(side) for name, side in sides.items()}
    table.append(("to full attention", *("-" if one is None else f"{one:.2f}" for one in ratio.values())))
    shards = plan.workload.shards
    each = plan.gpu.name if shards is None else f"each of {count} {plan.gpu.name}, tp={count}, left={shards.left}"
    show_table([each, *sides], table, right=True)


def _fraction(plan: "CapacityPlan", side: "PolicyPlan") -> str:
    """Return the smallest XLA_PYTHON_CLIENT_MEM_FRACTION that holds the plan, as text."""
    needed = math.ceil((side.device_bytes - plan.reserve_bytes) / plan.gpu.memory_bytes * 1000) / 1000
    return "default" if needed <= XLA_SHARE else f"{needed:.3f}" if side.fits else "-"


def _notes(plans: list["CapacityPlan"]) -> list[str]:
    """Return the assumptions behind the figures, one sentence each."""
    from jshadow.cache.system_memory import POOL_VARIABLE, pool_gib
    from jshadow.planner.prefill_time import PREFILL_SHARE

    first = plans[0]
    rates = [(plan.gpu, plan.gpu.hbm_bytes_per_second / 1e9, plan.gpu.pcie_bytes_per_second / 1e9) for plan in plans]
    sheets = [
        f"{gpu.name} {hbm:,.0f} GB/s HBM, {pcie:g} GB/s PCIe, {gpu.flops / 1e12:g} TFLOP/s" for gpu, hbm, pcie in rates
    ]
    lines = [
        f"Rates from data sheets, nothing measured on a GPU: {'; '.join(sheets)}.",
        "Predicted: reading, gathering, moving and computing take place one after the other. At most: all at once.",
        f"Prefill and compression: one request, at {PREFILL_SHARE:.0%} of the sheet's operations (assumed).",
        "First token of a stored state: its device bytes cross PCIe from host memory, then one decode step of one row.",
        "XLA memory fraction: set XLA_PYTHON_CLIENT_MEM_FRACTION to it; XLA takes 0.75 by itself.",
    ]
    if first.count > 1:
        rates_text = "; ".join(f"{plan.gpu.name} {plan.gpu.nvlink_bytes_per_second / 1e9:g} GB/s" for plan in plans)
        lines.append(f"Links: bytes that one GPU sends in a ring. Between GPUs: {rates_text}.")
    for plan in plans:
        sides = {name.replace("\n", " "): side for name, side in _sides_of(plan).items()}
        lines += [f"{plan.gpu.name}, {name}, {side.fetch_reason}." for name, side in sides.items() if side.fetch_reason]
        gather, link = plan.gpu.gather_bytes_per_second, plan.gpu.pcie_bytes_per_second
        if gather < link and any(side.step and side.step.gather_seconds for side in sides.values()):
            lines.append(
                f"device_put cannot reach PCIe on {plan.gpu.name}: the host gathers {gather / 1e9:g} GB/s (--gather), "
                f"and PCIe moves {link / 1e9:g} GB/s."
            )
    host = max(side.host_bytes for plan in plans for side in (plan.chosen, *plan.beside.values()))
    pool = pool_gib()
    if host > pool * GIB:
        lines.append(f"{POOL_VARIABLE}: {pool} here, {math.ceil(host / GIB)} for the largest of these.")
    if first.chosen.fallback:
        lines.append(f"generate falls back: {first.chosen.fallback}.")
    return lines


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _mb(size: int, tokens: int) -> str:
    """Format the bytes of each of some tokens as MB (10^6)."""
    return f"{size / tokens / 1e6:,.1f}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f}"
