"""Many requests at a server, of clients that read, leave, are slow, or hold their connections. One asyncio loop."""

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import resource
from collections import Counter

from raw_http import completion, connected, read_answer, read_head

WAYS = ("whole", "stream", "leave", "leave stream", "slow")


async def one(address, seed):
    """Send one request in one of the ways, by its number. Returns the way and the status, or the way and 0."""
    way, rng = WAYS[seed % len(WAYS)], random.Random(seed)
    stream = "whole" not in way and way != "leave"
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
    """Send the requests of `seeds`, so many at once. Returns the number of requests by way and status."""
    found, left = Counter(), iter(seeds)

    async def client():
        for seed in left:
            found[await one(address, seed)] += 1

    await asyncio.gather(*(client() for _ in range(at_once)))
    return found


async def flood(address, count, connections):
    """Send requests over connections that are kept. Returns the number of requests by status and code."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * connections), hard))
    found, left = Counter(), iter(range(count))
    data = completion(max_tokens=2)

    async def client():
        async with connected(address) as (reader, writer):
            for _ in left:
                writer.write(data)
                status, body = await read_answer(reader)
                found[status, json.loads(body).get("error", {}).get("code")] += 1

    await asyncio.gather(*(client() for _ in range(connections)))
    return found


def run(function, *args):
    """Run an asynchronous function of this file, in a process of its own."""
    return asyncio.run(globals()[function](*args))


def held_bytes():
    """The bytes of memory that this process has, after what it does not need was given back."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
