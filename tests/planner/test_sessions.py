"""The plan of sessions: its bytes are those of real states, and its counts are the largest that fit."""

import dataclasses

import jax
import pytest
from cases import PACKED, SMALL, TINY, TRANSFORM
from real_shapes import LLAMA_31_8B

from jshadow.cache.offload import host_bytes
from jshadow.errors import CapacityError
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GIB, GPUS
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.machine import abstract_state, prefill_peak
from jshadow.planner.sessions import SessionClass, session_plan
from jshadow.policies import Full, ShadowKV, ShadowKVPlus
from jshadow.policies.shadowkv import Values

SIZES = SessionClass(prompt=24, room=9, group_rows=3, groups=2)
TWO = dataclasses.replace(TINY, num_layers=2)
STATES = {
    "packed": ShadowKV(**SMALL, keys=TRANSFORM, landmarks=PACKED, values=Values("int4")),
    "plus": ShadowKVPlus(rank=8, budget=8, chunk_size=4, outlier_chunks=2, local_chunks=1, extra_outlier_chunks=2),
    "full": Full(),
}


def live_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def tiny_plan(policy, sizes):
    """The plan of one class on a CPU."""
    options = {"dtype": "float32", "fetch": "device_put", "backend": "cpu"}
    return session_plan(TWO, policy, [sizes], MemoryLimits(), **options).classes[0]


@pytest.mark.parametrize("name", STATES)
def test_bytes_are_those_of_states(name):
    """Of a group whose rows have their own prompts, and of a document that sessions share. A law has real states."""
    policy = STATES[name]
    own, shared = tiny_plan(policy, SIZES), tiny_plan(policy, dataclasses.replace(SIZES, documents=2))
    sizes = {"capacity": SIZES.capacity, "prompt": SIZES.prompt, "dtype": "float32", "fetch": "device_put"}
    group = abstract_state(TWO, policy, batch=SIZES.group_rows, room=SIZES.room, **sizes)
    document = abstract_state(TWO, policy, batch=1, room=0, **sizes)
    reads, writes = group.split()
    assert live_bytes(reads) + live_bytes(writes) == sum(own.group_bytes)
    assert live_bytes(writes) == sum(shared.group_bytes)
    assert live_bytes(document.split()) * 2 == sum(shared.documents_bytes)
    on_host = host_bytes(group.specs)
    assert on_host == own.group_bytes[1]
    assert bool(on_host) == (name != "full")


H200 = GPUS["h200"]
SMALL_HOST = MemoryLimits(H200.memory_bytes, 128 * GIB, CONTEXT_RESERVE)


def planned(policy=None, fetch=None, **changes):
    policy, sizes = policy or ShadowKV.packed(small=True), SessionClass(122_880, 1024, **changes)
    return session_plan(LLAMA_31_8B, policy, [sizes], SMALL_HOST, **({"fetch": fetch} if fetch else {}))


def test_sessions_of_an_h200_with_a_small_host():
    """The aims of the serving engine: 56 sessions with prompts of their own, 300 over 30 shared documents."""
    own, shared = planned(), planned(documents=30)
    assert own.fits
    assert own.sessions == own.classes[0].sessions_any_spread == 56
    assert shared.fits
    assert shared.classes[0].fetch == "device_put"
    assert shared.sessions >= 600
    assert shared.classes[0].sessions_any_spread >= 300
    assert shared.sessions - shared.classes[0].sessions_any_spread == 30 * 7
    assert not planned(policy=ShadowKV(), documents=30).sessions  # the documents alone need more host memory
    assert not planned(policy=Full()).fits
    assert 0 < planned(policy=Full(), group_rows=1).sessions < 8


@pytest.mark.parametrize("documents", [0, 30])
def test_one_more_group_does_not_fit(documents):
    plan = planned(documents=documents)
    groups, fetch = plan.classes[0].sizes.groups, plan.classes[0].fetch
    again = [planned(fetch=fetch, groups=count, documents=documents) for count in (groups, groups + 1)]
    assert again[0] == plan
    again[0].check()
    assert not again[1].fits
    name, needed, limit = ("device", again[1].device_bytes, H200.memory_bytes)
    if not documents:
        name, needed, limit = ("host", again[1].host_bytes, 128 * GIB)
    with pytest.raises(CapacityError, match=rf"{needed} bytes of {name} memory, and the limit is {limit}"):
        again[1].check()


def test_a_prefill_is_that_of_the_gpu_of_the_plan():
    """And not that of the process that plans: attention to a whole prompt takes another memory there."""
    plan = planned().classes[0]
    sizes = {"batch": 1, "tokens": 122_880, "capacity": 122_880 + 1024, "room": 1024, "fetch": plan.fetch}
    on = {name: prefill_peak(LLAMA_31_8B, plan.policy, **sizes, backend=name) for name in ("gpu", "cpu")}
    needed = {name: sum(parts.values()) - parts["weights"] - parts["state"] for name, parts in on.items()}
    held = sum(size.device for size in [*plan.prompt_parts.values(), *plan.live_parts.values()])
    assert plan.prefill.device - held == needed["gpu"] != needed["cpu"]


def test_classes_share_weights_temporaries_and_a_prefill():
    """What a step and a prefill take counts once. A class of short prompts has another policy."""

    def plan(*classes, limits=SMALL_HOST):
        return session_plan(LLAMA_31_8B, ShadowKV(), list(classes), limits, fetch="device_put")

    long = SessionClass(24_576, 1024, groups=2)
    short = SessionClass(1024, 1024, groups=3, policy=Full())
    one, two, both = (plan(*classes, limits=MemoryLimits()) for classes in ([long], [short], [long, short]))
    assert both.sessions == 8 * 5
    assert both.temporaries_bytes == max(one.temporaries_bytes, two.temporaries_bytes)
    assert both.prefill_bytes == one.prefill_bytes > two.prefill_bytes
    assert both.device_bytes == one.device_bytes + two.classes[0].state_bytes[0]
    rest = plan(long, dataclasses.replace(short, groups=None))
    assert rest.fits
    assert rest.device_bytes + rest.classes[1].group_bytes[0] > H200.memory_bytes
