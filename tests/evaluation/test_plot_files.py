"""Files of pictures: bad paths are refused, and a file is written completely or not at all."""

from pathlib import Path

import pytest

from jshadow.errors import ConfigError
from jshadow.evaluation import plots


@pytest.mark.parametrize(
    ("path", "tasks", "told"),
    [
        ("turns.gif", ["needle_multiturn"], "ends with one of"),
        ("nowhere/turns.svg", ["needle_multiturn"], "directory that exists"),
        ("turns.svg", ["needle_noise"], "needs a task of several turns"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_first(tmp_path: Path, path: str, tasks: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plots.check_plot(tmp_path / path, tasks, {"needle_multiturn": 4})


def test_a_picture_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    row = {
        "task": "needle_multiturn",
        "length": 9,
        "policy": "full",
        "name": "full",
        "samples": 1,
        "turns": [100.0, 50.0],
        "served_device_bytes": 5,
        "served_full_bytes": 10,
    }
    target = tmp_path / "turns.png"
    target.mkdir()  # a directory cannot be replaced by a file
    with pytest.raises(ConfigError, match="can be written"):
        plots.plot_turns([row], target)
    assert [path.name for path in tmp_path.iterdir()] == ["turns.png"]
    plots.plot_turns([row], tmp_path / "turns.pdf")
    assert (tmp_path / "turns.pdf").read_bytes().startswith(b"%PDF")
