"""Pictures: which rows are drawn, one look for each method, and files that depend only on the numbers.

A file is written completely or not at all.
"""

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import plots
import pytest
from result_rows import AGREEMENT, NEEDLES, TURNS, row

from jshadow.errors import ConfigError
from jshadow.policies import POLICIES

SWEEP = [
    row(settings={"rank": rank, "budget": 256}, top1=90.0, top1_stderr=None, kl=1 / rank, kl_stderr=None)
    for rank in (32, 8, 16)
]
RNG = np.random.default_rng(0)
SPECTRUM = {kind: np.sort(RNG.random((3, width)))[:, ::-1] for kind, width in (("k_pre", 8), ("x_in", 12))}
COSINES = RNG.uniform(-1, 1, (3, 2, 9))
DRAWN: dict[str, Callable[[Any], Any]] = {
    "turns": lambda path: plots.plot_turns(TURNS, path),
    "needles": lambda path: plots.plot_needles(NEEDLES, path),
    "memory": lambda path: plots.plot_memory(NEEDLES + AGREEMENT, path),
    "kl": lambda path: plots.plot_memory(AGREEMENT, path, measure="kl"),
    "moved": lambda path: plots.plot_memory(AGREEMENT, path, measure="kl", moved=True),
    "spectra": lambda path: plots.plot_spectra({"text": SPECTRUM}, path),
    "subspaces": lambda path: plots.plot_subspaces({"extended": np.ones(3), "other": np.zeros(3)}, 0.2, path),
    "cosines": lambda path: plots.plot_least_cosines({"text": COSINES}, path),
    "hits": lambda path: plots.plot_hit_rates({"text": np.linspace(0, 1, 12).reshape(4, 3)}, path),
    "sweep": lambda path: plots.plot_sweep(SWEEP, "rank", path),
}


FILES = [*((name, ".svg") for name in DRAWN), ("memory", ".png"), ("needles", ".png")]


def lines(axis: Any) -> dict[str, Any]:
    """The lines of a panel that have a label."""
    return {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}


def points(axis: Any) -> list[tuple[list[float], list[float]]]:
    """The points of each line with error bars, x and y."""
    return [tuple(data.tolist() for data in box.lines[0].get_data()) for box in axis.containers]


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


def legend(figure: Any) -> list[str]:
    return texts(figure.legends[0].get_texts())


def test_every_method_has_a_look_of_its_own():
    assert all({"color", "marker"} <= set(plots.look_of(name)) for name in POLICIES)
    assert len(set(plots.METHODS.values())) == len(plots.METHODS)
    assert len({plots.look_of(name)["color"] for name in ("shadowkv", "quest", "snapkv", "kivi", "h2o")}) == 5
    one, two = plots.look_of("shadowkv", 0), plots.look_of("shadowkv", 1)
    assert one["color"] == two["color"]
    assert all(one[part] != two[part] for part in ("linestyle", "marker"))
    assert plots.look_of("probe") == plots.look_of("probe")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "suffix"), FILES)
def test_the_same_numbers_are_the_same_bytes(name, suffix, tmp_path):
    DRAWN[name](tmp_path / f"one{suffix}")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "svg.hashsalt": "other"}):  # a user's own style
        DRAWN[name](tmp_path / f"two{suffix}")
    one, two = ((tmp_path / f"{part}{suffix}").read_bytes() for part in ("one", "two"))
    assert one == two
    assert one.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert b"dc:date" not in one
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"one{suffix}", f"two{suffix}"]


@pytest.mark.parametrize("name", DRAWN)
def test_all_axes_say_what_they_are_and_a_user_s_style_comes_back(name):
    matplotlib.get_backend()  # decided at its first use
    before = matplotlib.rcParams.copy()
    axes = [axis for axis in DRAWN[name](None).axes if axis.get_label() != "<colorbar>"]
    assert axes
    for axis in axes:
        assert axis.get_xlabel()
        assert axis.get_ylabel() or not axis.get_subplotspec().is_first_col()
    assert matplotlib.rcParams == before


# Scores against memory


def test_memory_has_a_line_a_method_and_a_mark_a_setting():
    figure = plots.plot_memory(NEEDLES)
    [axis] = figure.axes
    colors = [box.lines[0].get_color() for box in axis.containers]
    drawn = dict(zip(colors, points(axis), strict=True))
    assert drawn[plots.METHODS["shadowkv"][0]] == ([10.0, 20.0], [50.0, 75.0])  # MB, rising
    assert drawn[plots.METHODS["quest"][0]][0] == [10.0]
    assert plots.METHODS["kivi"][0] not in drawn  # nothing ran
    assert legend(figure) == ["full", "shadowkv", "quest"]
    rows = [row("full", length=length) for length in range(100, 600, 100)]
    assert len(plots.plot_memory(rows).axes) == 5  # in rows of two
    # divergence has a logarithmic axis without full
    [axis] = plots.plot_memory(AGREEMENT, measure="kl").axes
    assert axis.get_yscale() == "log"
    assert sorted(y[0] for _, y in points(axis)) == [0.03, 0.2]


def test_a_key_code_is_a_line_of_its_own_and_bytes_moved_a_panel():
    common = {"task": "agreement", "kl_stderr": 0.0, "settings": {"keys": "transform"}}
    coded = [row(kl=kl, served_moved_bytes=size, **common) for kl, size in ((0.02, 3_000_000), (0.04, 1_000_000))]
    figure = plots.plot_memory([*AGREEMENT, *coded], measure="kl", moved=True)
    held, moved = figure.axes
    assert legend(figure) == ["shadowkv", "snapkv", "shadowkv transform"]
    assert moved.get_xlabel() == "from the host a step, MB"
    assert points(moved)[-1] == ([1.0, 3.0], [0.04, 0.02])
    first, last = (held.containers[place].lines[0] for place in (0, -1))
    assert first.get_color() == last.get_color()
    assert first.get_linestyle() != last.get_linestyle()


def test_each_sweep_is_a_line():
    """A row that belongs to two sweeps is drawn in both lines."""
    marks = ((50.0, 10_000_000, ["rank", "budget"]), (75.0, 20_000_000, ["rank"]), (80.0, 10_000_000, ["budget"]))
    rows = [row(score=score, served_device_bytes=size, sweeps=sweeps) for score, size, sweeps in marks]
    figure = plots.plot_memory([row("full"), *rows])
    assert legend(figure) == ["full", "shadowkv, rank", "shadowkv, budget, tokens"]
    assert [y for _, y in points(figure.axes[0])[1:]] == [[50, 75], [50, 80]]


def test_landmarks_of_another_length_are_a_line_of_their_own():
    """They share a line only in the sweep over the lengths of landmarks."""
    settings = {"keys": "transform", "chunk_size": 8}
    marks = [(2, "keys.bits"), (8, "keys.bits"), (2, "landmarks.tokens"), (8, "landmarks.tokens")]
    rows = [row(settings=settings | {"landmarks.tokens": tokens}, sweeps=[sweep]) for tokens, sweep in marks]
    wanted = [", landmarks of 2, bits a column", ", bits a column", ", tokens a landmark", ", tokens a landmark"]
    assert [name for one in rows for name in plots.lines_of(one)] == [f"shadowkv transform{more}" for more in wanted]
    both = row(settings=settings | {"landmarks.tokens": 2, "landmarks.levels": 2, "landmarks.order": 2})
    for swept, more in (
        ("keys.bits", ", 2 levels, variance"),
        ("landmarks.order", ", 2 levels"),
        ("landmarks.levels", ", variance"),
    ):
        assert plots.kind_of(both, swept) == f"shadowkv transform, landmarks of 2{more}"
    bits = [
        row(score=50.0, settings=settings | {"landmarks.tokens": tokens, "keys.bits": bits}, sweeps=["keys.bits"])
        for tokens in (2, 8)
        for bits in (2.0, 4.0)
    ]
    assert [len(x) for x, _ in points(plots.plot_sweep(bits, "keys.bits").axes[0])] == [2, 2]


def test_a_control_and_a_taught_method_are_lines_of_their_own():
    rows = [row("streaming_llm"), row("streaming_llm", control_of="shadowkv", score=20.0), row("less", fitted=True)]
    assert legend(plots.plot_memory(rows)) == ["streaming_llm", "streaming_llm (control)", "less (fitted)"]


def test_titles_of_policies():
    assert plots.policy_title(row(policy="shadowkv:rank=8:budget=64")) == "shadowkv\nrank=8, budget=64"
    assert plots.policy_title(row(share=0.125)) == "shadowkv, 12.5 %"


# Needles and turns


def test_a_heat_map_is_depth_by_length():
    rows = [row(length=2048, depth_scores=[0.0, 25.0, 50.0, 100.0]), row(length=1024), row("quest", length=1024)]
    first, second, bar = plots.plot_needles(rows).axes
    assert bar.get_ylabel() == "found, %"
    assert first.images[0].get_array().tolist() == [[100, 0], [0, 25], [100, 50], [0, 100]]  # lengths rise
    assert texts(first.get_xticklabels()) == ["1,024", "2,048"]
    assert texts(first.get_yticklabels()) == ["12", "38", "62", "88"]
    assert second.images[0].get_array().shape == (4, 1)
    assert first.yaxis_inverted()  # the beginning of the text is above
    assert len(plots.plot_needles([*rows, *TURNS]).axes) == 3  # several facts lie at several depths


def test_turns_draw_two_settings_of_a_method_apart():
    [axis] = plots.plot_turns([*TURNS, row(task="needle_multiturn", turns=[0.0, 0.0], share=0.25)]).axes
    full, one, two = axis.lines
    assert full.get_linewidth() > one.get_linewidth()
    assert one.get_color() == two.get_color() == plots.METHODS["shadowkv"][0]
    assert one.get_linestyle() != two.get_linestyle()
    assert two.get_ydata().tolist() == [0, 0]


# Observations and sweeps


def test_observations_draw_what_they_are_given():
    left, right = plots.plot_spectra({"text": SPECTRUM}).axes
    assert left.get_xlim() == (1, 8)  # the narrower tensor's columns
    squares = SPECTRUM["x_in"] ** 2
    kept = 100 * (np.cumsum(squares, 1) / squares.sum(1, keepdims=True)).mean(0)[:8]
    np.testing.assert_allclose(lines(right)["hidden states"].get_ydata(), kept, rtol=1e-12)
    left, right = plots.plot_least_cosines({"text": np.array([[[-0.5, 0.25], [0.25, 0.75]]])}).axes
    found = dict(zip(lines(left)["text"].get_xdata().round(2), lines(left)["text"].get_ydata(), strict=True))
    assert [found[-0.4], found[0.3], found[1.0]] == [25, 75, 100]
    assert np.isnan(found[-0.6])
    assert lines(right)["text"].get_ydata().tolist() == [0.25]
    left, right = plots.plot_hit_rates({"text": np.array([[0.0, 1.0], [0.5, 1.0]])}).axes
    assert [data.tolist() for data in lines(left)["text"].get_data()] == [[2, 3], [50, 75]]
    assert lines(right)["text"].get_ydata().tolist() == [25, 100]
    score, kl, memory = plots.plot_sweep(SWEEP, "rank").axes  # agreement has no answers
    assert points(kl)[0] == ([8, 16, 32], [1 / 8, 1 / 16, 1 / 32])
    assert points(memory)[0][1] == [25] * 3
    assert score.get_xlabel() == "rank"


@pytest.mark.parametrize("profiles", [((16, 64, 64), (4, 40, 32)), ([16, 64, 64], [4, 40, 32]), ("int4", "exact")])
def test_steps_that_are_no_numbers_stand_by_name(profiles, tmp_path):
    """A profile is a tuple in Python, and a list after a round trip through JSON."""
    rows = [one | {"settings": {"keys.profile": profile}} for one, profile in zip(SWEEP, profiles, strict=False)]
    axis = plots.plot_sweep(rows, "keys.profile", tmp_path / "sweep.png").axes[0]
    assert texts(axis.get_xticklabels()) == [str(profile) for profile in sorted(profiles)]


def test_a_sweep_has_a_line_a_task_and_length():
    """A panel draws the rows that have its measure. Bytes are drawn once for two tasks. Other sweeps are left out."""
    longer = [one | {"length": 2 * one["length"], "kl": 3.0} for one in SWEEP]
    answers = [row(task="passkey", score=10.0 * i, settings={"rank": i}) for i in (2, 4)]
    own = [one | {"sweeps": ["rank"]} for one in [*SWEEP, *longer, *answers]]
    other = row(task="passkey", score=0.0, settings={"rank": 3, "budget": 64}, sweeps=["budget"])
    none = row("quest", task="passkey", score=0.0, settings={"rank": 3}, sweeps=[], share=0.5)
    right, top1, kl, size = plots.plot_sweep([*own, other, none], "rank").axes
    assert points(right) == [([2, 4], [20, 40])]
    assert texts(kl.get_legend().get_texts()) == [f"{times * SWEEP[0]['length']:,} tokens" for times in (1, 2)]
    assert [len(axis.containers) for axis in (top1, kl, size)] == [2, 2, 2]
    assert points(kl)[1][1] == [3.0] * 3


# Files and refusals

OTHER_DEPTHS = row(length=2048, depths=[0.5, 1.0], depth_scores=[100.0, 0.0])
REFUSED = [
    (lambda path: plots.plot_turns([row()]), "turns"),
    (lambda path: plots.plot_needles(AGREEMENT), "needles"),
    (lambda path: plots.plot_needles([row(), OTHER_DEPTHS]), "same depths"),
    (lambda path: plots.plot_memory([NEEDLES[-1]]), "score against memory"),
    (lambda path: plots.plot_memory(NEEDLES, measure="bytes"), "measure must be one of"),
    (lambda path: plots.plot_memory(AGREEMENT[:1], measure="kl"), "kl against memory"),
    (lambda path: plots.plot_sweep(SWEEP, "chunk_size"), "field must be a setting"),
    (lambda path: plots.plot_spectra({}), "spectra"),
    (lambda path: plots.plot_turns(TURNS, path / "turns.gif"), "ends with one of"),
    (lambda path: plots.plot_turns(TURNS, path / "nowhere" / "turns.svg"), "can be written"),
]


@pytest.mark.parametrize(("draw", "told"), REFUSED)
def test_nothing_to_draw_or_nowhere_to_write_is_refused(draw, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        draw(tmp_path)


def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "turns.png"
    target.mkdir()  # a directory cannot be replaced by a file
    with pytest.raises(ConfigError, match="can be written"):
        plots.plot_turns(TURNS[:1], target)
    assert [path.name for path in tmp_path.iterdir()] == ["turns.png"]
    plots.plot_turns(TURNS[:1], tmp_path / "turns.pdf")
    assert (tmp_path / "turns.pdf").read_bytes().startswith(b"%PDF")
