"""The way out of Pallas: the same op by a Triton kernel of its own.

JAX means to drop Pallas' Triton backend. This twin goes through jax_triton instead; neither it nor triton is imported
before it is used, and nothing else here needs them.
"""

import importlib
import inspect
from typing import Any

import jax

from pallas_kernels.fetch_reconstruct.rows import Values
from pallas_kernels.reconstruct_keys.factors import Factors
from pallas_kernels.tiles import blocks, power_of_two, warps

TOKENS, RANK_BLOCK, STAGES = 32, 32, 2
OPERANDS = ("values", "left", "right", "ids", "inverse", "kept", "stay", "tail", "tail_unit", "values_tail")
INTEGERS = ("ids", "tail_unit")


def fetch_reconstruct(values: Values, factors: Factors) -> tuple[jax.Array, jax.Array]:
    """As `pallas_kernels.fetch_reconstruct`; needs a GPU, triton and jax_triton.

    Args:
        values: checked by its `check`.
        factors: likewise; of the dtype of right. Numbers: it takes no packed codes, of keys or of values.

    Returns:
        keys and values [B, h_kv, k * c, d].
    """
    call = importlib.import_module("jax_triton").triton_call
    kernel = importlib.import_module("pallas_kernels.fetch_reconstruct.triton_kernel").fetch_reconstruct_kernel
    batch, heads, tokens, _ = factors.out_shape
    if values.kept is not None:
        values = values._replace(kept=values.kept.reshape(factors.out_shape))
    given = dict(zip(OPERANDS, (values.prompt, *factors[:4], values.kept, values.stay, *factors[4:], values.tail),
                     strict=True))  # fmt: skip
    # A pointer is wanted for each; the kernel does not touch those of parts that are not there.
    operands = [factors.ids if x is None else x for x in given.values()]
    shapes = [jax.ShapeDtypeStruct(factors.out_shape, x.dtype) for x in (factors.left, values.prompt)]
    outputs = "out_type" if "out_type" in inspect.signature(call).parameters else "out_shape"  # renamed in 0.4
    keys, rows = call(
        *operands, kernel=kernel, grid=(blocks(tokens, TOKENS), heads, batch), **options(factors),
        input_output_aliases={} if values.kept is None else {OPERANDS.index("kept"): 1},
        **{outputs: shapes}, **sizes(values, factors),
    )  # fmt: skip
    return keys, rows


def sizes(values: Values, factors: Factors) -> dict[str, int]:
    """The kernel's constants for arrays, or ShapeDtypeStructs, of these shapes."""
    dim, half = factors.right.shape[3], factors.inverse.shape[0]
    return {
        "HEADS": factors.ids.shape[1],
        "UNITS": factors.left.shape[1],
        "COUNT": factors.ids.shape[2],
        "CHUNK": factors.chunk,
        "RANK": factors.right.shape[2],
        "DIM": dim,
        "HALF": half,
        "KEPT": values.kept is not None,
        "TAIL": factors.tail.shape[1] if factors.tail is not None else 0,
        "VALUES_TAIL": values.tail.shape[2] if values.tail is not None else 0,
        "TOKENS": TOKENS,
        "RANK_BLOCK": RANK_BLOCK,
        "HALF_BLOCK": power_of_two(half),
        "REST_BLOCK": power_of_two(max(1, dim - 2 * half)),
        "DIM_BLOCK": power_of_two(dim),
    }


def options(factors: Factors) -> dict[str, int]:
    """How the kernel is compiled."""
    return {"num_warps": warps(factors.right.shape[3], factors.left, factors.right), "num_stages": STAGES}


def compile_ptx(values: Values, factors: Factors, capability: int) -> str:
    """The kernel's PTX by triton alone, on a machine without a GPU.

    Args:
        values: ShapeDtypeStructs will do.
        factors: likewise.
        capability: 80 for an A100, 90 for an H100 or H200.

    Returns:
        The PTX.
    """
    triton: Any = importlib.import_module("triton")
    source: Any = importlib.import_module("triton.compiler").ASTSource
    target: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    kernel = importlib.import_module("pallas_kernels.fetch_reconstruct.triton_kernel").fetch_reconstruct_kernel
    short = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
    kinds = {name: short[factors.left.dtype.name] for name in (*OPERANDS, "keys", "rows")}
    kinds |= dict.fromkeys(("values", "kept", "values_tail", "rows"), short[values.prompt.dtype.name])
    kinds |= {"inverse": "*fp32", "stay": "*i1"} | dict.fromkeys(INTEGERS, "*i32")
    constants = sizes(values, factors)
    ast = source(
        fn=kernel,
        signature=kinds | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(kinds))},  # as XLA aligns its buffers
    )
    done = triton.compile(
        ast, target=target("cuda", capability, 32), options=options(factors) | {"enable_fp_fusion": True}
    )
    return str(done.asm["ptx"])
