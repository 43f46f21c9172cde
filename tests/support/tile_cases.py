"""The table of cases of tile_products, and what it must return, in NumPy."""

from dataclasses import dataclass

import numpy as np
from quantized_cases import meant
from random_arrays import array

from jshadow.models.quantization import quantize_kernel
from pallas_kernels import Stack, Tiles


@dataclass(frozen=True)
class Products:
    """Tiles of rows, and the matrices of a stack that they are multiplied by."""

    sizes: tuple[int, int, int]  # matrices, D, F
    matrices: tuple[int, ...]  # of each tile
    rows: tuple[int, ...]  # of each tile, one after another
    height: int
    kind: str | None = None  # of the matrices: None or one of ops.projections.KINDS
    dtype: str = "float32"


PRODUCTS = (
    Products((1, 96, 50), (0,), (1,), 1),
    Products((3, 70, 17), (2, 0, 1, 2), (5, 0, 8, 1), 8, dtype="bfloat16"),
    Products((4, 128, 130), (3, 1, 2), (1, 1, 1), 1, "int4", "bfloat16"),
    Products((2, 80, 40), (1, 0), (7, 12), 16, "int4"),
    Products((2, 300, 33), (0, 1), (3, 2), 3, "fp8", "bfloat16"),
    Products((1, 40, 96), (0,), (5,), 5, "fp8"),
    Products((2, 256, 20), (1, 0), (20, 9), 32, "int8", "bfloat16"),
    Products((2, 52, 24), (1, 1, 0), (80, 3, 70), 80, "int4", "bfloat16"),
    Products((2, 64, 24), (1, 1, 0), (128, 3, 70), 128, None, "bfloat16"),
)


def product_inputs(case):
    rng = np.random.default_rng(case.sizes[1])
    numbers = rng.standard_normal(case.sizes).astype(np.float32)
    if case.kind is None:
        stack = Stack(array(numbers.astype(case.dtype)))
    else:
        record = quantize_kernel(case.kind, numbers)
        scaled = case.kind == "int4" or case.dtype == "float32"
        stack = Stack(*(array(part) for name, part in record.items() if scaled or name == "kernel"))
    ends = np.cumsum(case.rows)
    tiles = Tiles(*(array(np.int32(part)) for part in (case.matrices, ends - case.rows, ends)))
    x = array(rng.standard_normal((ends[-1], case.sizes[1])).astype(case.dtype))
    return {"x": x, "stack": stack, "tiles": tiles, "height": case.height}


def product_truth(x, stack, tiles, height):
    """The numbers of 4 bits are those that are rounded to x's dtype."""
    names = ("kernel", "kernel_scale", "kernel_zero")
    ones = np.ones((len(stack.kernel), stack.kernel.shape[2]), np.float32)
    record = {name: part for name, part in zip(names, stack, strict=True) if part is not None}
    numbers = meant({"kernel_scale": ones} | record)
    if stack.zero is not None:
        numbers = numbers.astype(np.float32).astype(x.dtype).astype(np.float64)
    out = np.zeros((len(x), stack.kernel.shape[2]))
    for matrix, first, end in zip(*map(np.asarray, tiles), strict=True):
        out[first:end] = np.asarray(x, np.float64)[first:end] @ numbers[matrix]
    return out
