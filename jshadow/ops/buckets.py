"""Rounding numbers of tokens up, so that prompts of nearly one length share a compiled program."""


def round_up(tokens: int, step: int, limit: int | None = None) -> int:
    """The smallest multiple of `step` that is at least `tokens`; at most `limit`, where one is given."""
    rounded = -(-tokens // step) * step
    return rounded if limit is None else min(rounded, limit)


def step_of(tokens: int, share: int, least: int = 1) -> int:
    """A step for `round_up` that grows with the number of tokens, in powers of two.

    Args:
        tokens: a number of tokens.
        share: a power of two. The step is this share of the next power of two: 32 gives 16 to 32 widths from one power
            of two to the next and pads little, 4 gives two widths and compiles little.
        least: the smallest step.
    """
    return max(least, (1 << (tokens - 1).bit_length()) // share)
