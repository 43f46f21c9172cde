"""Made-up result rows of an evaluation."""

from typing import Any

BASE: dict[str, Any] = {
    "share": None,
    "control_of": None,
    "fitted": False,
    "samples": 4,
    "infeasible": None,
    "served_full_bytes": 40_000_000,
}
DEPTHS = [0.125, 0.375, 0.625, 0.875]


def row(name: str = "shadowkv", **given: Any) -> dict[str, Any]:
    """A made-up result row of a needle task."""
    own = {
        "task": "needle_noise",
        "length": 1024,
        "policy": name,
        "name": name,
        "score": 50.0,
        "stderr": 12.5,
        "asked": 4,
        "found": 2,
        "found_by_full": 4,
        "found_by_both": 2,
        "recall_of_full": None,
        "depths": DEPTHS,
        "depth_scores": [100.0, 0.0, 100.0, 0.0],
        "turns": [50.0],
        "served_device_bytes": 10_000_000,
    }
    return BASE | own | given


NEEDLES = [
    row("full", score=100.0, depth_scores=[100.0] * 4, served_device_bytes=40_000_000),
    row(share=0.5, served_device_bytes=20_000_000, score=75.0),
    row(share=0.25),
    row("quest", share=0.5),
    row(
        "kivi",
        share=0.12,
        score=None,
        stderr=None,
        depths=None,
        depth_scores=None,
        served_device_bytes=None,
        infeasible="too small",
    ),
]
AGREEMENT = [
    row(name, task="agreement", top1=90.0, top1_stderr=1.0, kl=kl, kl_stderr=0.01, score=90.0, depths=None)
    for name, kl in (("full", 0.0), ("shadowkv", 0.03), ("snapkv", 0.2))
]


for one in AGREEMENT:
    del one["found"]


TURNS = [row(name, task="needle_multiturn", turns=[100.0, 50.0]) for name in ("full", "shadowkv")]
