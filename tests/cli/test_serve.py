"""`jshadow serve` up to the first request: what it refuses early, what it says at the start, and --warm-only."""

import json
import socket

import pytest

from jshadow.cli.main import main
from jshadow.serving.http import run

SMALL = ["--max-context", "96", "--room", "32", "--slots", "2", "--set", "rank=8", "--set", "outlier_chunks=2"]


BAD = {
    "port": (["--port", "65536"], "--port must be below 65536, got 65536"),
    "negative_port": (["--port", "-1"], "--port must be at least 0 and finite, got -1"),
    "slots": (["--slots", "0"], "--slots must be at least 1 and finite, got 0"),
    "queue": (["--queue", "0"], "--queue must be at least 1"),
    "context": (["--max-context", "1"], "--max-context must be at least 2"),
    "room": (["--max-context", "64", "--room", "64"], "--room must be below the context of 64 tokens, got 64"),
    "timeout": (["--timeout", "nan"], "--timeout must be above 0 and finite, got nan"),
    "drain": (["--drain", "inf"], "--drain must be at least 0 and finite, got inf"),
    "memory": (["--device-gib", "0"], "--device-gib must be above 0"),
    "tier": (["--library-host-gib", "-1"], "--library-host-gib must be at least 0"),
    "body": (["--max-body-mib", "0"], "--max-body-mib must be above 0"),
    "fetch": (["--fetch", "mail"], "fetch must be 'auto' or one of"),
    "policy": (["--policy", "nobody"], "nobody"),
    "prefill": (["--prefill", "none"], "prefill must be one of"),
    "keys": (["--api-key-file", "no.keys"], "no.keys must be a readable UTF-8 file of API keys"),
    "no_keys": (["--api-key-file", "empty"], "empty must have at least one API key in it, got none"),
    "library": (["--library", "empty"], "--library must be a directory, got the file empty"),
    "host": (["--host", "300.0.0.1"], "--host and --port must name a free address, got 300.0.0.1 and 8000"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_told_before_the_weights_are_loaded(case, no_weights, tmp_path, monkeypatch, capsys):
    options, told = BAD[case]
    (tmp_path / "empty").write_text("# no key\n\n")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "model", *options]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_a_port_in_use_is_told_before_the_weights_are_loaded(no_weights, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "model", "--port", str(port)]) == 2
    assert f"--host and --port must name a free address, got 127.0.0.1 and {port}" in capsys.readouterr().err


def test_a_context_above_the_model_s_is_refused(tiny_model, capsys):
    assert main(["serve", tiny_model, "--port", "0", "--max-context", "1000000"]) == 2
    assert "--max-context must be at most the model's context=" in capsys.readouterr().err


@pytest.mark.slow
def test_warm_only_compiles_and_exits(tiny_model, tmp_path, capsys):
    command = ["serve", tiny_model, *SMALL, "--dtype", "float32", "--library", str(tmp_path / "library")]
    assert main([*command, "--warm-only", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["programs"] > 0
    assert told["seconds"] > 0


def test_the_start_is_told_as_json(tiny_model, tmp_path, monkeypatch, capsys):
    def serve(service, config, sockets, *, listening, **options):
        listening()
        return 0

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(run, "config_of", lambda *given: None)  # uvicorn's would close the handlers of pytest's logging
    (tmp_path / "keys").write_text("one\n# a remark\ntwo\n")
    place = str(tmp_path / "library")
    options = [*SMALL, "--name", "tiny", "--library", place, "--api-key-file", str(tmp_path / "keys"), "--port", "0"]
    command = ["serve", tiny_model, *options, "--dtype", "float32"]
    assert main([*command, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert (known["model"], known["max_context"], known["policy"], known["dtype"]) == (
        "tiny",
        96,
        "shadowkv",
        "float32",
    )
    assert known["settings"]["rank"] == 8
    [row] = known["classes"]
    assert (row["prompt"], row["room"], row["rows"], row["fallback"]) == (64, 32, 2, None)
    assert row["device_bytes"] > 0
    assert known["library"] == {"place": place, "documents": 0, "tokens": 0, "bytes": 0}
    assert known["api_keys"] == 2
    assert known["device_bytes"] > 0
    assert main(command) == 0
    told = capsys.readouterr().out
    for part in ("http://127.0.0.1:", "rank=8", "2 of 64 + 32 tokens", f"{place}, 0 documents of 0 tokens", "API keys"):
        assert part in told
