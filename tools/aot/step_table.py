"""The kernels of one layer of a decode step, and how long a step takes at least, predicted from the compiled program.

A layer's launches are those of a program of three layers without those of a program of two. So a launch that serves
all layers belongs to none, such as that of RoPE's tables. In a hybrid model, the layer is a recurrent one. Those that
attend are counted apart, in the same way.

The prediction is a sum over launches. A launch takes the time of its bytes, or twice its issue floor if that is longer,
because kernels reach about half of the issue rate. A launch outside a command buffer takes LAUNCH_SECONDS more. The
kernel that fetches and rebuilds chunks works only for chunks that did not stay from the step before. Nothing here was
measured on a GPU.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from aot import programs
from aot.compiler import compile_for
from aot.launches import Launch, launches_of
from aot.models import LLAMA, WHOLE_HYBRID, hybrid_of
from aot.targets import TARGETS, Target
from jshadow.models.config import ModelConfig, recurrent_of
from jshadow.policies import Full, Policy, ShadowKV

LAUNCH_SECONDS = 2.2e-6
REACHED = 0.5  # share of the issue floor's rate that a kernel reaches
LINK = 55e9  # bytes a second that a kernel reads from host memory over PCIe 5, reached by large reads
CAPACITY = 122_880


class Setting(NamedTuple):
    """A decode step to compile.

    Attributes:
        name: name in the table.
        policy: the policy.
        fetch: its fetch mode.
        batch: number of rows.
        hits: share of the selected chunks that stay from step to step, and are neither fetched nor rebuilt again.
        hybrid: whether the model is Qwen3.6-27B, and the layer a recurrent one.
    """

    name: str
    policy: Policy
    fetch: str
    batch: int
    hits: float = 0.0
    hybrid: bool = False


SMALL = ShadowKV.packed(small=True)
SETTINGS = {
    "h200": (
        Setting("full", Full(), "resident", 8),
        Setting("paper", ShadowKV(), "zero_copy", 12, 0.6),
        Setting("paper, pool of 2", ShadowKV(pool=2.0), "zero_copy", 12, 0.86),
        Setting("packed", ShadowKV.packed(), "zero_copy", 47, 0.6),
        Setting("packed small", SMALL, "resident", 37, 0.6),
        Setting("packed small, one row", SMALL, "resident", 1, 0.6),
        Setting("hybrid", Full(), "resident", 8, hybrid=True),
    ),
    "a100-80gb": (
        Setting("full", Full(), "resident", 4),
        Setting("paper", ShadowKV(), "zero_copy", 12, 0.6),
        Setting("packed", ShadowKV.packed(), "zero_copy", 22, 0.6),
        Setting("packed small", SMALL, "resident", 19, 0.6),
    ),
}


@dataclasses.dataclass(frozen=True)
class StepTable:
    """What one decode step launches.

    Attributes:
        setting: what was compiled.
        gpu: one of TARGETS.
        layer: the launches of one layer.
        attends: the launches of a layer of a hybrid model that attends.
        rest: the launches of the step that belong to no layer.
        buffers: command buffers of the program.
    """

    setting: Setting
    gpu: str
    layer: tuple[Launch, ...]
    attends: tuple[Launch, ...]
    rest: tuple[Launch, ...]
    buffers: int

    @property
    def target(self) -> Target:
        """The GPU."""
        return TARGETS[self.gpu]

    def done(self, launch: Launch) -> float:
        """Return the share of a launch's work that is done: less than 1 if chunks that stay are left out."""
        return 1 - self.setting.hits if launch.name.startswith("fetch_reconstruct") else 1.0

    def issue(self, launch: Launch) -> float:
        """Return the issue floor of a launch in seconds."""
        return self.done(launch) * launch.issue_seconds(self.target)

    def moved(self, launch: Launch) -> float:
        """Return the seconds that the device bytes of a launch take."""
        return self.done(launch) * launch.bytes / self.target.bandwidth

    def fetched(self, launch: Launch) -> float:
        """Return the seconds that the host bytes of a launch take."""
        return self.done(launch) * launch.host_bytes / LINK

    def seconds(self, launch: Launch) -> float:
        """Return the predicted seconds of a launch."""
        launched = 0.0 if launch.captured else LAUNCH_SECONDS
        return max(self.moved(launch), self.fetched(launch), self.issue(launch) / REACHED) + launched

    def step_seconds(self) -> float:
        """Return the predicted seconds of a step of the whole model."""
        return self.whole(self.seconds)

    def bound_seconds(self) -> float:
        """Return the seconds that the bytes of a step take, without any instruction."""
        return self.whole(self.moved)

    def whole(self, seconds: Callable[[Launch], float]) -> float:
        """Return the sum over all launches of a step of the whole model."""
        layers, attending = LLAMA.num_layers, 0
        if self.setting.hybrid:
            layers = len(recurrent_of(WHOLE_HYBRID).layers)
            attending = WHOLE_HYBRID.num_layers - layers
        parts = (layers, self.layer), (attending, self.attends), (1, self.rest)
        return sum(count * sum(map(seconds, part)) for count, part in parts)

    def report(self) -> dict[str, Any]:
        """Return the table as JSON."""
        kinds = Counter(one.kind for one in self.layer)
        return {
            "setting": self.setting.name,
            "gpu": self.gpu,
            "fetch": self.setting.fetch,
            "batch": self.setting.batch,
            "capacity": CAPACITY,
            "hits": self.setting.hits,
            "kernels": len(self.layer) - kinds["kCopy"],
            "copies": kinds["kCopy"],
            "sorts": sum(one.name.startswith("sort") for one in self.layer),
            "command_buffers": self.buffers,
            "outside_buffers": sum(not one.captured for one in (*self.layer, *self.attends, *self.rest)),
            "issue_floor_ms": 1e3 * sum(map(self.issue, self.layer)),
            "bytes_ms": 1e3 * sum(map(self.moved, self.layer)),
            "step_ms": 1e3 * self.step_seconds(),
            "step_bytes_ms": 1e3 * self.bound_seconds(),
            "tokens_per_second": self.setting.batch / self.step_seconds(),
            "launches": [self.row(one) for one in self.layer],
        }

    def row(self, launch: Launch) -> dict[str, Any]:
        """Return one launch as JSON."""
        code = launch.code
        return {
            "name": launch.name,
            "kind": launch.kind,
            "ours": launch.ours,
            "grid": launch.blocks,
            "threads": launch.threads,
            "registers": code.registers if code else 0,
            "blocks_per_core": launch.blocks_per_core(self.target) if code else 0,
            "instructions": code.instructions if code else 0,
            "unknown_loops": code.unknown_loops if code else 0,
            "done": self.done(launch),
            "issue_floor_us": 1e6 * self.issue(launch),
            "bytes": launch.bytes,
            "host_bytes": launch.host_bytes,
            "bytes_us": 1e6 * self.moved(launch),
        }


def step_table(setting: Setting, gpu: str, tools: str) -> StepTable:
    """Compile a step of two layers and one of three, and compare them.

    Args:
        setting: what to compile.
        gpu: one of TARGETS.
        tools: the folder of ptxas and nvdisasm; see `machine_code`.
    """

    def compiled(config: ModelConfig) -> tuple[list[Launch], int]:
        task = programs.step_task(setting.name, gpu, config, setting.policy, setting.batch, CAPACITY, setting.fetch)
        program = compile_for(gpu, task.function, *task.arguments, donate=task.donate)
        return launches_of(program, TARGETS[gpu].architecture, tools), program.thunks.count("kCommandBuffer")

    configs = [dataclasses.replace(LLAMA, num_layers=layers) for layers in (2, 3)]
    if setting.hybrid:
        configs = [hybrid_of(2, 1), hybrid_of(3, 1), hybrid_of(2, 2)]
    (two, _), *more = map(compiled, configs)
    layer, attends = [*(difference(launches, two) for launches, _ in more), ()][:2]
    return StepTable(setting, gpu, layer, attends, without(without(two, layer * 2), attends), more[-1][1])


def difference(more: Sequence[Launch], fewer: Sequence[Launch]) -> tuple[Launch, ...]:
    """Return the launches that a program has more than one with a layer less. LookupError: it lacks some of them."""
    layer = without(more, fewer)
    if len(layer) != len(more) - len(fewer):
        raise LookupError(f"a program of more layers lacks launches of one of fewer: {without(fewer, more)}")
    return layer


def without(launches: Sequence[Launch], others: Sequence[Launch]) -> tuple[Launch, ...]:
    """Return the launches that are not among the others. Each of the others takes one launch of the same grid away."""
    left = Counter(map(same, others))
    kept = []
    for launch in launches:
        if left[same(launch)]:
            left[same(launch)] -= 1
        else:
            kept.append(launch)
    return tuple(kept)


def same(launch: Launch) -> tuple[str, str, int, int]:
    """Return what equal launches of two programs have in common. XLA names kernels of one block by what they fuse."""
    return launch.name if launch.blocks > 1 else "", launch.kind, launch.blocks, launch.threads
