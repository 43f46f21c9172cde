"""What is timed beside jshadow: dense attention in JAX and torch, and whole requests with transformers."""

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jshadow.evaluation.speed import Answer, Request, Shape, System, Times, measure, random_prompt, random_step, timed
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


CACHES = ("DynamicCache", "OffloadedCache")


def answer_transformers(request: Request, cache: str) -> Answer:
    """Answer a request twice with one of transformers' caches, and return the second answer."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()

    kind = getattr(torch, request.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(request.model, dtype=kind).eval()
    ids = torch.tensor(request.prompts(model.config.vocab_size).astype("int64"))

    def step(tokens: Any, kv_cache: Any) -> Any:
        logits = model(tokens, past_key_values=kv_cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(-1)

    def once() -> Answer:
        kv_cache: Any = DynamicCache(config=model.config, offloading=cache == "OffloadedCache")
        start = time.perf_counter()
        token = step(ids, kv_cache)
        middle = time.perf_counter()
        for _ in range(request.steps):
            token = step(token, kv_cache)
        end = time.perf_counter()
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kv_cache.layers)
        return Answer(middle - start, end - middle, size, 0)

    with torch.no_grad():
        once()
        return once()


def transformers_systems(request: Request) -> list[System]:
    """Return transformers with each of its caches, for `bench_model`. On a GPU or without torch there is none.

    torch runs on the CPU here, so it is left out if JAX runs on a GPU.
    """
    if importlib.util.find_spec("torch") is None or jax.default_backend() != "cpu":
        return []
    none = dict.fromkeys(("bytes_read", "bytes_fetched", "bytes_moved", "flops", "prefill_flops", "fallback"))
    about = {"policy": "transformers", "fetch": None} | none
    return [
        ({"setting": f"transformers {cache}"} | about, functools.partial(answer_transformers, request, cache))
        for cache in CACHES
    ]
