"""Draw the table "Methods at equal memory": divergence from full attention by device bytes, one line for each method.

python benchmarks/picture_of_methods.py docs/benchmarks/methods.md docs/assets/methods.png
"""

import argparse
import re
from pathlib import Path

import matplotlib.pyplot as plt
from plots import STYLE, look_of

PANELS = {"2,048 tokens": (1, 4), "4,096 tokens": (5, 8)}  # title -> (column of device bytes, column of KL)
BYTES = re.compile(r"([\d.]+) \(([\d.]+) %\)")
KL = re.compile(r"([\d.]+) ± ([\d.]+)")


def points(table: list[list[str]], columns: tuple[int, int]) -> dict[str, list[tuple[float, float, float]]]:
    """Return the points of each method: (percent of full attention's device bytes, KL, standard error of KL)."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in table:
        name = row[0].removesuffix(" (fitted)")
        size, divergence = BYTES.match(row[columns[0]]), KL.match(row[columns[1]])
        if size and divergence and name != "full":
            found.setdefault(name, []).append((float(size[2]), float(divergence[1]), float(divergence[2])))
    return found


def main() -> None:
    """Read the page and write the picture."""
    add = argparse.ArgumentParser(description="Draw the table of methods at equal memory.")
    add.add_argument("page", type=Path)
    add.add_argument("picture", type=Path)
    args = add.parse_args()
    lines = [line for line in args.page.read_text().splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = [row for row in table if len(row) > max(column for columns in PANELS.values() for column in columns)]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
        for axis, (title, columns) in zip(axes, PANELS.items(), strict=True):
            for name, values in points(table, columns).items():
                x, y, error = zip(*sorted(values), strict=True)
                width = 2.5 if name == "shadowkv" else 1.0
                axis.errorbar(x, y, yerr=error, label=name, **look_of(name), linewidth=width, elinewidth=0.6)
            axis.set(title=f"{title}, 5 prompts", xlabel="KV bytes on the device, % of full attention's", yscale="log")
        axes[0].set_ylabel("KL from full attention, nats")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
        args.picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
