"""All sizes of a run: those for a GPU, and tiny ones for a dry run."""

from dataclasses import dataclass, replace

from aot.models import LLAMA

from gpu.environment import GIB
from jshadow.models.config import ModelConfig
from jshadow.policies import ShadowKV
from jshadow.policies.shadowkv import Values

LEFT = 64  # the prompt has this many tokens fewer than the capacity


@dataclass(frozen=True)
class Sizes:
    """One set of sizes.

    Attributes:
        dry: whether this is a dry run, whose measurements mean nothing.
        config: the model of the decode parts. All other parts use one of its layers.
        policies: settings of ShadowKV by name, a key of CODES.
        capacities: maximum tokens of a row, in the order in which they are measured.
        layer_batch: batch of the single layers, for each capacity.
        dense_batch: batch of full attention of a single layer, for each capacity.
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
        generate_prompt: tokens of the prompt of `jshadow.generate`.
        generate_tokens: tokens that follow it.
    """

    dry: bool
    config: ModelConfig
    policies: dict[str, ShadowKV]
    capacities: tuple[int, ...]
    layer_batch: tuple[int, ...]
    dense_batch: tuple[int, ...]
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
    generate_prompt: int
    generate_tokens: int

    @property
    def layer_config(self) -> ModelConfig:
        """The config of a model with one layer."""
        return replace(self.config, num_layers=1)

    def prompt(self, capacity: int) -> int:
        """Return the number of prompt tokens for a capacity."""
        return capacity - LEFT


# "paper": the paper's settings. "int4": the same with values of 4 bits. "packed" and "packed small": all codes packed.
CODES = {
    "paper": ShadowKV(),
    "int4": ShadowKV(values=Values("int4")),
    "packed": ShadowKV.packed(),
    "packed small": ShadowKV.packed(small=True),
}
# Few columns have no code of 4/3 bits, so tiny models have a profile instead.
TINY_KEYS = {"packed": (4, 16, 12), "packed small": (0, 8, 12)}


def tiny(name: str, **settings: int) -> ShadowKV:
    """Return the policy of CODES with settings of a tiny model of 32 key columns."""
    if name in TINY_KEYS:
        return replace(CODES[name], keys=replace(CODES[name].keys, bits=None, profile=TINY_KEYS[name]), **settings)
    return replace(CODES[name], rank=8, **settings)


# The peak rates need gigabytes, because a launch takes as long as reading half a gigabyte.
REAL = Sizes(
    False,
    LLAMA,
    CODES,
    (122_880, 61_440),
    (24, 48),
    (6, 12),
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
    workers=16,
    generate_prompt=30_720,
    generate_tokens=33,
)
DRY = Sizes(
    True,
    ModelConfig("llama", 128, 2, 64, 96, 4, 2, 16, 1e-5, 4096),
    {name: tiny(name, outlier_chunks=4, budget=80) for name in CODES},
    (1024, 512),
    (2, 2),
    (1, 1),
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
    generate_prompt=480,
    generate_tokens=5,
)
