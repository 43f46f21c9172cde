"""`jshadow bench layer | decode | prefill | ceilings`: measured times, and the peak rates of the machine."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jshadow.cli.compile_cache import CacheOptions
from jshadow.cli.console import show_table
from jshadow.cli.fields import Command, option
from jshadow.cli.options import FETCH_HELP, MODEL_HELP, check_least
from jshadow.errors import ConfigError

if TYPE_CHECKING:
    from jshadow.evaluation.speed import Shape, System

ABOUT = """Measure on this machine. Absolute times drift where cores are shared: compare within one run."""
POLICIES_HELP = "NAME or NAME:key=value:..., comma list"
DTYPE_HELP = "float32 or bfloat16"
WIDTH = 140  # of the tables


@dataclasses.dataclass(kw_only=True)
class Layer(CacheOptions, Command):
    """One decode step of one layer's attention on random keys and values.

    bound: bytes moved at the measured read rate, and operations at the measured product rate.
    """

    context: str = option("prompt tokens, comma list", "131072")
    batch: int = option("rows", 1)
    heads: int = option("query heads", 32)
    kv_heads: int = option("key and value heads", 8)
    head_dim: int = option("width of a head", 128)
    repeats: int = option("timed calls; their median is printed", 10)
    dtype: str = option(DTYPE_HELP, "bfloat16")
    policies: str = option(POLICIES_HELP, "full,shadowkv")
    fetch: str = option(FETCH_HELP, "auto")

    def shapes(self) -> list["Shape"]:
        """Return the shape of each context. Raises ConfigError for an option that is out of range."""
        from jshadow.evaluation.speed import Shape

        check_least(self, 1, "repeats")
        _check_dtype(self.dtype)
        contexts = list(dict.fromkeys(part.strip() for part in self.context.split(",")))
        if not all(part.isdecimal() for part in contexts):
            raise ConfigError(f"--context must be a comma list of token counts, got {self.context!r}")
        sizes = (self.batch, self.heads, self.kv_heads, self.head_dim, self.dtype)
        return [Shape(int(context), *sizes) for context in contexts]

    def run(self) -> int:
        """Return 0 when all settings are measured."""
        from jshadow.evaluation.speed import bench_layer, ceilings

        shapes, policies = self.shapes(), policies_of(self.policies)
        best = ceilings(3)
        rows = [
            {"setting": text} | bench_layer(shape, policy, self.fetch, self.repeats)
            for shape in shapes
            for text, policy in policies
        ]
        for row in rows:
            row["bound_seconds"] = bound(row, best, self.dtype)
        if self.json:
            return tell_json(ceilings=best, results=rows)
        for shape in shapes:
            print_rows([row for row in rows if row["context"] == shape.context], shape.context)
        print_growth(rows)
        print_ceilings(best)
        return 0


@dataclasses.dataclass(kw_only=True)
class _Model(CacheOptions, Command):
    part: ClassVar[str]
    model: str = option(MODEL_HELP, positional=True, required=True)
    tokens: int = option("tokens of each prompt", 4096)
    batch: int = option("prompts", 1)
    steps: int = option("tokens fed after the prompt", 24)
    runs: int = option("processes of each system", 3)
    dtype: str = option(DTYPE_HELP, "float32")
    policies: str = option(POLICIES_HELP, "full,shadowkv")
    fetch: str = option("auto, resident, device_put, zero_copy, comma list", "auto")

    def others(self) -> Sequence["System"]:
        """Return the systems that are timed beside jshadow."""
        return ()

    def run(self) -> int:
        """Return 1 if a setting of jshadow could not be measured, else 0."""
        from jshadow.evaluation.speed import Request, bench_model, ceilings

        _check_dtype(self.dtype)
        request = Request(self.model, self.tokens, self.batch, self.steps, self.dtype)

        def progress(system: str) -> None:
            print(f"running {system} ...", file=sys.stderr, flush=True)

        policies, fetches = policies_of(self.policies), [part.strip() for part in self.fetch.split(",")]
        rows = bench_model(request, policies, fetches, runs=self.runs, others=self.others(), progress=progress)
        best = ceilings(3)
        for row in rows:
            known = row["flops"] is not None
            row["bound_seconds"] = bound(row, best, self.dtype) if known else None
            row["prefill_bound_seconds"] = row["prefill_flops"] / best[f"matmul_{self.dtype}"] if known else None
        if self.json:
            tell_json(ceilings=best, results=rows)
        else:
            _print_model(rows, self.part, self.tokens * self.batch)
            print_ceilings(best)
        return int(any(row["error"] is not None and row["fetch"] is not None for row in rows))


@dataclasses.dataclass(kw_only=True)
class Decode(_Model):
    """Measure decode steps of a checkpoint on random tokens.

    Each policy runs in processes of its own, in turn; its first answer compiles and warms up, its second counts.
    """

    part: ClassVar[str] = "decode"


@dataclasses.dataclass(kw_only=True)
class Prefill(_Model):
    """Measure the prefill of a checkpoint on random tokens.

    Each policy runs in processes of its own, in turn; its first answer compiles and warms up, its second counts.
    """

    part: ClassVar[str] = "prefill"


@dataclasses.dataclass(kw_only=True)
class Ceilings(CacheOptions, Command):
    """Bytes a second read and copied, operations a second in products; with a GPU, the bus too."""

    repeats: int = option("timed calls; the best one counts", 10)

    def run(self) -> int:
        """Return 0 when all rates are measured."""
        from jshadow.evaluation.speed import ceilings

        check_least(self, 1, "repeats")
        rates = ceilings(self.repeats)
        if self.json:
            return tell_json(ceilings=rates)
        rows = [
            (name, f"{value / 1e9:,.1f} {'GFLOP' if name.startswith('matmul') else 'GB'}")
            for name, value in rates.items()
        ]
        show_table(["ceiling", "a second"], rows, width=WIDTH)
        return 0


def _check_dtype(dtype: str) -> None:
    """Raise ConfigError for a dtype whose products are not measured."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"--dtype must be float32 or bfloat16, got {dtype!r}")


def policies_of(text: str) -> list[tuple[str, Any]]:
    """Return the policies of a comma list, each with its text. Raises ConfigError for an unknown policy or setting."""
    from jshadow.policies import parse_policy, split_policy

    return [(part, parse_policy(*split_policy(part))) for part in text.split(",")]


def bound(row: dict[str, Any], best: dict[str, float], dtype: str) -> float:
    """Return the seconds that a row's bytes and operations take at the measured rates of this machine.

    It adds the time of the reads from device memory, the time of the transfers from the host and the time of the
    operations, as if they did not overlap. The rates `best` come from `ceilings`.
    """
    bus = row["bytes_fetched"] / best.get("host_to_device", best["read"])
    return float(row["bytes_read"] / best["read"] + bus + row["flops"] / best[f"matmul_{dtype}"])


def tell_json(**results: Any) -> int:
    """Print the machine and some results as one JSON object, and return 0."""
    from jshadow.evaluation.machine import machine

    print(json.dumps({"machine": machine(), **results}))
    return 0


def _print_model(rows: list[dict[str, Any]], part: str, tokens: int) -> None:
    """Print the table of `decode` or `prefill`, with a line for each setting that was not measured."""
    from jshadow.evaluation.speed import label_of

    decode = part == "decode"
    name, least, most, limit = (
        ("step_seconds", "least", "most", "bound_seconds")
        if decode
        else ("prefill_seconds", "prefill_least", "prefill_most", "prefill_bound_seconds")
    )
    there = [row for row in rows if row["error"] is None]
    first = min(there, key=lambda row: (row["fetch"] is not None, row["policy"] != "full"), default={"setting": "-"})
    unit, scale = ("step, ms", 1e3) if decode else ("prefill, s", 1.0)
    titles = ("", unit, "least to most", "tokens/s", f"{first['setting']} / this", "to its bound")
    table: list[Sequence[str]] = []
    for row in rows:
        if row["error"] is not None:
            table.append((label_of(row), "not measured"))
            continue
        rate = row["tokens_per_second"] if decode else tokens / row[name]
        cells = (
            f"{row[name] * scale:.2f}",
            f"{row[least] * scale:.2f} to {row[most] * scale:.2f}",
            f"{rate:,.1f}",
            f"{first[name] / row[name]:.2f}",
            f"{row[name] / row[limit]:.2f}" if row[limit] else "",
            *(
                "" if row[size] is None else f"{row[size] / 1e6:,.1f}"
                for size in ("bytes_device", "bytes_host", "bytes_moved")
            ),
        )
        table.append((label_of(row), *cells))
    show_table([*titles, "device MB", "host MB", "moved MB a step"], table, width=WIDTH)
    for row in rows:
        if row["fallback"]:
            print(f"{row['setting']}: {row['fallback']}")
        if row["error"]:
            print(f"{label_of(row)}: not measured: {row['error']}")


def print_rows(rows: list[dict[str, Any]], context: int) -> None:
    """Print the table of `layer` for one context length. Ratios are to the fastest dense row, else to the first row."""
    from jshadow.evaluation.speed import label_of

    dense = [row for row in rows if row["policy"] == "full" or row["fetch"] is None]
    first = min(dense, key=lambda row: row["step_seconds"]) if dense else rows[0]
    compared = f"{'dense' if dense else first['setting']} / this"
    titles = (f"{context:,} tokens", "step, ms", "least to most", compared, "to its bound")
    table = [
        (
            label_of(row),
            *milliseconds(row),
            f"{first['step_seconds'] / row['step_seconds']:.2f}",
            times_bound(row),
            *(f"{row[name] / 1e6:,.1f}" for name in ("bytes_device", "bytes_host", "bytes_moved")),
        )
        for row in rows
    ]
    show_table([*titles, "device MB", "host MB", "moved MB"], table, width=WIDTH)


def milliseconds(row: dict[str, Any]) -> tuple[str, str]:
    """Return the median of a row's times, and their range, in milliseconds."""
    return f"{row['step_seconds'] * 1e3:.1f}", f"{row['least'] * 1e3:.1f} to {row['most'] * 1e3:.1f}"


def times_bound(row: dict[str, Any]) -> str:
    """Return the ratio of a row's time to its bound, or "" if the bound is zero."""
    return f"{row['step_seconds'] / row['bound_seconds']:.2f}" if row["bound_seconds"] else ""


def print_growth(rows: list[dict[str, Any]]) -> None:
    """Print the ratio of the step times at the longest and the shortest context, for each setting."""
    shortest, longest = (pick(row["context"] for row in rows) for pick in (min, max))
    if shortest == longest:
        return
    grown = []
    for row in rows:
        if row["context"] == longest:
            before = next(r for r in rows if r["context"] == shortest and r["setting"] == row["setting"])
            grown.append(f"{row['setting']} {row['step_seconds'] / before['step_seconds']:.2f}")
    print(f"times as long at {longest:,} as at {shortest:,} tokens: {', '.join(grown)}")


def print_ceilings(best: dict[str, float]) -> None:
    """Print the measured rates that the bounds are computed from."""
    rates = ", ".join(f"{name} {value / 1e9:,.1f} G/s" for name, value in best.items())
    print(f"bounds from the rates measured on this machine: {rates}")
