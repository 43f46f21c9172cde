"""Servers for tests, in their process over a tiny model or as a process of their own, and what they should answer."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from socket import SO_SNDBUF, SOL_SOCKET

import numpy as np
import row_oracle
import serving_cases
from raw_http import NAME
from serving_cases import CLASSES, END, PARAMS, SHADOW
from starlette.testclient import TestClient
from transformers.convert_slow_tokenizer import bytes_to_unicode

import jshadow
from jshadow.library import Library
from jshadow.serving import Limits, Request
from jshadow.serving.admission import effective_policy
from jshadow.serving.http.app import make_app
from jshadow.serving.http.options import ServerOptions
from jshadow.serving.http.run import Server, config_of
from jshadow.serving.http.service import Service

CHAT, COMPLETION, FILES = "/v1/chat/completions", "/v1/completions", "/v1/files"
SYMBOLS = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
BYTES = [SYMBOLS[symbol] for symbol in PARAMS.tokenizer.convert_ids_to_tokens(range(END))]  # of each token


@contextlib.contextmanager
def tiny_service(folder=None, *, params=PARAMS, waiting=64, classes=CLASSES, **options):
    """A service over the tiny model, with a library in `folder`. Its engine runs until the end of the block."""
    with contextlib.ExitStack() as stack:
        library = None
        if folder is not None:
            library = stack.enter_context(Library(folder, params, SHADOW, capacity=classes[-1].capacity))
        limits = Limits(waiting=waiting)
        engine = serving_cases.engine_of(params, classes=classes, library=library, limits=limits, threaded=True)
        stack.callback(engine.close, drain=False)
        service = Service(engine, library, ServerOptions(NAME, **options))
        service.ready = True
        yield service


def client_of(service, **options):
    """A client of a service in this process. It asks as a program of this machine does."""
    return TestClient(make_app(service), base_url="http://localhost", **options)


@contextlib.contextmanager
def listening(service, *, drain_seconds=30.0, buffer=None, socket=None):
    """The running `Server` of a service in a thread, with its address as `address`, until the end of the block.

    It listens on `socket`, or on a free port. `buffer` is the number of bytes that the system keeps of what was sent on
    a connection and was not read.
    """
    config = config_of(service, "127.0.0.1", 0)
    socket, begun = socket or config.bind_socket(), threading.Event()
    if buffer is not None:
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, buffer)
    server = Server(config, service, drain_seconds, begun.set)
    server.address = socket.getsockname()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        assert begun.wait(30)
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextlib.contextmanager
def ending(process):
    """End a process with SIGTERM at the end of the block."""
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()


def server_process(model, *arguments):
    """`jshadow serve` as a process on a free port, as of `served`."""
    return served([sys.executable, "-m", "jshadow", "serve", str(model), "--port", "0", "--json", *arguments])


@contextlib.contextmanager
def served(command, **options):
    """A command that serves, with `--json`. Yields the process with its URL as `url`."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ending(subprocess.Popen(command, **pipes, **options)) as process:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        process.url = json.loads(line)["url"]
        yield process


def until(condition, seconds=30.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition must hold in time"
        time.sleep(0.005)


def until_ready(process):
    """Wait until a server that `served` has started takes requests."""

    def ready():
        assert process.poll() is None, process.stderr.read()
        try:
            return urllib.request.urlopen(f"{process.url}/ready", timeout=30).close() is None
        except urllib.error.URLError:
            return False

    until(ready, 600)


def idle(service):
    """Whether no request has a row, waits or is open."""
    report = service.engine.report()
    return not (report.rows_in_use or report.waiting or report.reading or service.open)


# What they should answer: by `generate`, and step by step in plain NumPy


def offline(ids, new):
    return serving_cases.offline(Request(ids, new))


def logits_along(ids, tokens, new):
    """The logits for each of the tokens that follow a prompt, float32 [len(tokens), V].

    The prompt is padded to one of two lengths, so that all tests share compiled programs.
    """
    capacity = serving_cases.class_of(len(ids), new).capacity
    policy, _ = effective_policy(PARAMS.config, SHADOW, capacity)
    padded = np.pad([ids], ((0, 0), (0, (CLASSES[0].prompt if len(ids) <= CLASSES[0].prompt else 128) - len(ids))))
    logits, state = jshadow.prefill(PARAMS, padded, np.asarray([len(ids)]), policy, capacity=capacity)
    rows = [np.asarray(logits)[0]]
    for token in tokens[:-1]:
        logits, state = jshadow.decode_step(PARAMS, np.asarray([token]), state)
        rows.append(np.asarray(logits)[0])
    return np.stack(rows)


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def assert_drawn(ids, tokens, new, settings):
    """The tokens are those that the settings draw from the model's logits."""
    for step, logits in enumerate(logits_along(ids, tokens, new)):
        scores = row_oracle.change(settings, logits, list(ids), list(tokens[:step]))
        token, close = row_oracle.draw(settings, scores, step)
        assert close or token == tokens[step], step
        if close:
            return


def chat_tokens(choice):
    """The token ids of the entries of `logprobs`. A token of the tiny model is a byte, or the end."""
    said = [entry["bytes"] for entry in choice["logprobs"]["content"]]
    return [BYTES.index(one[0]) if len(one) == 1 else END for one in said]


def posted(client, path, **body):
    """The JSON of an answer."""
    answer = client.post(path, json={"model": NAME} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(client, path, **body):
    """The events of a stream that ends with "[DONE]"."""
    with client.stream("POST", path, json={"model": NAME, "stream": True} | body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def error_of(answer):
    """The status and the code of an answer with an error."""
    return answer.status_code, answer.json()["error"]["code"]


def about(file, question):
    """The messages of a question on a document, which is a part of the first one."""
    return [{"role": "user", "content": [{"type": "file", "file": file}, {"type": "text", "text": question}]}]
