"""The bytes that a device of a mesh sends over links in a decode step.

An exchange among n devices is counted as a ring does it. In an all-gather or a reduce-scatter, a device sends
(n - 1) / n of the whole array. In an all-reduce, which is one after the other, it sends twice as much.
"""

Links = dict[str, int]  # for each part, the bytes that a device sends along `tp`


def gathered(size: int, devices: int) -> int:
    """Return the bytes that a device sends to gather, or to reduce and scatter, an array of `size` bytes in all."""
    return -(-size * (devices - 1) // devices)


def reduced(size: int, devices: int) -> int:
    """Return the bytes that a device sends so that all devices have the sum or the maximum of `size` bytes each."""
    return 2 * gathered(size, devices)
