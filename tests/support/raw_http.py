"""Clients over plain sockets. This file imports little, because processes of their own run them.

Many of them at a server read, leave, are slow, or hold their connections.
"""

import asyncio
import contextlib
import json
import random
import resource
from collections import Counter

NAME = "tiny"  # the model of server_cases
WAYS = ("whole", "stream", "leave", "leave stream", "slow")


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
async def connected(address, source=None):
    """The reader and the writer of a connection, from another address of this machine. It is closed at the end."""
    reader, writer = await asyncio.open_connection(*address[:2], local_addr=source and (source, 0))
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


def asked(address, data):
    return asyncio.run(ask(address, data))


async def one_way(address, seed):
    """Send one request in one of the ways, by its number. Returns the way and the status, or the way and 0."""
    way, rng = WAYS[seed % len(WAYS)], random.Random(seed)
    stream = way not in ("whole", "leave")
    data = completion(prompt="x" * rng.randint(1, 12), max_tokens=rng.randint(1, 8), seed=seed, stream=stream)
    async with connected(address) as (reader, writer):
        writer.write(data)
        if way == "leave":
            await asyncio.sleep(rng.random() * 0.05)
            writer.transport.abort()
            return way, 0
        if way == "leave stream":
            status, _ = await read_head(reader)
            writer.transport.abort()
            return way, 0 if status == 200 else status
        if way == "slow":
            await asyncio.sleep(rng.random() * 0.1)
        status, body = await read_answer(reader)
        if stream and status == 200:
            assert body.endswith(b"data: [DONE]\n\n"), body
        return way, status


async def mixed(address, seeds, at_once):
    found, left = Counter(), iter(seeds)

    async def client():
        for seed in left:
            found[await one_way(address, seed)] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return found


def load(address, seeds, at_once):
    """Send the requests of `seeds`, so many at once. Returns the number of requests by way and status."""
    return asyncio.run(mixed(address, seeds, at_once))


def flood(address, count, connections):
    """Send requests over connections that are kept. Return the number of requests by status and code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * connections), hard))
    found, left, data = Counter(), iter(range(count)), completion(max_tokens=2)

    async def client():
        async with connected(address) as (reader, writer):
            for _ in left:
                writer.write(data)
                status, body = await read_answer(reader)
                found[status, json.loads(body).get("error", {}).get("code")] += 1

    async def clients():
        await asyncio.gather(*(client() for _ in range(connections)))

    asyncio.run(clients())
    return found
