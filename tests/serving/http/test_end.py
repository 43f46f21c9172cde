"""The end of a server: open requests are answered, new ones are refused, and the exit status is 0."""

import asyncio
import json
import resource
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest
from raw_http import ask, asked, completion, connected, message, read_answer, read_head
from server_cases import PARAMS, idle, listening, server_process, tiny_service, until

import jshadow

LONG = {"prompt": "Hello", "max_tokens": 64, "logit_bias": {"256": -100}}


async def streamed(address, seed, begun):
    """Ask for a stream, and return its events. `begun` counts the streams of which the first event has come."""
    async with connected(address) as (reader, writer):
        writer.write(completion(**LONG, stream=True, seed=seed))
        status, _ = await read_head(reader)
        assert status == 200
        first = await reader.readuntil(b"data: ")
        begun.append(seed)
        return first + await reader.read()  # until the server closes the connection


async def drained(address, end, many=4):
    """Open streams, begin the end, and look: `/ready`, new requests, and the streams."""
    begun = []
    streams = [asyncio.create_task(streamed(address, seed, begun)) for seed in range(many)]
    async with connected(address) as (reader, writer):  # a connection that is kept alive
        writer.write(message("/health"))
        assert (await read_answer(reader))[0] == 200
        while len(begun) < many:
            await asyncio.sleep(0.002)
        end()
        while (await ask(address, message("/ready")))[0] != 503:
            await asyncio.sleep(0.002)
        status, body = await ask(address, completion())
        assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable")
        writer.write(completion())
        assert (await read_answer(reader))[0] == 503
        for text in await asyncio.gather(*streams):
            assert b"[DONE]" in text
            assert b"error" not in text


def test_streams_finish_while_new_requests_are_refused():
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        with tiny_service() as service, listening(service) as server:
            assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(2**16, hard)  # more sockets than the default
            asked(server.address, completion(**LONG))  # compiles
            asyncio.run(drained(server.address, lambda: server.handle_exit(signal.SIGTERM, None)))
            until(lambda: server.should_exit)
            assert idle(service)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_server_whose_engine_fails_ends():
    """Its exit status is then 1, so that whoever started it starts it again."""
    with tiny_service() as service, listening(service) as server:
        service.engine._loop.run_once = lambda: 1 / 0
        assert asked(server.address, completion())[0] == 503
        until(lambda: server.should_exit)


def test_a_stream_without_end_is_cut_after_the_time_of_the_end():
    """A client sends half of a body, and waits."""
    with (
        tiny_service() as service,
        listening(service, drain_seconds=0.3) as server,
        socket.create_connection(server.address[:2]) as client,
    ):
        client.sendall(completion()[:-1])
        until(lambda: service.open == 1)
        begun = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.should_exit)
        assert time.monotonic() - begun >= 0.3
    assert service.open == 0


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("ready", [True, False], ids=["under load", "while it compiles"])
def test_the_process_ends_with_0_after_sigterm(tmp_path, ready):
    jshadow.save(PARAMS, tmp_path / "tiny")
    options = ("--dtype", "float32", "--room", "64", "--max-context", "320", "--slots", "4")
    with server_process(tmp_path / "tiny", *options) as process:
        address = urlsplit(process.url).hostname, urlsplit(process.url).port
        until(lambda: asked(address, message("/health"))[0] == 200)
        if ready:
            until(lambda: asked(address, message("/ready"))[0] == 200, 120)
            asyncio.run(drained(address, lambda: process.send_signal(signal.SIGTERM)))
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
