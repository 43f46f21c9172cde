"""Times of decode steps on this machine, beside dense baselines and beside what the machine can do.

A bench compiles first, warms up, and tells the median of its repeats with the least and the most. States are real: a
random prompt, compressed by the policy. Peers (torch) are measured in the same run where they are installed.
"""

import dataclasses
import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jshadow import offload
from jshadow.config import ModelConfig
from jshadow.errors import ConfigError
from jshadow.planning import cache_specs
from jshadow.policies import Full, Policy
from jshadow.prefill import compress_layer
from jshadow.rope import inverse_frequencies
from jshadow.state import CacheSpec, HostTier, LayerState, PromptKV, StepKV
from jshadow.step import COMPILER_OPTIONS, step_layer

LEFT = 64  # tokens that the caches can take beyond the prompt
COPY_BYTES, SIDE = 2**29, 2048  # of the arrays behind `ceilings`
QUERIES = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer's attention.

    Attributes:
        context: prompt tokens.
        batch: rows.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        dtype: of keys and values.
    """

    context: int
    batch: int = 1
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads={self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even, got {self.head_dim}")

    def config(self) -> ModelConfig:
        """A model of one such layer, of which nothing but the attention is ever run."""
        return ModelConfig(
            "llama", 2, 1, self.heads * self.head_dim, 1, self.heads, self.kv_heads, self.head_dim, 1e-5,
            self.context + LEFT,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call: the median of several, the least and the most, and of compiling it."""

    median: float
    least: float
    most: float
    compile: float = 0.0


def measure(call: Callable[[], Any], repeats: int, compile_seconds: float = 0.0) -> Times:
    """Time a call that waits for its own result, after one that does not count."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Times(statistics.median(seconds), min(seconds), max(seconds), compile_seconds)


def compiled(
    function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> tuple[Callable[..., Any], float]:
    """The function compiled for these arguments, and the seconds that took."""
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donate, compiler_options=COMPILER_OPTIONS)
    program = jitted.lower(*args).compile()
    return program, time.perf_counter() - start


def timed(function: Callable[..., Any], *args: Any, repeats: int) -> Times:
    """Times of a function of arrays, compiled."""
    program, seconds = compiled(function, *args)
    return measure(lambda: jax.block_until_ready(program(*args)), repeats, seconds)


# Ceilings


def ceilings(repeats: int = 10) -> dict[str, float]:
    """What this machine does at best: bytes a second read and copied, operations a second in products.

    On an accelerator also bytes a second from pinned host memory to the device and back.

    Returns:
        {"read", "copy" (read and written bytes together), "matmul_float32", "matmul_bfloat16"}, and
        {"host_to_device", "device_to_host"} where there is a device apart.
    """
    x = jnp.ones(COPY_BYTES // 4, jnp.float32)
    found = {
        "read": COPY_BYTES / timed(jnp.sum, x, repeats=repeats).least,
        "copy": 2 * COPY_BYTES / timed(lambda x: x + 1.0, x, repeats=repeats).least,
    }
    for dtype in ("float32", "bfloat16"):
        square = jnp.ones((SIDE, SIDE), dtype)
        times = timed(
            functools.partial(jnp.matmul, preferred_element_type=jnp.float32), square, square, repeats=repeats
        )
        found[f"matmul_{dtype}"] = 2 * SIDE**3 / times.least
    if jax.default_backend() != "cpu":
        device = x.sharding
        host = device.with_memory_kind("pinned_host")
        away = jax.block_until_ready(jax.device_put(x, host))
        for name, source, target in (("device_to_host", x, host), ("host_to_device", away, device)):
            found[name] = COPY_BYTES / measure(functools.partial(move, source, target), repeats).least
    return found


def move(x: Array, target: Any) -> None:
    """Copy x to another memory, and wait."""
    jax.block_until_ready(jax.device_put(x, target))


# One layer


def random_prompt(shape: Shape, policy: Policy, seed: int = 0) -> PromptKV:
    """Random keys and values [B, S, h_kv, d] of a prompt that fills the context, and the queries that a policy needs.

    All log-sum-exps are those of even attention.
    """

    def normal(key: Array, count: int, heads: int) -> Array:
        return jax.random.normal(key, (shape.batch, count, heads, shape.head_dim), shape.dtype)

    k, v, q, tail = jax.random.split(jax.random.key(seed), 4)
    keys, everything = normal(k, shape.context, shape.kv_heads), "q_all" in policy.needs
    positions = jnp.arange(shape.context, dtype=jnp.int32)
    even = jnp.log(positions + 1.0)
    return PromptKV(
        k_pre=keys, k_post=keys, v=normal(v, shape.context, shape.kv_heads),
        lengths=jnp.full(shape.batch, shape.context, jnp.int32),
        positions=jnp.broadcast_to(positions, (shape.batch, shape.context)),
        q_tail=normal(tail, policy.q_tail, shape.heads) if policy.q_tail else None,
        q_post=normal(q, shape.context, shape.heads) if everything else None,
        lse=jnp.broadcast_to(even, (shape.batch, shape.heads, shape.context)) if everything else None,
    )  # fmt: skip


def layer_state(shape: Shape, policy: Policy, fetch: str) -> tuple[CacheSpec, LayerState]:
    """A layer's state after a random prompt.

    Raises:
        ConfigError: a setting of the policy or the fetch mode is out of range.
    """
    config = shape.config()
    policy = policy.resolve(config, shape.context + LEFT)
    spec = cache_specs(
        config, policy, shape.batch, shape.context + LEFT, shape.context, shape.dtype, offload.resolve_fetch(fetch)
    )[0]  # fmt: skip
    state, write = compress_layer(random_prompt(shape, spec.policy), None, spec=dataclasses.replace(spec, layer=None))
    return spec, state.replace(host=offload.place(spec.policy.host_layout(spec), spec, write))


def random_step(shape: Shape, seed: int) -> StepKV:
    """Queries, keys and values of the token after the prompt."""
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (
        jax.random.normal(key, (shape.batch, 1, heads, shape.head_dim), shape.dtype)
        for key, heads in zip(keys, (shape.heads, shape.kv_heads, shape.kv_heads), strict=True)
    )
    lengths = jnp.full(shape.batch, shape.context, jnp.int32)
    inverse = jnp.asarray(inverse_frequencies(shape.config().rope, shape.head_dim))
    valid, x_in = jnp.ones((shape.batch, 1), bool), q.reshape(shape.batch, 1, -1)
    return StepKV(q, q, k, k, v, lengths[:, None], valid, lengths, x_in, inverse)


def bench_layer(shape: Shape, policy: Policy, fetch: str = "auto", repeats: int = 10) -> dict[str, Any]:
    """One decode step of one layer's attention, again and again on the state that it leaves.

    Unrelated queries take turns, so that what one selects is hardly ever what the one before selected.

    Returns:
        A row: policy, fetch, context, batch, dtype, step_seconds, least, most, compile_seconds, bytes_device and
        bytes_host of the layer's state, bytes_read and bytes_fetched (what a step must read on the device, and bring
        from the host), bytes_moved (both) and flops.
    """
    spec, state = layer_state(shape, policy, fetch)
    steps = itertools.cycle([random_step(shape, seed) for seed in range(1, 1 + QUERIES)])

    def run(reads: Any, writes: Any, step: StepKV) -> tuple[Array, Any]:
        layer = LayerState(reads[0], writes[0], HostTier(reads[1], writes[1]))
        out, layer, _, _ = step_layer(spec, layer, step, None, {}, (spec,), [layer.host])
        return out, (layer.live, layer.host.tail)

    reads, writes = (state.frozen, state.host.prompt), (state.live, state.host.tail)
    program, seconds = compiled(run, reads, writes, next(steps), donate=(1,))
    held = [writes]

    def once() -> None:
        out, held[0] = program(reads, held[0], next(steps))
        jax.block_until_ready((out, held[0]))

    times = measure(once, repeats, seconds)
    sizes = np.array(list(spec.policy.nbytes(state).values())).sum(axis=0)
    moved = np.array(list(spec.policy.step_bytes(spec, state).values())).sum(axis=0)
    return {
        "policy": spec.policy.name, "fetch": spec.fetch, "context": shape.context, "batch": shape.batch,
        "dtype": shape.dtype, "step_seconds": times.median, "least": times.least, "most": times.most,
        "compile_seconds": times.compile, "bytes_device": int(sizes[0]), "bytes_host": int(sizes[1]),
        "bytes_read": int(moved[0]), "bytes_fetched": int(moved[1]), "bytes_moved": int(moved.sum()),
        "flops": int(spec.policy.step_flops(spec, state)),
    }  # fmt: skip


# Dense baselines on the same keys and values


def dense_jax(shape: Shape, repeats: int) -> Times:
    """`jax.nn.dot_product_attention` of one query a row."""
    prompt, q = random_prompt(shape, Full()), random_step(shape, seed=1).q_post
    return timed(jax.nn.dot_product_attention, q, prompt.k_post, prompt.v, repeats=repeats)


def torch_arrays(shape: Shape) -> tuple[Any, Any, Any]:
    """Random q [B, h, 1, d], k and v [B, h_kv, S, d] of torch."""
    import torch

    kind, generator = getattr(torch, shape.dtype), torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> Any:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, generator=generator).to(kind)

    return normal(shape.heads, 1), normal(shape.kv_heads, shape.context), normal(shape.kv_heads, shape.context)


def dense_torch_sdpa(shape: Shape, repeats: int) -> Times:
    """torch's scaled_dot_product_attention with grouped queries."""
    import torch

    q, k, v = torch_arrays(shape)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        return measure(lambda: attend(q, k, v, enable_gqa=True), repeats)


def dense_torch_bmm(shape: Shape, repeats: int) -> Times:
    """Two batched products and a softmax in torch: for one query a row faster than its fused attention."""
    import torch

    q, k, v = torch_arrays(shape)
    rows = q.reshape(shape.batch * shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    keys, values = (x.reshape(-1, shape.context, shape.head_dim) for x in (k, v))

    def once() -> Any:
        scores = torch.bmm(rows, keys.transpose(1, 2)) * shape.head_dim**-0.5
        return torch.bmm(torch.softmax(scores.float(), dim=-1).to(values.dtype), values)

    with torch.no_grad():
        return measure(once, repeats)


BASELINES: dict[str, tuple[str | None, Callable[[Shape, int], Times]]] = {
    "jax.nn.dot_product_attention": (None, dense_jax),
    "torch sdpa": ("torch", dense_torch_sdpa),
    "torch bmm": ("torch", dense_torch_bmm),
}


def bench_baselines(shape: Shape, repeats: int = 10) -> Iterator[dict[str, Any]]:
    """A row for each dense baseline that this machine has; its bytes are those of all keys and values."""
    size = 2 * shape.batch * shape.context * shape.kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
    for name, (package, run) in BASELINES.items():
        # torch is measured on the CPU, which is no peer of a GPU.
        if package is not None and (importlib.util.find_spec(package) is None or jax.default_backend() != "cpu"):
            continue
        times = run(shape, repeats)
        yield {
            "policy": name, "fetch": None, "context": shape.context, "batch": shape.batch, "dtype": shape.dtype,
            "step_seconds": times.median, "least": times.least, "most": times.most,
            "compile_seconds": times.compile, "bytes_device": size, "bytes_host": 0,
            "bytes_read": size, "bytes_fetched": 0, "bytes_moved": size,
            "flops": 4 * shape.batch * shape.context * shape.heads * shape.head_dim,
        }  # fmt: skip
