"""The preparation of a prefill: its arguments, its policies, its attention, and the units in which it runs."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax import Array

from jshadow.cache import host_memory
from jshadow.cache.records import PromptKV
from jshadow.cache.spec import CacheSpec, Shards
from jshadow.cache.state import check_room_size
from jshadow.engine.agree import run_together
from jshadow.engine.checks import check_capacity, check_logits, check_policy, check_tokens
from jshadow.engine.placement import check_shards, fetch_for, shards_of
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.engine.prefill.layer import Begun, Given, LayerPlan, Requests, SecondWork, read_request, requests_of
from jshadow.engine.types import Fitted, Logits, Progress, Tokens
from jshadow.errors import ConfigError, check_integer
from jshadow.models.config import ModelConfig
from jshadow.ops.attention import capability_here
from jshadow.planner import prefill_time
from jshadow.planner.bytes import Workload
from jshadow.planner.pieces import attends_whole, rows_at_once
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import attention_of
from jshadow.policies.checks import check_fitted, check_sinks, reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention, SecondPass
from jshadow.policies.recurrent import RecurrentPrefill
from jshadow.weights.params import Params

Work = Literal["begin", "piece", "project", "attend", "finish", "repeat", "compress"]


class Unit(NamedTuple):
    """One call of a program.

    Attributes:
        work: the program. "piece" is the block on one piece of the prompt. A sparse attention has "begin" before it,
            and if it needs all keys first, "project" for each piece before that. Attention in one call over the whole
            prompt has "project" for each piece, "attend", and "finish" for each piece. A second pass has "repeat" for
            each chunk. The last unit of a layer is "compress".
        row: first of the rows.
    """

    work: Work
    piece: int = 0
    row: int = 0


class LayerWork(NamedTuple):
    """The arrays of the layer that is being read.

    Attributes:
        x: hidden states [B, S, D].
        begun: the keys and values so far, or the lengths int32 [B] before the first unit.
        q: queries after RoPE [R, S, h_q, d] from "project", or None.
        carry: the pytree of the sparse attention, or the output of attention in one call [R, S, h_q, d], or None.
        second: the arrays of the second pass, or None.
    """

    x: Array
    begun: Begun
    q: Array | None = None
    carry: Any = None
    second: SecondWork | None = None


def units_of(plan: LayerPlan, batch: int, pieces: int, chunks: int = 0) -> tuple[Unit, ...]:
    """Return the units of a layer.

    Args:
        chunks: number of chunks of the second pass.
    """

    def each(work: Work, row: int = 0) -> Iterator[Unit]:
        return (Unit(work, piece, row) for piece in range(pieces))

    def reading() -> Iterator[Unit]:
        if plan.whole is not None:
            assert plan.attention is None, "exact attention is replaced"
            assert not plan.needs_all, "attention in one call gives no log-sum-exps"
            for row in range(0, batch, plan.rows or batch):
                yield from each("project", row)
                yield Unit("attend", row=row)
                yield from each("finish", row)
            return
        if plan.attention is not None:
            if plan.attention.ahead:
                yield from each("project")
            yield Unit("begin")
        yield from each("piece")

    return (*reading(), *(Unit("repeat", chunk) for chunk in range(chunks)), Unit("compress"))


def run_unit(plan: LayerPlan, unit: Unit, given: Given, layer: LayerWork) -> LayerWork:
    """Run any unit but "compress", and return the arrays after it. The arrays that it changes are donated."""
    x, begun, q, carry, second = layer
    piece, row = np.int32(unit.piece), np.int32(unit.row)
    if unit.work == "project":
        begun, q = run_together(prefill_layer.project_piece, given, x, begun, q, piece, row, plan=plan)
        carry = None  # the output of the rows before is no longer needed
    elif unit.work == "begin":
        carry = run_together(prefill_layer.begin_attention, given, x, begun, q, plan=plan)
    elif unit.work == "piece":
        x, begun, carry = run_together(prefill_layer.read_piece, given, x, begun, q, carry, piece, plan=plan)
    else:
        assert isinstance(begun, PromptKV), unit
        if unit.work == "attend":
            assert q is not None
            carry = run_together(prefill_layer.attend_whole, given, begun, q, row, plan=plan)
        elif unit.work == "repeat":
            assert second is not None
            held = carry if plan.kind.recurrent else None
            second, begun = run_together(read_request, given, second, begun, piece, held, plan=plan)
        else:
            assert unit.work == "finish", unit
            x = run_together(prefill_layer.finish_piece, given, x, begun.lengths, carry, piece, row, plan=plan)
    return LayerWork(x, begun, q, carry, second)


def prompt_read(plan: LayerPlan, layer: LayerWork) -> PromptKV:
    """Return the layer's keys and values after all units that read it."""
    assert isinstance(layer.begun, PromptKV), "no piece was read"
    return layer.begun.replace(extra=None if plan.attention is None else layer.carry)


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """The units of all layers of a prefill.

    Attributes:
        requests: number of requests of the second pass, and number of tokens of each. (0, 0): there is none.
    """

    plans: tuple[LayerPlan, ...]
    compressions: tuple[int, ...]
    batch: int
    pieces: int
    requests: tuple[int, int] = (0, 0)

    @functools.cached_property
    def units(self) -> list[tuple[Unit, ...]]:
        """The units of each layer."""
        return [units_of(plan, self.batch, self.pieces, self.requests[0]) for plan in self.plans]

    @functools.cached_property
    def done(self) -> list[list[float]]:
        """For each layer, the share of all operations that is done before each unit, and after the last one."""
        costs = [[self._operations(layer, unit) for unit in units] for layer, units in enumerate(self.units)]
        total, before, shares = sum(map(sum, costs)), 0.0, []
        for layer in costs:
            shares.append([done / total for done in itertools.accumulate(layer, initial=before)])
            before += sum(layer)
        return shares

    def _operations(self, layer: int, unit: Unit) -> float:
        plan = self.plans[layer]
        config, size, first = plan.config, plan.size, unit.piece * plan.size
        rows = (plan.rows or self.batch) if plan.whole else self.batch
        project = prefill_time.projection_operations(config, size)
        rest = prefill_time.rest_operations(config, size)

        def attention(first: int, tokens: int) -> int:
            return prefill_time.attention_operations(config, plan.kind.window, first, tokens)

        if unit.work == "compress":
            return self.compressions[layer]
        if unit.work == "begin":
            return 0
        if unit.work == "attend":
            return rows * attention(0, self.pieces * size)
        if unit.work == "repeat":
            tokens, end = self.requests[1], self.pieces * size
            return self.batch * prefill_time.request_operations(config, plan.kind.window, end, tokens)
        if unit.work == "piece":
            return rows * (project + attention(first, size) + rest)
        return rows * (rest if unit.work == "finish" else project)


@dataclasses.dataclass(frozen=True)
class PrefillOptions:
    """The settings that all policies of a prefill share. They are arguments of `prefill_many`."""

    capacity: int
    fitted: Fitted | None = None
    logits: Logits[Any] = "last"
    prefill_chunk: int = 2048
    shortest: int | None = None
    progress: Progress | None = None
    attention: PrefillAttention | None = None
    room: int | None = None


@dataclasses.dataclass(frozen=True)
class PrefillJob:
    """A prefill that can run: its arguments are checked.

    Attributes:
        tokens: token ids, int32 [B, S], with zeros after each row's real tokens.
        lengths: number of real tokens of each row, int32 [B].
        shards: how the states are split over the devices of the weights. None: one device has all.
        attention: the attention that replaces exact attention, or None.
        learned: the settings of `attention` as arrays [L, ...], from `PrefillAttention.prepared`, or None.
        requests: the tokens of the second pass, or None.
    """

    params: Params
    tokens: np.ndarray
    lengths: np.ndarray
    policies: list[Policy]
    plans: list[tuple[CacheSpec, ...]]
    shards: Shards | None
    attention: PrefillAttention | None
    learned: Any
    options: PrefillOptions
    requests: Requests | None = None

    def layer_plan(self, index: int, count: int, size: int) -> LayerPlan:
        """Return the static arguments of `prefill_layer` for layer `index`.

        The prompt is processed in `count` pieces of `size` tokens. On an NVIDIA GPU, cuDNN computes exact attention of
        the whole prompt in one call. With several devices it does so only if the prompt is one piece.
        """
        config, policies = self.params.config.at(index), [plan[index].policy for plan in self.plans]
        kind = self.params.config.attention_kind(index)
        if kind.recurrent:
            return LayerPlan(config, kind, False, 0, size, RecurrentPrefill())
        if self.options.attention:
            attention = self.attention if kind.window is None else None
        else:
            attention = attention_of(policies[0])
        needs_all = any(policy.reads.all_queries for policy in policies)
        tail = max(policy.reads.last_queries for policy in policies)
        second = None if self.requests is None else self.requests.settings
        plan = LayerPlan(config, kind, needs_all, tail, size, attention, second_pass=second)
        several, batch = self.shards is not None, len(self.lengths)
        exact = attention is None and not needs_all and not (several and count > 1)
        if not exact or not attends_whole(config, kind.window, self.params.dtype, capability_here()):
            return plan
        rows = batch if several else rows_at_once(batch, size, self.options.prefill_chunk)
        return dataclasses.replace(plan, whole="cudnn", rows=rows)


def check_job(
    params: Params,
    tokens: Tokens,
    lengths: Tokens,
    policies: Sequence[Policy | None],
    fetch: str | Sequence[str],
    options: PrefillOptions,
) -> PrefillJob:
    """Check the arguments of `prefill_many`, and return a prefill that can run. Raises the errors of `prefill`."""
    config, fitted = params.config, options.fitted
    token_ids, row_lengths = check_tokens(config, tokens, lengths, least=1)
    check_logits(options.logits)
    check_capacity(config, options.capacity, int(row_lengths.max()))
    check_integer("prefill_chunk", options.prefill_chunk, least=1)
    check_room_size(options.room)
    capacity, dtype = int(options.capacity), str(params.dtype)
    modes: list[Any] = list(fetch) if isinstance(fetch, tuple | list) else [fetch] * len(policies)
    if not policies or len(modes) != len(policies):
        raise ConfigError(
            f"policies must be a non-empty list with one fetch mode each, got {len(policies)} and {len(modes)} modes"
        )
    chosen = [ShadowKV() if policy is None else policy for policy in policies]
    for policy in chosen:
        check_policy(policy)
    resolved = [policy.resolve(config, capacity) for policy in chosen]
    shortest = int(row_lengths.min())
    floor = shortest if options.shortest is None else min(options.shortest, shortest)
    shards = shards_of(params, len(row_lengths))
    workload = Workload(floor, capacity - floor, len(row_lengths), dtype, room=options.room, width=token_ids.shape[1])
    plans = []
    for policy, mode in zip(resolved, modes, strict=True):
        fetch = fetch_for(params, policy, workload.with_fetch(mode), states=len(resolved)).fetch
        plans.append(dataclasses.replace(workload, fetch=fetch, shards=shards).specs(config, policy))
    check_shards(plans)
    readers = [policy for policy in resolved if reads_fitted(policy)]
    for policy in readers or resolved[:1]:
        check_fitted(policy, config, fitted)
    host_memory.check_host_memory(plans)
    attention, learned = prepared_attention(resolved, options.attention, config)
    check_sinks(config, (spec.policy for plan in plans for spec in plan), attention)
    options = dataclasses.replace(options, capacity=capacity)
    second = _second_pass_of(plans)
    requests = None if second is None else requests_of(second, params.tokenizer, token_ids, row_lengths, config)
    return PrefillJob(params, token_ids, row_lengths, resolved, plans, shards, attention, learned, options, requests)


def own_attention(policies: Sequence[Policy], attention: PrefillAttention | None) -> PrefillAttention | None:
    """Return the attention that replaces exact attention in a prefill, or None for exact attention.

    It is the policy's own attention if the policy has one, and `attention` otherwise.
    """
    own = [attention_of(policy) for policy in policies]
    changed = [innermost(policy).name for policy, its in zip(policies, own, strict=True) if its is not None]
    # The layers of a wrapped policy may differ, so only equal policies are known to have the same attention.
    if changed and (len(set(policies)) > 1 or attention is not None):
        raise ConfigError(
            f"{changed[0]} attends to a prompt in its own way: it takes no prefill= and shares its prefill with no "
            f"other policy, got {attention!r} and {[policy.name for policy in policies]}"
        )
    return own[0] if changed else attention


def _second_pass_of(plans: Sequence[Sequence[CacheSpec]]) -> SecondPass | None:
    """Return the second pass over the prompts that any layer needs, or None."""
    reads = (spec.policy.reads for plan in plans for spec in plan)
    needed = {read.second_pass for read in reads if read.second_pass is not None}
    if len(needed) > 1:
        raise ConfigError(f"policies must need equal second passes to share a prefill, got {sorted(map(str, needed))}")
    return next(iter(needed), None)


def prepared_attention(
    policies: Sequence[Policy], attention: PrefillAttention | None, config: ModelConfig
) -> tuple[PrefillAttention | None, Any]:
    """Return the attention that replaces exact attention in a prefill, and its settings as arrays.

    The first axis of each array is the layer. Return (None, None) for exact attention.

    Raises:
        ConfigError: `attention` is not a PrefillAttention, was found on another model, or is given although a policy
            has its own.
    """
    if attention is not None and not isinstance(attention, PrefillAttention):
        raise ConfigError(f"prefill must be a PrefillAttention such as VerticalSlash(), or None, got {attention!r}")
    chosen = own_attention(policies, attention)
    return (None, None) if chosen is None else chosen.prepared(config)
