"""The demo's text, which is the same everywhere, and the marks of right answers."""

import hashlib
import json
import re
from pathlib import Path

from jshadow.cli import demo_text
from jshadow.cli.main import main

SHA256 = "c6a8133802031075e3dfa0f8d090ef611c974cd616f93350855afec35bef348f"


def test_the_text_is_fixed_and_has_one_fact(capsys):
    text = demo_text.document()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert text.count(demo_text.FACT) == text.count(demo_text.NUMBER) == 1
    assert 0.4 < text.index(demo_text.FACT) / len(text) < 0.6
    assert demo_text.main([]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    assert demo_text.main(["--question"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == demo_text.QUESTION


def test_right_answers_are_marked(tiny_model, capsys):
    command = [
        "generate",
        tiny_model,
        "--prompt",
        "a",
        "--policy",
        "full",
        "--max-new-tokens",
        "2",
        "--dtype",
        "float32",
    ]
    assert main([*command, "--json"]) == 0
    [plain] = json.loads(capsys.readouterr().out)["results"]
    assert "right" not in plain
    for expected, right, mark in ((plain["text"], True, "✓"), ("nothing like it", False, "✗")):
        assert main([*command, "--expect", expected, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["results"][0]["right"] is right
        assert main([*command, "--expect", expected]) == 0
        assert mark in capsys.readouterr().out


def test_offloading_on_a_cpu_is_explained(tiny_model, capsys):
    """And a policy that takes more memory than full attention says why."""
    small = ["--set", "rank=8", "--set", "outlier_chunks=2", "--set", "budget=64", "--max-new-tokens", "2"]
    command = ["generate", tiny_model, "--prompt", "a document " * 20, *small, "--dtype", "float32"]
    assert main([*command, "--fetch", "device_put"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "host memory and device memory are the same memory" in out
    assert main([*command, "--fetch", "resident", "--set", "rank=32"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "same memory" not in out
    assert "shadowkv takes more device memory than full attention because" in out
    assert "fetch=resident moves nothing to the host" in out


def test_the_demo_asks_for_its_number_and_says_what_comes_next():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = makefile[makefile.index("\ndemo:") : makefile.index("\nsetup:")]
    assert re.search(r"--expect (\d+)", recipe)[1] == demo_text.NUMBER
    assert len(re.findall(r'^\t@echo "  \$\(BIN\)/jshadow', recipe, re.MULTILINE)) == 3
