"""The preparation of a prefill: its arguments are checked, its policies resolved, and its attention chosen."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jshadow.cache import host_memory
from jshadow.cache.spec import CacheSpec, Shards, local_spec
from jshadow.cache.state import check_room_size, with_room
from jshadow.engine.checks import check_capacity, check_logits, check_piece, check_policy, check_tokens
from jshadow.engine.fetch_mode import fetch_for
from jshadow.engine.mesh.checks import check_shards
from jshadow.engine.placement import shards_of
from jshadow.engine.prefill.layer_run import LayerPlan
from jshadow.engine.prefill.second_pass import Requests, requests_of
from jshadow.engine.types import Fitted, Logits, Progress, Tokens
from jshadow.errors import ConfigError
from jshadow.models.config import ModelConfig
from jshadow.ops.whole_attention import capability_here
from jshadow.planner.bytes import cache_specs
from jshadow.planner.machine import Batch
from jshadow.planner.prefill_pieces import attends_whole, rows_at_once
from jshadow.policies import Policy, ShadowKV
from jshadow.policies.base import innermost
from jshadow.policies.capabilities import attention_of
from jshadow.policies.checks import check_fitted, reads_fitted
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.second_pass import SecondPass
from jshadow.weights.params import Params


@dataclasses.dataclass(frozen=True)
class PrefillOptions:
    """The settings that all policies of a prefill share. They are arguments of `prefill_many`."""

    capacity: int
    fitted: Fitted | None
    logits: Logits[Any]
    prefill_chunk: int
    shortest: int | None
    progress: Progress | None
    attention: PrefillAttention | None
    room: int | None


@dataclasses.dataclass(frozen=True)
class PrefillJob:
    """A prefill that can run: its arguments are checked.

    Attributes:
        params: the model.
        tokens: token ids, int32 [B, S], with zeros after each row's real tokens.
        lengths: number of real tokens of each row, int32 [B].
        policies: the resolved policies.
        plans: for each policy, the CacheSpec of every layer.
        shards: how the states are split over the devices of the weights. None: one device has all.
        attention: the attention that replaces exact attention, or None.
        learned: the settings of `attention` as arrays [L, ...], from `PrefillAttention.prepared`, or None.
        options: the settings that all policies share.
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
        config, policies = self.params.config, [plan[index].policy for plan in self.plans]
        kind = config.attention_kind(index)
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
        if not exact or not attends_whole(config, self.params.dtype, capability_here()):
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
    check_piece("prefill_chunk", options.prefill_chunk)
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
    batch = Batch(len(row_lengths), capacity, floor, token_ids.shape[1], dtype, len(resolved), options.room)
    sizes = (batch.rows, capacity, floor, dtype)
    plans = [
        with_room(cache_specs(config, policy, *sizes, fetch_for(mode, params, policy, batch).fetch), options.room)
        for policy, mode in zip(resolved, modes, strict=True)
    ]
    shards = shards_of(params, batch.rows)
    plans = [tuple(local_spec(spec, shards) for spec in plan) for plan in plans]
    check_shards(plans)
    readers = [policy for policy in resolved if reads_fitted(policy)]
    for policy in readers or resolved[:1]:
        check_fitted(policy, config, fitted)
    host_memory.check_host_memory(plans)
    attention, learned = prepared_attention(resolved, options.attention, config)
    options = dataclasses.replace(options, capacity=capacity)
    second = second_pass_of(plans)
    requests = None if second is None else requests_of(second, params.tokenizer, token_ids, row_lengths, config)
    return PrefillJob(params, token_ids, row_lengths, resolved, plans, shards, attention, learned, options, requests)


def own_attention(policies: Sequence[Policy], attention: PrefillAttention | None) -> PrefillAttention | None:
    """Return the attention that replaces exact attention in a prefill, or None for exact attention.

    It is the policy's own attention if the policy has one, and `attention` otherwise.

    Raises:
        ConfigError: a policy has its own attention, and `attention` or a different policy is also given.
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


def second_pass_of(plans: Sequence[Sequence[CacheSpec]]) -> SecondPass | None:
    """Return the second pass over the prompts that any layer needs, or None.

    Raises:
        ConfigError: two layers need different ones.
    """
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
