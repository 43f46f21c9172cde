"""The specs, shapes and bytes of a KV state, computed without allocating it and without weights."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.cache import offload
from jshadow.cache.accounting import state_nbytes, total
from jshadow.cache.recurrence import row_bytes
from jshadow.cache.spec import CacheSpec, Shards, local_spec
from jshadow.cache.state import Counters, KVState, of_layer, with_room
from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.ops.attention import SINK_COLUMNS
from jshadow.planner.mesh import device_weights
from jshadow.planner.pieces import most_rows, pieces_of, second_pass_bytes, tile_numbers, token_numbers, whole_or_pieces
from jshadow.policies.base import LayerCache, Policy
from jshadow.policies.capabilities import attention_of, first_shared, rows_of
from jshadow.policies.prefill_attention import PrefillAttention
from jshadow.policies.recurrent import RecurrentPrefill, RecurrentState
from jshadow.policies.sliding_window import SlidingWindow


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests of one size, and how their states are held.

    Attributes:
        context: number of tokens in each prompt, or in the shortest one. Windows are sized by it.
        max_new_tokens: number of tokens that each request may hold beyond these.
        batch: number of requests. None: as many as fit.
        dtype: dtype of weights, keys and values.
        fetch: fetch mode. "auto" stands for the mode with the most predicted tokens per second, for each policy.
        repeat_share: share of the selected units that are still on the device from the previous step, in [0, 1]. It
            counts where a kernel fetches with "zero_copy" or "resident"; every other fetch moves all units. None: 0.6,
            as in the ShadowKV paper.
        room: number of tokens that a request may take after its prompt, by which windows are sized as in `prefill`.
            None: windows are sized for the capacity.
        width: number of tokens to which the prompts are padded. None: `context`.
        shards: the mesh over which model and states are split, or None for one device.
        quantize: the type of the projections' weights, as in `jshadow.load`.
    """

    context: int
    max_new_tokens: int = 64
    batch: int | None = None
    dtype: str = "bfloat16"
    fetch: str = "device_put"
    repeat_share: float | None = None
    room: int | None = None
    width: int | None = None
    shards: Shards | None = None
    quantize: str | None = None

    @property
    def capacity(self) -> int:
        """Number of tokens that each request may hold."""
        return self.context + self.max_new_tokens

    @property
    def tp(self) -> int:
        """Number of devices over which the model is split."""
        return 1 if self.shards is None else self.shards.tp

    @property
    def prompt_width(self) -> int:
        """Number of tokens to which the prompts are padded."""
        return self.width or self.context

    def with_batch(self, batch: int) -> "Workload":
        """Return the workload with another number of requests."""
        return dataclasses.replace(self, batch=batch)

    def with_fetch(self, fetch: str) -> "Workload":
        """Return the workload with another fetch mode."""
        return dataclasses.replace(self, fetch=fetch)

    def specs(self, config: ModelConfig, policy: Policy) -> tuple[CacheSpec, ...]:
        """Return the spec of each layer on one device. `policy` is resolved. Without `batch`, they are for a request.

        Raises:
            CapacityError: room is not an integer of at least 0.
        """
        sizes = (self.batch or 1, self.capacity, self.context, self.dtype, self.fetch)
        specs = with_room(cache_specs(config, policy, *sizes), self.room)
        return tuple(local_spec(spec, self.shards) for spec in specs)


@functools.lru_cache(maxsize=256)
def cache_specs(
    config: ModelConfig, policy: Policy, batch: int, capacity: int, shortest: int, dtype: str, fetch: str
) -> tuple[CacheSpec, ...]:
    """Return the static description of each layer's cache.

    Args:
        policy: the policy, resolved for this capacity.
        capacity: maximum number of tokens that a row can hold.
        shortest: number of tokens in the shortest prompt. It decides how many tokens the windows must hold.
        dtype: name of the dtype of keys and values.
        fetch: fetch mode, not "auto".
    """
    specs = []
    for layer in range(config.num_layers):
        kind, sizes = config.attention_kind(layer), config.at(layer)
        cache: LayerCache
        if kind.recurrent:
            cache = RecurrentState(recurrent_of(config))
        else:
            cache = policy.for_layer(layer, config) if kind.window is None else SlidingWindow(kind.window)
        specs.append(
            CacheSpec(
                layer=layer,
                num_layers=config.num_layers,
                batch=batch,
                capacity=capacity,
                window=cache.window_slots(capacity, shortest),
                q_heads=sizes.q_heads,
                kv_heads=sizes.kv_heads,
                head_dim=sizes.head_dim,
                model_dim=config.model_dim,
                dtype=dtype,
                scale=sizes.attention_scale,
                rope=kind.rope,
                sliding_window=kind.window,
                fetch=fetch,
                policy=cache,
                keep=offload.keeps(fetch, jax.default_backend()),
                values_from_keys=sizes.keys_follow,
            )
        )
    return tuple(specs)


def on_backend(specs: tuple[CacheSpec, ...], backend: str) -> tuple[CacheSpec, ...]:
    """Return the specs as a process with another backend makes them. `backend` is as in `offload.keeps`."""
    return tuple(dataclasses.replace(spec, keep=offload.keeps(spec.fetch, backend)) for spec in specs)


def abstract_of(specs: tuple[CacheSpec, ...], policy: Policy, fitted: Any = None) -> KVState:
    """Return the state that the specs describe, with ShapeDtypeStructs in place of arrays.

    Args:
        policy: the resolved policy.
        fitted: arrays that the policy learned, or their ShapeDtypeStructs, or None.
    """
    layers, shapes = [], {}
    for spec in specs:
        alike = dataclasses.replace(spec, layer=None)  # layers that differ in their index alone have the same shapes
        if alike not in shapes:
            init = functools.partial(lambda spec, fitted: spec.policy.init(spec, of_layer(fitted, spec.layer)), spec)
            shapes[alike] = jax.eval_shape(init, fitted).replace(
                host=offload.tier_shapes(spec.policy.host_layout(spec), spec)
            )
        layers.append(shapes[alike])
    batch = specs[0].batch
    shared, lengths, counters, fitted = jax.eval_shape(
        lambda fitted: (
            first_shared(policy, specs, fitted),
            jnp.zeros(batch, jnp.int32),
            Counters.zeros(batch),
            fitted,
        ),
        fitted,
    )
    return KVState(tuple(layers), shared, lengths, lengths, counters, fitted, specs, policy)


def weight_bytes(config: ModelConfig, dtype: str, quantize: str | None = None) -> int:
    """Return the bytes of a model's weights. `dtype` and `quantize` are those of `jshadow.load`."""
    return device_weights(config, None, jnp.dtype(dtype).itemsize, quantize).bytes


def full_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Return the bytes of the cache of one row of full attention. `itemsize` is the bytes of one number.

    A layer with a sliding window holds only its window, and a recurrent one its state.
    """
    size = 0
    for layer, kind in enumerate(config.attention_kinds):
        if kind.recurrent:
            size += row_bytes(recurrent_of(config), itemsize)
        else:
            slots = capacity if kind.window is None else SlidingWindow(kind.window).slots(capacity)
            size += 2 * slots * config.at(layer).key_columns * itemsize
    return size


def prefill_parts(
    config: ModelConfig,
    policy: Policy,
    workload: Workload,
    *,
    prefill_chunk: int = 2048,
    attention: PrefillAttention | None = None,
    backend: str | None = None,
) -> dict[str, int]:
    """Return `prefill_peak` of a workload with a fetch mode other than "auto", for a resolved policy on one device."""
    batch, dtype, tokens = workload.batch or 1, workload.dtype, workload.prompt_width
    item, columns = jnp.dtype(dtype).itemsize, config.most_key_columns
    sparse_attention = attention or attention_of(policy)
    sparse_attention = sparse_attention.prepared(config)[0] if sparse_attention else None
    count, size = pieces_of(tokens, prefill_chunk, sparse_attention.multiple if sparse_attention else 1)
    state = abstract_of(workload.specs(config, policy), policy)
    parts = state_nbytes(state)
    queries = config.most_query_columns
    token, tile = token_numbers(config), tile_numbers(config)  # attention in pieces has a tile
    sparse = sparse_attention.piece_bytes(config, batch, count * size, size) if sparse_attention else 0

    def scan(size: int) -> int:
        return RecurrentPrefill().piece_bytes(config, batch, count * size, size) if config.recurrent else 0

    ways, rows = set[bool](), min(batch, most_rows(size, prefill_chunk))
    if config.recurrent:  # its layers are read in pieces
        ways, sparse = {False}, max(sparse, scan(size))
    for layer, spec in enumerate(state.specs):
        if spec.policy.is_recurrent:
            continue
        exact = sparse_attention is None or (attention is not None and spec.sliding_window is not None)
        exact = exact and not spec.policy.reads.all_queries
        ways |= whole_or_pieces(config.at(layer), spec.sliding_window, dtype, backend) if exact else {False}
    in_pieces = batch * (tile + size * token) * 4 + sparse if False in ways else 0
    # The keys and values of some of the rows are copied.
    copied = 2 * columns if rows < batch else 0
    if config.sinks:  # queries, keys, values and output have more columns for a while
        copied += (2 * queries + 2 * columns) * (config.head_dim + SINK_COLUMNS) // config.head_dim
    whole = rows * count * size * (2 * queries + copied) * item if True in ways else 0
    if sparse_attention and sparse_attention.ahead:
        whole = max(whole, batch * count * size * queries * item)
    asks = {spec.policy.reads.second_pass for spec in state.specs} - {None}
    second = [
        second_pass_bytes(config, one, batch, count * size, item) + scan(one.most_tokens(count * size)) for one in asks
    ]
    return {
        "weights": weight_bytes(config, dtype, workload.quantize),
        "hidden": batch * count * size * config.model_dim * item,
        "keys_values": 3 * batch * count * size * columns * item,  # keys before and after RoPE, values
        "attention": whole,
        "piece": max(in_pieces, rows * size * token * 4),
        "second_pass": max(second, default=0),
        "compress": max(spec.policy.compress_bytes(spec, count * size) for spec in state.specs),
        "in_flight": batch * workload.capacity * columns * item if parts.get("host rows", (0, 0))[1] else 0,
        "state": total(parts.values()).device,
    }


def step_temporaries(config: ModelConfig, policy: Policy, specs: Sequence[CacheSpec]) -> dict[str, int]:
    """Return an upper bound, by part, on the device bytes of a decode step without weights and state.

    Layers run one after the other, so only the largest layer counts. Logits count twice, because a copy is made in
    which the logits of a bad row are NaN. The residual stream, the projections and the two halves of the MLP count with
    their float32 copies. On a mesh, a device has its part of the logits and all of them.

    Args:
        policy: the resolved policy.
        specs: the spec of each layer on one device, for the rows of the step.
    """
    c, rows = config, specs[0].batch * rows_of(policy)
    tp = 1 if specs[0].shards is None else specs[0].shards.tp
    heads = max((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim for spec in specs)
    token = 6 * c.model_dim - 3 * (-c.active_width // tp) + 3 * heads
    return {
        "logits": 4 * rows * (2 * c.vocab_size - (-c.vocab_size // tp if tp > 1 else 0)),
        "activations": 4 * rows * token,
        "attention": max(spec.policy.step_temporaries(spec) for spec in specs),
    }
