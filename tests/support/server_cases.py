"""Servers for tests: one inside the test's process over a tiny model, and one as a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys

from serving_cases import CLASSES, PARAMS, SHADOW, THREADED
from starlette.testclient import TestClient

from jshadow.library import Library
from jshadow.serving import Engine, Limits
from jshadow.serving.http.app import make_app
from jshadow.serving.http.options import ServerOptions
from jshadow.serving.http.service import Service

NAME = "tiny"


@contextlib.contextmanager
def tiny_service(folder=None, *, waiting=64, classes=CLASSES, **options):
    """A service over the tiny model, with a library in `folder`. Its engine runs until the end of the block."""
    library = None
    if folder is not None:
        library = Library(folder, PARAMS, SHADOW, capacity=classes[-1].capacity)
    limits = Limits(waiting=waiting)
    engine = Engine(PARAMS, SHADOW, classes=classes, library=library, limits=limits, options=THREADED)
    try:
        service = Service(engine, library, ServerOptions(NAME, **options))
        service.ready = True
        yield service
    finally:
        engine.close(drain=False)
        if library is not None:
            library.close()


def client_of(service, **options):
    """A client of a service in this process. It asks as a program of this machine does."""
    return TestClient(make_app(service), base_url="http://localhost", **options)


@contextlib.contextmanager
def server_process(model, *arguments, environment=None):
    """`jshadow serve` as a process on a free port. Yields the process with its URL as `url`; ends it with SIGTERM."""
    command = [sys.executable, "-m", "jshadow", "serve", str(model), "--port", "0", "--json", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | (environment or {})
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        process.url = json.loads(line)["url"]
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        process.communicate()
