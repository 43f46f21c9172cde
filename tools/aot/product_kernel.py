"""The kernel of tile products: experts of Qwen3-30B-A3B over a piece of a prompt, and products of a decode step.

The predicted time is the longest of three: issuing all instructions twice, the tensor cores' products of whole tiles,
and reading each matrix once from device memory. The router chooses the experts of each token evenly and independently,
so many tiles are not full. Nothing here was measured on a GPU.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

import pallas_kernels
from aot.compiler import compile_for, place
from aot.launches import Launch, launches_of
from aot.machine_code import MOST_LOCAL
from aot.models import EXPERTS, LLAMA
from aot.programs import DTYPE, size, stack_of
from aot.targets import TARGETS
from jshadow.ops.projections import KINDS
from pallas_kernels import Tiles

TOKENS, HEIGHT = 2048, 128
LEAST_RATE = 0.6  # of the tensor cores' rate, for the products of a piece of a prompt with plain experts


@dataclasses.dataclass(frozen=True)
class ProductTable:
    """A compiled kernel.

    Attributes:
        name: what it computes.
        gpu: one of TARGETS.
        launch: the launch of the kernel.
        rows: rows that are multiplied.
        tiles: tiles that have rows, and tiles of the grid.
        height: rows of a tile in the program.
        shape: D and F of each matrix.
        read: bytes of the matrices that are read.
        least: the least share of the tensor cores' rate, or of the memory's rate for few rows.
    """

    name: str
    gpu: str
    launch: Launch
    rows: int
    tiles: tuple[int, int]
    height: int
    shape: tuple[int, int]
    read: int
    least: float

    def report(self) -> dict[str, Any]:
        """Return the table as JSON."""
        target, code, (used, slots) = TARGETS[self.gpu], self.launch.code, self.tiles
        assert code is not None
        products = 2 * self.shape[0] * self.shape[1] / target.products
        read = self.read / target.bandwidth
        issue = self.launch.issue_seconds(target) * used / slots
        seconds = max(2 * issue, used * self.height * products, read)
        return {
            "program": self.name,
            "gpu": self.gpu,
            "registers": code.registers,
            "spilled": code.spilled,
            "blocks_per_core": self.launch.blocks_per_core(target),
            "issue_us": 1e6 * issue,
            "read_us": 1e6 * read,
            "products_us": 1e6 * used * self.height * products,
            "us": 1e6 * seconds,
            "rate": max(self.rows * products, read) / seconds,
        }

    def faults(self) -> Iterator[str]:
        """Yield one line for each check that fails."""
        told = self.report()
        if told["spilled"] > MOST_LOCAL:
            yield f"{self.name} on {self.gpu}: {told['spilled']} bytes of registers are spilled"
        if self.launch.code is not None and self.launch.code.unknown_loops:
            yield f"{self.name} on {self.gpu}: a loop whose number of runs is not known"
        if told["rate"] < self.least:
            yield f"{self.name} on {self.gpu}: {told['rate']:.0%} of the hardware's rate, less than {self.least:.0%}"


def product_tables(gpu: str, tools: str) -> list[ProductTable]:
    """Compile the kernels for one of TARGETS. `tools` is the folder of ptxas and nvdisasm; see `machine_code`."""
    experts = EXPERTS.experts
    assert experts is not None
    pairs = TOKENS * experts.chosen
    counts = np.bincount(
        np.argsort(np.random.default_rng(0).random((TOKENS, experts.count)))[:, : experts.chosen].ravel()
    )
    many = (int((-(-counts // HEIGHT)).sum()), pairs // HEIGHT + experts.count)
    shape = (EXPERTS.model_dim, experts.width)
    tables = []
    for kind in (None, *KINDS):
        told, sizes = kind or "plain", (pairs, many, HEIGHT, shape, experts.count)
        least = LEAST_RATE if kind is None else 0.0
        tables.append(_table(f"{told} experts, {TOKENS:,} tokens", gpu, tools, kind, sizes, least))
        sizes = (experts.chosen, (experts.chosen,) * 2, 1, shape, experts.count)
        tables.append(_table(f"{told} experts, a token", gpu, tools, kind, sizes, 0.0))
    for kind in ("fp8", "int4"):
        sizes = (1, (1, 1), 1, (LLAMA.model_dim, LLAMA.ffn_dim), 1)
        tables.append(_table(f"{kind} projection, a token", gpu, tools, kind, sizes, 0.0))
    return tables


def _table(name: str, gpu: str, tools: str, kind: str | None, sizes: tuple, least: float) -> ProductTable:
    rows, tiles, height, shape, count = sizes
    stack = stack_of(kind, count, *shape)
    table = Tiles(*[place(Shape((tiles[1],), jnp.int32))] * 3)
    multiply = functools.partial(pallas_kernels.tile_products, height=height, implementation="pallas")
    program = compile_for(gpu, multiply, place(Shape((rows, shape[0]), DTYPE)), stack, table)
    launch = next(one for one in launches_of(program, TARGETS[gpu].architecture, tools) if one.name == "tile_products")
    read = size(stack) * min(tiles[0], count) // count
    return ProductTable(name, gpu, launch, rows, tiles, max(16, height), shape, read, least)
