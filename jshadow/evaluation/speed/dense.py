"""Dense attention of one query for each row, on the same shapes. These are the baselines of `bench layer`."""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.evaluation.speed.layer import Shape, random_prompt, random_step
from jshadow.evaluation.speed.timing import Times, measure, timed
from jshadow.policies import Full


def dense_jax(shape: Shape, repeats: int) -> Times:
    """Time `jax.nn.dot_product_attention` with one query for each row."""
    prompt, q = random_prompt(shape, Full()), random_step(shape, seed=1).q_post
    return timed(jax.nn.dot_product_attention, q, prompt.k_post, prompt.v, repeats=repeats)


def torch_arrays(shape: Shape) -> tuple[Any, Any, Any]:
    """Return random torch tensors q [B, h, 1, d], k and v [B, h_kv, S, d]."""
    import torch

    kind, generator = getattr(torch, shape.dtype), torch.Generator().manual_seed(0)

    def normal(heads: int, tokens: int) -> Any:
        return torch.randn(shape.batch, heads, tokens, shape.head_dim, generator=generator).to(kind)

    return normal(shape.heads, 1), normal(shape.kv_heads, shape.context), normal(shape.kv_heads, shape.context)


def dense_torch_sdpa(shape: Shape, repeats: int) -> Times:
    """Time torch's scaled_dot_product_attention with grouped queries."""
    import torch

    q, k, v = torch_arrays(shape)
    attend = torch.nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        return measure(lambda: attend(q, k, v, enable_gqa=True), repeats)


def dense_torch_bmm(shape: Shape, repeats: int) -> Times:
    """Time two batched products and a softmax in torch. For one query this is faster than its fused attention."""
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
    """Yield a row for each dense baseline that is installed. Its bytes are those of all keys and values."""
    size = 2 * shape.batch * shape.context * shape.kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
    for name, (package, run) in BASELINES.items():
        # torch runs on the CPU here, so it is left out if JAX runs on a GPU.
        if package is not None and (importlib.util.find_spec(package) is None or jax.default_backend() != "cpu"):
            continue
        times = run(shape, repeats)
        yield {
            "policy": name,
            "fetch": None,
            "context": shape.context,
            "batch": shape.batch,
            "dtype": shape.dtype,
            "step_seconds": times.median,
            "least": times.least,
            "most": times.most,
            "compile_seconds": times.compile,
            "bytes_device": size,
            "bytes_host": 0,
            "bytes_read": size,
            "bytes_fetched": 0,
            "bytes_moved": size,
            "flops": 4 * shape.batch * shape.context * shape.heads * shape.head_dim,
        }
