"""Profiles of the transform code: how many key columns have 8, 4 and 2 bits.

All layers and prompts have the same profile, so that shapes are static. `profile_of` returns the default profile for a
number of key columns and a number of bits per token.
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


def profile_of(columns: int, bits: float) -> Profile:
    """Return the default profile for a number of key columns and a number of bits.

    Args:
        columns: number of key columns, all KV heads together.
        bits: bits of a token's code. They are rounded to whole bytes, which the profile fills completely.

    Returns:
        The numbers of columns that have 8, 4 and 2 bits.

    Raises:
        ConfigError: bits are less than a byte, or more than 8 for each column.
    """
    size = round(bits / 8)
    if not 1 <= size <= columns:
        raise ConfigError(f"bits of a token's key code must be in [8, {8 * columns}], got {bits!r}")
    mean = 8 * size / columns
    for (low, first), (high, last) in itertools.pairwise(POINTS):
        if mean <= high:
            along = (mean - low) / (high - low)
            _, fours, twos = (columns * (a + along * (b - a)) for a, b in zip(first, last, strict=True))
            break
    four, two = 2 * round(fours / 2), 4 * round(twos / 4)
    # Rounding may have made more columns than the bytes or the keys have room for.
    while size < four // 2 + two // 4 or columns < size + four // 2 + two * 3 // 4:
        four, two = (four, two - 4) if two else (four - 2, two)
    return size - four // 2 - two // 4, four, two
