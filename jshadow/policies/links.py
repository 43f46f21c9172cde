"""The bytes that a device of a mesh sends over links in a decode step.

An exchange among n devices is counted as a ring does it. In an all-gather or a reduce-scatter, a device sends
(n - 1) / n of the whole array. In an all-reduce, which is one after the other, it sends twice as much.

B rows, T queries of a step, h_q query heads of a device, d head width.
"""

from jshadow.cache.spec import CacheSpec

Links = dict[str, tuple[int, int]]  # for each part, the bytes that a device sends along (tp, sp)


def gathered(size: int, devices: int) -> int:
    """Return the bytes that a device sends to gather, or to reduce and scatter, an array of `size` bytes in all."""
    return -(-size * (devices - 1) // devices)


def reduced(size: int, devices: int) -> int:
    """Return the bytes that a device sends so that all devices have the sum or the maximum of `size` bytes each."""
    return 2 * gathered(size, devices)


def added(links: Links, more: Links) -> Links:
    """Return the sums of the bytes of each part."""
    parts = [dict.fromkeys(links | more, (0, 0)) | part for part in (links, more)]
    return {name: (parts[0][name][0] + parts[1][name][0], parts[0][name][1] + parts[1][name][1]) for name in parts[0]}


def merged(spec: CacheSpec, queries: int) -> Links:
    """Return the bytes by which results of attention are merged along `sp` (`ops.split.attend_split`).

    The maximum of the scores, float32 [B, h_q, T], the sum of the weights and the weighted sum of the values, float32
    [B, h_q, T, 1 + d], are reduced.

    Args:
        spec: the layer on one device.
        queries: number of queries T.
    """
    if spec.shards is None or spec.shards.sp == 1:
        return {}
    floats = spec.batch * queries * spec.q_heads
    parts = (reduced(4 * floats, spec.shards.sp), reduced(4 * floats * (1 + spec.head_dim), spec.shards.sp))
    return {"attention": (0, sum(parts))}
