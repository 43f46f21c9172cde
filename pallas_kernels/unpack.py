"""Unpacking of signed codes to bfloat16 in a kernel, in few instructions, by inline assembly (PTX).

A 32-bit register holds the bytes of four packed elements. `prmt` spreads two of them over the halves of a register. One
`lop3` then turns a code into the bits of a bfloat16: 0x4300 is 128, and its last seven bits are a whole number that is
added to it. One or two fused multiply-adds on both halves subtract what was added. All of it is exact. Conversions by
way of int32 and float32 take about four times as many instructions.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.bits import code_at, signed

ONE, MINUS_ONE = "0x3F803F80", "0xBF80BF80"  # two bfloat16 each
# ((bits & mask) ^ 8) + 128 is the code + 136.
FOUR_BITS = f"""
lop3.b32 lo, lo, 0x000F000F, 0x43084308, 0x6A;
lop3.b32 hi, hi, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 $0, lo, {ONE}, 0xC308C308;
fma.rn.bf16x2 $1, hi, {ONE}, 0xC308C308;
"""
# The low seven bits + 128, less 128 if the sign bit is set, less 128. The sign bit times 0x86 is 0x4300, which is 128.
EIGHT_BITS = f"""
and.b32 slo, lo, 0x00800080;
and.b32 shi, hi, 0x00800080;
mul.lo.u32 slo, slo, 0x86;
mul.lo.u32 shi, shi, 0x86;
lop3.b32 lo, lo, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 hi, hi, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 lo, slo, {MINUS_ONE}, lo;
fma.rn.bf16x2 hi, shi, {MINUS_ONE}, hi;
fma.rn.bf16x2 $0, lo, {ONE}, 0xC300C300;
fma.rn.bf16x2 $1, hi, {ONE}, 0xC300C300;
"""


def assembly(place: int, bits: int) -> str:
    """Return the PTX that unpacks the codes in one place of four bytes ($2) to four bfloat16 numbers ($0 and $1)."""
    return f"""{{
.reg .b32 all, lo, hi, slo, shi;
shr.u32 all, $2, {place * bits};
prmt.b32 lo, all, 0, 0x4140;
prmt.b32 hi, all, 0, 0x4342;
{(FOUR_BITS if bits == 4 else EIGHT_BITS).strip()}
}}"""


def signed_numbers(packed: jax.Array, place: int, bits: int, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """Return the whole numbers in one place of a tile of packed bytes.

    Args:
        packed: uint8, two's complement codes in the layout of `bits`.
        place: position in each byte.
        bits: bits of a code, 8 or 4.
        dtype: dtype of the result. Only bfloat16 is unpacked by assembly.
        interpret: whether the kernel is run by JAX's interpreter, which knows no assembly.
    """
    if interpret or dtype != jnp.bfloat16:
        return signed(code_at(lax.convert_element_type(packed, jnp.int32), place, bits), bits).astype(dtype)
    [numbers] = pltriton.elementwise_inline_asm(
        assembly(place, bits),
        args=[packed],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, dtype)],
    )
    return numbers
