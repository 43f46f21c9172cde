"""Measure `jshadow serve` over HTTP: `python benchmarks/serve_load.py MODEL`.

The server runs in another process. The measurement begins when its programs are compiled.

"clients": so many clients send requests one after another, each for the same number of new tokens. Given are the
tokens per second of all clients together, and the seconds until the first token of a request, as median and 95th
percentile. The numbers of clients take turns, and a first turn is not counted.

"document": seconds until the first token of a question about a document of `--tokens` tokens. "read": the document is
in the request, and is read. "again": it was uploaded before, and is asked by its id. A first document is not counted.

"speculation": two servers, one of them with `--speculate`, answer the same requests in turn. Given is the ratio of
their tokens per second, with the reading of the prompts, for answers that repeat a part of the prompt and for free text
(`speed.speculation.texts_of`). The first run is not counted. Answers that differ are counted.
"""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from speed.speculation import texts_of
from transformers import AutoTokenizer

from jshadow.evaluation.tasks.texts import documentation
from jshadow.weights.templates import frame

QUESTION = "What is this text about?"
ROOM = 256
POLICIES = {"shadowkv": ["--set", "rank=32", "--set", "budget=256"], "full": []}
OPTIONS = ["--dtype", "float32", "--fetch", "resident", "--port", "0", "--json"]


@contextlib.contextmanager
def serving(args: argparse.Namespace, *options: str) -> Iterator[str]:
    """Start a server that is ready. Yields its URL."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--max-context", str(args.tokens + 2 * ROOM), "--room", str(ROOM), "--slots", str(args.slots)]
        command = [sys.executable, "-m", "jshadow", "serve", args.model, "--library", folder, *OPTIONS, *sizes]
        command += ["--policy", args.policy, *POLICIES[args.policy], *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = json.loads(process.stdout.readline())["url"]
                while asyncio.run(send(url, "GET", "/ready"))[0] != 200:
                    time.sleep(0.5)
                yield url
            finally:
                process.terminate()


async def send(
    url: str, method: str, path: str, body: bytes = b"", kind: str = "application/json"
) -> tuple[int, float, bytes]:
    """Send a request on a new connection.

    Return the status, the seconds until the first byte of the response's body, and the body. A body in chunks is
    returned with the sizes of the chunks in it.
    """
    parts, begun = urlsplit(url), time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"{method} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
    first = await reader.read(1)
    seconds = time.perf_counter() - begun
    rest = await reader.read()
    writer.close()
    await writer.wait_closed()
    return status, seconds, first + rest


async def streamed(url: str, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any], str]:
    """Ask for a stream. Return the seconds until its first event, its usage, and the text of completions."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    status, seconds, text = await send(url, "POST", path, json.dumps(body).encode())
    events = [line[6:] for line in text.decode().splitlines() if line.startswith("data: {")]
    if status != 200 or not events or "error" in json.loads(events[-1]):
        raise RuntimeError(f"{path} must answer, got {status}: {text[-300:]!r}")
    *parts, last = map(json.loads, events)
    return seconds, last["usage"], "".join(one["choices"][0]["text"] for one in parts if one["choices"])


async def at_once(url: str, bodies: list[dict[str, Any]], clients: int) -> tuple[float, list[Any]]:
    """Send completions, so many at once. Return tokens per second, and what `streamed` returned for each."""
    left, begun = iter(enumerate(bodies)), time.perf_counter()
    found: list[Any] = [None] * len(bodies)

    async def client() -> None:
        for place, body in left:
            found[place] = await streamed(url, "/v1/completions", body)

    await asyncio.gather(*(client() for _ in range(clients)))
    return sum(one[1]["completion_tokens"] for one in found) / (time.perf_counter() - begun), found


def lengths_of(count: int, args: argparse.Namespace, seed: int) -> list[int]:
    """Return the lengths of prompts. Their logarithms are evenly spread from the fewest tokens to the most."""
    low, high = args.prompt[0], args.prompt[-1]
    lengths = [round(low * (high / low) ** ((place + 0.5) / count)) for place in range(count)]
    random.Random(seed).shuffle(lengths)
    return lengths


def clients_part(url: str, model: str, tokenizer: Any, args: argparse.Namespace) -> dict[int, dict[str, list[float]]]:
    """Return the tokens per second of each run and the seconds to each first token, by the number of clients."""
    found: dict[int, dict[str, list[float]]] = {count: {"rates": [], "firsts": []} for count in args.clients}
    source = documentation(tokenizer, random.Random(0))
    for run, count in itertools.product(range(args.runs + 1), args.clients):
        prompts = [list(itertools.islice(source, length)) for length in lengths_of(count * args.requests, args, run)]
        bodies = [{"model": model, "prompt": prompt, "max_tokens": args.new} for prompt in prompts]
        rate, answers = asyncio.run(at_once(url, bodies, count))
        if run:
            found[count]["rates"].append(rate)
            found[count]["firsts"] += [first for first, _, _ in answers]
    return found


def speculation_part(args: argparse.Namespace, tokenizer: Any) -> list[dict[str, Any]]:
    """Return a row for each task and number of clients: the ratio of each run, and the share of accepted tokens."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    with serving(args) as plain, serving(args, "--speculate", args.speculate) as guessing:
        [model] = json.loads(asyncio.run(send(plain, "GET", "/v1/models"))[2])["data"]
        for run, count in itertools.product(range(args.runs + 1), args.clients):
            texts = [texts_of(tokenizer, args.prompt[-1], run * 1000 + place) for place in range(count * args.requests)]
            for same in zip(*texts, strict=True):
                bodies = [{"model": model["id"], "prompt": text.ids, "max_tokens": args.new} for text in same]
                (slow, before), (fast, after) = (asyncio.run(at_once(url, bodies, count)) for url in (plain, guessing))
                row = rows.setdefault((same[0].task, count), {"ratios": [], "kept": 0, "proposed": 0, "other": 0})
                row["other"] += sum(one[2] != its[2] for one, its in zip(before, after, strict=True))
                for _, usage, _ in after if run else ():
                    details = usage["completion_tokens_details"]
                    row["kept"] += details["accepted_prediction_tokens"]
                    row["proposed"] += sum(details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
                row["ratios"] += [fast / slow] if run else []
                print(f"run {run}, {count} clients, {same[0].task}: {slow:.1f}, {fast:.1f} tokens/s", file=sys.stderr)
    return [{"task": task, "clients": count, **row} for (task, count), row in rows.items()]


def document_part(url: str, model: str, tokenizer: Any, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds until the first token, of each way and run."""
    head, tail = frame(tokenizer, QUESTION, "")
    length, seconds = args.tokens - len(head) - len(tail), {"read": [], "again": []}
    source = documentation(tokenizer, random.Random(1))
    for run in range(args.runs + 1):
        text = tokenizer.decode(list(itertools.islice(source, length))).encode()
        form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n' + text + b"\r\n--x--\r\n"

        def ask(**file: str) -> float:
            parts = [{"type": "file", "file": file}, {"type": "text", "text": QUESTION}]
            body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": parts}]}
            return asyncio.run(first_word(url, body))

        read = ask(file_data=base64.b64encode(text).decode())
        status, _, made = asyncio.run(send(url, "POST", "/v1/files", form, "multipart/form-data; boundary=x"))
        if status != 200:
            raise RuntimeError(f"/v1/files must store the document, got {status}: {made!r:.300}")
        again = ask(file_id=json.loads(made)["id"])
        if run:
            seconds["read"].append(read)
            seconds["again"].append(again)
    return seconds


async def first_word(url: str, body: dict[str, Any]) -> float:
    """Ask a chat. Return the seconds until the event of its first token; the first event has only a role."""
    parts, begun = urlsplit(url), time.perf_counter()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = json.dumps(body | {"stream": True, "temperature": 0}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    for _ in range(2):
        line = await reader.readuntil(b"data: ")
    seconds = time.perf_counter() - begun
    rest = line + await reader.read()
    writer.close()
    await writer.wait_closed()
    if b"[DONE]" not in rest:
        raise RuntimeError(f"the chat must be answered, got {rest[-300:]!r}")
    return seconds


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=4, help="of each client in a run")
    parser.add_argument("--prompt", type=int, nargs="+", default=[256], help="tokens of a prompt: a number, or a range")
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a document and a question")
    parser.add_argument("--policy", choices=POLICIES, default="shadowkv")
    parser.add_argument("--slots", type=int, default=8, help="rows of the server")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--part", choices=("all", "clients", "speculation"), default="all")
    parser.add_argument("--speculate", default="prompt_lookup", help="the drafter of the part speculation")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.part == "speculation":
        rows = speculation_part(args, tokenizer)
        if args.json:
            print(json.dumps(rows))
        for row in () if args.json else rows:
            middle, ratios = statistics.median(row["ratios"]), row["ratios"]
            print(
                f"{row['task']}, {row['clients']} clients: {middle:.2f} times plain ({min(ratios):.2f} to "
                f"{max(ratios):.2f}), {row['kept']} of {row['proposed']} accepted, {row['other']} other answers"
            )
        return
    with serving(args) as url:
        [model] = json.loads(asyncio.run(send(url, "GET", "/v1/models"))[2])["data"]
        clients = clients_part(url, model["id"], tokenizer, args)
        seconds = document_part(url, model["id"], tokenizer, args) if args.part == "all" else {}
    if args.json:
        print(json.dumps({"clients": clients, "document_seconds": seconds}))
        return
    for count, one in clients.items():
        late = statistics.quantiles(one["firsts"], n=20)[-1] if len(one["firsts"]) > 1 else one["firsts"][0]
        rate, first = statistics.median(one["rates"]), statistics.median(one["firsts"])
        print(f"{count} clients: {rate:.1f} tokens/s, first token {first:.3f} s, 95th percentile {late:.3f} s")
    for way, values in seconds.items():
        print(
            f"{args.tokens} tokens, {way}: {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f})"
        )


if __name__ == "__main__":
    main()
