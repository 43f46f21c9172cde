"""Clients that attack a server, and one that watches it meanwhile. Processes of their own run this file."""

import asyncio
import contextlib
import multiprocessing
import time

from raw_http import ask, completion, connected, message, read_answer, read_head

CHAT, COMPLETION, FILES = "/v1/chat/completions", "/v1/completions", "/v1/files"
MIB = 2**20
CHUNKED = "transfer-encoding: chunked\r\n"


def of_size(head, item, end, size=16 * MIB - 64):
    """A JSON text of a list of equal items, of almost `size` bytes."""
    return head + item * ((size - len(head) - len(end)) // len(item)) + end


def lists():
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":[', b"[1],", b"[1]]}"))


def ids():
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":[', b"1,", b"1]}"))


def few_ids():
    """As many token ids as are parsed."""
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":[', b"7,", b"1]}", 2**21 - 2**10))


def messages():
    one = b'{"role":"user","content":"a"}'
    return message(CHAT, of_size(b'{"model":"tiny","messages":[', one + b",", one + b"]}"))


def few_messages():
    """As many messages as are parsed and checked."""
    one = b'{"role":"user","content":"a"}'
    return message(CHAT, of_size(b'{"model":"tiny","messages":[', one + b",", one + b"]}", 2**12 * 30))


def objects():
    return message(CHAT, of_size(b'{"model":"tiny","messages":[', b'{"a":{}},', b"{}]}", 2**15 * 9))


def deep():
    return message(CHAT, b'{"a":' * 3 * MIB)


def texts():
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":[', b'"",', b'""]}'))


def punctuation():
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":"', b"!?.,;", b'"}'))


def escapes():
    return message(COMPLETION, of_size(b'{"model":"tiny","prompt":"', b"\\\\", b'"}'))


def stops():
    return completion(stop=["a" * 40_000])


def many_answers():
    return completion(prompt=["Hi"] * 64, n=16)


def logprobs():
    return completion(logprobs=20, n=16, max_tokens=64, logit_bias={"256": -100})


def file(data, name="a.txt"):
    head = f'--x\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    return message(FILES, head + data + b"\r\n--x--\r\n", headers="content-type: multipart/form-data; boundary=x\r\n")


def long_file():
    return file(b"!?.," * (16 * MIB - 64))


def many_lines():
    """A form of lines that each could begin a boundary."""
    return file(b"\r\n--" * 8 * MIB)


def fields():
    part = b'--x\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n'
    return message(FILES, part * 10**5, headers="content-type: multipart/form-data; boundary=x\r\n")


def chunks():
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{CHUNKED}\r\n".encode()
    return head + b"1\r\n \r\n" * MIB


def header():
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\na: " + b"a" * 4 * MIB


def headers():
    return b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * MIB


def pipelined():
    return message("/health") * 20_000


# What is sent, and the statuses of the answers. 0: the connection is closed without an answer.
BODIES = {
    **{body: {400} for body in (lists, ids, few_ids, messages, few_messages, objects, deep, texts, punctuation)},
    **{body: {400} for body in (escapes, stops, many_answers, fields)},
    **{body: {400, 429} for body in (long_file, many_lines)},
    **{body: {0, 400} for body in (header, headers)},
    chunks: {0, 400},
    pipelined: {200},
    logprobs: {200, 429},
}


async def send(address, data):
    """Send bytes while the answer is awaited. Return its status, or 0 if there is none."""
    async with connected(address) as (reader, writer):
        answer = asyncio.create_task(read_answer(reader))
        with contextlib.suppress(ConnectionError):
            for first in range(0, len(data), MIB):
                writer.write(data[first : first + MIB])
                await writer.drain()
                if answer.done():
                    break
        try:
            return (await answer)[0]
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0


def attack(address, name, count):
    """Send one of the bodies so many times at once. Return the statuses, and the seconds that it took."""

    async def run():
        data = globals()[name]()
        begun = time.monotonic()
        return await asyncio.gather(*(send(address, data) for _ in range(count))), time.monotonic() - begun

    return asyncio.run(run())


def hold(address, parts, stop):
    """Send the beginnings of requests, one on a connection, and keep the connections until the event `stop`."""

    async def run():
        async with contextlib.AsyncExitStack() as stack:
            for part in parts:
                _, writer = await stack.enter_async_context(connected(address))
                writer.write(part)
            while not stop.is_set():
                await asyncio.sleep(0.05)

    asyncio.run(run())


# The watch


async def probes(address, path, seconds, stop):
    """Ask for a path again and again. Collect how long each answer took."""
    async with connected(address) as (reader, writer):
        while not stop.is_set():
            begun = time.monotonic()
            writer.write(message(path))
            assert (await read_answer(reader))[0] == 200
            seconds.append(time.monotonic() - begun)
            await asyncio.sleep(0.01)


async def streams(address, gaps, stop):
    """Read one stream after another. Collect the times between the parts that arrive."""
    data = completion(prompt="The sea", max_tokens=64, logit_bias={"256": -100}, stream=True)
    while not stop.is_set():
        async with connected(address) as (reader, writer):
            writer.write(data)
            assert (await read_head(reader))[0] == 200
            last, text = None, b""
            while b"[DONE]" not in text[-64:] and not stop.is_set():
                text += (part := await reader.read(2**16))
                assert part
                assert b'"error"' not in part
                if last is not None:
                    gaps.append(time.monotonic() - last)
                last = time.monotonic()


def watching(address, stop, ready, found):
    async def run():
        seconds, gaps = [], []
        tasks = [asyncio.create_task(probes(address, "/health", seconds, stop))]
        tasks.append(asyncio.create_task(streams(address, gaps, stop)))
        while not (len(seconds) > 3 and len(gaps) > 3):
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        ready.set()
        await asyncio.gather(*tasks)
        return seconds, gaps

    try:
        found.put(asyncio.run(run()))
    except BaseException as error:
        found.put(error)
        raise


@contextlib.contextmanager
def watched(address, target=None, *arguments):
    """Watch a server in another process during the block.

    Yields a list that then has the seconds of each answer of /health, and those between the parts of a stream. A
    `target` runs in a third process, with `arguments` and an event that is set at the end.
    """
    spawn = multiprocessing.get_context("spawn")
    stop, ready, found, result = spawn.Event(), spawn.Event(), spawn.Queue(), []
    processes = [spawn.Process(target=watching, args=(address, stop, ready, found))]
    if target is not None:
        processes.append(spawn.Process(target=target, args=(*arguments, stop)))
    for process in processes:
        process.start()
    try:
        assert ready.wait(60)
        yield result
    finally:
        stop.set()
        got = found.get(timeout=60)
        for process in processes:
            process.join(60)
    if isinstance(got, BaseException):
        raise got
    result.extend(got)


def answered(address, data):
    """The status of an answer, and the seconds until it was there."""
    begun = time.monotonic()
    status, _ = asyncio.run(ask(address, data))
    return status, time.monotonic() - begun
