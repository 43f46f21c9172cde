"""Measure the serving engine and the library: `python benchmarks/serving.py MODEL`.

"sessions": requests of unequal prompts are answered by one engine, all at once and one after another, in turn, and by
`jshadow.generate` one after another. Every answer has the same number of tokens. The tokens per second include the
prefills.

"questions": seconds until the first token of a question about a document. "read": the engine reads the document and
the question. "memory": the document is in the library's memory. "disk": a new process finds it in the directory. The
programs were compiled before by another document of the same length, of which the file is read in the new process too.

"behind": seconds until the first token of a question of 32 tokens. "alone": nothing else runs. "behind": `--sessions`
prompts of `--prompt` tokens came just before it. "last of them": the first token of the last one of these to be read.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jshadow
from jshadow.evaluation.tasks.texts import documentation
from jshadow.serving import Engine, Request, RowClass
from jshadow.weights.templates import frame

POLICIES = {"shadowkv": jshadow.ShadowKV(rank=32, budget=256), "full": jshadow.Full()}
QUESTION = "What is this text about?"
ROOM = 256


def sessions(params: Any, args: argparse.Namespace, policy: Any) -> dict[str, list[float]]:
    """Return the tokens per second of each run, of requests at once and one after another."""
    text = list(itertools.islice(documentation(params.tokenizer, random.Random(0)), args.prompt * args.sessions))
    step = args.prompt // (2 * args.sessions)  # the prompts are a half to the whole of --prompt
    prompts = [text[i * args.prompt : (i + 1) * args.prompt - i * step] for i in range(args.sessions)]
    requests = [Request(ids, max_new_tokens=args.new) for ids in prompts]
    options = {"max_new_tokens": args.new, "capacity": args.prompt + ROOM}
    ways = ("at once", "in turn", "generate")
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for ids in prompts:  # compiles
        jshadow.generate(params, ids, policy, **options | {"max_new_tokens": 2})
    with Engine(params, policy, classes=[RowClass(args.prompt, ROOM, rows=args.sessions)]) as engine:
        engine.warm()
        for way in ways * args.runs:
            start = time.perf_counter()
            if way == "at once":
                results = [answer.result() for answer in [engine.submit(request) for request in requests]]
            elif way == "in turn":
                results = [engine.submit(request).result() for request in requests]
            else:
                results = [jshadow.generate(params, ids, policy, **options) for ids in prompts]
            tokens = sum(len(result.tokens) for result in results)
            rates[way].append(tokens / (time.perf_counter() - start))
    return rates


def first_token(engine: Any, ids: list[int]) -> float:
    """Ask, and return the seconds until the first token."""
    start = time.perf_counter()
    answer = engine.submit(Request(ids, max_new_tokens=4))
    next(iter(answer))
    seconds = time.perf_counter() - start
    answer.result()
    return seconds


def behind(params: Any, args: argparse.Namespace, policy: Any) -> dict[str, list[float]]:
    """Return the seconds until the first token of a short question, of each way and run."""
    source = documentation(params.tokenizer, random.Random(2))
    seconds: dict[str, list[float]] = {"alone": [], "behind": [], "last of them": []}
    with Engine(params, policy, classes=[RowClass(args.prompt, ROOM, rows=args.sessions + 1)]) as engine:
        engine.warm()
        for _ in range(args.runs):
            seconds["alone"].append(first_token(engine, list(itertools.islice(source, 32))))
            prompts = [list(itertools.islice(source, args.prompt)) for _ in range(args.sessions)]
            start = time.perf_counter()
            answers = [engine.submit(Request(ids, max_new_tokens=4)) for ids in prompts]
            while not engine.report().reading:
                time.sleep(0.001)
            seconds["behind"].append(first_token(engine, list(itertools.islice(source, 32))))
            seconds["last of them"].append(max([_first(answer) for answer in answers]) - start)
            for answer in answers:
                answer.result()
    return seconds


def _first(answer: Any) -> float:
    """Wait for the first token, and return when it was seen."""
    next(iter(answer))
    return time.perf_counter()


def questions(params: Any, args: argparse.Namespace, place: str, policy: Any) -> dict[str, list[float]]:
    """Return the seconds until the first token, of each way and run."""
    head, tail = frame(params.tokenizer, QUESTION, "")
    seconds: dict[str, list[float]] = {"disk": []} if args.place else {"read": [], "memory": []}
    count = args.runs + 1  # the first document compiles
    length = args.tokens - len(head)
    text = list(itertools.islice(documentation(params.tokenizer, random.Random(1)), length * count))
    documents = [head + text[i * length : (i + 1) * length] for i in range(count)]
    room = RowClass(args.tokens + len(tail), ROOM, rows=2)
    library = jshadow.Library(place, params, policy, capacity=room.capacity)
    with (
        Engine(params, policy, classes=[room]) as plain,
        Engine(params, policy, classes=[room], library=library) as engine,
    ):
        for index, document in enumerate(documents):
            if args.place:
                row = {"disk": first_token(engine, document + tail)}
            else:
                row = {"read": first_token(plain, document + tail)}
                library.add(document)
                for _ in range(1 if index else 2):  # the first question of the first document compiles
                    row["memory"] = first_token(engine, document + tail)
            for way, value in row.items() if index else ():
                seconds[way].append(value)
    library.close()
    return seconds


def restarted(args: argparse.Namespace, place: str, name: str) -> dict[str, list[float]]:
    """Ask about the documents of a directory in a new process."""
    command = [sys.executable, __file__, args.model, "--place", place, "--policy", name, "--json"]
    options = {"tokens": args.tokens, "runs": args.runs}
    command += [str(word) for key, value in options.items() for word in (f"--{key}", value)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def stored_questions(params: Any, args: argparse.Namespace, policy: Any) -> dict[str, list[float]]:
    """Return the seconds until the first token, of each way and run, with those of a new process."""
    with tempfile.TemporaryDirectory() as folder:
        place = str(Path(folder, "library"))
        return questions(params, args, place, policy) | restarted(args, place, args.policy)


def spread(values: list[float]) -> str:
    """Return the median and the range as text."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Run the benchmark and print its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the longest prompt of a session")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer of a session")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--policy", choices=POLICIES, default="shadowkv")
    parser.add_argument("--part", choices=("all", "sessions", "questions", "behind"), default="all")
    parser.add_argument("--place", help="ask only about the documents of this directory")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    params, policy = jshadow.load(args.model, dtype="float32"), POLICIES[args.policy]
    if args.place:
        print(json.dumps(questions(params, args, args.place, policy)))
        return
    rates = sessions(params, args, policy) if args.part in ("all", "sessions") else {}
    seconds = stored_questions(params, args, policy) if args.part in ("all", "questions") else {}
    waits = behind(params, args, policy) if args.part in ("all", "behind") else {}
    if args.json:
        figures = {"policy": args.policy, "tokens_per_second": rates, "first_token_seconds": seconds, "behind": waits}
        print(json.dumps(figures))
        return
    for way, values in rates.items():
        print(f"{args.policy}, {args.sessions} sessions {way}: {spread(values)} tokens/s")
    for way, values in seconds.items():
        print(f"{args.policy}, {args.tokens} tokens, first token, {way}: {spread(values)} s")
    for way, values in waits.items():
        told = "a short question" if way != "last of them" else f"{args.sessions} prompts of {args.prompt} tokens"
        print(f"{args.policy}, {told}, first token, {way}: {spread(values)} s")


if __name__ == "__main__":
    main()
