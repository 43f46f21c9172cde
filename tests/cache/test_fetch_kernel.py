"""Which fetches use a kernel on a GPU: the programs as this machine lowers them for one."""

import dataclasses
import re
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from cases import TINY
from kernel_lowering import TARGET, device_named

from jshadow.cache import offload
from jshadow.cache.records import Kept, Selection
from jshadow.planner.bytes import abstract_of, abstract_state, on_backend
from jshadow.policies import ShadowKV
from jshadow.policies.settings import with_settings


@pytest.mark.parametrize(
    ("values", "backend", "kernels"),
    [
        ("int4", "gpu", ["fetch_reconstruct"]),
        ("model", "gpu", ["fetch_reconstruct"]),
        ("int4", "cpu", ["fetch_reconstruct"]),
        ("model", "cpu", ["reconstruct_keys"]),
    ],
)
def test_a_kernel_reads_resident_values_on_a_gpu(values, backend, kernels):
    """On a GPU, states keep rows, and one kernel fetches the others. A state from a CPU keeps none.

    With exact values, XLA then gathers the values, which needs one kernel beside the one that rebuilds keys.
    """
    policy = with_settings(ShadowKV.packed(), {"values.dtype": values})
    sizes = {"batch": 1, "capacity": 1024, "prompt": 960, "dtype": "bfloat16", "fetch": "resident"}
    state = abstract_state(dataclasses.replace(TINY, context=1024), policy, **sizes)
    state = abstract_of(on_backend(state.specs, backend), state.policy)
    spec, layer = state.specs[0], state.layers[0]
    chosen = jnp.zeros((1, spec.kv_heads, spec.policy.max_selected(1024)), jnp.int32)

    def fetch(layer, ids):
        step = types.SimpleNamespace(inverse=jnp.ones(spec.head_dim // 2))
        kept = Kept(layer.live.values, layer.live.keys, ids, ids, ids[..., 0]) if spec.keep else None
        selection = Selection(ids, ids >= 0, rebuild=spec.policy.rebuild(spec, layer, step), kept=kept)
        return offload.fetch(spec, layer.host, selection, spec.policy.host_layout(spec))

    with device_named("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(fetch).trace(layer, chosen)
        on_gpu, on_cpu = (traced.lower(lowering_platforms=(one,)).as_text() for one in ("cuda", "cpu"))
    assert re.findall(r'name = "(\w+)"', on_gpu) == kernels
    assert TARGET not in on_cpu
