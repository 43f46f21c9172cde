"""Clients over plain sockets. This file imports little, because processes of their own run them."""

import asyncio
import contextlib
import json

NAME = "tiny"  # the model of server_cases


def message(path, body=None, *, method=None, headers=""):
    """The bytes of a request. The body is an object that becomes JSON, bytes, or None."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = method or ("GET" if body is None else "POST")
    kind = "" if "content-type" in headers else "content-type: application/json\r\n"
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}content-length: {len(data)}\r\n{headers}\r\n"
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


@contextlib.asynccontextmanager
async def connected(address):
    """The reader and the writer of a connection. It is closed at the end of the block."""
    reader, writer = await asyncio.open_connection(*address[:2])
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def ask(address, data):
    """Send one request on a connection of its own. Returns the status and the body of its response."""
    async with connected(address) as (reader, writer):
        writer.write(data)
        await writer.drain()
        return await read_answer(reader)
