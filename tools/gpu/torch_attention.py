"""Full attention of one token by torch, in a process of its own, because JAX takes the memory of the device.

The process prints one JSON object: the milliseconds of each way, or {"not_available": reason}.
"""

import json
import statistics
import sys
import time
from typing import Any

from gpu.sizes import DRY, REAL, Sizes

CALLS = 8
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def milliseconds(torch: Any, backend: str, sizes: Sizes, capacity: int, batch: int) -> float:
    """Return the milliseconds of scaled_dot_product_attention by one backend. Query heads share their KV heads."""
    config = sizes.config
    sides = ((config.q_heads, 1), (config.kv_heads, capacity), (config.kv_heads, capacity))
    q, k, v = (torch.randn(batch, *side, config.head_dim, dtype=torch.bfloat16, device="cuda") for side in sides)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(CALLS):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / CALLS

    with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
        once()
        return 1e3 * statistics.median(once() for _ in range(sizes.repeats))


def measured(sizes: Sizes) -> dict[str, Any]:
    """Return one row for each context, or {"not_available": reason}."""
    try:
        import torch
    except ImportError as error:
        return {"not_available": f"torch is not installed: {error}"}
    if not torch.cuda.is_available():
        return {"not_available": f"torch {torch.__version__} has no CUDA device"}
    rows = []
    for capacity, batch in zip(sizes.capacities, sizes.dense_batch, strict=True):
        row: dict[str, Any] = {"capacity": capacity, "batch": batch, "milliseconds": {}, "not_available": {}}
        for name, backend in BACKENDS.items():
            try:
                row["milliseconds"][name] = milliseconds(torch, backend, sizes, capacity, batch)
            except Exception as error:  # this version of torch has no such backend, or not for these shapes
                row["not_available"][name] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return {"torch": torch.__version__, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(measured(DRY if "--dry-run" in sys.argv[1:] else REAL)))
