"""Keys, limits of bodies and time, and clients that leave or read slowly."""

import asyncio
import json
import socket
import threading

import pytest
from raw_http import ask, completion, connected, message, read_answer, read_head
from server_cases import NAME, client_of, tiny_service
from socket_cases import idle, listening, until

from jshadow.errors import CheckpointError, ConfigError, HostMemoryError
from jshadow.serving.http.options import ServerOptions, read_keys

BODY = 20_000
LONG = {"prompt": "Hello", "max_tokens": 64, "logit_bias": {"256": -100}}


@pytest.fixture(scope="module")
def service():
    with tiny_service(waiting=8, body_bytes=BODY, held_bytes=2 * BODY, seconds=30.0) as service:
        yield service


@pytest.fixture(scope="module")
def server(service):
    with listening(service) as server:
        yield server


def error_of(answer):
    status, body = answer
    return status, json.loads(body)["error"]


def test_a_key_is_asked_for_except_for_the_state_of_the_server(service, monkeypatch):
    monkeypatch.setattr(service, "options", ServerOptions(NAME, api_keys=("first", "second")))
    with client_of(service) as client:
        for header in ("", "first", "Bearer", "Bearer other", "Bearer first second", "Basic first", "Bearer \xff"):
            answer = client.get("/v1/models", headers={"authorization": header.encode("latin-1")})
            assert answer.status_code == 401, header
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert [client.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
        assert client.get("/openapi.json").status_code == 401
        assert 'jshadow:requests_refused_total{status="401"} ' in client.get("/metrics").text


SAME = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
SITES = [
    ("/v1/models", "localhost:8000", {}, 200),
    ("/v1/models", "LocalHost", {}, 200),
    ("/v1/models", "[::1]:8000", {}, 200),
    ("/v1/models", "a.localhost:1", {}, 200),
    ("/v1/models", "box.lan:8000", {}, 200),
    ("/v1/models", "localhost:8000", SAME, 200),
    ("/v1/models", "localhost:8000", {"sec-fetch-site": "none"}, 200),
    ("/v1/models", "evil.example:8000", {}, "host_not_allowed"),  # DNS rebinding
    ("/v1/models", "localhost.evil.example", {}, "host_not_allowed"),
    ("/v1/models", "", {}, "host_not_allowed"),
    ("/metrics", "evil.example", {}, "host_not_allowed"),
    ("/health", "10.0.0.7:8000", {}, 200),  # a probe of an orchestrator
    ("/v1/models", "localhost:8000", {"origin": "http://evil.example"}, "cross_site"),
    ("/v1/models", "localhost:8000", {"origin": "http://localhost:3000"}, "cross_site"),
    ("/v1/models", "localhost:8000", {"origin": "null"}, "cross_site"),
    ("/v1/models", "localhost:8000", {"sec-fetch-site": "cross-site"}, "cross_site"),
    ("/v1/models", "localhost:8000", {"sec-fetch-site": "same-site"}, "cross_site"),
    ("/", "localhost:8000", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link to the page
    ("/v1/models", "localhost:8000", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, "cross_site"),
]


def test_a_web_page_of_another_site_cannot_ask_a_server_without_keys(service, monkeypatch):
    monkeypatch.setattr(service, "options", ServerOptions(NAME, allowed_hosts=("box.lan",)))
    with client_of(service) as client:
        for path, host, headers, expected in SITES:
            answer = client.get(path, headers={"host": host} | headers)
            got = answer.json()["error"]["code"] if answer.status_code == 403 else answer.status_code
            assert got == expected, (path, host, headers)
        upload = {"files": {"file": ("a.txt", b"text")}, "data": {"purpose": "assistants"}}
        assert client.post("/v1/files", headers={"origin": "http://evil.example"}, **upload).status_code == 403
        slash = client.get("/v1/files/", headers={"host": "localhost"}, follow_redirects=False)
        assert (slash.status_code, slash.headers.get("location")) == (404, None)
    for options in ({"allowed_hosts": ("*",)}, {"api_keys": ("first",)}):
        monkeypatch.setattr(service, "options", ServerOptions(NAME, **options))
        with client_of(service) as client:
            headers = {"host": "evil.example", "authorization": "Bearer first"}
            assert client.get("/v1/models", headers=headers).status_code == 200
    with pytest.raises(ConfigError, match=r"allowed_hosts must be names .* got 'http://a'"):
        ServerOptions(NAME, allowed_hosts=("http://a",))


def test_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\n first \nsecond\n")
    assert read_keys(path) == ("first", "second")
    path.write_text("# none\n")
    with pytest.raises(CheckpointError, match="at least one API key"):
        read_keys(path)
    with pytest.raises(ConfigError, match="held_bytes must be an integer of at least 1, got 0"):
        ServerOptions(NAME, held_bytes=0)


def test_a_body_in_chunks_is_refused_at_its_limit(server):
    async def send_without_end():
        async with connected(server.address) as (reader, writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            answer = asyncio.create_task(read_answer(reader))
            sent = 0
            while not answer.done():
                writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                sent += 1000
                await writer.drain()
                await asyncio.sleep(0.001)
            return await answer, sent

    answer, sent = asyncio.run(send_without_end())
    status, error = error_of(answer)
    assert status == 413
    assert str(BODY) in error["message"]
    assert sent < 100 * BODY


def test_the_bodies_of_all_requests_have_a_limit(server, service):
    """Two bodies that never end hold all bytes. A third is refused, and so is a small one."""
    held = message("/v1/completions", b" " * BODY)[:-1]

    async def run():
        async with connected(server.address) as (_, first), connected(server.address) as (_, second):
            first.write(held)
            second.write(held)
            while service.open < 2:
                await asyncio.sleep(0.002)
            async with connected(server.address) as (reader, third):
                third.write(held)
                return await read_answer(reader), await ask(server.address, completion())

    late, small = asyncio.run(run())
    status, error = error_of(late)
    assert (status, error["code"]) == (429, "bodies_full")
    assert str(2 * BODY) in error["message"]
    assert error_of(small)[0] == 429
    until(lambda: idle(service))
    assert asyncio.run(ask(server.address, completion()))[0] == 200


def test_a_body_that_does_not_arrive_in_time_is_refused():
    async def stop_in_the_middle(address):
        async with connected(address) as (reader, writer):
            writer.write(completion()[:-3])
            return await read_answer(reader)

    with tiny_service(seconds=0.2) as service, listening(service) as server:
        status, error = error_of(asyncio.run(stop_in_the_middle(server.address)))
    assert (status, error["code"]) == (408, "timeout")
    assert "0.2 seconds" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(server, service, stream):
    cancelled, finished = service.engine.report().counts.cancelled, service.engine.report().counts.finished

    async def leave():
        async with connected(server.address) as (reader, writer):
            writer.write(completion(**LONG, stream=stream, n=4))
            if stream:
                await read_head(reader)
                await reader.readuntil(b"data: ")
            else:
                await asyncio.to_thread(until, lambda: service.engine.report().rows_in_use)
            writer.transport.abort()
            return service.engine.report().counts.steps

    steps = asyncio.run(leave())
    until(lambda: idle(service))
    counts = service.engine.report().counts
    assert counts.cancelled + counts.finished == cancelled + finished + 4
    assert counts.cancelled > cancelled
    assert counts.steps - steps < 60  # 64 steps and more without the cancellation


def test_a_slow_reader_blocks_no_other_and_its_row_becomes_free(service):
    """It asks for more than its connection can hold, and reads nothing until another has its answers."""
    with listening(service, buffer=2**12) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        slow.settimeout(20)
        slow.connect(server.address[:2])
        slow.sendall(completion(**LONG, n=4, logprobs=20, stream=True))
        assert [asyncio.run(ask(server.address, completion()))[0] for _ in range(3)] == [200] * 3
        until(lambda: not service.engine.report().rows_in_use and not service.engine.report().waiting)
        assert service.open == 1  # the rest of the events waits for the reader
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        text = b""
        while b"[DONE]" not in text:
            text += slow.recv(2**16)
        assert text.count(b"data: ") > 4 * 64
        until(lambda: idle(service))


def test_a_server_without_memory_says_so(service, monkeypatch):
    def full(_):
        raise HostMemoryError("the host must have 9 bytes free, it has 5")

    with client_of(service) as client:
        monkeypatch.setattr(service.engine, "submit_all", full)
        answer = client.post("/v1/completions", json={"model": NAME, "prompt": "Hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "host_memory_full")
        assert "9 bytes" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        monkeypatch.undo()
        assert client.post("/v1/completions", json={"model": NAME, "prompt": "Hi", "max_tokens": 2}).is_success


def test_a_request_beyond_the_queue_is_refused(server, service):
    """The engine waits while 40 requests come. 8 may wait with it."""
    seen = threading.Event()

    async def run():
        asked = [asyncio.create_task(ask(server.address, completion(**LONG))) for _ in range(40)]
        async with asyncio.timeout(20):
            while sum(one.done() for one in asked) < 32:
                await asyncio.sleep(0.01)
        seen.set()
        return await asyncio.gather(*asked)

    service.engine._messages.put(seen.wait)
    try:
        answers = asyncio.run(run())
    finally:
        seen.set()
    statuses = [status for status, _ in answers]
    assert (statuses.count(200), statuses.count(429)) == (8, 32)
    refused = next(error_of(answer)[1] for answer in answers if answer[0] == 429)
    assert (refused["code"], refused["type"]) == ("queue_full", "rate_limit_error")
    until(lambda: idle(service))
