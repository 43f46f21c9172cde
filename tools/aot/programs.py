"""The programs that `make aot` compiles: functions, their abstract arguments, and the values that are checked."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

import pallas_kernels
from aot.compiler import place
from aot.models import EXPERTS, HYBRID, LLAMA, ONE_LAYER
from jshadow.cache import recurrence
from jshadow.cache.accounting import state_nbytes, total
from jshadow.cache.state import KVState, Reads
from jshadow.engine.prefill import layer as prefill_layer
from jshadow.engine.prefill.layer import Given, LayerPlan
from jshadow.engine.step import step_writes
from jshadow.models.config import AttentionKind, ModelConfig, recurrent_of
from jshadow.models.experts import ExpertMLP
from jshadow.models.transformer import abstract_weights
from jshadow.ops.packing import Scaled
from jshadow.ops.projections import KINDS, record_of
from jshadow.planner.bytes import abstract_of, cache_specs, on_backend
from jshadow.planner.machine import abstract_state, prefill_peak
from jshadow.planner.pieces import pieces_of, rows_at_once
from jshadow.policies import Full, Policy, ShadowKV
from jshadow.policies.settings import with_settings
from jshadow.policies.shadowkv import Landmarks, TransformCode, Values
from jshadow.policies.shadowkv.landmarks import GROUP, Levels, first_level, first_spread, two_levels
from pallas_kernels import ChosenKeys, HostRows, KeptRows, NewTokens, Stack, Tiles

DTYPE = jnp.bfloat16
PACKED = ShadowKV.packed()
# The keys have the bits of the default rank, but more columns. Each landmark covers two tokens, and every query reads
# all landmarks.
ONE_LEVEL = ShadowKV(keys=TransformCode(), landmarks=Landmarks(tokens=2, dtype="int4"), values=Values(dtype="int4"))


class ReadLayer(NamedTuple):
    """The limits of a program that reads a prompt in one layer. It has no loop.

    Attributes:
        attentions: number of calls of cuDNN's attention.
        temporaries: maximum bytes of temporary arrays, and of results that reuse no argument.
        products: number of results of all matrix products.
    """

    attentions: int
    temporaries: int
    products: int


class Task(NamedTuple):
    """One program to compile, and the numbers that it is checked against.

    Attributes:
        name: name in the table.
        gpu: one of TARGETS.
        function: see `compile_for`.
        arguments: see `compile_for`.
        donate: see `compile_for`.
        state: the abstract state among the arguments, or None.
        other: device bytes of the other arguments.
        fetches: number of layers that fetch with "device_put".
        resident: bytes of a layer's selected keys and values if they are fetched with "zero_copy", else None.
        kernel: whether the program is a single kernel of pallas_kernels.
        read: the limits of a layer of a prefill, or None for another program.
        reused: bytes of the arguments whose memory the results take, in both memories, or None if this is not checked.
        prompt: the prompt half that all rows of a step share, or None if each row has its own.
        target: the abstract state whose tokens a cycle of speculation checks, or None for another program.
        without_loops: whether the program must have no loop.
    """

    name: str
    gpu: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    state: KVState | None = None
    other: int = 0
    fetches: int = 0
    resident: int | None = None
    kernel: bool = False
    read: ReadLayer | None = None
    reused: int | None = None
    prompt: Reads | None = None
    target: KVState | None = None
    without_loops: bool = False


def size(tree: Any) -> int:
    """Return the bytes of a tree of abstract arrays."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def weights_of(config: ModelConfig) -> Any:
    """Return the abstract weights of a model in bfloat16."""
    return jax.tree.map(lambda leaf: Shape(leaf.shape, DTYPE), abstract_weights(config))


def step_task(name: str, gpu: str, config: ModelConfig, policy: Policy, batch: int, capacity: int, fetch: str) -> Task:
    """Return the program of a decode step after prompts that fill all but 64 tokens of the capacity."""
    state = abstract_state(
        config, policy, batch=batch, capacity=capacity, prompt=capacity - 64, dtype="bfloat16", fetch=fetch
    )
    state = abstract_of(on_backend(state.specs, "gpu"), state.policy)
    weights, token, new = weights_of(config), Shape((batch, 1), jnp.int32), Shape((batch,), jnp.int32)

    def step(weights: Any, token: Any, new: Any, reads: Any, writes: Any) -> Any:
        return step_writes(weights, config, token, new, reads, writes)

    arguments = tuple(place(tree) for tree in (weights, token, new, *state.split()))
    resident = None
    if fetch == "zero_copy" and isinstance(state.policy, ShadowKV):
        units = state.policy.max_selected(capacity) * state.policy.chunk_size
        resident = 2 * batch * config.kv_heads * units * config.head_dim * 2
    fetches = config.num_layers if fetch == "device_put" and isinstance(policy, ShadowKV) else 0
    return Task(
        f"{name}, {batch} x {capacity:,}, {fetch}",
        gpu,
        step,
        arguments,
        (4,),
        state,
        size((weights, token, new)),
        fetches,
        resident,
    )


def prefill_tasks(gpu: str, batch: int, tokens: int, window: int | None = None) -> Iterator[Task]:
    """Yield the programs of one layer of a prefill in pieces of 2,048 tokens, in which cuDNN computes attention."""
    c, (count, piece) = LLAMA, pieces_of(tokens, 2048)
    rows = rows_at_once(batch, piece, 2048)
    plan = LayerPlan(c, AttentionKind(c.rope, window), False, q_tail=64, size=piece, whole="cudnn", rows=rows)
    given = Given(weights_of(c)["layer_0"], Shape((c.head_dim // 2,), jnp.float32))
    x, index = Shape((batch, count * piece, c.model_dim), DTYPE), Shape((), jnp.int32)
    lengths, q = Shape((batch,), jnp.int32), Shape((rows, count * piece, c.q_heads, c.head_dim), DTYPE)
    prompt = jax.eval_shape(lambda: plan.empty_prompt(jnp.zeros(batch, jnp.int32), count * piece, DTYPE))
    sizes: dict[str, Any] = {"batch": batch, "tokens": tokens, "capacity": tokens + 64}
    peak = prefill_peak(c, ShadowKV(), **sizes, fetch="device_put", backend="gpu")
    projected, rest = (c.q_heads + 2 * c.kv_heads) * c.head_dim, c.model_dim + 2 * c.ffn_dim + c.model_dim
    told = f"{batch} x {tokens:,}" + ("" if window is None else f", window {window:,}")

    def task(name: str, program: Any, arguments: tuple, donate: tuple[int, ...], read: ReadLayer) -> Task:
        function = functools.partial(program.__wrapped__, plan=plan)
        return Task(f"prefill, {name}, {told}", gpu, function, tuple(map(place, arguments)), donate, read=read)

    yield task(
        "project",
        prefill_layer.project_piece,
        (given, x, prompt, q, index, index),
        (2, 3),
        ReadLayer(0, peak["piece"], rows * piece * projected),
    )
    # The queries are an argument. No piece is in memory beside the output and the copies of some rows.
    attention = ReadLayer(1, peak["attention"] + peak["piece"] - size(q), 0)
    yield task("attend", prefill_layer.attend_whole, (given, prompt, q, index), (), attention)
    yield task(
        "finish",
        prefill_layer.finish_piece,
        (given, x, lengths, q, index, index),
        (1,),
        ReadLayer(0, peak["piece"], rows * piece * rest),
    )


def fetch(values: HostRows, keys: ChosenKeys, cache: Any, places: Any, missed: Any) -> Any:
    """Call fetch_reconstruct, and return its results in the order of the donated buffers, as a state does.

    `cache` are the values and the keys.
    """
    return pallas_kernels.fetch_reconstruct(values, keys, KeptRows(*cache, places, missed))[::-1]


def kernel_tasks(gpu: str, batch: int = 2, capacity: int = 122_880) -> Iterator[Task]:
    """Yield each kernel at the shapes of a decode step of Llama-3.1-8B."""
    policy = ShadowKV().resolve(LLAMA, capacity)
    assert policy.rank is not None
    heads, dim, chunk = LLAMA.kv_heads, LLAMA.head_dim, policy.chunk_size
    chunks, count = policy.max_chunks(capacity), policy.max_selected(capacity)

    def array(*shape: int, dtype: Any = DTYPE, memory: str = "device") -> Any:
        return place(Shape((batch, *shape), dtype), memory)

    q, landmarks = array(1, LLAMA.q_heads, dim), array(heads, chunks, dim)
    window, row, table = array(heads, 96, dim), array(1, heads, dim), array(1, dim // 2, dtype=jnp.float32)
    new = NewTokens(q, row, row, table, table, array(1, dtype=jnp.int32), array(1, dtype=jnp.bool_))
    yield Task("append_rows", gpu, pallas_kernels.append_rows, (window, window, new), (0, 1), kernel=True)
    scores = functools.partial(pallas_kernels.chunk_scores, scale=dim**-0.5)
    yield Task("chunk_scores", gpu, scores, (q, landmarks, array(heads, chunks, dtype=jnp.bool_)), kernel=True)
    inverse = place(Shape((dim // 2,), jnp.float32))
    left, right = array(chunks, chunk * policy.rank), array(heads, policy.rank, dim)
    ids = array(heads, count, dtype=jnp.int32)
    keys = ChosenKeys(left, right, ids, inverse)
    yield Task("reconstruct_keys", gpu, pallas_kernels.reconstruct_keys, (keys,), kernel=True)
    marks = array(heads, chunks, dtype=jnp.float32), array(dtype=jnp.bool_), ids
    yield Task("select_chunks", gpu, functools.partial(pallas_kernels.select_chunks, count=count), marks, kernel=True)
    values = HostRows(array(heads, chunks, chunk * dim, memory="pinned_host"))
    kept = (array(heads, count, chunk * dim),) * 2
    resident = 2 * batch * heads * count * chunk * dim * 2
    yield Task("fetch_reconstruct", gpu, fetch, (values, keys, kept, ids, ids), (2,), resident=resident, kernel=True)
    sizes = (count * chunk, policy.max_outliers(capacity) * chunk, 96)
    pieces = [(array(heads, n, dim), array(heads, n, dim), array(1, 1, n, dtype=jnp.bool_)) for n in sizes]
    attend = functools.partial(pallas_kernels.sparse_attention, scale=dim**-0.5)
    yield Task("sparse_attention", gpu, attend, (q, pieces), kernel=True)


def recurrent_task(gpu: str, batch: int = 8) -> Task:
    """Return the kernel of a decode step of a recurrent layer of Qwen3.6-27B."""
    sizes, row = recurrent_of(HYBRID), Shape((batch,), jnp.int32)
    held = jax.eval_shape(lambda: recurrence.empty(batch, sizes, DTYPE))
    keys, values = ((heads, dim) for _, _, heads, dim in (held.recent.k.shape, held.recent.u.shape))
    heads = tuple(Shape((batch, 1, *shape), DTYPE) for shape in (keys, keys, values))
    taps = tuple(Shape((sizes.taps, *shape), DTYPE) for shape in (keys, keys, values))
    gates = (Shape((batch, 1, sizes.value_heads), jnp.float32),) * 2
    new = recurrence.RecurrentTokens(heads, gates, taps, None, row, Shape((batch, 1), jnp.bool_), sizes)
    arguments = place(held), place(new)
    return Task("recurrent_step", gpu, recurrence.step_tokens, arguments, (0,), kernel=True, reused=size(held))


def product_tasks(gpu: str) -> Iterator[Task]:
    """Yield products of a decode step of Llama-3.1-8B, and the experts of Qwen3-30B-A3B in a step and in a prefill."""
    one = [place(Shape((1,), jnp.int32))] * 3
    for kind in ("int4", "fp8"):
        kernel = stack_of(kind, 1, LLAMA.model_dim, LLAMA.ffn_dim)
        few = functools.partial(pallas_kernels.tile_products, height=1, implementation="pallas")
        arguments = (place(Shape((1, LLAMA.model_dim), DTYPE)), kernel, Tiles(*one))
        yield Task(f"tile_products, {kind}, 1 row", gpu, few, arguments, kernel=True)
    for rows, tiles, height in ((8, 8, 1), (16_384, 256, 128)):
        for kind in (None, "int4", "fp8", "int8"):
            table = Tiles(*[place(Shape((tiles,), jnp.int32))] * 3)
            arguments = (place(Shape((rows, 2048), DTYPE)), stack_of(kind, 128, 2048, 768), table)
            many = functools.partial(pallas_kernels.tile_products, height=height, implementation="pallas")
            yield Task(f"tile_products, {kind or 'plain'}, experts, {rows:,} rows", gpu, many, arguments, kernel=True)


def expert_tasks(gpu: str) -> Iterator[Task]:
    """Yield the MLP with experts of a layer of Qwen3-30B-A3B, for a token and for a piece of a prompt."""
    layer = jax.tree.map(lambda leaf: Shape(leaf.shape, DTYPE), abstract_weights(EXPERTS)["layer_0"]["mlp"])

    def mlp(weights: Any, x: Any, valid: Any) -> Any:
        return ExpertMLP(EXPERTS).apply({"params": weights}, x, valid)

    for kind in (None, *KINDS):
        weights = layer
        if kind is not None:
            experts = {name: record_of(kind, part["kernel"].shape) for name, part in layer["experts"].items()}
            made = {name: {key: Shape(*one) for key, one in part.items()} for name, part in experts.items()}
            weights = layer | {"experts": made}
        for tokens in (1, 2048):
            given = Shape((1, tokens, EXPERTS.model_dim), DTYPE), Shape((1, tokens), jnp.bool_)
            name = f"experts, {kind or 'plain'}, {tokens:,} tokens"
            yield Task(name, gpu, mlp, tuple(map(place, (weights, *given))), kernel=True, without_loops=True)


def stack_of(kind: str | None, count: int, inputs: int, features: int) -> Stack:
    """Return the abstract kernels of experts, plain or quantized."""
    shapes = record_of(kind, (count, inputs, features))
    return Stack(*(place(Shape(shape, dtype or DTYPE)) for shape, dtype in shapes.values()))


def packed_tasks(gpu: str, told: str, policy: ShadowKV, batch: int = 2, capacity: int = 122_880) -> Iterator[Task]:
    """Yield the kernels of a decode step on the arrays of a state with packed numbers."""
    state = abstract_state(
        ONE_LAYER, policy, batch=batch, capacity=capacity, prompt=capacity - 64, dtype="bfloat16", fetch="zero_copy"
    )
    policy, layer, layout = state.policy, state.layers[0], state.policy.host_layout(state.specs[0])
    assert layout is not None
    frozen, host, heads, dim = place(layer.frozen), place(layer.host).prompt, LLAMA.kv_heads, LLAMA.head_dim
    count, width = policy.max_selected(capacity), policy.chunk_size * dim

    def array(*shape: int, dtype: Any = DTYPE) -> Any:
        return place(Shape((batch, *shape), dtype))

    def scores(q: Any, landmarks: Any, spread: Any, candidates: Any) -> Any:
        first = first_level(landmarks)
        assert isinstance(first, Scaled)
        return pallas_kernels.chunk_scores(
            q, first.codes, candidates, scale=dim**-0.5, landmark_scale=first.scale, spread=first_spread(spread)
        )

    def near_scores(q: Any, scores: Any, landmarks: Any, spread: Any) -> Any:
        options = {"count": count, "size": GROUP, "scale": dim**-0.5}
        return pallas_kernels.level_scores(q, scores, two_levels(landmarks, spread[1]), **options)

    q, ids = array(1, LLAMA.q_heads, dim), array(heads, count, dtype=jnp.int32)
    inverse = place(Shape((dim // 2,), jnp.float32))
    keys = ChosenKeys(frozen.left, ids=ids, inverse=inverse, **policy.codec.operands(frozen.right))
    values = HostRows(host.array, bits=layout.bits, dtype=DTYPE)
    marks = frozen.landmarks, frozen.spread
    yield Task(f"chunk_scores, {told}", gpu, scores, (q, *marks, frozen.candidates), kernel=True)
    if isinstance(frozen.landmarks, Levels):
        means = array(heads, 1, policy.max_chunks(capacity), dtype=jnp.float32)
        yield Task(f"level_scores, {told}", gpu, near_scores, (q, means, *marks), kernel=True)
    yield Task(f"reconstruct_keys, {told}", gpu, pallas_kernels.reconstruct_keys, (keys,), kernel=True)
    kept = (array(heads, count, width),) * 2
    resident = 2 * batch * heads * count * width * 2
    yield Task(
        f"fetch_reconstruct, {told}", gpu, fetch, (values, keys, kept, ids, ids), (2,), resident=resident, kernel=True
    )


def tasks(gpu: str, full_batch: int) -> Iterator[Task]:
    """Yield all programs for one GPU. `full_batch` is the largest batch of full attention that fits into it."""
    yield from kernel_tasks(gpu)
    yield recurrent_task(gpu)
    yield from product_tasks(gpu)
    yield from expert_tasks(gpu)
    for told, policy in (("packed", PACKED), ("one level", ONE_LEVEL)):
        yield from packed_tasks(gpu, told, policy)
    for fetch in ("device_put", "zero_copy"):
        yield step_task("decode layer", gpu, ONE_LAYER, ShadowKV(), 8, 131_072, fetch)
        yield step_task("decode layer, packed", gpu, ONE_LAYER, PACKED, 8, 131_072, fetch)
        yield step_task("decode layer, one level", gpu, ONE_LAYER, ONE_LEVEL, 8, 131_072, fetch)
        twice = with_settings(PACKED, {"choice.rounds": 2})
        yield step_task("decode layer, two rounds", gpu, ONE_LAYER, twice, 8, 131_072, fetch)
    small = ShadowKV.packed(small=True)
    for batch in (1, 8):
        step = step_task("decode layers of a hybrid", gpu, HYBRID, small, batch, 122_880, "resident")
        assert step.state is not None
        yield step._replace(reused=size(step.state.split()[1]))  # the recurrent states are updated in place
    for batch, tokens in ((1, 122_880), (4, 122_880), (4, 2_048)):
        yield from prefill_tasks(gpu, batch, tokens)
    yield from prefill_tasks(gpu, 1, 122_880, window=4096)
    yield step_task("Llama-3.1-8B, full", gpu, LLAMA, Full(), full_batch, 122_880, "resident")
    for fetch in ("device_put", "zero_copy"):
        yield step_task("Llama-3.1-8B, shadowkv", gpu, LLAMA, ShadowKV(), 24, 122_880, fetch)
        yield step_task("Llama-3.1-8B, shadowkv", gpu, LLAMA, ShadowKV(), 12, 249_856, fetch)


def planned(task: Task) -> tuple[int, int]:
    """Return the device and host bytes of a task's state as the planner computes them from policy and sizes."""
    assert task.state is not None
    spec = task.state.specs[0]
    config = next(config for config in (LLAMA, HYBRID, ONE_LAYER) if config.num_layers == spec.num_layers)
    sizes = (1, spec.capacity, spec.capacity - 64, "bfloat16", spec.fetch)
    specs = on_backend(cache_specs(config, task.state.policy, *sizes), "gpu")
    device, host = total(state_nbytes(abstract_of(specs, task.state.policy)).values())
    return device * spec.batch, host * spec.batch
