"""The fetch mode that `fetch="auto"` stands for: the fastest one, as predicted, of those that fit into memory."""

from collections.abc import Sequence
from typing import NamedTuple

from jshadow.cache.offload import FETCH_MODES
from jshadow.cache.spec import CacheSpec
from jshadow.planner.gpu_specs import GIB
from jshadow.planner.limits import MemoryLimits


class ModeFigures(NamedTuple):
    """The predicted figures of one fetch mode.

    Attributes:
        fetch: the fetch mode, one of FETCH_MODES.
        rows: number of requests. 0: not one request fits.
        device_bytes: bytes that these requests need in device memory, with weights and temporaries.
        host_bytes: bytes that they need in host memory.
        tokens_per_second: predicted tokens per second of all requests together.
        refusal: "" if a GPU serves the mode in its own way. Otherwise the settings that prevent it, as text.
    """

    fetch: str
    rows: int
    device_bytes: int
    host_bytes: int
    tokens_per_second: float
    refusal: str = ""


class FetchChoice(NamedTuple):
    """A fetch mode and the reason for it.

    Attributes:
        fetch: the fetch mode.
        reason: a sentence with the figures that decided. None if the caller asked for the mode.
    """

    fetch: str
    reason: str | None


def choose_fetch(modes: Sequence[ModeFigures], limits: MemoryLimits) -> FetchChoice:
    """Return the fetch mode with the most predicted tokens per second, and a sentence that says why.

    A mode must be served and fit into both memories. If no mode does, the result is the served mode that needs the
    least device memory. If modes are equal, the first of them in FETCH_MODES is chosen. At least one must be served.
    """
    served = sorted((mode for mode in modes if not mode.refusal), key=lambda mode: FETCH_MODES.index(mode.fetch))
    fitting = [mode for mode in served if _why_no_fit(mode, limits) is None]
    if fitting:
        best = max(fitting, key=lambda mode: mode.tokens_per_second)
        memories = f"{best.device_bytes / GIB:.1f} of {(limits.device or 0) / GIB:.1f} GiB of device memory"
        if best.host_bytes:
            memories += f" and {best.host_bytes / GIB:.1f} GiB of host memory"
        reason = f"{best.fetch}: {requests(best.rows)} fit into {memories}, {speed(best)}"
    else:
        best = min(served, key=lambda mode: mode.device_bytes)
        reason = f"{best.fetch}: no mode fits, and this one needs the least device memory"
    others = []
    for mode in modes:
        if mode.refusal:
            others.append(f"{mode.fetch} has no kernel for {mode.refusal}")
        elif (missing := _why_no_fit(mode, limits)) is not None:
            others.append(f"{mode.fetch} {missing}")
        elif mode is not best:
            others.append(f"{mode.fetch} {speed(mode)} with {requests(mode.rows)}")
    return FetchChoice(best.fetch, reason + (f" ({'; '.join(others)})" if others else ""))


def _why_no_fit(mode: ModeFigures, limits: MemoryLimits) -> str | None:
    """Return the memory that a mode lacks as text, or None if its requests fit."""
    if mode.rows == 0:
        return "holds no request"
    for name, needed, limit in limits.excess((mode.device_bytes, mode.host_bytes)):
        return f"needs {needed / GIB:.1f} of {limit / GIB:.1f} GiB of {name} memory"
    return None


def speed(mode: ModeFigures) -> str:
    """Return the predicted speed of a mode as text."""
    return f"predicted {mode.tokens_per_second:,.0f} tokens/s"


def requests(rows: int) -> str:
    """Return the number of requests as text: "1 request", "2 requests"."""
    return f"{rows:,} request" + ("" if rows == 1 else "s")


def offloads(specs: Sequence[CacheSpec]) -> bool:
    """Return whether any layer has rows that a fetch mode can keep in host memory."""
    return any(spec.policy.host_layout(spec) is not None for spec in specs)


def kernel_refusal(specs: Sequence[CacheSpec]) -> str:
    """Return "" if one GPU kernel fetches the rows of each layer with "zero_copy", or else the settings without one.

    No kernel fetches rows that hold keys as well as values. Such rows are gathered on the host in both modes.
    """
    for spec in specs:
        layout = spec.policy.host_layout(spec)
        if layout is None:
            continue
        if layout.no_kernel:
            return f"{spec.policy.name} with {layout.no_kernel}"
        if layout.planes > 1:
            return f"{spec.policy.name}, which keeps keys beside the values"
    return ""
