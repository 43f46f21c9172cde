"""How many prompts one prefill can read on a GPU."""

from jshadow.models.config import ModelConfig
from jshadow.planner.bytes import prefill_peak
from jshadow.planner.gpu_plan import Serving
from jshadow.planner.prefill_pieces import most_rows, pieces_of
from jshadow.policies import Policy

PREFILL_CHUNK = 2048  # the default of `prefill`


def largest_prefill(config: ModelConfig, policy: Policy, serving: Serving, room: int) -> int:
    """Return how many rows can be prefilled in one call on an NVIDIA GPU, or 0.

    Args:
        config: the model.
        policy: the resolved policy.
        serving: the requests.
        room: number of device bytes that the prefill may take.
    """

    def peak(rows: int) -> int:
        parts = prefill_peak(
            config,
            policy,
            batch=rows,
            tokens=serving.context,
            capacity=serving.capacity,
            prefill_chunk=PREFILL_CHUNK,
            dtype=serving.dtype,
            fetch=serving.fetch,
            backend="gpu",
            room=serving.room,
        )
        return sum(parts.values())

    # Up to `group` rows go through a layer at once. In each of the two ranges, up to `group` rows and above, every
    # further row adds the same number of bytes. So two peaks of a range give all others.
    group = most_rows(pieces_of(serving.context, PREFILL_CHUNK)[1], PREFILL_CHUNK)
    for first, last in ((group + 1, None), (1, group)):
        one, two = peak(first), peak(first + 1)
        if one <= room:
            rows = first + (room - one) // (two - one)
            return rows if last is None else min(rows, last)
    return 0
