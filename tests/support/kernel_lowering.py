"""Programs of the GPU ops as this machine lowers them for another."""

import warnings
from typing import Any

import jax
import kernel_calls
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

TARGET = "__gpu$xla.gpu.triton"


def device_named(name: str) -> Any:
    """Return a context in which JAX traces and lowers for a GPU of this name. Without it, Pallas finds no GPU."""
    device = AbstractDevice(device_kind=name, num_cores=None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def lowered(op: str, inputs: dict[str, Any], platform: str, **choice: Any) -> str:
    """The program of one op for "cuda" or "cpu", as text."""
    arrays = {key: x for key, x in inputs.items() if hasattr(x, "shape")}
    static = {key: x for key, x in inputs.items() if key not in arrays and key != "pieces"}
    arrays |= {key: inputs[key] for key in ("pieces",) if key in inputs}
    with device_named("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(lambda x: getattr(kernel_calls, op)(**x, **static, **choice)).trace(arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()
