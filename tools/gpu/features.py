"""Checks of the memories and the arithmetic that JAX and XLA provide, and a comparison of the three fetch modes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu.runner import Task, attempt, brief
from gpu.sizes import Sizes, tiny
from gpu.synthetic import free, sharding
from jshadow.cache import offload
from jshadow.cache.records import HostArray, HostTier
from jshadow.engine import decode
from jshadow.models.config import ModelConfig
from jshadow.ops.layout import top_k
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv.key_codecs.lowrank import EXACT, key_factors
from jshadow.weights.params import init_params
from pallas_kernels import ChosenKeys, HostRows, fetch_reconstruct

MODEL = ModelConfig("llama", 499, 4, 256, 384, 8, 2, 64, 1e-5, 1024)
SMALL_MODEL = ModelConfig("llama", 101, 2, 32, 48, 4, 2, 16, 1e-5, 1024)
LENGTHS, CAPACITY, STEPS = (310, 171, 59), 352, 6
POLICIES = {
    "": ShadowKV(rank=24, budget=64, outlier_chunks=4),
    "packed, ": tiny("packed", budget=64, outlier_chunks=4),
}
# NEAR: the largest difference of logits of unit variance, because sums are computed in a different order. ALIKE: the
# smallest share of equal selected ids, because a near tie may be decided either way.
NEAR = {"float32": 2e-3, "bfloat16": 0.1}
ALIKE = {"float32": 0.99, "bfloat16": 0.9}


def check_memories() -> dict[str, Any]:
    """Check that the device addresses pinned host memory, and that an array survives the way there and back."""
    kinds = sorted(memory.kind for memory in jax.devices()[0].addressable_memories())
    x = jnp.arange(1001.0)
    away = jax.device_put(x, sharding("pinned_host"))
    same = bool((jax.device_put(away, sharding("device")) == x).all())
    return {"ok": same and away.sharding.memory_kind == "pinned_host", "memories": kinds}


def check_top_k(sizes: Sizes) -> dict[str, Any]:
    """Compare top_k with a stable sort of NumPy on scores with many ties. The lower index must win."""
    rng, count = np.random.default_rng(0), 24 if sizes.dry else 239
    wrong = []
    for levels in (50, 100_000):
        scores = rng.integers(0, levels, (2, 8, 1, 500 if sizes.dry else 15_356)).astype(np.float32)
        want = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
        got = np.asarray(jax.jit(functools.partial(top_k, count=count))(scores))
        if not np.array_equal(got, want):
            wrong.append(f"{levels} levels: {(got != want).mean():.2%} of the ids differ")
    return {"ok": not wrong, "wrong": wrong}


def check_gram(sizes: Sizes) -> dict[str, Any]:
    """Check that a float32 Gram matrix does not use TF32 products, and that its factors reproduce the keys."""
    rows, heads, dim = (64, 2, 8) if sizes.dry else (4096, 8, 128)
    keys = jax.random.normal(jax.random.key(0), (rows, heads, dim), jnp.float32) + 0.5
    flat = keys.reshape(rows, -1)
    exact = np.asarray(flat, np.float64)
    want = exact.T @ exact

    def off(got: Any) -> float:
        return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))

    error = off(jax.jit(functools.partial(jnp.einsum, "sm,sn->mn", precision=EXACT))(flat, flat))
    default = off(jax.jit(functools.partial(jnp.einsum, "sm,sn->mn"))(flat, flat))
    left, right = jax.jit(functools.partial(key_factors, rank=heads * dim))(keys[None], jnp.full(1, rows))
    back = np.einsum("sr,hrd->shd", np.asarray(left[0], np.float64), np.asarray(right[0], np.float64))
    rebuilt = float(np.linalg.norm(back - np.asarray(keys, np.float64)) / np.linalg.norm(exact))
    return {
        "ok": error < 1e-5 and rebuilt < 2e-5,
        "gram_error": error,
        "gram_error_default": default,
        "rebuilt_error": rebuilt,
    }


def check_basis(sizes: Sizes) -> dict[str, Any]:
    """Compare the factors of bfloat16 keys with the best ones, which NumPy computes in float64.

    On a GPU, tensor cores multiply the keys, and the basis comes from subspace iteration.
    """
    rows, heads, dim, rank = (64, 2, 128, 40) if sizes.dry else (4096, 8, 128, 160)
    width = heads * dim
    scale = jnp.arange(1, width + 1) ** -0.5
    keys = jax.random.normal(jax.random.key(0), (rows, width)) * scale + 0.5
    keys = keys.reshape(1, rows, heads, dim).astype(jnp.bfloat16)
    left, right = jax.jit(functools.partial(key_factors, rank=rank))(keys, jnp.full(1, rows))
    exact = np.asarray(keys[0], np.float64).reshape(rows, width)
    least = float(np.linalg.eigvalsh(exact.T @ exact)[:-rank].sum())
    columns = np.asarray(right[0], np.float64).transpose(1, 0, 2).reshape(rank, width)
    lost = float(np.linalg.norm(exact - exact @ columns.T @ columns) ** 2)
    rows_off = np.asarray(left[0], np.float64) - exact @ columns.T
    off = float(np.linalg.norm(rows_off) / np.linalg.norm(exact))
    uneven = float(np.abs(columns @ columns.T - np.eye(rank)).max())
    return {
        "ok": lost < 1.01 * least and off < 4e-3 and uneven < 1e-4,
        "lost_over_least": lost / least,
        "left_error": off,
        "not_orthonormal": uneven,
    }


def decoded(sizes: Sizes, params: Any, fetch: str, policy: ShadowKV) -> tuple[np.ndarray, np.ndarray, float]:
    """Decode STEPS tokens.

    Returns:
        Logits [T, B, V], sorted ids of the selected chunks [T, layers, B, h_kv, k], and the share of hits.
    """
    config, rng = SMALL_MODEL if sizes.dry else MODEL, np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (len(LENGTHS), max(LENGTHS)), dtype=np.int32)
    fed = rng.integers(0, config.vocab_size, (STEPS, len(LENGTHS)), dtype=np.int32)
    _, state = decode.prefill(params, tokens, np.asarray(LENGTHS), policy, capacity=CAPACITY, fetch=fetch)
    logits, ids = [], []
    for token in fed:
        out, state = decode.decode_step(params, token, state)
        logits.append(np.asarray(out, np.float32))
        ids.append([np.sort(np.asarray(layer.live.resident), axis=-1) for layer in state.layers])
    counters = state.counters
    hits = float(np.asarray(counters.hits, float).sum() / np.asarray(counters.selected).sum())
    return np.asarray(logits), np.asarray(ids), hits


def check_modes(sizes: Sizes, dtype: str, policy: ShadowKV) -> dict[str, Any]:
    """Compare all fetch modes on the same prompts and tokens: selected chunks, and logits while selections agree."""
    with jax.default_matmul_precision("highest"):  # TF32 would cause more near ties
        params = init_params(SMALL_MODEL if sizes.dry else MODEL, dtype=dtype)
        base, chosen, hits = decoded(sizes, params, "resident", policy)
        row: dict[str, Any] = {"ok": bool(np.isfinite(base).all()), "repeat_share": hits}
        for fetch in offload.FETCH_MODES[1:]:
            try:
                mine, picked, _ = decoded(sizes, params, fetch, policy)
            except Exception as error:
                row |= {"ok": False, fetch: {"error": brief(error)}}
                continue
            # A different selection also changes all later steps of the row, so these are not compared.
            agree = np.logical_and.accumulate((picked == chosen).all(axis=(1, 3, 4)), axis=0)
            off = np.abs(mine - base).max(axis=-1)[agree]
            row[f"{fetch}_ids"] = alike = float(np.mean(picked == chosen))
            row[f"{fetch}_compared"], row[f"{fetch}_logits"] = float(agree.mean()), float(off.max(initial=0.0))
            # The comparison is "<" and not "not >", so that NaN fails.
            good = bool(np.isfinite(mine).all()) and bool((off < NEAR[dtype]).all()) and alike >= ALIKE[dtype]
            row["ok"] = row["ok"] and good
    return row


def expected(index: Any, width: int) -> Any:
    """Return small whole numbers that depend on the flat index of a chunk. They are exact in bfloat16."""
    return ((index * 7)[..., None] % 251 + jnp.arange(width) % 5).astype(jnp.bfloat16)


def check_big(sizes: Sizes) -> dict[str, Any]:
    """Fetch chunks of a pinned array that is too large for 32-bit offsets (JAX issue 42349).

    They are fetched by the kernel and by the host, and the array is copied as a whole.
    """
    batch, heads, units, chunk, rank = 2, 4, sizes.big_units, 8, 16
    dim = 16 if sizes.dry else 128
    width = chunk * dim

    @jax.jit
    def made() -> jax.Array:
        b, h, u = (jax.lax.broadcasted_iota(jnp.int32, (batch, heads, units), axis) for axis in range(3))
        return expected((b * heads + h) * units + u, width)

    here = jax.block_until_ready(made())
    away = jax.block_until_ready(jax.device_put(here, sharding("pinned_host")))
    whole = bool((jax.device_put(away, sharding("device")) == here).all())
    ids = jnp.asarray(np.random.default_rng(0).integers(0, units, (batch, heads, 64)), jnp.int32)
    ids = ids.at[..., 0].set(0).at[..., 1].set(units - 1)
    row, head = jnp.ogrid[:batch, :heads]
    want = expected((row * heads + head)[..., None] * units + ids, width)
    left, right = jnp.zeros((batch, units, chunk * rank), jnp.bfloat16), jnp.ones((batch, heads, rank, dim), "bfloat16")
    inverse = jnp.ones(dim // 2, jnp.float32)

    def by_host(values: Any, ids: Any, left: Any) -> Any:
        return offload.gather(HostTier(HostArray(values, "pinned_host")), ids, (units,))

    def by_kernel(values: Any, ids: Any, left: Any) -> Any:
        return fetch_reconstruct(HostRows(values), ChosenKeys(left, right, ids, inverse))[1]

    ways: dict[str, Callable[..., Any]] = {
        "zero_copy": by_kernel,
        "device_put": by_host,
    }

    def equal(get: Callable[..., Any]) -> bool:
        return bool((jax.jit(get)(away, ids, left).reshape(want.shape) == want).all())

    found = {way: attempt(functools.partial(equal, get)) for way, get in ways.items()}
    size = away.nbytes
    free(here, away, left)
    good = whole and all(one is True for one in found.values())
    return {"ok": good, "bytes": size, "whole": whole} | found


def tasks(sizes: Sizes) -> Iterator[Task]:
    """Yield the checks that do not belong to a single kernel."""
    yield Task("memories", 1, check_memories)
    for dtype in NEAR:
        for told, policy in POLICIES.items():
            yield Task(f"fetch modes, {told}{dtype}", 20, functools.partial(check_modes, sizes, dtype, policy))
    yield Task("pinned array beyond 4 GiB", 20, functools.partial(check_big, sizes))
    yield Task("top_k", 5, functools.partial(check_top_k, sizes))
    yield Task("Gram matrix in float32", 10, functools.partial(check_gram, sizes))
    yield Task("basis of bfloat16 keys", 10, functools.partial(check_basis, sizes))
