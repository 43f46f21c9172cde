"""A check at run time that offloading changes nothing: the resident path runs beside the offloaded path.

There are two comparisons at each step. In the first, each layer of both paths gets the same queries, keys and values.
The selection and the fetched rows must be equal bit by bit. The rebuilt keys and the attention's output must be equal
up to the dtype's rounding. The error names the layer that differs. In the second comparison, another resident state
runs on its own. Its logits must stay within the dtype's tolerance.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jshadow.cache.records import Fetched, HostArray, HostTier, LayerState, StepKV
from jshadow.cache.spec import CacheSpec
from jshadow.cache.state import KVState, Reads, Writes
from jshadow.engine.step import COMPILER_OPTIONS, AllLayers, LayerWork, step_layer, step_state, step_writes, turn_piece
from jshadow.errors import StateMismatch, VerificationError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of
from jshadow.weights.digest import host_array
from jshadow.weights.params import Params

# The largest difference that rounding may cause, as a share of the largest number that is compared.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.005}
BITS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}


class Finding(NamedTuple):
    """One comparison of a layer: where it failed, bool [B, heads], and the first bad unit, int32 [B, heads] or None."""

    bad: Array
    unit: Array | None = None


class LayerFindings(NamedTuple):
    """The comparisons of one layer. A fault shows first in the first of them that it affects."""

    selected: Finding | None = None
    values: Finding | None = None
    keys: Finding | None = None
    attention: Finding | None = None


NAMES = ("selected chunks", "fetched values", "keys", "attention outputs")


def _differs(mine: Array, theirs: Array) -> Array:
    """Whether two arrays differ in any bit, elementwise. A NaN is equal to itself."""
    if jnp.issubdtype(mine.dtype, jnp.floating):
        bits = BITS[mine.dtype.itemsize]
        mine, theirs = lax.bitcast_convert_type(mine, bits), lax.bitcast_convert_type(theirs, bits)
    return mine != theirs


def _far(mine: Array, theirs: Array, axes: tuple[int, ...], dtype: str) -> Array:
    """Whether arrays differ by more than rounding, reduced over axes. A NaN differs from everything."""
    mine, theirs = mine.astype(jnp.float32), theirs.astype(jnp.float32)
    limit = TOLERANCE[dtype] * jnp.maximum(jnp.abs(theirs).max(axis=axes, keepdims=True), 1e-3)
    return ~(jnp.abs(mine - theirs) <= limit).all(axis=axes)


def _compare_fetch(spec: CacheSpec, mine: Fetched, theirs: Fetched) -> LayerFindings:
    """Compare two fetches of the same layer. Rows that are not attended to may hold any values."""
    units = mine.ids.shape[2]
    valid = mine.valid.reshape(*mine.ids.shape, -1).any(-1)
    chosen = (_differs(mine.ids, theirs.ids) & valid).any(-1) | _differs(mine.valid, theirs.valid).any(-1)
    wrong = _differs(mine.v, theirs.v) & mine.valid[..., None]
    wrong = wrong.reshape(*wrong.shape[:2], units, -1).any(-1)
    first = jnp.take_along_axis(jnp.broadcast_to(mine.ids, wrong.shape), wrong.argmax(-1)[..., None], 2)[..., 0]
    keys = None
    if mine.k is not None and theirs.k is not None:
        one, other = (jnp.where(mine.valid[..., None], x, 0) for x in (mine.k, theirs.k))
        keys = Finding(_far(one, other, (2, 3), spec.dtype))
    return LayerFindings(Finding(chosen), Finding(wrong.any(-1), first), keys)


def _worse(one: Finding | None, other: Finding | None) -> Finding | None:
    """Two findings of the same comparison as one: bad where either is."""
    if one is None or other is None:
        return one or other
    unit = None if one.unit is None or other.unit is None else jnp.where(one.bad, one.unit, other.unit)
    return Finding(one.bad | other.bad, unit)


class WatchedWrites(NamedTuple):
    """The changing halves of the three states that take a step together.

    Attributes:
        offloaded: of the state that is verified.
        twin: of a resident state whose layers get the inputs of the offloaded one.
        free: of a resident state that runs freely.
    """

    offloaded: Writes
    twin: Writes
    free: Writes


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("writes",), compiler_options=COMPILER_OPTIONS)
def _watched_step(
    weights: dict,
    tokens: Array,
    new: Array,
    reads: Reads,
    resident: Reads,
    writes: WatchedWrites,
    *,
    config: ModelConfig,
) -> tuple[Array, WatchedWrites, list[LayerFindings], Finding]:
    """One step of the three states; `resident` is the half that the twin and the free state read."""
    twin = KVState.of(resident, writes.twin)
    layers = list(twin.layers)
    twins = AllLayers(twin.specs, [layer.host for layer in layers])
    findings: list[LayerFindings] = []
    later: list[Any] = []

    def both(
        spec: CacheSpec, state: LayerState, step: StepKV, everyone: AllLayers
    ) -> tuple[Array, LayerState, LayerWork]:
        index = spec.layer
        assert index is not None
        out, state, work = step_layer(spec, state, step, everyone)
        same, layers[index], other = step_layer(twin.specs[index], layers[index], step, twins)
        twins.tiers[index] = layers[index].host
        later.extend(other.later)
        seen = step.valid[:, :, None, None]
        attention = Finding(_far(jnp.where(seen, out, 0), jnp.where(seen, same, 0), (1, 3), spec.dtype))
        layer_findings = LayerFindings(attention=attention)
        for fetched, twin_fetched in zip(work.fetches, other.fetches, strict=True):
            layer_findings = LayerFindings(*map(_worse, layer_findings, _compare_fetch(spec, fetched, twin_fetched)))
        findings.append(layer_findings)
        return out, state, work

    state = KVState.of(reads, writes.offloaded)
    logits, state = step_state(weights, config, tokens, new, state, run_layer=both)
    after = state.split()[1]
    for target, selection, brought in later:
        layers[target] = twin.specs[target].policy.receive(twin.specs[target], layers[target], selection, brought)
    changed = tuple((layer.live, layer.host.tail) for layer in layers)
    twin_after = Writes(changed, *jax.tree.map(jnp.copy, (after.shared, after.lengths, after.last, after.counters)))
    free_logits, free_after = step_writes(weights, config, tokens, new, resident, writes.free)
    apart = _far(logits, free_logits, (1,), reads.specs[0].dtype) & (new > 0)
    return logits, WatchedWrites(after, twin_after, free_after), findings, Finding(apart[:, None])


class Verifier:
    """Keeps the two resident states beside an offloaded one.

    Attributes:
        steps: steps (or pieces of a turn) that were verified so far.
    """

    def __init__(self, params: Params, state: KVState, resident: KVState) -> None:
        """`resident` holds what `state` holds, with its host rows on the device; it is consumed.

        Raises:
            VerificationError: rows in the host tier differ from their origin already.
        """
        if state.fetch == "resident":
            raise StateMismatch("state must be offloaded to be verified, got fetch='resident'")
        self.params, self.twin, self.free = params, resident, resident.fork()
        self.steps = 0
        for index, (layer, twin) in enumerate(zip(state.layers, resident.layers, strict=True)):
            if layer.host.prompt is None or twin.host.prompt is None:
                continue
            rows, twin_rows = host_array(layer.host.prompt.array), host_array(twin.host.prompt.array)
            bad = (rows.view(np.uint8) != twin_rows.view(np.uint8)).any(-1)
            if bad.any():
                row, head, unit = (int(x) for x in np.argwhere(bad)[0])
                raise VerificationError(
                    f"prefill, layer {index}, row {row}, KV head {head}: values of chunk {unit} in host memory differ "
                    "from those that were sent"
                )

    def step(self, tokens: Any, new: Any, state: KVState) -> tuple[Array, KVState]:
        """One verified step: tokens int32 [B, T], of which `new` [B] are real. Consumes the state.

        Raises:
            VerificationError: the first difference, with layer, head and step.
        """
        reads, writes = state.split()
        resident, twin_writes = self.twin.split()
        logits, after, findings, apart = _watched_step(
            self.params.weights,
            jnp.asarray(tokens),
            jnp.asarray(new, jnp.int32),
            reads,
            resident,
            WatchedWrites(writes, twin_writes, self.free.split()[1]),
            config=self.params.config,
        )
        self.twin, self.free = self.twin.join(after.twin), self.free.join(after.free)
        for layer, layer_findings in enumerate(jax.tree.map(np.asarray, findings)):
            for name, finding in zip(NAMES, layer_findings, strict=True):
                if finding is not None:
                    self._check(finding, f"layer {layer}", name)
        self._check(jax.tree.map(np.asarray, apart), "last layer", "logits")
        self.steps += 1
        return logits, state.join(after.offloaded)

    def extend(self, tokens: np.ndarray, lengths: np.ndarray, state: KVState) -> tuple[Array, KVState]:
        """A verified turn: tokens int32 [B, T], lengths [B]; float32 logits of each row's last new token."""
        size = turn_piece(state, tokens.shape[1])
        last = jnp.zeros((len(lengths), self.params.config.vocab_size))
        for first in range(0, tokens.shape[1], size):
            piece = np.pad(tokens[:, first : first + size], ((0, 0), (0, max(0, first + size - tokens.shape[1]))))
            new = np.clip(lengths - first, 0, size)
            logits, state = self.step(piece, new, state)
            last = jnp.where((new > 0)[:, None], logits, last)
        return last, state

    def _check(self, finding: Finding, where: str, name: str) -> None:
        if not finding.bad.any():
            return
        row, head = (int(x) for x in np.argwhere(finding.bad)[0])
        place = f"step {self.steps}, {where}, row {row}"
        place += f", head {head}" if where != "last layer" else ""
        unit = f" of chunk {int(finding.unit[row, head])}" if finding.unit is not None else ""
        raise VerificationError(f"{place}: {name}{unit} differ between the offloaded and the resident path")


def resident_twin(state: KVState) -> KVState:
    """A fork of an offloaded state with its host rows on the device."""

    def bring(part: HostArray | None) -> HostArray | None:
        if part is None:
            return None
        return HostArray(jax.device_put(part.array, part.array.sharding.with_memory_kind("device")), "device")

    fork = state.fork()
    specs = tuple(dataclasses.replace(spec, fetch="resident") for spec in state.specs)
    abstract = abstract_of(specs, state.policy, state.fitted)
    layers = tuple(
        layer.replace(
            live=without_extra(layer.live, like.live), host=HostTier(bring(layer.host.prompt), bring(layer.host.tail))
        )
        for layer, like in zip(fork.layers, abstract.layers, strict=True)
    )
    return fork.replace(layers=layers, specs=specs)


def without_extra(live: Any, like: Any) -> Any:
    """A layer's changing half without the fields that an offloaded state alone has."""
    extra = [field.name for field in dataclasses.fields(live) if getattr(like, field.name) is None]
    return live.replace(**dict.fromkeys(extra))
