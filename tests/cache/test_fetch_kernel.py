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
from jshadow.cache.records import Selection
from jshadow.planner.bytes import abstract_state
from jshadow.policies import ShadowKV
from jshadow.policies.settings import with_settings


@pytest.mark.parametrize(("values", "kernels"), [("int4", ["fetch_reconstruct"]), ("model", ["reconstruct_keys"])])
def test_resident_values_of_few_bits_are_read_by_the_kernel_on_a_gpu(values, kernels):
    """With exact values, XLA gathers them, which needs one kernel beside the one that rebuilds keys."""
    policy = with_settings(ShadowKV.packed(), {"values.dtype": values})
    sizes = {"batch": 1, "capacity": 1024, "prompt": 960, "dtype": "bfloat16", "fetch": "resident"}
    state = abstract_state(dataclasses.replace(TINY, context=1024), policy, **sizes)
    spec, layer = state.specs[0], state.layers[0]
    chosen = jnp.zeros((1, spec.kv_heads, spec.policy.max_selected(1024)), jnp.int32)

    def fetch(layer, ids):
        step = types.SimpleNamespace(inverse=jnp.ones(spec.head_dim // 2))
        selection = Selection(ids, ids >= 0, rebuild=spec.policy.rebuild(spec, layer, step))
        return offload.fetch(spec, layer.host, selection, spec.policy.host_layout(spec))

    with device_named("NVIDIA H200"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        traced = jax.jit(fetch).trace(layer, chosen)
        on_gpu, on_cpu = (traced.lower(lowering_platforms=(one,)).as_text() for one in ("cuda", "cpu"))
    assert re.findall(r'name = "(\w+)"', on_gpu) == kernels
    assert TARGET not in on_cpu
