"""API keys, limits of bodies and time, and clients that leave or read slowly."""

import asyncio
import contextlib
import hashlib
import http.client
import json
import re
import socket
import threading

import pytest
from raw_http import ask, asked, completion, connected, message, read_answer, read_head
from server_cases import COMPLETION, FILES, NAME, client_of, error_of, idle, listening, tiny_service, until

from jshadow.cli.serve import _unix_socket
from jshadow.errors import ConfigError, HostMemoryError
from jshadow.serving.http import access
from jshadow.serving.http.keys import ApiKeys, KeyLimits
from jshadow.serving.http.options import ServerOptions

BODY = 20_000
LONG = {"prompt": "Hello", "max_tokens": 64, "logit_bias": {"256": -100}}
MODELS = "/v1/models"


@pytest.fixture(scope="module")
def service():
    with tiny_service(waiting=8, body_bytes=BODY, held_bytes=2 * BODY, seconds=30.0) as service:
        yield service


@pytest.fixture(scope="module")
def server(service):
    with listening(service) as server:
        yield server


def told_by(answer):
    """The status, the code and the message of a raw answer with an error."""
    error = json.loads(answer[1])["error"]
    return answer[0], error["code"], error["message"]


def test_a_key_is_asked_for_except_for_the_state_of_the_server(service, monkeypatch):
    monkeypatch.setattr(service, "keys", ApiKeys(dict.fromkeys(("first", "second"), KeyLimits()), None))
    with client_of(service) as client:
        for header in ("", "first", "Bearer", "Bearer other", "Bearer first second", "Basic first", "Bearer \xff"):
            answer = client.get(MODELS, headers={"authorization": header.encode("latin-1")})
            assert error_of(answer) == (401, "invalid_api_key"), header
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            assert client.get(MODELS, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/openapi.json", 401)):
            assert client.get(path).status_code == status, path
        assert 'jshadow:requests_refused_total{status="401"} ' in client.get("/metrics").text


def test_a_server_listens_on_a_unix_socket(service, tmp_path):
    path = str(tmp_path / "socket")

    def answer_to(method, place, body=None, host="localhost"):
        connection = http.client.HTTPConnection(host)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.connect(path)
            connection.request(method, place, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    with listening(service, socket=_unix_socket(path)):
        status, text = answer_to("GET", MODELS)
        assert (status, json.loads(text)["data"][0]["id"]) == (200, NAME)
        status, text = answer_to(
            "POST", COMPLETION, json.dumps({"model": NAME, "max_tokens": 3, "stream": True, "prompt": "Hi"})
        )
        assert (status, text.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert answer_to("GET", MODELS, host="evil.example")[0] == 403


def test_each_request_has_an_id_in_its_response_and_in_the_log(service, monkeypatch, caplog):
    """Refused requests and failures of the server have ids too. A malformed id is replaced. No key is logged."""
    caplog.set_level("INFO", logger=access.ACCESS_LOG)
    monkeypatch.setattr(service, "keys", ApiKeys({"first": KeyLimits()}, None))
    monkeypatch.setattr(service, "check_model", lambda name: 1 / 0)
    key = {"authorization": "Bearer first", "content-type": "application/json"}
    with client_of(service, raise_server_exceptions=False) as client:
        asked = [
            client.get("/health", headers={"x-request-id": "a-1"}),
            client.get(MODELS, headers={"x-request-id": "not an id"}),
            client.post(COMPLETION, content=b'{"prompt": "a", "model": "m"}', headers=key | {"x-request-id": "b.2"}),
            client.get(MODELS, headers=key),
        ]
    lines = [json.loads(record.message) for record in caplog.records if record.name == access.ACCESS_LOG]
    ids = [answer.headers["x-request-id"] for answer in asked]
    assert (ids[0], ids[2]) == ("a-1", "b.2")
    assert all(re.fullmatch("[0-9a-f]{32}", ids[place]) for place in (1, 3))
    assert ids[1] != ids[3]
    assert [line["id"] for line in lines] == ids
    assert [line["status"] for line in lines] == [answer.status_code for answer in asked] == [200, 401, 500, 200]
    assert lines[2]["client"] == lines[3]["client"] == hashlib.sha256(b"first").hexdigest()[:12]
    assert (lines[2]["method"], lines[2]["path"], lines[2]["body_bytes"]) == ("POST", COMPLETION, 29)


def test_a_key_is_one_client_however_it_is_sent():
    """Else a client could take the turns of several."""
    sent = (b"Bearer first", b"bearer first", b"BEARER   first ", b"Bearer second")
    kinds, keys = zip(*(access.given_key({"headers": [(b"authorization", one)]}) for one in sent), strict=True)
    assert set(kinds) == {b"bearer"}
    assert keys[0] == keys[1] == keys[2] != keys[3]


HERE = "localhost:8000"
SAME = {"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
OTHERS = [
    {"origin": origin} for origin in ("http://evil.example", "http://localhost:3000", "null", "http://[evil", "//")
]
OTHERS += [{"sec-fetch-site": site} for site in ("cross-site", "same-site")]
REBOUND = ("evil.example:8000", "localhost.evil.example", "")  # by DNS
SITES = [
    *(
        (MODELS, host, {}, 200)
        for host in (HERE, "LocalHost", "[::1]:8000", "a.localhost:1", "127.0.0.2:8000", "box.lan:8000")
    ),
    *((MODELS, HERE, headers, 200) for headers in (SAME, {"sec-fetch-site": "none"})),
    *((MODELS, host, SAME, 200) for host in ("LOCALHOST:8000", "LocalHost:8000")),
    *((MODELS, host, {}, "host_not_allowed") for host in REBOUND),
    *((MODELS, HERE, headers, "cross_site") for headers in (*OTHERS, LINK)),
    ("/metrics", "evil.example", {}, "host_not_allowed"),
    ("/health", "10.0.0.7:8000", {}, 200),  # a probe of an orchestrator
    ("/", HERE, LINK, 200),  # to the page
]


def test_a_web_page_of_another_site_cannot_ask_a_server_without_keys(service, monkeypatch):
    monkeypatch.setattr(service, "options", ServerOptions(NAME, allowed_hosts=("Box.lan",)))
    with client_of(service) as client:
        for path, host, headers, expected in SITES:
            answer = client.get(path, headers={"host": host} | headers)
            got = answer.json()["error"]["code"] if answer.status_code == 403 else answer.status_code
            assert got == expected, (path, host, headers)
        upload = {"files": {"file": ("a.txt", b"text")}, "data": {"purpose": "assistants"}}
        assert client.post(FILES, headers={"origin": "http://evil.example"}, **upload).status_code == 403
        slash = client.get(f"{FILES}/", headers={"host": "localhost"}, follow_redirects=False)
        assert (slash.status_code, slash.headers.get("location")) == (404, None)
    for hosts, keys in ((("*",), {}), ((), {"first": KeyLimits()})):
        monkeypatch.setattr(service, "options", ServerOptions(NAME, allowed_hosts=hosts))
        monkeypatch.setattr(service, "keys", ApiKeys(keys, None))
        with client_of(service) as client:
            headers = {"host": "evil.example", "authorization": "Bearer first"}
            assert client.get(MODELS, headers=headers).status_code == 200


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="held_bytes must be an integer of at least 1, got 0"):
        ServerOptions(NAME, held_bytes=0)
    with pytest.raises(ConfigError, match=r"allowed_hosts must be names .* got 'http://a'"):
        ServerOptions(NAME, allowed_hosts=("http://a",))


def test_a_body_in_chunks_is_refused_at_its_limit(server):
    async def send_without_end():
        async with connected(server.address) as (reader, writer):
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
            answer, sent = asyncio.create_task(read_answer(reader)), 0
            while not answer.done():
                writer.write(b"3e8\r\n" + b" " * 1000 + b"\r\n")
                sent += 1000
                await writer.drain()
                await asyncio.sleep(0.001)
            return await answer, sent

    answer, sent = asyncio.run(send_without_end())
    status, _, told = told_by(answer)
    assert status == 413
    assert str(BODY) in told
    assert sent < 100 * BODY


def test_the_bodies_of_all_requests_and_of_one_client_have_a_limit(server, service, monkeypatch):
    """Bodies that never end hold all bytes of a client, and then of all clients. Small ones are answered meanwhile."""
    monkeypatch.setattr(access, "SMALL", 1000)
    held, most = message(COMPLETION, b" " * BODY)[:-1], 2 * BODY

    async def run():
        async with contextlib.AsyncExitStack() as stack:

            async def hold(number):
                reader, writer = await stack.enter_async_context(connected(server.address, f"127.0.0.{number}"))
                writer.write(held)
                return asyncio.create_task(read_answer(reader))

            async def first(*tasks):
                """The answer of the one that came last. The others go on to hold their bytes."""
                done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                open_tasks.extend(left)
                return done.pop().result()

            open_tasks = []
            second = await first(await hold(2), await hold(2))
            third = await first(await hold(3), await hold(4), *open_tasks)
            small = await ask(server.address, completion())
            for task in open_tasks:
                task.cancel()
            return second, third, small

    second, third, small = asyncio.run(run())
    assert told_by(second)[:2] == told_by(third)[:2] == (429, "bodies_full")
    assert f"one client must have at most {BODY} bytes" in told_by(second)[2]
    assert f"all clients must have at most {most} bytes" in told_by(third)[2]
    assert small[0] == 200
    until(lambda: idle(service))
    assert asked(server.address, message(COMPLETION, b" " * (BODY - 1) + b"{"))[0] == 400  # nothing is held any more


def test_a_body_that_stands_still_or_drips_is_refused(server, monkeypatch):
    monkeypatch.setattr(access, "STILL_SECONDS", 0.3)
    monkeypatch.setattr(access, "MOVED", 1000)

    async def send(bytes_a_time):
        """Send a body of 3,000 bytes, so many each tenth of a second, until there is an answer."""
        async with connected(server.address) as (reader, writer):
            answer, left = asyncio.create_task(read_answer(reader)), completion(user="u" * 3000)
            while left and not answer.done():
                writer.write(left[:bytes_a_time])
                left = left[bytes_a_time:]
                await asyncio.sleep(0.1)
            return await answer

    status, code, told = told_by(asyncio.run(send(20)))
    assert (status, code) == (408, "timeout")
    assert "1000 bytes of the body must arrive every 0.3 seconds" in told
    assert asyncio.run(send(900))[0] == 200


def test_a_connection_without_a_request_is_closed(service, monkeypatch):
    monkeypatch.setattr(access, "HEAD_SECONDS", 0.2)

    async def left(address, *sent):
        """What a client reads that sends parts of requests, until the server closes the connection."""
        async with connected(address) as (reader, writer):
            for part in sent:
                writer.write(part)
                await asyncio.sleep(0.02)
            return await asyncio.wait_for(reader.read(), 20)

    health = message("/health")
    with listening(service) as server:
        assert asyncio.run(left(server.address)) == b""
        assert asyncio.run(left(server.address, health[:-4])) == b""
        for after in (b"", b"G"):  # after an answer, with the beginning of another request
            assert asyncio.run(left(server.address, health, after)).endswith(b'{"status":"ok"}')


def test_little_is_read_at_once_and_nothing_is_written_late(service):
    """Chunks of one byte take long to parse, so few of them may hold the event loop. Tokens do not wait for others."""
    with listening(service) as server:

        async def run():
            async with connected(server.address) as (reader, writer):
                writer.write(message("/health"))
                await read_answer(reader)
                [transport] = [one.transport for one in server.server_state.connections]
                nodelay = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                return transport.max_size, nodelay

        assert asyncio.run(run()) == (access.READ_BYTES, 1)


def test_a_body_of_tiny_chunks_is_refused(service, monkeypatch):
    monkeypatch.setattr(access, "MOST_CHUNKS", 100)
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += "transfer-encoding: chunked\r\n\r\n"
    body = completion().split(b"\r\n\r\n")[1]
    with listening(service) as server:
        for chunk, status in ((b" ", 400), (b" " * access.CHUNK_BYTES, 200)):
            chunks = (b"%x\r\n%s\r\n" % (len(one), one) for one in [*[chunk] * 200, body, b""])
            assert asked(server.address, head.encode() + b"".join(chunks))[0] == status


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_row(server, service, stream):
    before = service.engine.report().counts
    ended = before.cancelled + before.finished, before.cancelled

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
    assert counts.cancelled + counts.finished == ended[0] + 4
    assert counts.cancelled > ended[1]
    assert counts.steps - steps < 60  # 64 steps and more without the cancellation


def test_a_slow_reader_blocks_no_other_and_its_row_becomes_free(service):
    """It asks for more than its connection can hold, and reads nothing until another has its answers."""
    with listening(service, buffer=2**12) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
        slow.settimeout(20)
        slow.connect(server.address[:2])
        slow.sendall(completion(**LONG, n=4, logprobs=20, stream=True))
        assert [asked(server.address, completion())[0] for _ in range(3)] == [200] * 3
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

    body = {"model": NAME, "prompt": "Hi", "max_tokens": 2}
    with client_of(service) as client:
        with monkeypatch.context() as memory:
            memory.setattr(service.engine, "submit_all", full)
            answer = client.post(COMPLETION, json=body)
        assert error_of(answer) == (503, "host_memory_full")
        assert "9 bytes" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert client.post(COMPLETION, json=body).is_success


def test_a_request_beyond_the_queue_is_refused(server, service):
    """The engine waits while 40 requests come. 8 may wait with it."""
    seen = threading.Event()

    async def run():
        tasks = [asyncio.create_task(ask(server.address, completion(**LONG))) for _ in range(40)]
        async with asyncio.timeout(20):
            while sum(one.done() for one in tasks) < 32:
                await asyncio.sleep(0.01)
        seen.set()
        return await asyncio.gather(*tasks)

    service.engine._messages.put(seen.wait)
    try:
        answers = asyncio.run(run())
    finally:
        seen.set()
    statuses = [status for status, _ in answers]
    assert (statuses.count(200), statuses.count(429)) == (8, 32)
    refused = next(json.loads(body)["error"] for status, body in answers if status == 429)
    assert (refused["code"], refused["type"]) == ("queue_full", "rate_limit_error")
    until(lambda: idle(service))
