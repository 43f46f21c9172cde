"""Profiles of the transform code: how many columns get 8, 4 and 2 bits, by the keys' width and the bits of a token.

One profile serves all layers and prompts, so that shapes are static. `profile_of` is the default for any width;
`best_profile` finds a model's own from what each column loses at each number of bits (`jshadow key-profile`).
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jshadow.errors import ConfigError
from jshadow.policies.shadowkv.key_codecs.midrise import Profile, dequantise, quantise, steps

KINDS = (8, 4, 2)
# (mean bits of a key column, shares of all columns that have 8, 4 and 2 bits). Shares between two points lie on a
# straight line. The points were measured on SmolLM2-135M, which has 192 key columns: 4/3, 2 and 8/3 bits by divergence
# from full attention, more bits by the least variance lost. 5/2 bits are those of the usual rank of wide keys: the
# shares of 8/3 in proportion, (80, 320, 320) of 1,024 columns.
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
    """The default profile of keys of that width, at so many bits.

    Args:
        columns: of a token's key, all KV heads together.
        bits: of a token's code, rounded to whole bytes, which the profile fills without waste.

    Raises:
        ConfigError: less than a byte, or more than eight bits a column.
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
    while size < four // 2 + two // 4 or columns < size + four // 2 + two * 3 // 4:  # rounding took too much
        four, two = (four, two - 4) if two else (four - 2, two)
    return size - four // 2 - two // 4, four, two


# A model's own


def column_errors(rows: Float[Array, "tokens columns"]) -> Float[Array, "4 columns"]:
    """Mean squared error of each column in 8, 4 and 2 bits by the code's own quantiser, and of leaving it out.

    Args:
        rows: centred coefficients [tokens, columns], a multiple of four columns, the first of largest deviation.
    """
    squares, largest = (rows**2).mean(axis=0), jnp.abs(rows).max(axis=0)
    lost = []
    for kind in KINDS:
        eight, four, two = (rows.shape[1] * (kind == other) for other in KINDS)
        profile = (eight, four, two)
        step = steps(jnp.sqrt(squares), largest, profile)
        lost.append(((rows - dequantise(quantise(rows, step, profile), step, profile)) ** 2).mean(axis=0))
    return jnp.stack([*lost, squares])


def profile_error(errors: np.ndarray, profile: Profile) -> float:
    """What all columns lose together, errors [4, columns] as `column_errors` has them."""
    kinds = np.repeat(np.arange(4), (*profile, errors.shape[1] - sum(profile)))
    return float(errors[kinds, np.arange(errors.shape[1])].sum())


def best_profile(errors: np.ndarray, bits: float) -> Profile:
    """The profile that loses least within so many bits: all are tried. Of equal ones, that with fewer wide columns.

    Args:
        errors: of each column in 8, 4, 2 bits and none [4, columns], as `column_errors` has them.
        bits: of a token's code, rounded to whole bytes.

    Raises:
        ConfigError: less than a byte.
    """
    size, columns = round(bits / 8), errors.shape[1]
    if size < 1:
        raise ConfigError(f"bits of a token's key code must be at least 8, got {bits!r}")
    before = np.concatenate([np.zeros((4, 1)), np.cumsum(errors, axis=1)], axis=1)
    eight, pairs = np.mgrid[: min(size, columns) + 1, : min(size, columns // 2) + 1]
    first = eight + 2 * pairs
    left = size - eight - pairs
    fits = (left >= 0) & (first <= columns)
    first = np.where(fits, first, eight)
    last = first + np.minimum(4 * np.maximum(left, 0), (columns - first) // 4 * 4)  # two bits lose less than none
    lost = before[0, eight] + before[1, first] - before[1, eight] + before[2, last] - before[2, first]
    lost = np.where(fits, lost + before[3, -1] - before[3, last], np.inf)
    place = np.unravel_index(np.argmin(lost), lost.shape)
    return int(eight[place]), int(2 * pairs[place]), int(last[place] - first[place])
