"""A server that listens on a socket in another thread of the test's process, and clients over plain sockets."""

import asyncio
import contextlib
import json
import threading
import time

from server_cases import NAME

from jshadow.server.run import Server, config_of


@contextlib.contextmanager
def listening(service, *, drain_seconds=30.0):
    """The running `Server` of a service, with its address as `address`. It is ended at the end of the block."""
    config = config_of(service, "127.0.0.1", 0)
    socket = config.bind_socket()
    server = Server(config, service, drain_seconds)
    server.address = socket.getsockname()
    thread = threading.Thread(target=server.run, args=([socket],))
    thread.start()
    try:
        until(lambda: server.started)
        yield server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def until(condition, seconds=30.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition must hold in time"
        time.sleep(0.005)


def idle(service):
    """Whether no request has a row, waits or is open."""
    report = service.engine.report()
    return not (report.rows_in_use or report.waiting or report.reading or service.open)


def message(path, body=None, *, method=None, headers=""):
    """The bytes of a request. The body is an object that becomes JSON, bytes, or None."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    kind = "" if "content-type" in headers else "content-type: application/json\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\n{kind}content-length: {len(data)}\r\n{headers}\r\n"
    return head.encode() + data


def completion(**fields):
    """The bytes of a request for a completion."""
    return message("/v1/completions", {"model": NAME, "prompt": "Hi", "max_tokens": 4, "temperature": 0} | fields)


async def read_head(reader):
    """Read the status and the headers of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    return int(head[0].split()[1]), headers


async def read_answer(reader):
    """Read one response. Returns its status and its body."""
    status, headers = await read_head(reader)
    if "content-length" in headers:
        return status, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return status, body


async def ask(address, data):
    """Send one request on a connection of its own. Returns the status and the body of its response."""
    reader, writer = await asyncio.open_connection(*address[:2])
    try:
        writer.write(data)
        await writer.drain()
        return await read_answer(reader)
    finally:
        writer.close()
