"""Tables fit the width without cutting a number."""

import io
import json
import re

import pytest
from few import slow
from real_shapes import LLAMA_31_8B_JSON
from rich.console import Console
from rich.table import Table

from jshadow.cli import console
from jshadow.cli.console import print_table


def drawn(table, width):
    out = Console(width=width, file=io.StringIO())
    print_table(table, out)
    return out.file.getvalue()


@pytest.mark.parametrize("width", [30, 40, 80])
def test_columns_go_into_further_tables(width):
    numbers = [f"{10**12 + index:,}" for index in range(9)]
    table = Table("bytes of something long", *(f"{index} tokens" for index in range(9)))
    table.add_row("a label of several words", *numbers)
    text = drawn(table, width)
    assert all(number in text for number in numbers)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert text.count("0 tokens") == 1
    table = Table("label", "x\ny")  # it fits, and stays one
    table.add_row("one", "1")
    assert drawn(table, width).count("label") == 1
    assert "│ one   │ 1 │" in drawn(table, width)


def test_a_column_that_just_fits_stays_in_its_table():
    table = Table("label", "12345", "67890")
    table.add_row("one", "1", "2")
    widths = [drawn(table, width).count("label") for width in (24, 25, 26)]
    assert widths == [2, 1, 1]
    assert max(map(len, drawn(table, 25).splitlines())) == 25


LONG = ["--context", "122880"]


@pytest.mark.parametrize("command", [slow(["plan", *LONG]), ["plan"], ["policies", *LONG, "--model"]])
def test_commands_at_80_columns(command, tmp_path, printed, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B_JSON))
    monkeypatch.setattr(console, "console", lambda width=0: Console(width=80))
    out = printed(*command, tmp_path / "config.json")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    # each number stands whole in its cell
    cells = [cell.strip() for line in out.splitlines() if line.startswith("│") for cell in line.split("│")[2:-1]]
    assert any(re.fullmatch(r"[\d,]{9,}", cell) for cell in cells) or command[0] == "policies"
    assert not any(cell.endswith(",") for cell in cells)
