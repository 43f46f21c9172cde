"""Instructions that a GPU has and JAX does not name, by inline assembly (PTX).

**Unpacking to bfloat16.** A 32-bit register holds the bytes of four packed elements. `prmt` spreads two of them over
the halves of a register. One `lop3` then turns a code into the bits of a bfloat16: 0x4300 is 128, and its last seven
bits are a whole number that is added to it. A fused multiply-add on both halves subtracts what was added. All of it is
exact.

**Unpacking to scaled bfloat16.** A 32-bit register holds two words of 16 bits. One `lop3` turns the code in one place
of each word into the bits of a bfloat16, and a fused multiply-add subtracts what was added. A scale of 11 bits is the
sum of two bfloat16 numbers, high and low. The code times the low part is exact. One more multiply-add adds the code
times the high part to it, and rounds once. So the result is the product in float32, rounded to bfloat16.

**Unpacking codes with an offset.** As above, one `lop3` makes a code the bits of 128 + code, and a fused multiply-add
subtracts 128. A second one multiplies the code by a factor, adds the value of code 0, and rounds once.

**Unpacking fp8.** The bits of an E4M3 number, moved into the exponent and the fraction of a bfloat16, are a number that
is smaller by 2**120. A fused multiply-add makes it larger, also if it is subnormal. An A100 has no instruction for it.

**Unpacking to 8-bit integers.** A shift and a mask turn four bytes into four integers at once.

**Sines.** The GPU's own `sin.approx` and `cos.approx` are off by less than 1e-6 between -pi and pi. That is far less
than half a unit in the last place of a key of 16 bits. They take a third of the instructions of `cos_sin_of`.

**Powers of 2 and logarithms.** `ex2.approx` and `lg2.approx` are one instruction each. The exponential of CUDA's
mathematical library takes eight.

JAX's interpreter knows no assembly. A kernel that it runs passes `interpret`, and gets the same numbers from other
operations (sines differ by less than 1e-6).
"""

import math
import struct

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.bits import code_at, middle, signed
from pallas_kernels.rotation import cos_sin_of, split_constant

# A code is its own last four bits of 128 + code.
AFFINE = """
mov.b32 one, 0x3F803F80;
mov.b32 less, 0xC300C300;
lop3.b32 lo, lo, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 hi, hi, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 lo, lo, one, less;
fma.rn.bf16x2 hi, hi, one, less;
fma.rn.bf16x2 $0, lo, $3, $5;
fma.rn.bf16x2 $1, hi, $4, $6;
"""
FP8 = """{
.reg .b32 lo, hi, sign, large, zero;
mov.b32 large, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 lo, $2, 0, 0x1404;
prmt.b32 hi, $2, 0, 0x3424;
and.b32 sign, lo, 0x80008000;
shr.u32 lo, lo, 4;
lop3.b32 lo, lo, 0x07F007F0, sign, 0xEA;
and.b32 sign, hi, 0x80008000;
shr.u32 hi, hi, 4;
lop3.b32 hi, hi, 0x07F007F0, sign, 0xEA;
fma.rn.bf16x2 $0, lo, large, zero;
fma.rn.bf16x2 $1, hi, large, zero;
}"""

# The code q is shifted to the second bit, so (bits & mask | 1) + 128 is 2 q + 129. Half of it, less 72 or 66, is
# q + 1/2 - 8 or q + 1/2 - 2.
MIDDLE = """
mov.b32 half, 0x3F003F00;
mov.b32 less, {less};
lop3.b32 lo, lo, {mask}, 0x43014301, 0xEA;
lop3.b32 hi, hi, {mask}, 0x43014301, 0xEA;
fma.rn.bf16x2 $0, lo, half, less;
fma.rn.bf16x2 $1, hi, half, less;
"""
MIDDLE_OF = {4: {"mask": "0x001E001E", "less": "0xC290C290"}, 2: {"mask": "0x00060006", "less": "0xC284C284"}}


def spread(shift: str, body: str) -> str:
    """Return PTX that shifts four bytes ($2), spreads them over the registers lo and hi, and then runs `body`."""
    return f"""{{
.reg .b32 all, lo, hi, one, half, less;
{shift}
prmt.b32 lo, all, 0, 0x4140;
prmt.b32 hi, all, 0, 0x4342;
{body.strip()}
}}"""


def shifted_assembly(place: int) -> str:
    """Return the PTX that moves 4-bit codes in one place of four bytes ($1) to the upper halves of four bytes ($0)."""
    return f"""{{
.reg .b32 all;
shl.b32 all, $1, {4 - 4 * place};
and.b32 $0, all, 0xF0F0F0F0;
}}"""


def middle_assembly(place: int, bits: int) -> str:
    """Return the PTX that unpacks mid-rise codes of 4 or 2 bits in one place of four bytes to four bfloat16."""
    shift = f"shr.u32 all, $2, {bits * place - 1};" if place else "shl.b32 all, $2, 1;"
    return spread(shift, MIDDLE.format(**MIDDLE_OF[bits]))


def unpacked(assembly: str, packed: jax.Array) -> jax.Array:
    """Run assembly that unpacks four bytes to four bfloat16 on a tile of uint8."""
    [numbers] = pltriton.elementwise_inline_asm(
        assembly,
        args=[packed],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return numbers


def shifted_numbers(packed: jax.Array, place: int, bits: int, interpret: bool) -> jax.Array:
    """Return the whole numbers in one place of a tile of packed bytes, times 2**(8 - bits), as int8.

    Args:
        packed: uint8, two's complement codes in the layout of `bits`.
        place: position in each byte.
        bits: bits of a code, 8 or 4.
    """
    if bits == 8:
        return packed.astype(jnp.int8)
    if interpret:
        return ((packed << jnp.uint8(4 - 4 * place)) & jnp.uint8(0xF0)).astype(jnp.int8)
    [numbers] = pltriton.elementwise_inline_asm(
        shifted_assembly(place),
        args=[packed],
        constraints="=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.int8)],
    )
    return numbers


def middle_numbers(packed: jax.Array, place: int, bits: int, dtype: jnp.dtype, interpret: bool) -> jax.Array:
    """Return the numbers q + 1/2 - 2**(bits - 1) of the mid-rise codes q in one place of a tile of packed bytes.

    Args:
        packed: uint8, codes in the layout of `bits`.
        place: position in each byte.
        bits: bits of a code, 8, 4 or 2.
        dtype: dtype of the result. All model dtypes represent the numbers exactly.
    """
    if not interpret and bits in MIDDLE_OF and dtype == jnp.bfloat16:
        return unpacked(middle_assembly(place, bits), packed)
    return middle(code_at(lax.convert_element_type(packed, jnp.int32), place, bits), bits).astype(dtype)


def affine_numbers(
    packed: jax.Array, place: int, scale: jax.Array, zero: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool
) -> jax.Array:
    """Return code * scale + zero of the 4-bit codes in one place of a tile of bytes, in a dtype.

    Args:
        packed: uint8, codes in the layout of `bits`.
        place: position in each byte.
        scale: floating, broadcastable to the tile.
        zero: floating, as the scale.
    """
    if interpret or not jnp.dtype(dtype) == scale.dtype == zero.dtype == jnp.bfloat16:
        codes = code_at(lax.convert_element_type(packed, jnp.int32), place, 4).astype(jnp.float32)
        factor, offset = (jnp.broadcast_to(x.astype(jnp.float32), codes.shape) for x in (scale, zero))
        return multiply_add(codes, factor, offset, interpret).astype(dtype)
    [numbers] = pltriton.elementwise_inline_asm(
        spread("shr.u32 all, $2, 4;" if place else "mov.b32 all, $2;", AFFINE),
        args=[packed, *(jnp.broadcast_to(x, packed.shape) for x in (scale, zero))],
        constraints="=r,=r,r,r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return numbers


def fp8_numbers(packed: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool) -> jax.Array:
    """Return the numbers of a tile of E4M3 bytes, uint8, in a dtype. All model dtypes represent them exactly."""
    if interpret:
        return lax.bitcast_convert_type(packed, jnp.float8_e4m3fn).astype(dtype)
    return unpacked(FP8, packed).astype(dtype)


def scaled_assembly(place: int) -> str:
    """Return the PTX that unpacks signed 4-bit codes in one place of two words ($1) and multiplies them by scales.

    The scales are two sums of bfloat16 numbers, $2 + $3. The products are rounded to two bfloat16 ($0). With the sign
    bit of a code flipped, the last four bits of the bfloat16 number 128 make it 136 + code.
    """
    moved = f"shr.u32 codes, $1, {4 * place};" if place else "mov.b32 codes, $1;"
    return f"""{{
.reg .b32 codes, one, less, zero;
mov.b32 one, 0x3F803F80;
mov.b32 less, 0xC308C308;
mov.b32 zero, 0;
{moved}
lop3.b32 codes, codes, 0x000F000F, 0x43084308, 0x6A;
fma.rn.bf16x2 codes, codes, one, less;
fma.rn.bf16x2 less, codes, $3, zero;
fma.rn.bf16x2 $0, codes, $2, less;
}}"""


def scaled_numbers(
    packed: jax.Array, place: int, bits: int, scale: jax.Array, dtype: jax.typing.DTypeLike, interpret: bool
) -> jax.Array:
    """Unpack the whole numbers in one place of a tile of words, and multiply them by scales.

    Args:
        packed: uint16 [..., n], two's complement codes in the layout of `bits`.
        place: position in each word.
        bits: bits of a code, 8 or 4.
        scale: float32 [..., 1]. If `dtype` has two bytes, the numbers are those of finite float16.

    Returns:
        The products in float32, rounded to `dtype`, [..., n].
    """
    if interpret or bits != 4 or jnp.dtype(dtype) != jnp.bfloat16:
        codes = signed(code_at(lax.convert_element_type(packed, jnp.int32), place, bits), bits)
        return (codes.astype(jnp.float32) * scale).astype(dtype)
    high = scale.astype(jnp.bfloat16)
    low = (scale - high.astype(jnp.float32)).astype(jnp.bfloat16)
    [products] = pltriton.elementwise_inline_asm(
        scaled_assembly(place),
        args=[packed, *(jnp.broadcast_to(part, packed.shape) for part in (high, low))],
        constraints="=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return products


def float_bits(value: float) -> str:
    """Return a float32 constant as PTX writes it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def reduce_assembly() -> str:
    """Return the PTX that subtracts whole turns from a float32 angle ($1) in [0, 1.6e6]. $0 is between -3.2 and 3.2.

    A fused multiply-add rounds only its result, so a turn needs two parts.
    """
    parts = split_constant(2 * math.pi, 1, 24)
    subtract = "\n".join(f"fma.rn.f32 x, turns, {float_bits(-part)}, x;" for part in parts)
    return f"""{{
.reg .f32 turns, x;
mov.f32 x, $1;
fma.rn.f32 turns, x, {float_bits(0.5 / math.pi)}, {float_bits(0.5)};
cvt.rmi.f32.f32 turns, turns;
{subtract}
mov.f32 $0, x;
}}"""


def cos_sin(angle: jax.Array, dtype: jnp.dtype, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of float32 angles in [0, 1.6e6], for results that are rounded to `dtype`.

    The error is at most 2e-7 for float32, and 1e-6 for dtypes of 16 bits.
    """
    if interpret or jnp.dtype(dtype).itemsize == 4:
        return cos_sin_of(angle)
    angle = float_assembly(reduce_assembly(), angle)
    return float_assembly("cos.approx.f32 $0, $1;", angle), float_assembly("sin.approx.f32 $0, $1;", angle)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """Return 2**x for float32 numbers, with a relative error of at most 2e-7. Results below 2**-126 are 0."""
    return jnp.exp2(x) if interpret else float_assembly("ex2.approx.ftz.f32 $0, $1;", x)


def log2(x: jax.Array, interpret: bool) -> jax.Array:
    """Return the base-2 logarithm of float32 numbers from 1 to 16, with an error of at most 1e-6."""
    return jnp.log2(x) if interpret else float_assembly("lg2.approx.ftz.f32 $0, $1;", x)


def nearest(x: jax.Array, interpret: bool) -> jax.Array:
    """Round float32 numbers between -2**31 and 2**31 to the nearest whole numbers, int32."""
    if interpret:
        return jnp.rint(x).astype(jnp.int32)
    return float_assembly("cvt.rni.s32.f32 $0, $1;", x, dtype=jnp.int32)


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array, interpret: bool) -> jax.Array:
    """Return x * y + z for float32 tiles of the same shape. A GPU rounds once."""
    return x * y + z if interpret else float_assembly("fma.rn.f32 $0, $1, $2, $3;", x, y, z)


def float_assembly(assembly: str, *tiles: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Run assembly on each float32 number ($1, $2 ...) of the tiles. Its result is $0, a number of four bytes."""
    [result] = pltriton.elementwise_inline_asm(
        assembly,
        args=tiles,
        constraints=",".join(["=f" if dtype == jnp.float32 else "=r", *("f" for _ in tiles)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tiles[0].shape, dtype)],
    )
    return result
