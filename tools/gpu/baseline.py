"""The best speed of full attention on each machine, in a file, so that each later call can compare with it.

The module does not import JAX.
"""

from pathlib import Path
from typing import Any

from gpu.runner import load, save

SAME = ("device", "jax", "dry_run")  # entries of the machine that must be equal


class Baseline:
    """The best tokens per second of full attention, by capacity.

    Args:
        path: the JSON file. It has a list of entries, one for each device, version of JAX and capacity.
        machine: description of this machine, as `environment.machine` returns it, and "dry_run".
    """

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        self.entries: list[dict[str, Any]] = load(path).get("entries", [])

    def is_mine(self, entry: dict[str, Any]) -> bool:
        """Return whether an entry was measured on this kind of device with this version of JAX."""
        return all(entry.get(key) == self.machine.get(key) for key in SAME)

    def entry(self, capacity: int) -> dict[str, Any] | None:
        """Return the entry for a capacity on this machine, or None."""
        return next((one for one in self.entries if self.is_mine(one) and one["capacity"] == capacity), None)

    def best(self, capacity: int) -> float | None:
        """Return the best tokens per second at a capacity, or None if none was measured on this machine."""
        found = self.entry(capacity)
        return found["tokens_per_second"] if found else None

    def remember(self, capacity: int, batch: int, rate: float) -> None:
        """Store a rate in tokens per second if it is the best so far."""
        found = self.entry(capacity)
        if found and found["tokens_per_second"] >= rate:
            return
        about = {key: self.machine.get(key) for key in (*SAME, "jaxlib", "date", "commit")}
        new = about | {"capacity": capacity, "batch": batch, "tokens_per_second": rate}
        self.entries = [one for one in self.entries if one is not found] + [new]
        save(self.path, {"entries": self.entries})

    def told(self) -> list[str]:
        """Return one sentence for each entry that is ignored, because it was measured on another machine."""
        here = f"this is {self.machine.get('device')} with jax {self.machine.get('jax')}"
        return [
            f"{self.path.name}: full attention at {one.get('capacity'):,} tokens of {one.get('device')} with jax "
            f"{one.get('jax')}{' in a dry run' if one.get('dry_run') else ''} is ignored, because {here}"
            for one in self.entries
            if not self.is_mine(one)
        ]
