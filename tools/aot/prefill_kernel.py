"""The kernel of sparse prefill on a prompt of 131,072 tokens, and how long it takes at least.

The 32 heads have the mix of sizes that MInference ships for Llama-3.1-8B, whose heads are all vertical-slash. The
columns lie evenly over the prompt. The diagonals lie in runs of 64, the first at distance 0 and the others evenly
over the prompt. The paper (arXiv 2407.02490, section 4) gives no places. A run that crosses the edges of blocks touches
three blocks of a query block.

The prediction for the kernel is pessimistic: each visited tile of keys and values is read from device memory. That for
dense attention is optimistic: each array is read once, and tensor cores multiply at their full rate. Nothing here was
measured on a GPU.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

import pallas_kernels
from aot.compiler import compile_for, place
from aot.launches import Launch, launches_of
from aot.models import LLAMA
from aot.targets import TARGETS
from jshadow.engine.sparse_prefill.attention import open_columns
from jshadow.engine.sparse_prefill.lines import Lines, make_lines, strip_blocks
from pallas_kernels import KeyLists, Keys

TOKENS, BLOCK = 131_072, 64
COUNT = TOKENS // BLOCK
# (columns, diagonals) and the number of heads, in the shares of the 1,024 heads of the shipped configuration.
SIZES = {(100, 800): 9, (1000, 6096): 9, (30, 800): 5, (3500, 100): 5, (500, 700): 4}
MOST_SHARE = 1 / 3  # of the predicted time of dense attention


@dataclasses.dataclass(frozen=True)
class KernelTable:
    """The compiled kernel.

    Attributes:
        gpu: one of TARGETS.
        launch: the launch of the kernel.
        loops: for each loop of a program, the numbers of operations of its matrix products.
        visits: tiles of key blocks and tiles of columns that all programs visit.
    """

    gpu: str
    launch: Launch
    loops: tuple[int, ...]
    visits: tuple[int, int]

    def report(self) -> dict[str, Any]:
        """Return the table as JSON. Times are those of one layer."""
        target, code = TARGETS[self.gpu], self.launch.code
        assert code is not None
        operations = sum(each * visits for each, visits in zip(self.loops, self.visits, strict=True))
        read = sum(self.visits) * 2 * BLOCK * LLAMA.head_dim * 2
        dense = 4 * LLAMA.q_heads * LLAMA.head_dim * TOKENS**2 // 2
        once = 2 * TOKENS * (LLAMA.q_heads + LLAMA.kv_heads) * LLAMA.head_dim * 2
        products_ms, read_ms = 1e3 * operations / target.products, 1e3 * read / target.bandwidth
        return {
            "gpu": self.gpu,
            "tokens": TOKENS,
            "registers": code.registers,
            "spilled": code.spilled,
            "blocks_per_core": self.launch.blocks_per_core(target),
            "share": sum(self.visits) / (LLAMA.q_heads * COUNT * (COUNT + 1) / 2),
            "products_ms": products_ms,
            "read_ms": read_ms,
            "ms": max(products_ms, read_ms),
            "dense_ms": 1e3 * max(dense / target.products, once / target.bandwidth),
        }

    def faults(self) -> Iterator[str]:
        """Yield one line for each check that fails."""
        told, start = self.report(), f"sparse_prefill on {self.gpu}: "
        if told["spilled"]:
            yield f"{start}{told['spilled']} bytes of registers are spilled"
        if told["blocks_per_core"] < 2:
            yield f"{start}{told['registers']} registers: {told['blocks_per_core']} block on a multiprocessor"
        if self.launch.blocks != COUNT * LLAMA.q_heads:
            yield f"{start}{self.launch.blocks} programs, not one for each query block and head"
        if self.loops != (4 * BLOCK * BLOCK * LLAMA.head_dim,) * 2:
            yield f"{start}operations in a run of each loop {self.loops}, not those of one tile in two loops"
        if told["ms"] > MOST_SHARE * told["dense_ms"]:
            yield f"{start}predicted {told['ms']:.1f} ms, dense attention takes {told['dense_ms']:.1f} ms"


def kernel_table(gpu: str, tools: str) -> KernelTable:
    """Compile the kernel for one of TARGETS. `tools` is the folder of ptxas and nvdisasm; see `machine_code`."""
    heads, dim = LLAMA.q_heads, LLAMA.head_dim
    keys = Shape((1, TOKENS, LLAMA.kv_heads, dim), jnp.bfloat16)
    most = max(columns for columns, _ in SIZES)
    ids = [Shape((1, heads, COUNT, *more), jnp.int32) for more in ((COUNT,), (), (most,), ())]
    masks = [Shape((1, heads, TOKENS), jnp.bool_)] * 2
    arguments = (Shape((1, TOKENS, heads, dim), jnp.bfloat16), Keys(keys, keys, Shape((1,), jnp.int32)))
    arguments = place((*arguments, KeyLists(*ids, *masks), Shape((), jnp.int32)))
    attend = functools.partial(pallas_kernels.sparse_prefill, scale=LLAMA.attention_scale, implementation="pallas")
    program = compile_for(gpu, attend, *arguments)
    launch = next(one for one in launches_of(program, TARGETS[gpu].architecture, tools) if one.ours)
    kernel = next(one for one in equations(program.jaxpr) if one.primitive.name == "pallas_call")
    loops = tuple(
        sum(map(operations_of, equations(one.params["body_jaxpr"])))
        for one in equations(kernel.params["jaxpr"])
        if one.primitive.name == "while"
    )
    return KernelTable(gpu, launch, loops, visits())


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, and those of the jaxprs inside, but not those inside kernels and loops."""
    for one in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield one
        if one.primitive.name not in ("pallas_call", "while"):
            for inner in jax.tree.leaves(one.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def operations_of(equation: Any) -> int:
    """Return the multiplications and additions of a matrix product, and 0 for another equation."""
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return int(2 * equation.outvars[0].aval.size * np.prod([left[axis] for axis in contracted]))


@functools.cache
def visits() -> tuple[int, int]:
    """Return the tiles of key blocks and of columns in the lists of all query blocks and heads."""
    blocks = tiles = 0
    for (columns, diagonals), heads in SIZES.items():
        lines, index = lines_of(columns, diagonals), jnp.arange(COUNT)
        near = jax.jit(jax.vmap(lambda one, lines=lines: strip_blocks(lines, one)[1]))(index)
        more = jax.jit(jax.vmap(lambda one, lines=lines: open_columns(lines, one, BLOCK)[1]))(index)
        blocks, tiles = blocks + heads * int(near.sum()), tiles + heads * int((-(-more // BLOCK)).sum())
    return blocks, tiles


def lines_of(columns: int, diagonals: int) -> Lines:
    """Return evenly spread columns, and diagonals in runs of 64, of one head."""
    ids = np.arange(columns) * TOKENS // columns
    runs = -(-diagonals // BLOCK)
    chosen = (np.arange(runs) * (TOKENS - BLOCK) // runs)[:, None] + np.arange(BLOCK)
    masks = [np.zeros((1, 1, TOKENS), bool) for _ in range(2)]
    for mask, places in zip(masks, (ids, chosen.ravel()[:diagonals]), strict=True):
        mask[..., places] = True
    return make_lines(jnp.asarray(ids, jnp.int32)[None, None], *map(jnp.asarray, masks), BLOCK)
