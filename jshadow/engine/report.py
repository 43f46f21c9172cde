"""The report of a generation: measured bytes, counted tokens, and seconds, with compilation counted separately."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import Array

from jshadow.cache.accounting import FETCH_QUANTUM, state_nbytes
from jshadow.cache.state import Counters, KVState
from jshadow.models.config import ModelConfig
from jshadow.policies.settings import policy_settings

_COMPILE_EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """Seconds that JAX spent tracing, lowering and compiling, and how many programs it compiled, in this process."""

    seconds = 0.0
    programs = 0

    @classmethod
    def on_event(cls, event: str, duration_secs: float, **_: Any) -> None:
        """Add the duration of a JAX monitoring event if it belongs to compilation."""
        if event in _COMPILE_EVENTS:
            cls.seconds += duration_secs
            cls.programs += event == _COMPILE_EVENTS[-1]


class PhaseClock:
    """Seconds of the phases of a generation, without those of compilation.

    Attributes:
        compile_seconds: seconds of tracing, lowering and compiling in all phases.
    """

    def __init__(self) -> None:
        self.seconds, self.compile_seconds = {"prefill": 0.0, "decode": 0.0}, 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the context to a phase."""
        start, compiled = time.perf_counter(), CompileClock.seconds
        try:
            yield
        finally:
            spent = CompileClock.seconds - compiled
            self.compile_seconds += spent
            self.seconds[name] += max(0.0, time.perf_counter() - start - spent)

    def rate(self, tokens: int) -> float | None:
        """Return the tokens of a second of the phase "decode", or None if that phase took no time."""
        return tokens / self.seconds["decode"] if self.seconds["decode"] else None


jax.monitoring.register_event_duration_secs_listener(CompileClock.on_event)


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of one row of a generation.

    Bytes are those that the row takes in the state, at its allocated capacity.

    Attributes:
        policy: the resolved policy that ran.
        fetch: the fetch mode.
        fetch_reason: a sentence that says why fetch="auto" chose the mode. None if the mode was given, or is that of
            the state that was continued.
        prompt_tokens: number of tokens in the prompt. If a state was continued, only those of this turn.
        generated_tokens: number of sampled tokens, including a stop token or the tokens of a stop string.
        attended_tokens: number of tokens that a query attended to, as a mean over decode steps, heads and the layers
            that attend. It includes the window, outliers and generated tokens. None if no step ran.
        attended_parts: number of tokens of each part that the last query attended to, as a mean over the same layers
            and heads. The parts are "selected", "outliers", "window" (without generated tokens) and "generated". Empty
            if no step ran.
        device_bytes: KV bytes in device memory.
        host_bytes: KV bytes in host memory.
        full_bytes: KV bytes of full attention at the same capacity.
        bytes_fetched: bytes moved from host to device in this generation.
        hit_rate: share of the selected units (such as chunks) that the previous step had also selected. None if the
            policy selects nothing.
        prefill_seconds: seconds of the prefill of the whole batch, without compilation.
        decode_seconds: seconds of the decode steps of the whole batch, without compilation.
        compile_seconds: seconds of tracing, lowering and compiling, for the whole batch.
        decode_tokens_per_second: tokens per second of the whole batch. None if no step ran.
        verified_steps: steps in which the offloaded path was compared with the resident path. None without `verify`.
        fallback: why a dense cache was used instead of the policy, or None.
        prefill: the attention of the prompt: "exact", or the sparse attention with its settings. None if a state was
            continued.
        device_kind: the device that holds the state, as JAX names it ("NVIDIA H100 80GB HBM3").
        dtype: dtype of the weights and the cache.
        large_cache: a sentence about the largest parts of the state if it takes more device bytes than full attention,
            else None.
        cycles: cycles of speculation. Each gave one token or more. None without `speculate`.
        proposed_tokens, accepted_tokens: tokens that the drafter proposed, and how many of them were kept; or None.
    """

    policy: Any
    fetch: str
    prompt_tokens: int
    generated_tokens: int
    attended_tokens: float | None
    attended_parts: dict[str, float]
    device_bytes: int
    host_bytes: int
    full_bytes: int
    bytes_fetched: int
    hit_rate: float | None
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    decode_tokens_per_second: float | None
    fallback: str | None
    verified_steps: int | None = None
    prefill: str | None = "exact"
    device_kind: str = ""
    dtype: str = ""
    fetch_reason: str | None = None
    large_cache: str | None = None
    cycles: int | None = None
    proposed_tokens: int | None = None
    accepted_tokens: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as values for JSON. The policy is given by its name and settings."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"policy": {"name": self.policy.name, **policy_settings(self.policy)}}


def measured_bytes(state: KVState) -> dict[str, int]:
    """Return the KV bytes of a state in each memory: {"device": bytes, "host": bytes}."""
    sizes = {"device": 0, "host": 0}
    for leaf in jax.tree.leaves((state.layers, state.shared, state.fitted)):
        sizes["device" if leaf.sharding.memory_kind in (None, "device") else "host"] += leaf.nbytes
    return sizes


def explain_large_cache(state: KVState, device_bytes: int, dense_bytes: int) -> str | None:
    """Return a sentence about the largest parts of a state, or None if it is not larger than a dense cache.

    Args:
        dense_bytes: bytes of one row of full attention at the same capacity.
    """
    if device_bytes <= dense_bytes:
        return None
    parts = {name: device // state.batch for name, (device, _) in state_nbytes(state).items()}
    if "host rows" in parts:  # a resident state has them on the device
        parts["rows that an offloading fetch mode keeps on the host"] = parts.pop("host rows")
    largest = sorted(parts, key=lambda name: -parts[name])[:2]
    return (
        f"{state.policy.name} takes {device_bytes / dense_bytes:.2f} times the device bytes of full attention at "
        f"capacity={state.capacity}; its largest parts are "
        + " and ".join(f"{name} ({parts[name]:,} bytes)" for name in largest)
    )


def _parts_of_rows(state: KVState) -> list[dict[str, Array]]:
    """Return the tokens that the last query of each row attended to, by part, float32 [B], for each layer that attends.

    A recurrent layer does not.
    """
    layers = zip(state.specs, state.layers, strict=True)
    attending = ((spec, layer) for spec, layer in layers if not spec.policy.is_recurrent)
    return [spec.policy.attended_parts(spec, layer, state.lengths) for spec, layer in attending]


def attended_parts(state: KVState, generated: np.ndarray) -> list[dict[str, float]]:
    """Return the number of tokens of each part that each row's last query attended to, as a mean over layers.

    A row that holds no generated token gets {}.

    Args:
        generated: number of generated tokens that each row holds, int [B].
    """
    totals: dict[str, Any] = {}
    layers = state.each_row(_parts_of_rows) if state.shares_prompt else _parts_of_rows(state)
    for attended in layers:
        parts = {part: np.asarray(tokens, np.float64) for part, tokens in attended.items()}
        if "window" in parts:  # its newest tokens are the generated ones
            parts["generated"] = np.minimum(generated, parts["window"])
            parts["window"] = parts["window"] - parts["generated"]
        for part, tokens in parts.items():
            totals[part] = totals.get(part, 0.0) + tokens / len(layers)
    rows = [{part: float(tokens[row]) for part, tokens in totals.items()} for row in range(state.batch)]
    return [parts if count else {} for parts, count in zip(rows, generated.tolist(), strict=True)]


def row_figures(before: Counters, after: Counters, row: int, config: ModelConfig) -> dict[str, Any]:
    """Return attended_tokens, hit_rate and bytes_fetched of one row, for the time between two readings of the counters.

    Args:
        before: the counters at the first reading, as NumPy arrays [B].
        after: the counters at the second reading.
        row: index of the row.
    """

    def gained(name: str) -> Any:
        new, old = (np.asarray(getattr(counters, name))[row] for counters in (after, before))
        return float(new - old) if name == "attended" else int(np.uint32(np.int64(new) - np.int64(old)))

    steps, selected = gained("steps"), gained("selected")
    attending = sum(not kind.recurrent for kind in config.attention_kinds)
    return {
        "attended_tokens": gained("attended") / (steps * attending) if steps and attending else None,
        "hit_rate": gained("hits") / selected if selected else None,
        "bytes_fetched": gained("fetched") * FETCH_QUANTUM,
    }
