"""Every command of the pages that a new user reads first: all of them parse, and those of the first two pages run."""

import collections
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_models import CONFIG
from conftest import REPO
from pages import GITHUB, PAGES, command_lines, shell_lines
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli.fields import command_of
from jshadow.cli.main import main, parser
from jshadow.evaluation.tasks import TASKS
from jshadow.evaluation.tasks.__main__ import main as prompt_of_a_task
from jshadow.policies import parse_policy
from jshadow.weights.params import init_params

FIRST = {page: PAGES.get(page) or GITHUB[page] for page in ("README.md", "getting_started.md")}
AFTER = {page: PAGES[page] for page in ("on_a_gpu.md", "coming_from.md")}
PRINTED = ("[", "│", "shadowkv has nothing")  # how lines begin that a command prints
HUB_ID, SMALL = "Qwen/Qwen3-8B", "smollm2-135m-instruct"
CALM = "The sea is calm today. The wind is low. " * 60


def commands(pages: dict[str, str]) -> list[str]:
    """Each command of a page once: the lines of its blocks, and `make ...` and `pip ...` in its text and tables."""
    lines = [line for text in pages.values() for line in shell_lines(text) if not line.startswith(PRINTED)]
    lines += [line for text in pages.values() for line in re.findall(r"`(make [a-z-]+|pip [^`]*)`", text)]
    return list(dict.fromkeys(lines))


def told(pattern: str) -> list[str]:
    """The commands of the first two pages that a pattern finds."""
    return [line for line in commands(FIRST) if re.search(pattern, line)]


# Patterns of the commands, by the test below that runs them. No test runs `make docs`.
RUN = {"install": "^pip ", "make": "^make (demo|serve)$", "small": SMALL, "hub": HUB_ID, "plan": "^jshadow plan "}


def test_every_first_command_is_run_below():
    assert all(told(pattern) for pattern in RUN.values())
    once = collections.Counter(line for pattern in RUN.values() for line in told(pattern))
    assert once == collections.Counter(line for line in commands(FIRST) if line != "make docs")


def test_the_first_commands_parse():
    """A dry run: every option has a value of its type. Placeholders of models and files are values too."""
    lines = [line for text in (FIRST | AFTER).values() for line in command_lines(text, inline=False)]
    assert len(lines) >= 10
    for line in lines:
        command = command_of(parser().parse_args(shlex.split(line)[1:]))
        parse_policy(getattr(command, "policy", None) or "shadowkv", getattr(command, "set", ()))


def test_the_other_first_commands_exist():
    """Every line of a block starts with a known program. `make` has its target, `pip` its extras, and -m its module."""
    makefile, project = (REPO / "Makefile").read_text(), tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    lines = [line.split() for line in commands(FIRST | AFTER)]
    programs = {line[0] for line in lines}
    assert programs == {"jshadow", "make", "pip", "python", "export", "vllm", "llama-server"}
    for program, *words in lines:
        if program == "make":
            assert f"\n{words[0]}:" in makefile, words
        if program == "pip":
            extras = re.search(r"\[(.*)\]", words[-1])
            assert words[0] == "install"
            assert not extras or set(extras[1].split(",")) <= project["optional-dependencies"].keys(), words
        if program == "python":
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1])
            assert words[2] in TASKS


@pytest.mark.slow
def test_the_first_plans_run(capsys):
    lines = {line for text in (FIRST | AFTER).values() for line in command_lines(text) if " plan " in line}
    assert len(lines) >= 4
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
    assert "tokens/s, predicted" in capsys.readouterr().out


@pytest.mark.real
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_commands_of_the_small_model_answer(smollm2_dir, tmp_path, monkeypatch, capsys):
    """They write a prompt, answer it, and chat."""
    (tmp_path / "checkpoints").symlink_to(smollm2_dir.parent)
    monkeypatch.chdir(tmp_path)
    lines = told(RUN["small"])
    assert len(lines) == 3  # a prompt, its answer, and the chat of both pages
    for line in sorted(lines, key=lambda line: (not line.startswith("python"), line)):
        words, out = shlex.split(line.split(">")[0]), line.partition("> ")[2]
        if words[0] == "python":
            assert prompt_of_a_task(words[3:]) == 0
            (tmp_path / out).write_text(capsys.readouterr().out)
            [(fact, city, number)] = re.findall(r"(The secret number of (\w+) is (\d+))", (tmp_path / out).read_text())
            continue
        if "--file" in words:
            (tmp_path / "book.txt").write_text(f"{CALM}{fact}. {CALM}")
            monkeypatch.setattr("sys.stdin", io.StringIO(f"What is the secret number of {city}?\n"))
        assert main(words[1:]) == 0
        assert number in capsys.readouterr().out


def answer_of(server: Any, model: str, question: str, *, file: Path | None = None) -> str:
    """The answer of a server that `served` has started, about a file if there is one. It has a page."""
    import openai
    from server_cases import about, until_ready

    until_ready(server)
    assert urllib.request.urlopen(server.url, timeout=30).headers["content-type"].startswith("text/html")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": question}]
        if file:
            messages = about({"file_id": client.files.create(file=file, purpose="user_data").id}, question)
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
        return answer.choices[0].message.content or ""


@pytest.mark.real
@pytest.mark.process
@pytest.mark.timeout(2400)
def test_make_answers_about_its_text(smollm2_dir, tmp_path):
    """`make demo` finds the planted number. `make serve` finds it in a file that is put on its page."""
    from server_cases import served

    assert told(RUN["make"]) == ["make demo", "make serve"]
    demo = subprocess.run(["make", "demo"], cwd=REPO, capture_output=True, text=True, check=True)
    assert "4719362" in demo.stdout
    question = (REPO / ".cache" / "demo-prompt.txt").read_text().splitlines()[-1]
    options = f"SERVE_OPTIONS=--port 0 --json --library {tmp_path}/documents"
    with served(["make", "-s", "serve", options], cwd=REPO) as server:
        assert "4719362" in answer_of(server, smollm2_dir.name, question, file=REPO / ".cache" / "demo.txt")


@pytest.mark.real
@pytest.mark.process
@pytest.mark.timeout(2400)
def test_an_installation_runs_the_commands_of_a_hub_model(tmp_path):
    """The lines of pip with the most extras can be resolved. That of the CPU is installed, not those of GPUs.

    A tiny model stands in for that of the hub.
    """
    from server_cases import served

    lines = {
        frozenset(re.findall(r"[a-z0-9]+", line.partition("[")[2])): shlex.split(line)[1:]
        for line in told(RUN["install"])
    }
    most = [words for extras, words in lines.items() if not any(extras < others for others in lines)]
    assert most == [["install", ".[serve,cuda12]"], ["install", ".[serve,cuda13]"]]
    pip = [tmp_path / "venv/bin/python", "-m", "pip", "--quiet"]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    for words in most:
        subprocess.run([*pip, *words, "--dry-run"], cwd=REPO, check=True)
    subprocess.run([*pip, *lines[frozenset({"serve"})]], cwd=REPO, check=True)

    folder = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("tiny")
    config = replace(CONFIG, model_type="qwen3", qk_norm=True, context=4096)
    jshadow.save(replace(init_params(config), tokenizer=byte_tokenizer()), folder / "snapshots" / "tiny")
    (tmp_path / "book.txt").write_text(CALM)
    variables = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": f"{tmp_path}/hub", "PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin"}
    away = {"cwd": tmp_path, "env": {**os.environ, **variables}}
    chat, serve = told(RUN["hub"])
    for line, typed in (("jshadow doctor", ""), (chat, "What is the sea?\n")):
        subprocess.run(shlex.split(line), input=typed, text=True, check=True, **away)
    with served([*shlex.split(serve), "--port", "0", "--json"], **away) as server:
        assert answer_of(server, "Qwen3-8B", "What is the sea?")
