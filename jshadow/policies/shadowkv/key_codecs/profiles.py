"""Profiles of the transform code: how many key columns have 8, 4 and 2 bits.

All layers and prompts have the same profile, so that shapes are static. `profile_of` returns the default profile for a
number of key columns and a number of bits per token.

A GPU loads 16 bytes at once, if they begin at a multiple of 16. So each part of a code of many columns (those of 8, of
4 and of 2 bits) fills whole pieces of 16 bytes, which `pallas_kernels.reconstruct_keys` then loads without masks while
it multiplies the piece before. A code of few columns has too few pieces to share out, and fills whole bytes.
"""

import itertools

from jshadow.errors import ConfigError
from jshadow.policies.shadowkv.key_codecs.midrise import Profile

# Points (mean bits of a key column, shares of all columns that have 8, 4 and 2 bits). Between two points, shares are
# interpolated linearly. The points were measured on SmolLM2-135M, which has 192 key columns. Those at 4/3, 2 and 8/3
# bits have the least divergence from full attention, and those with more bits lose the least variance. 5/2 bits are
# those of the usual rank of wide keys; its shares, (80, 320, 320) of 1,024 columns, are in proportion to those of 8/3.
POINTS = (
    (0, (0, 0, 0)),
    (4 / 3, (4 / 192, 40 / 192, 32 / 192)),
    (2, (28 / 192, 40 / 192, 0)),
    (5 / 2, (80 / 1024, 320 / 1024, 320 / 1024)),
    (8 / 3, (16 / 192, 64 / 192, 64 / 192)),
    (4, (33 / 192, 102 / 192, 48 / 192)),
    (16 / 3, (75 / 192, 96 / 192, 20 / 192)),
    (20 / 3, (130 / 192, 58 / 192, 4 / 192)),
    (8, (1, 0, 0)),
)
PIECE = 16  # bytes that a GPU loads at once
MANY = 512  # key columns from which on the parts of a code fill whole pieces


def profile_of(columns: int, bits: float) -> Profile:
    """Return the default profile for a number of key columns and a number of bits.

    Args:
        columns: number of key columns, all KV heads together.
        bits: bits of a token's code. They are rounded to whole bytes, which the profile fills completely; with MANY
            columns or more, to whole pieces of 16 bytes, at least one.

    Returns:
        The numbers of columns that have 8, 4 and 2 bits.

    Raises:
        ConfigError: bits are less than a byte, or more than 8 for each column.
    """
    size, unit = round(bits / 8), unit_of(columns)
    if not 1 <= size <= columns:
        raise ConfigError(f"bits of a token's key code must be in [8, {8 * columns}], got {bits!r}")
    mean = 8 * size / columns  # the shares are those of the bits that were asked for
    size = unit * min(max(1, round(size / unit)), columns // unit)
    for (low, first), (high, last) in itertools.pairwise(POINTS):
        if mean <= high:
            along = (mean - low) / (high - low)
            _, fours, twos = (columns * (a + along * (b - a)) for a, b in zip(first, last, strict=True))
            break
    four, two = (step * round(count / step) for count, step in ((fours, 2 * unit), (twos, 4 * unit)))
    # Rounding may have made more columns than the bytes or the keys have room for.
    while size < four // 2 + two // 4 or columns < size + four // 2 + two * 3 // 4:
        four, two = (four, two - 4 * unit) if two else (four - 2 * unit, two)
    return size - four // 2 - two // 4, four, two


def unit_of(columns: int) -> int:
    """Return the number of bytes of which each part of a default profile is a multiple."""
    return PIECE if columns >= MANY else 1
