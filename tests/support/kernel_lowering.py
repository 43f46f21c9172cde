"""Programs of the GPU ops as this machine lowers them for another."""

import warnings
from contextlib import ExitStack
from typing import Any

import jax
import kernel_calls

TARGET = "__gpu$xla.gpu.triton"


def lowered(op: str, inputs: dict[str, Any], platform: str, **choice: Any) -> str:
    """The program of one op for "cuda" or "cpu", as text."""
    arrays = {key: x for key, x in inputs.items() if hasattr(x, "shape")}
    static = {key: x for key, x in inputs.items() if key not in arrays and key != "pieces"}
    arrays |= {key: inputs[key] for key in ("pieces",) if key in inputs}
    traced = jax.jit(lambda x: getattr(kernel_calls, op)(**x, **static, **choice)).trace(arrays)
    with ExitStack() as stack:
        if hasattr(jax.sharding, "AbstractDevice"):  # JAX 0.11 on asks which GPU it is for
            device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        return traced.lower(lowering_platforms=(platform,)).as_text()
