"""A check at run time that offloading does not change results.

The offloaded path is compared with the resident path, in which all rows lie on the device.

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
from jshadow.engine.step import COMPILER_OPTIONS, AllLayers, LayerWork, step_layer, step_state, step_writes
from jshadow.errors import StateMismatch, VerificationError
from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import abstract_of
from jshadow.planner.pieces import turn_piece
from jshadow.weights.digest import host_array
from jshadow.weights.params import Params

# The largest difference that rounding may cause, as a share of the largest number that is compared.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03, "float16": 0.005}
_BITS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}


class _Finding(NamedTuple):
    """The result of one comparison of a layer.

    Attributes:
        bad: whether the comparison failed, bool [B, heads].
        unit: number of the first unit that differs, int32 [B, heads], or None. Only used where `bad` is True.
    """

    bad: Array
    unit: Array | None = None


class _LayerFindings(NamedTuple):
    """The comparisons of one layer, in the order in which they are reported. None means that nothing was compared."""

    selected: _Finding | None = None
    values: _Finding | None = None
    keys: _Finding | None = None
    attention: _Finding | None = None


_NAMES = ("selected chunks", "fetched values", "keys", "attention outputs")


def _differs(mine: Array, theirs: Array) -> Array:
    """Compare two arrays bit by bit: bool, True for each element that differs. Two NaN with equal bits are equal."""
    if jnp.issubdtype(mine.dtype, jnp.floating):
        bits = _BITS[mine.dtype.itemsize]
        mine, theirs = lax.bitcast_convert_type(mine, bits), lax.bitcast_convert_type(theirs, bits)
    return mine != theirs


def _far(mine: Array, theirs: Array, axes: tuple[int, ...], dtype: str) -> Array:
    """Compare two arrays up to rounding: bool, True if any element along `axes` differs. A NaN always differs."""
    mine, theirs = mine.astype(jnp.float32), theirs.astype(jnp.float32)
    limit = TOLERANCE[dtype] * jnp.maximum(jnp.abs(theirs).max(axis=axes, keepdims=True), 1e-3)
    return ~(jnp.abs(mine - theirs) <= limit).all(axis=axes)


def _compare_fetch(spec: CacheSpec, mine: Fetched, theirs: Fetched) -> _LayerFindings:
    """Compare two fetches of the same layer. Rows that no query attends to may hold any values."""
    units, mine, theirs = mine.ids.shape[2], mine.listed(spec.head_dim), theirs.listed(spec.head_dim)
    chosen = (_differs(mine.ids, theirs.ids) & mine.valid).any(-1) | _differs(mine.valid, theirs.valid).any(-1)
    wrong = _differs(mine.v, theirs.v)
    wrong = wrong.reshape(*wrong.shape[:2], units, -1).any(-1) & mine.valid
    first = jnp.take_along_axis(jnp.broadcast_to(mine.ids, wrong.shape), wrong.argmax(-1)[..., None], 2)[..., 0]
    keys = None
    if mine.k is not None and theirs.k is not None:
        seen = jnp.repeat(mine.valid, mine.k.shape[2] // units, axis=2)[..., None]
        one, other = (jnp.where(seen, x, 0) for x in (mine.k, theirs.k))
        keys = _Finding(_far(one, other, (2, 3), spec.dtype))
    return _LayerFindings(_Finding(chosen), _Finding(wrong.any(-1), first), keys)


def _worse(one: _Finding | None, other: _Finding | None) -> _Finding | None:
    """Merge two findings of the same comparison. The result is bad where either of them is."""
    if one is None or other is None:
        return one or other
    unit = None if one.unit is None or other.unit is None else jnp.where(one.bad, one.unit, other.unit)
    return _Finding(one.bad | other.bad, unit)


class _WatchedWrites(NamedTuple):
    """The changing halves of the three states that take a step together.

    Attributes:
        twin: the half of a resident state. Its layers get the same inputs as the layers of the offloaded state.
        free: the half of another resident state. Its layers get the outputs of its own layers.
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
    writes: _WatchedWrites,
    *,
    config: ModelConfig,
) -> tuple[Array, _WatchedWrites, list[_LayerFindings], _Finding]:
    """Run one step of the three states. `resident` is the half that the twin and the free state only read."""
    twin = KVState.of(resident, writes.twin)
    layers = list(twin.layers)
    twins = AllLayers(twin.specs, [layer.host for layer in layers])
    findings: list[_LayerFindings] = []
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
        attention = _Finding(_far(jnp.where(seen, out, 0), jnp.where(seen, same, 0), (1, 3), spec.dtype))
        layer_findings = _LayerFindings(attention=attention)
        for fetched, twin_fetched in zip(work.fetches, other.fetches, strict=True):
            layer_findings = _LayerFindings(*map(_worse, layer_findings, _compare_fetch(spec, fetched, twin_fetched)))
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
    return logits, _WatchedWrites(after, twin_after, free_after), findings, _Finding(apart[:, None])


class Verifier:
    """Runs two resident states beside an offloaded state, and compares the results.

    Attributes:
        steps: number of verified steps. A piece of a turn counts as one step.
    """

    def __init__(self, params: Params, state: KVState, resident: KVState) -> None:
        """Compare the host rows of the two states.

        Args:
            resident: a state with the same contents, whose host rows lie on the device. It is consumed.
        """
        if state.fetch == "resident":
            raise StateMismatch("state must be offloaded to be verified, got fetch='resident'")
        if state.specs[0].shards is not None:
            raise StateMismatch("verify needs a state on one device, got one on a mesh")
        resident = _without_kept(resident)
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
        """Run one verified step. Return the float32 logits [B, V] and the new state. This consumes the state.

        Args:
            tokens: token ids, int32 [B, T], right padded.
            new: number of real tokens of each row, int32 [B].
        """
        reads, writes = state.split()
        resident, twin_writes = self.twin.split()
        logits, after, findings, apart = _watched_step(
            self.params.weights,
            jnp.asarray(tokens),
            jnp.asarray(new, jnp.int32),
            reads,
            resident,
            _WatchedWrites(writes, twin_writes, self.free.split()[1]),
            config=self.params.config,
        )
        self.twin, self.free = self.twin.join(after.twin), self.free.join(after.free)
        for layer, layer_findings in enumerate(jax.tree.map(np.asarray, findings)):
            for name, finding in zip(_NAMES, layer_findings, strict=True):
                if finding is not None:
                    self._check(finding, f"layer {layer}", name)
        self._check(jax.tree.map(np.asarray, apart), "last layer", "logits")
        self.steps += 1
        return logits, state.join(after.offloaded)

    def extend(self, tokens: np.ndarray, lengths: np.ndarray, state: KVState) -> tuple[Array, KVState]:
        """Feed the tokens of a turn in verified steps. This consumes the state.

        Args:
            tokens: token ids, int32 [B, T], right padded.
            lengths: number of real tokens of each row, int32 [B].

        Returns:
            The float32 logits [B, V] for each row's last new token, and the new state.
        """
        size = turn_piece(state, tokens.shape[1])
        last = jnp.zeros((len(lengths), self.params.config.vocab_size))
        for first in range(0, tokens.shape[1], size):
            piece = np.pad(tokens[:, first : first + size], ((0, 0), (0, max(0, first + size - tokens.shape[1]))))
            new = np.clip(lengths - first, 0, size)
            logits, state = self.step(piece, new, state)
            last = jnp.where((new > 0)[:, None], logits, last)
        return last, state

    def _check(self, finding: _Finding, where: str, name: str) -> None:
        if not finding.bad.any():
            return
        row, head = (int(x) for x in np.argwhere(finding.bad)[0])
        place = f"step {self.steps}, {where}, row {row}"
        place += f", head {head}" if where != "last layer" else ""
        unit = f" of chunk {int(finding.unit[row, head])}" if finding.unit is not None else ""
        raise VerificationError(f"{place}: {name}{unit} differ between the offloaded and the resident path")


def resident_twin(state: KVState) -> KVState:
    """Return a fork of an offloaded state, with its host rows on the device."""
    if state.shares_prompt:
        raise StateMismatch(f"verify needs a prompt half for each row, got {state.batch} rows that share one")

    def bring(part: HostArray | None) -> HostArray | None:
        if part is None:
            return None
        return HostArray(jax.device_put(part.array, part.array.sharding.with_memory_kind("device")), "device")

    fork = state.fork()
    layers = tuple(
        layer.replace(host=HostTier(bring(layer.host.prompt), bring(layer.host.tail))) for layer in fork.layers
    )
    specs = tuple(dataclasses.replace(spec, fetch="resident") for spec in state.specs)
    return _without_kept(fork.replace(layers=layers, specs=specs))


def _without_kept(state: KVState) -> KVState:
    """Return a resident state that keeps no rows, so that every step fetches and rebuilds all selected units."""
    specs = tuple(dataclasses.replace(spec, keep=False) for spec in state.specs)
    abstract = abstract_of(specs, state.policy, state.fitted)
    layers = tuple(
        layer.replace(live=_without_extra(layer.live, like.live))
        for layer, like in zip(state.layers, abstract.layers, strict=True)
    )
    return state.replace(layers=layers, specs=specs)


def _without_extra(live: Any, like: Any) -> Any:
    """Return a layer's changing half without the fields that `like` lacks, the half of a state that keeps no rows."""
    extra = [field.name for field in dataclasses.fields(live) if getattr(like, field.name) is None]
    return live.replace(**dict.fromkeys(extra))
