"""What XLA makes of a decode step: operations, bytes and temporaries of the compiled program against a stored table.

Counted by the compiler, not timed: a change that copies a cache or computes something twice shows here on any machine.
A change that means to move the costs writes the table anew, with `python tests/planner/test_step_costs.py` from the
root of the repository. Read the difference.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from few import quick

from jshadow.cache.offload import FETCH_MODES
from jshadow.cache.records import HostArray
from jshadow.cache.state import KVState
from jshadow.engine import decode
from jshadow.models.config import ModelConfig
from jshadow.models.transformer import abstract_weights
from jshadow.planner.machine import abstract_state
from jshadow.policies import Full, ShadowKV, ShadowKVPlus, StreamingLLM

TABLE = Path(__file__).with_name("step_costs.json")
# A cache large enough that one needless copy of it stands out from all else in the step.
CONFIG = ModelConfig("llama", 64, 2, 128, 192, 8, 2, 32, 1e-5, 4096)
PROMPT, CAPACITY, BATCH = 1900, 2048, 2
SMALL = {"rank": 24, "budget": 128, "outlier_chunks": 8}
POLICIES = {
    "full": (Full(), FETCH_MODES[:1]),
    "streaming_llm": (StreamingLLM(window=256), FETCH_MODES[:1]),
    "shadowkv": (ShadowKV(**SMALL), FETCH_MODES),
    "shadowkv_plus": (ShadowKVPlus(**SMALL, later_keys="projected"), FETCH_MODES),
}
TYPES = ("float32", "bfloat16")
CASES = [(name, fetch, dtype) for name, (_, fetches) in POLICIES.items() for fetch in fetches for dtype in TYPES]
WRITTEN_WITH = json.loads(TABLE.read_text())["jax"] if TABLE.exists() else None
# What another version of XLA may count differently.
ROOM = 1.05 if jax.__version__ == WRITTEN_WITH else 1.5
LITTLE = 4096  # bytes, or operations: nothing to argue about


def placed(leaf):
    """A leaf of an abstract state. Rows in host memory are real, because a shape has no memory."""
    if not isinstance(leaf, HostArray) or leaf.memory == "device":
        return leaf
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=leaf.memory)
    return leaf.replace(array=jax.device_put(np.zeros(leaf.array.shape, leaf.array.dtype), there))


def step_costs(name: str, fetch: str, dtype: str) -> dict[str, int]:
    """Operations, bytes accessed and temporary bytes of one decode step of BATCH rows, from shapes alone."""
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), abstract_weights(CONFIG))
    sizes = {"batch": BATCH, "capacity": CAPACITY, "prompt": PROMPT, "dtype": dtype, "fetch": fetch}
    state = abstract_state(CONFIG, POLICIES[name][0], **sizes)
    state = jax.tree.map(placed, state, is_leaf=lambda leaf: isinstance(leaf, HostArray))
    token = jax.ShapeDtypeStruct((BATCH,), "int32")

    def step(weights, token, reads, writes):
        out, state = decode.step(weights, CONFIG, token, KVState.of(reads, writes))
        return out, state.split()[1]

    program = jax.jit(step, donate_argnums=3).lower(weights, token, *state.split()).compile()
    cost, temporaries = program.cost_analysis(), program.memory_analysis().temp_size_in_bytes
    return {"operations": int(cost["flops"]), "bytes": int(cost["bytes accessed"]), "temporaries": int(temporaries)}


@pytest.mark.parametrize(("name", "fetch", "dtype"), quick(CASES[:2], CASES))
def test_a_step_costs_what_it_did(name, fetch, dtype):
    stored, found = json.loads(TABLE.read_text())["steps"][f"{name}-{fetch}-{dtype}"], step_costs(name, fetch, dtype)
    assert found.keys() == stored.keys()
    for key, was in stored.items():
        assert found[key] <= ROOM * was + LITTLE, f"{key} grew from {was:,} to {found[key]:,}"
        if jax.__version__ == WRITTEN_WITH:
            assert was <= ROOM * found[key] + LITTLE, f"{key} fell from {was:,} to {found[key]:,}: write the table anew"


def test_the_table_has_all_rows_and_no_room_for_a_copy_of_the_cache():
    """One layer's keys, read and written once more, are far beyond what the table allows."""
    stored = json.loads(TABLE.read_text())["steps"]
    assert sorted(stored) == sorted("-".join(case) for case in CASES)
    one_copy = 2 * BATCH * CONFIG.kv_heads * CAPACITY * CONFIG.head_dim * 4
    assert one_copy > 0.05 * stored["full-resident-float32"]["bytes"] + LITTLE


if __name__ == "__main__":
    made = {"-".join(case): step_costs(*case) for case in CASES}
    TABLE.write_text(json.dumps({"jax": jax.__version__, "steps": made}, indent=1) + "\n")
    print(f"{len(made)} rows written to {TABLE.name}")
