"""The tables that `jshadow plan` prints for GPUs."""

import math
from collections.abc import Callable
from typing import Any

from rich.table import Table

from jshadow.cache.host_memory import POOL_VARIABLE, pool_gib
from jshadow.planner.gpu import CapacityPlan, PolicyPlan
from jshadow.planner.gpu_specs import GIB
from jshadow.planner.machine import XLA_SHARE
from jshadow.planner.prefill_time import PREFILL_SHARE


def bytes_text(device: int, host: int) -> str:
    """Return a text of device bytes, and of host bytes with a mark, or "0" if there are none."""
    return (f"{device:,}" if device else "") + (f"{host:,} (host)" if host else "") or "0"


def sides_of(plan: CapacityPlan) -> dict[str, PolicyPlan]:
    """Return the planned policies by their column titles: the chosen one, those beside it, and full attention."""
    name = plan.chosen.policy.name
    beside = {f"{name}\n{other}": side for other, side in plan.beside.items()}
    return {name: plan.chosen} | beside | ({"full": plan.full} if name != "full" else {})


def parts_table(plan: CapacityPlan) -> Table:
    """Return the table of the bytes of one request by part. These bytes do not depend on the GPU."""
    where = "" if plan.count == 1 else f", on one of {plan.count} GPUs"
    sides = sides_of(plan)
    table = Table(f"bytes of one request of {plan.workload.context:,} tokens{where}", *sides)
    for part in dict.fromkeys(part for side in sides.values() for part in side.row_parts):
        sizes = (side.row_parts.get(part) for side in sides.values())
        table.add_row(part, *("" if size is None else bytes_text(*size) for size in sizes))
    table.add_row("device, all parts", *(f"{side.row_bytes[0]:,}" for side in sides.values()))
    return table


def plan_table(plan: CapacityPlan) -> Table:
    """Return the table of one GPU, or of each of several equal ones, with a column for each policy."""
    count, sides = plan.count, sides_of(plan)
    table = Table(plan.gpu.name if count == 1 else f"each of {count} {plan.gpu.name}, {mesh_text(plan)}")
    for name in sides:
        table.add_column(name, justify="right")

    def row(label: str, value: Callable[[CapacityPlan, PolicyPlan], str]) -> None:
        table.add_row(label, *(value(plan, side) for side in sides.values()))

    def step(label: str, value: Callable[[Any], str]) -> None:
        row(label, lambda plan, side: "-" if side.step is None else value(side.step))

    row("memory, GiB", lambda plan, side: f"{plan.gpu.memory_bytes / GIB:.1f}")
    row("fetch", lambda plan, side: side.fetch)
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
    for part in {part: None for bytes_read in reads for part in bytes_read}:  # without parts that round to 0.00
        if max(bytes_read.get(part, 0) for bytes_read in reads) >= 5e6:
            step(f"HBM, {part}, GB", lambda bound, part=part: gb(bound.hbm_bytes.get(part, 0)))  # type: ignore[misc]
    step("HBM, all, GB", lambda bound: gb(sum(bound.hbm_bytes.values())))
    step("PCIe, GB", lambda bound: gb(bound.pcie_bytes))
    if count > 1:
        step("links, GB", lambda bound: gb(bound.sent))
        row("PCIe a token, MB", lambda plan, side: "-" if side.step is None else mb(side.step.pcie_bytes, side.batch))
        row("links a token, MB", lambda plan, side: "-" if side.step is None else mb(side.step.sent, side.batch))
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
    row("to full attention", lambda plan, side: "-" if side is plan.full else ratio_text(plan.ratio_of(side)))
    return table


def mesh_text(plan: CapacityPlan) -> str:
    """Return the sizes of a mesh as text: "tp=4, left=split"."""
    shards = plan.workload.shards
    return "" if shards is None else f"tp={shards.tp}, left={shards.left}"


def ratio_text(ratio: float | None) -> str:
    """Format a ratio with two decimals. None becomes "-"."""
    return "-" if ratio is None else f"{ratio:.2f}"


def fraction(plan: CapacityPlan, side: PolicyPlan) -> str:
    """Return the smallest XLA_PYTHON_CLIENT_MEM_FRACTION that holds the plan, as text.

    It is "default" if XLA's own share is enough. Otherwise, it is "-" if the plan does not fit the GPU.
    """
    needed = math.ceil((side.device_bytes - plan.reserve_bytes) / plan.gpu.memory_bytes * 1000) / 1000
    return "default" if needed <= XLA_SHARE else f"{needed:.3f}" if side.fits else "-"


def notes(plans: list[CapacityPlan]) -> list[str]:
    """Return the assumptions behind the figures, one sentence each."""
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
        sides = {name.replace("\n", " "): side for name, side in sides_of(plan).items()}
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


def gib(size: int) -> str:
    """Format bytes as GiB with two decimals."""
    return f"{size / GIB:.2f}"


def mb(size: int, tokens: int) -> str:
    """Format bytes for each of some tokens as MB (10^6) with one decimal."""
    return f"{size / tokens / 1e6:,.1f}"


def gb(size: int) -> str:
    """Format bytes as GB (10^9) with two decimals."""
    return f"{size / 1e9:.2f}"
