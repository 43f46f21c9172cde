"""What JAX finds on this machine. `jshadow doctor` runs this in a process of its own, because JAX may hang or crash.

`python -m jshadow.cli.probe` prints a line of JSON before each stage, and one with what the stage has found.
"""

import json
from collections.abc import Callable
from typing import Any


def _import() -> dict[str, Any]:
    import jax
    import jaxlib

    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def _devices() -> dict[str, Any]:
    """Return the devices of JAX's default backend, and why the CUDA plugin did not start if it did not."""
    import jax

    found: dict[str, Any] = {"backend": jax.default_backend(), "devices": [_device(one) for one in jax.local_devices()]}
    if found["backend"] == "cpu":
        try:
            jax.devices("cuda")
        except RuntimeError as error:
            found["no_cuda"] = " ".join(str(error).split())
    return found


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "runtime": " ".join(device.client.platform_version.split()),
        "compute_capability": getattr(device, "compute_capability", None),
        "bytes_for_xla": stats.get("bytes_limit"),
        "bytes_in_use": stats.get("bytes_in_use"),
        "memories": [memory.kind for memory in device.addressable_memories()],
    }


def _compute() -> dict[str, Any]:
    import jax.numpy as jnp

    ones = jnp.ones((256, 256), jnp.bfloat16)
    largest = float(abs((ones @ ones).astype(jnp.float32) - 256).max())
    if largest != 0:
        raise ArithmeticError(f"256 ones times 256 ones differ from 256 by {largest}")
    return {}


def _pinned() -> dict[str, Any]:
    import jax
    import numpy as np

    sent = np.arange(2**20, dtype=np.int32)
    there = jax.device_put(sent, jax.memory.Space.Host)
    if not np.array_equal(jax.device_put(there, jax.memory.Space.Device), sent):
        raise ArithmeticError("the array came back changed")
    return {"kind": there.sharding.memory_kind}


def _kernels() -> dict[str, Any]:
    """Return for each kernel that was tried whether it serves this device."""
    import jax

    from jshadow.ops.attention import capability_here, cudnn_attends

    capability = capability_here()
    if capability is None:
        return {"kernels": {}, "why": f"the kernels are for NVIDIA GPUs, and JAX uses {jax.default_backend()}"}
    results = {name: tried(call, "pallas") for name, call in kernel_calls().items()}
    return {"kernels": results, "cudnn_attention": cudnn_attends(128, "bfloat16", capability)}


def kernel_calls() -> dict[str, Callable[[str], Any]]:
    """Return a small call of each kernel of a decode step of ShadowKV. Its argument is the implementation."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels as kernels

    def some(*shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)

    width, chunks, one = 64, 64, jnp.ones((1, 1), jnp.int32)
    q, k, v, landmarks = some(1, 1, 8, width), *(some(1, 2, chunks, width) for _ in range(3))
    candidates, resident = jnp.ones((1, 2, chunks), bool), jnp.full((1, 2, 16), -1, jnp.int32)
    scores, pairs = jnp.abs(some(1, 2, chunks).astype(jnp.float32)), jnp.arange(width // 2, dtype=jnp.float32)
    cos, sin = (wave(pairs)[None, None] for wave in (jnp.cos, jnp.sin))
    new = kernels.NewTokens(q, some(1, 1, 2, width), some(1, 1, 2, width), cos, sin, one, one == 1)
    ids = jnp.arange(32, dtype=jnp.int32).reshape(1, 2, 16)
    keys = kernels.ChosenKeys(some(1, chunks, 8 * 32), some(1, 2, 32, width), ids, pairs / 100)
    values = some(1, 2, chunks, 8 * width)

    def fetch(how: str) -> Any:
        there = jax.device_put(values, jax.memory.Space.Host) if how == "pallas" else values
        return kernels.fetch_reconstruct(kernels.HostRows(there), keys, implementation=how)

    pieces, scale = [(k, v, one[None, None] * chunks)], 0.125
    return {
        "append_rows": lambda how: kernels.append_rows(k, v, new, implementation=how),
        "chunk_scores": lambda how: kernels.chunk_scores(q, landmarks, candidates, scale=scale, implementation=how),
        "select_chunks": lambda how: kernels.select_chunks(scores, one[0] == 1, resident, count=16, implementation=how),
        "reconstruct_keys": lambda how: kernels.reconstruct_keys(keys, implementation=how),
        "fetch_reconstruct": fetch,
        "sparse_attention": lambda how: kernels.sparse_attention(q, pieces, scale=scale, implementation=how),
    }


def tried(call: Callable[[str], Any], implementation: str) -> str:
    """Return "serves", or what is wrong, after comparing a kernel with its reference in plain jax.numpy."""
    import jax
    import numpy as np

    try:
        got, want = (jax.tree.leaves(call(how)) for how in (implementation, "xla"))
        pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(got, want, strict=True)]
    except NotImplementedError as error:
        return f"refuses: {error}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    worst = max(float(np.max(np.abs(x - y) / (1 + np.abs(y)), initial=0)) for x, y in pairs)
    return "serves" if worst < 0.02 else f"differs from the reference by {worst:.3g}"


# By what the stage does.
STAGES = {
    "importing jax": _import,
    "finding devices": _devices,
    "multiplying two matrices": _compute,
    "copying an array to pinned host memory and back": _pinned,
    "running the kernels": _kernels,
}


def main() -> None:
    """Run the stages. The first one that raises an exception is the last."""
    for name, stage in STAGES.items():
        print(json.dumps({"stage": name}), flush=True)
        try:
            found = stage()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps({"stage": name, "found": found}), flush=True)
        if "error" in found:
            return


if __name__ == "__main__":
    main()
