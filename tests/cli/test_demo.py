"""The demo's text, which is the same everywhere."""

import hashlib
import re

import demo_text
from conftest import REPO

SHA256 = "c6a8133802031075e3dfa0f8d090ef611c974cd616f93350855afec35bef348f"


def test_the_text_is_fixed_and_has_one_fact_and_the_demo_asks_for_its_number(capsys):
    text = demo_text.document()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert text.count(demo_text.FACT) == text.count(demo_text.NUMBER) == 1
    assert 0.4 < text.index(demo_text.FACT) / len(text) < 0.6
    assert demo_text.main([]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    assert demo_text.main(["--question"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == demo_text.QUESTION
    makefile = (REPO / "Makefile").read_text()
    recipe = makefile[makefile.index("\ndemo:") : makefile.index("\nsetup:")]
    assert re.search(r"--expect (\d+)", recipe)[1] == demo_text.NUMBER
    assert len(re.findall(r'^\t@echo "  \$\(BIN\)/jshadow', recipe, re.MULTILINE)) == 3  # what comes next
