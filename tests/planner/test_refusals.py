"""What cannot be planned is refused: a row has a call, its error and the words of its message."""

import dataclasses
from functools import partial

import pytest
from cases import TINY
from real_shapes import LLAMA_31_8B

from jshadow.cli.main import main
from jshadow.errors import CapacityError, ConfigError
from jshadow.planner.bytes import Workload
from jshadow.planner.gpu import capacity_plan
from jshadow.planner.gpu_specs import CONTEXT_RESERVE, GIB, GPUS, custom_gpu, gpu_named
from jshadow.planner.limits import MemoryLimits
from jshadow.planner.machine import footprint
from jshadow.planner.mesh import mesh_shards
from jshadow.planner.sessions import SessionClass, session_plan
from jshadow.planner.speculation import Drafting, speculation_plan
from jshadow.policies import Full, InfLLM, ShadowKV, SnapKV, StreamingLLM
from jshadow.policies.shadowkv import ExactKeys

H200 = GPUS["h200"]
EXACT, FREE = ShadowKV(keys=ExactKeys()), SessionClass(1024, 8)
SMALL = ShadowKV(rank=12, budget=16, chunk_size=4, outlier_chunks=2, local_chunks=2)
LIMITS = MemoryLimits(H200.memory_bytes, 128 * GIB, CONTEXT_RESERVE)
NO_KERNEL = "fetch must be 'device_put' or 'resident' for shadowkv "


def plan(policy=None, mesh=None, host=None, **sizes):
    workload = Workload(**{"context": 64} | sizes | ({"shards": mesh_shards(**mesh)} if mesh else {}))
    capacity_plan(TINY, policy or Full(), dataclasses.replace(H200, **host or {}), workload)


def sessions(*classes, policy=None, limits=None, **options):
    session_plan(LLAMA_31_8B, policy or StreamingLLM(), list(classes), limits or MemoryLimits(), **options)


def speculation(serving=None, drafting=None, **target):
    speculation_plan(LLAMA_31_8B, H200, serving or Workload(122_880, batch=7), drafting or Drafting(8, 0.9), **target)


def figures(**given):
    custom_gpu(None, **{"gib": None, "bandwidth": None, "link": None, "tflops": None} | given)


REFUSED = [
    (partial(gpu_named, "tpu"), ConfigError, "gpu must be one of .*'h100'.*, got 'tpu'"),
    (partial(plan, context=0), ConfigError, "context must be at least 1, got 0"),
    (partial(plan, context=200, max_new_tokens=57), CapacityError, "model's context=256, got 200 [+] 57"),
    (partial(plan, max_new_tokens=-1), ConfigError, "max_new_tokens must be at least 0"),
    (partial(plan, batch=0), ConfigError, "batch must be at least 1, got 0"),
    (partial(plan, host={"host_limit": -1}), ConfigError, "host_limit must be at least 0, got -1"),
    (partial(plan, fetch="mail"), ConfigError, "fetch must be"),
    (partial(plan, repeat_share=0.5), ConfigError, "repeat_share must be 0 with fetch='device_put'"),
    (partial(plan, SMALL, fetch="zero_copy", repeat_share=1.5), ConfigError, r"share must lie in \[0, 1\], got 1.5"),
    (partial(plan, EXACT, fetch="zero_copy"), ConfigError, f"{NO_KERNEL}with keys='exact'"),
    *(
        (
            partial(plan, ShadowKV(), host={"gather_bytes_per_second": rate}),
            ConfigError,
            "second must be above 0 and finite",
        )
        for rate in (0, -1.0, float("inf"), float("nan"))
    ),
    *(
        (partial(footprint, LLAMA_31_8B, ShadowKV(), capacity=4096, prompt=1024, room=room), CapacityError, error)
        for room, error in zip((-1, True, 1.5, "8"), ["room must be an integer of at least 0"] * 4, strict=True)
    ),
    # Several GPUs
    (partial(plan, mesh=dict(tp=3)), ConfigError, "tp must divide the 2 KV heads, got tp=3"),
    (partial(plan, mesh=dict(tp=0)), ConfigError, "tp must be an integer of at least 1, got 0"),
    (partial(plan, mesh=dict(tp=-1)), ConfigError, "tp must be an integer of at least 1, got -1"),
    (partial(plan, mesh=dict(tp=1.5)), ConfigError, "tp must be an integer of at least 1, got 1.5"),
    (partial(plan, mesh=dict(left="right")), ConfigError, "left must be one of"),
    (partial(plan, InfLLM(), dict(tp=2)), ConfigError, "mesh must be None for infllm, which is not split over devices"),
    (partial(plan, SMALL, dict(tp=2), fetch="zero_copy"), ConfigError, f"{NO_KERNEL}with left='split'"),
    # Sessions
    (partial(sessions, SessionClass(0, 8)), CapacityError, "prompt must be at least 1"),
    (partial(sessions, SessionClass(8, -1)), CapacityError, "room at least 0"),
    (partial(sessions, SessionClass(131_000, 1024)), CapacityError, "context=131072, got 131000 . 1024"),
    (partial(sessions, SessionClass(8, 8, group_rows=0)), ConfigError, "group_rows must be at least 1, got 0"),
    (partial(sessions, SessionClass(8, 8, groups=-1)), ConfigError, "groups must be at least 0, got -1"),
    (partial(sessions, SessionClass(8, 8, documents=-1)), ConfigError, "documents must be at least 0, got -1"),
    (partial(sessions, FREE), ConfigError, "groups must be given where no memory has a limit"),
    (partial(sessions, limits=LIMITS), ConfigError, "groups=None in at most one"),
    (partial(sessions, FREE, FREE, limits=LIMITS), ConfigError, "groups=None in at most one"),
    (partial(sessions, FREE, policy=EXACT, limits=LIMITS, fetch="zero_copy"), ConfigError, "fetch must be"),
    # Speculation
    (partial(speculation, drafting=Drafting(0, 0.9)), ConfigError, "drafts must be an integer of at least 1, got 0"),
    (partial(speculation, drafting=Drafting(8, 1.5)), ConfigError, r"acceptance must lie in \[0, 1\], got 1.5"),
    (partial(speculation, target=SnapKV()), ConfigError, "policy must be full or offloaded to plan a speculation, got"),
    (partial(speculation, Workload(122_880, batch=70)), ConfigError, "batch must be at least 1 and at most 8 on"),
    (partial(speculation, Workload(4096, shards=mesh_shards(tp=2))), ConfigError, "is planned for one GPU, got 2"),
    # GPUs by their figures
    (partial(figures, link=5), ConfigError, "got none for --gpu-gib, --bandwidth, --tflops"),
    (partial(figures, gib=16, bandwidth=0, link=1, tflops=1), ConfigError, "--bandwidth must be above 0 and finite, g"),
    (partial(figures, gib=float("inf"), bandwidth=1, link=1, tflops=1), ConfigError, "--gpu-gib must be above 0"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_planned_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


SPECULATE = "--context 4096 --speculate 8 --acceptance 0.9 "
COMMANDS = [
    ("--context 8192 --tp 3", "tp must divide the 8 KV heads, got tp=3"),
    ("--context 8192 --tp 0", "tp must be an integer of at least 1, got 0"),
    ("--context 8192 --tp 2 --shared 3", "--tp must be left out with --shared and --group-rows, got 2"),
    ("--tp 2", "--tp must come with --context"),
    ("--link 63", "--link must come with --context"),
    (SPECULATE + "--policy offloaded --drafter self", "policy must be full for speculate='self', got offloaded"),
    (SPECULATE + "--drafter compressed:snapkv", "must be made from keys and values alone"),
    (SPECULATE + "--speculate 100", "tokens must be an integer in"),
    (SPECULATE + "--policy offloaded --set dense_first.layers=2", "must be offloaded without a wrapper"),
    ("--context 4096 --speculate 8", "--speculate and --acceptance must come together"),
    ("--context 4096 --drafter self", "--drafter must come with --speculate"),
]


@pytest.mark.parametrize(("words", "message"), COMMANDS)
def test_a_command_that_cannot_plan_says_why(words, message, capsys):
    assert main(["plan", "llama-3.1-8b", *words.split()]) == 2
    assert message in capsys.readouterr().err
