"""Rounding numbers of tokens up, so that prompts of similar lengths share a compiled program."""


def round_up(tokens: int, step: int, limit: int | None = None) -> int:
    """Return the smallest multiple of `step` that is at least `tokens`, or `limit` if the multiple is larger."""
    rounded = -(-tokens // step) * step
    return rounded if limit is None else min(rounded, limit)


def step_of(tokens: int, share: int, least: int = 1) -> int:
    """Return a step for `round_up` that grows with the number of tokens, in powers of two.

    Args:
        tokens: a number of tokens.
        share: a power of two. The step is the next power of two divided by share. With 32 there are 16 different widths
            between two powers of two, so little is padded. With 4 there are two widths, so few programs are compiled.
        least: the smallest step.
    """
    return max(least, (1 << (tokens - 1).bit_length()) // share)
