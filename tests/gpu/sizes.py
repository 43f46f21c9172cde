"""All sizes of a run: those for a GPU, and tiny ones for a dry run."""

from dataclasses import dataclass, replace

from aot.models import LLAMA

from gpu.environment import GIB
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Landmarks, TransformCode, Values

LEFT = 64  # the prompt has this many tokens fewer than the capacity


@dataclass(frozen=True)
class Sizes:
    """One set of sizes.

    Attributes:
        dry: whether this is a dry run, whose measurements mean nothing.
        config: the model of the decode parts. All other parts use one of its layers.
        policy: ShadowKV with the paper's settings.
        packed: ShadowKV with packed keys, landmarks and values.
        capacities: maximum tokens of a row, in the order in which they are measured.
        layer_batch: batch of the single layers, for each capacity.
        device_bytes: maximum device bytes of states. None means the memory of the machine.
        host_bytes: maximum host bytes of states. None means the memory of the machine.
        singles: number of decode steps that are timed one by one.
        runs: number of runs of steps that are dispatched together.
        run_steps: number of steps of a run.
        repeats: number of timed calls of everything else.
        big_units: number of chunks of the array that is too large for 32-bit offsets.
        ceiling_bytes: bytes of the array for the memory rates.
        ceiling_side: side of the matrices for the rates of products.
        cases: number of awkward cases of each kernel that are checked. None means all.
        workers: number of programs that are compiled at the same time.
    """

    dry: bool
    config: ModelConfig
    policy: ShadowKV
    packed: ShadowKV
    capacities: tuple[int, ...]
    layer_batch: tuple[int, ...]
    device_bytes: int | None
    host_bytes: int | None
    singles: int
    runs: int
    run_steps: int
    repeats: int
    big_units: int
    ceiling_bytes: int
    ceiling_side: int
    cases: int | None
    workers: int

    @property
    def layer_config(self) -> ModelConfig:
        """The config of a model with one layer."""
        return replace(self.config, num_layers=1)

    def prompt(self, capacity: int) -> int:
        """Return the number of prompt tokens for a capacity."""
        return capacity - LEFT


BITS, PROFILE = TransformCode(bits=2), TransformCode(profile=(4, 16, 12))
PACKED = {"landmarks": Landmarks(tokens=2, levels=2, order=2, dtype="int4"), "values": Values("int4")}
# The peak rates need gigabytes, because a launch takes as long as reading half a gigabyte.
REAL = Sizes(
    False,
    LLAMA,
    ShadowKV(),
    ShadowKV(**PACKED, keys=BITS),
    (122_880, 61_440),
    (24, 48),
    None,
    None,
    singles=8,
    runs=3,
    run_steps=6,
    repeats=10,
    big_units=300_000,
    ceiling_bytes=4 * GIB,
    ceiling_side=8192,
    cases=None,
    workers=4,
)
DRY = Sizes(
    True,
    ModelConfig("llama", 128, 2, 64, 96, 4, 2, 16, 1e-5, 4096),
    ShadowKV(rank=8, outlier_chunks=4, budget=80),
    ShadowKV(**PACKED, keys=PROFILE, outlier_chunks=4, budget=80),
    (1024, 512),
    (2, 2),
    2 * GIB,
    2**19,
    singles=2,
    runs=2,
    run_steps=3,
    repeats=2,
    big_units=96,
    ceiling_bytes=2**20,
    ceiling_side=64,
    cases=1,
    workers=2,
)
