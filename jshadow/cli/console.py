"""Standard output of the commands, and tables that never cut a number."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PADDING = 3  # columns that a border and two blanks take, for each column of a table


def console(width: int = 120) -> "Console":
    """Return standard output as a console: as wide as the terminal, or `width` columns in a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else width)


def print_table(table: "Table", out: "Console") -> None:
    """Print a table whose first column has labels. Columns that do not fit the width go into further tables.

    Args:
        table: the table. Its cells are strings. The lines of each column after the first are not broken.
        out: the console to print to.
    """
    for part in split_table(table, out.width):
        out.print(part)


def split_table(table: "Table", width: int) -> list["Table"]:
    """Split a table into tables of at most `width` characters.

    Each of them has the first column, which holds the labels, and some of the other columns.
    """
    from rich.cells import cell_len
    from rich.table import Table

    texts = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(cell_len(line) for text in cells for line in text.split("\n")) + PADDING for cells in texts]
    # A long label may wrap, down to a third of the width.
    room = width - 1 - min(widths[0], width // 3)
    groups: list[list[int]] = [[]]
    for index in range(1, len(widths)):
        if groups[-1] and sum(widths[one] for one in groups[-1]) + widths[index] > room:
            groups.append([])
        groups[-1].append(index)
    parts = []
    for group in groups:
        part = Table(title=table.title)
        part.add_column(texts[0][0], overflow="fold")
        for index in group:
            part.add_column(texts[index][0], justify=table.columns[index].justify, no_wrap=True, overflow="fold")
        for row in zip(*(texts[index][1:] for index in (0, *group)), strict=True):
            part.add_row(*row)
        parts.append(part)
    return parts
