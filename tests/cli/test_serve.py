"""`jshadow serve` up to the first request: what it refuses early, what it says at the start, and --warm-only."""

import socket
import threading
import types

import pytest

from jshadow.cli import serve
from jshadow.serving.http import run
from jshadow.serving.http.options import ServerOptions

SMALL = ["--max-context", "96", "--room", "32", "--slots", "2", "--set", "rank=8", "--set", "outlier_chunks=2"]
SMALL += ["--dtype", "float32"]
BAD = [
    (["--port", "65536"], "--port must be below 65536, got 65536"),
    (["--port", "-1"], "--port must be at least 0 and finite, got -1"),
    (["--slots", "0"], "--slots must be at least 1 and finite, got 0"),
    (["--queue", "0"], "--queue must be at least 1"),
    (["--max-context", "1"], "--max-context must be at least 2"),
    (["--max-context", "64", "--room", "64"], "--room must be below the context of 64 tokens, got 64"),
    (["--timeout", "nan"], "--timeout must be above 0 and finite, got nan"),
    (["--drain", "inf"], "--drain must be at least 0 and finite, got inf"),
    (["--device-gib", "0"], "--device-gib must be above 0"),
    (["--library-host-gib", "-1"], "--library-host-gib must be at least 0"),
    (["--max-body-mib", "0"], "--max-body-mib must be above 0"),
    (["--fetch", "mail"], "fetch must be 'auto' or one of"),
    (["--policy", "nobody"], "nobody"),
    (["--prefill", "none"], "prefill must be one of"),
    (["--api-key-file", "no.keys"], "no.keys must be a readable UTF-8 file of API keys"),
    (["--api-key-file", "empty"], "empty must have at least one API key in it, got none"),
    (["--library", "empty"], "--library must be a directory, got the file empty"),
    (["--host", "300.0.0.1", "--api-key-file", "keys"], "must name a free address, got 300.0.0.1 and 8000"),
    (["--host", "0.0.0.0"], "address of this machine alone in a server without keys, got 0.0.0.0"),
    (["--host", "::"], "address of this machine alone in a server without keys, got ::"),
    (["--host", "box.lan"], "address of this machine alone in a server without keys, got box.lan"),
    (["--host", "300.0.0.1", "--insecure"], "must name a free address, got 300.0.0.1 and 8000"),
    (["--uds", "keys"], "--uds must be a path for a new socket, got keys"),
    (["--uds", "no/such/folder"], "--uds must be a path for a new socket, got no/such/folder"),
    (["--max-rows", "0"], "--max-rows must be at least 1"),
    (["--traces", "127.0.0.1:4318"], "--traces must begin with http:// or https://, got '127.0.0.1:4318'"),
    (["--allowed-host", "http://a"], "allowed_hosts must be names or addresses without a port, got 'http://a'"),
]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(("options", "told"), BAD)
def test_what_cannot_work_is_told_before_the_weights_are_loaded(options, told, tmp_path, monkeypatch, refused):
    (tmp_path / "empty").write_text("# no key\n\n")
    (tmp_path / "keys").write_text("one\n")
    monkeypatch.chdir(tmp_path)
    refused(told, "serve", "model", *options)


@pytest.mark.usefixtures("no_weights")
def test_a_port_in_use_is_told_before_the_weights_are_loaded(refused):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(f"must name a free address, got 127.0.0.1 and {port}", "serve", "model", "--port", port)


@pytest.mark.usefixtures("no_weights")
def test_a_unix_socket_in_use_is_told_and_an_abandoned_one_is_replaced(refused, tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        refused(f"--uds must be a path on which no server listens, got {path}", "serve", "model", "--uds", str(path))
    with serve._listening_socket("127.0.0.1", 0, str(path)) as found:
        assert (found.getsockname(), path.stat().st_mode & 0o777) == (str(path), 0o600)


def test_a_context_above_the_model_s_is_refused(tiny_model, refused):
    refused("--max-context must be at most the model's context=", "serve", tiny_model, "--max-context", "1000000")


@pytest.mark.slow
def test_warm_only_compiles_and_exits(tiny_model, tmp_path, answer):
    told = answer("serve", tiny_model, *SMALL, "--library", tmp_path / "library", "--warm-only")
    assert told["programs"] > 0 < told["seconds"]


def test_the_start_is_told_as_json(tiny_model, tmp_path, monkeypatch, answer, printed):
    monkeypatch.setattr(run, "serve", lambda *given, listening, **options: listening() or 0)
    monkeypatch.setattr(run, "config_of", lambda *given: None)  # uvicorn's would close the handlers of pytest's logging
    (tmp_path / "keys").write_text("one\n# a remark\ntwo\n")
    place = str(tmp_path / "library")
    command = ["serve", tiny_model, *SMALL, "--name", "tiny", "--library", place]
    command += ["--api-key-file", tmp_path / "keys", "--port", "0"]
    known = answer(*command)
    told = {"model": "tiny", "max_context": 96, "policy": "shadowkv", "dtype": "float32", "api_keys": 2}
    assert known.items() >= told.items()
    assert known["settings"]["rank"] == 8
    [row] = known["classes"]
    assert (row["prompt"], row["room"], row["rows"], row["fallback"]) == (64, 32, 2, None)
    assert known["library"] == {"place": place, "documents": 0, "tokens": 0, "bytes": 0}
    assert row["device_bytes"] > 0 < known["device_bytes"]
    out = printed(*command)
    for part in ("http://127.0.0.1:", "rank=8", "2 of 64 + 32 tokens", f"{place}, 0 documents of 0 tokens", "API keys"):
        assert part in out


def test_an_end_that_hangs_ends_the_process(monkeypatch, capsys):
    exits, hangs = [], threading.Event()
    monkeypatch.setattr(serve, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(serve.os, "_exit", lambda status: exits.append(status) or hangs.set())
    engine = types.SimpleNamespace(close=lambda drain: hangs.wait(20))
    serve._end(types.SimpleNamespace(engine=engine, library=None, options=ServerOptions("tiny")))
    assert exits == [1]
    assert "did not end in 0.05 s" in capsys.readouterr().err
    hangs.clear()
    engine.close = lambda drain: None
    serve._end(types.SimpleNamespace(engine=engine, library=None, options=ServerOptions("tiny")))
    assert not hangs.wait(0.2)
