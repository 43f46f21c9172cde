"""Made-up result rows of an evaluation."""

from typing import Any

BASE: dict[str, Any] = {"share": None, "control_of": None, "fitted": False, "samples": 4, "infeasible": None}
BASE |= {"served_full_bytes": 40_000_000, "served_device_bytes": 10_000_000, "task": "needle_noise", "length": 1024}
BASE |= {"score": 50.0, "stderr": 12.5, "asked": 4, "found": 2, "found_by_full": 4, "found_by_both": 2}
BASE |= {"depths": [0.125, 0.375, 0.625, 0.875], "depth_scores": [100.0, 0.0, 100.0, 0.0], "turns": [50.0]}
BASE |= {"recall_of_full": None}


def row(name: str = "shadowkv", **given: Any) -> dict[str, Any]:
    """A made-up result row of a needle task."""
    return BASE | {"policy": name, "name": name} | given


NOTHING = dict.fromkeys(("score", "stderr", "depths", "depth_scores", "served_device_bytes"))
NEEDLES = [
    row("full", score=100.0, depth_scores=[100.0] * 4, served_device_bytes=40_000_000),
    row(share=0.5, served_device_bytes=20_000_000, score=75.0),
    row(share=0.25),
    row("quest", share=0.5),
    row("kivi", share=0.12, infeasible="too small", **NOTHING),
]
AGREEMENT = [
    row(name, task="agreement", top1=90.0, top1_stderr=1.0, kl=kl, kl_stderr=0.01, score=90.0, depths=None)
    for name, kl in (("full", 0.0), ("shadowkv", 0.03), ("snapkv", 0.2))
]
for one in AGREEMENT:
    del one["found"]
TURNS = [row(name, task="needle_multiturn", turns=[100.0, 50.0]) for name in ("full", "shadowkv")]
