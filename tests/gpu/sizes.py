"""How large everything is: for a GPU, and tiny for a dry run."""

from dataclasses import dataclass, replace

from aot.models import LLAMA

from gpu.environment import GIB
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Landmarks, TransformCode, Values

LEFT = 64  # tokens of a capacity that the prompt leaves


@dataclass(frozen=True)
class Sizes:
    """One set of sizes.

    Attributes:
        dry: whether figures mean nothing.
        config: the model of the decode part; its layers are those of all others.
        policy: ShadowKV's settings.
        packed: settings of the same bits in which keys, landmarks and values are codes of a few bits.
        capacities: tokens that a row may hold, in the order in which they are measured.
        layer_batch: rows of the single layers, by capacity, in the same order.
        device_bytes, host_bytes: what states may take; None: what the machine has.
        singles, runs, run_steps: decode steps timed alone; runs of steps dispatched together; steps of a run.
        repeats: timed calls of everything else.
        big_units: chunks of the array that no 32-bit offset spans.
        ceiling_bytes, ceiling_side: of the arrays behind the ceilings.
        cases: the most awkward cases of each kernel that are checked; None: all.
        workers: programs compiled at once.
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
        """One layer of the model."""
        return replace(self.config, num_layers=1)

    def prompt(self, capacity: int) -> int:
        """Tokens of a prompt that fills the capacity."""
        return capacity - LEFT


BITS, PROFILE = TransformCode(bits=2), TransformCode(profile=(4, 16, 12))
PACKED = {"landmarks": Landmarks(tokens=2, levels=2, order=2, dtype="int4"), "values": Values("int4")}
# Ceilings of gigabytes: at half a gigabyte, a launch takes as long as the reading.
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
