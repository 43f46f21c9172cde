"""The table that `jshadow generate` prints below an answer."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from jshadow.engine.generation import Generation
    from jshadow.engine.report import Report


def is_right(generation: "Generation", expected: str) -> bool:
    """Return whether an answer has the expected text in it."""
    return expected in (generation.text or "")


def figures(results: Sequence["Generation"], expected: str | None = None) -> "Table":
    """Return a table of the figures of one or more generations, with one column for each policy.

    Args:
        results: the generations.
        expected: the text that a right answer has in it, for a row of ticks and crosses. None: there is no such row.
    """
    from rich.table import Table

    table = Table(title=None)
    table.add_column("")
    for generation in results:
        table.add_column(generation.report.policy.name, overflow="fold")

    def row(label: str, value: Callable[[Any], str]) -> None:
        table.add_row(label, *(value(generation) for generation in results))

    def optional(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    row("answer", lambda m: (m.text or "").strip())
    if expected is not None:
        row(f"right ({expected})", lambda m: "✓" if is_right(m, expected) else "✗")
    for label, name in (("device", "device_kind"), ("dtype", "dtype")):
        if any(hasattr(generation.report, name) for generation in results):
            row(label, lambda m, name=name: str(getattr(m.report, name, "-")))  # type: ignore[misc]
    row("prompt tokens", lambda m: f"{m.report.prompt_tokens:,}")
    row("tokens attended a step", lambda m: optional(m.report.attended_tokens, "{:,.1f}"))
    row("of these, in the last step", lambda m: parts_text(m.report.attended_parts))
    row("KV bytes on the device", lambda m: f"{m.report.device_bytes:,}")
    row("KV bytes on the host", lambda m: f"{m.report.host_bytes:,}")
    row("device bytes, full / this", lambda m: f"{m.report.full_bytes / m.report.device_bytes:.2f}")
    row("repeat share", lambda m: optional(m.report.hit_rate, "{:.1%}"))
    row("prefill", lambda m: m.report.prefill or "-")
    row("prefill seconds", lambda m: f"{m.report.prefill_seconds:.2f}")
    row("decode tokens/s", lambda m: optional(m.report.decode_tokens_per_second, "{:.1f}"))
    if any(generation.report.cycles is not None for generation in results):
        row("speculation", lambda m: speculation_text(m.report))
    row("compile seconds", lambda m: f"{m.report.compile_seconds:.2f}")
    row("fetch", lambda m: m.report.fetch if m.report.host_bytes or m.report.fetch == "resident" else "-")
    row("fallback", lambda m: str(m.report.fallback))
    if any(generation.report.verified_steps is not None for generation in results):
        row("verified steps", lambda m: optional(m.report.verified_steps, "{:,}"))
    return table


def parts_text(parts: dict[str, float]) -> str:
    """Return a text such as "256 selected, 384 outliers" of the parts that are not empty."""
    return ", ".join(f"{tokens:,.4g} {name.replace('_', ' ')}" for name, tokens in parts.items() if tokens) or "-"


def speculation_text(report: "Report") -> str:
    """Return a text such as "2.4 tokens a cycle, 57 of 80 proposed tokens kept", or "-" without speculation."""
    if not report.cycles:
        return "-"
    tokens = (report.cycles + (report.accepted_tokens or 0)) / report.cycles
    return f"{tokens:.2f} tokens a cycle, {report.accepted_tokens:,} of {report.proposed_tokens:,} proposed kept"


def notes(results: Sequence["Generation"]) -> list[str]:
    """Return the sentences below the table.

    They say why a policy takes more memory than full attention, what offloading costs on a CPU, and why a fetch mode
    was chosen on an accelerator.
    """
    import jax

    sentences = [sentence for one in results if (sentence := why_larger(one.report))]
    if jax.default_backend() == "cpu" and any(one.report.host_bytes for one in results):
        sentences.append(
            "On a CPU, offloading costs time and saves nothing: host memory and device memory are the same memory."
        )
    if jax.default_backend() != "cpu":
        sentences += [f"fetch {one.report.fetch_reason}." for one in results if one.report.fetch_reason]
    return sentences


def why_larger(report: "Report") -> str | None:
    """Return a sentence for a policy that takes more device memory than full attention, or None if it takes less."""
    if report.device_bytes <= report.full_bytes:
        return None
    tokens = report.prompt_tokens + report.generated_tokens
    sentence = (
        f"{report.policy.name} takes more device memory than full attention because what it adds to keys and values "
        f"outweighs what it leaves out of {tokens:,} tokens"
    )
    return sentence + (", and fetch=resident moves nothing to the host." if report.fetch == "resident" else ".")
