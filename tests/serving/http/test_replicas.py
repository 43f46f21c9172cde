"""examples/replicas: two workers behind vllm-router. A document stays on one, and moves when that worker dies."""

import concurrent.futures
import contextlib
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import byte_models
import httpx2
import pytest
from conftest import REPO
from pydantic import ValidationError
from server_cases import CHAT, FILES, about, client_of, ending, error_of, server_process, tiny_service, until
from serving_cases import PARAMS, SHADOW

import jshadow
from jshadow.errors import CheckpointError
from jshadow.serving.http.metrics import FRESH_SECONDS
from jshadow.serving.http.schemas import ChatRequest, Routed
from jshadow.serving.http.service import file_id_of

START = REPO / "examples" / "replicas" / "start.py"
KEY = "a-key"
DOCUMENTS, ROUNDS = 8, 6
POLICY = ["--policy", "shadowkv", "--set", "rank=12", "--set", "budget=64", "--set", "outlier_chunks=2"]
OPTIONS = ["--dtype", "float32", *POLICY, "--max-context", "512", "--room", "128", "--slots", "2"]
HAS_WHEEL = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def wait_until(holds):
    """Wait until a condition holds, on servers that may not yet listen."""

    def held():
        with contextlib.suppress(httpx2.TransportError):
            return holds()

    until(held, 400)


class Replicas:
    """The processes that the script started, and a client of each."""

    def __init__(self, process, clients, name):
        self.process, self.name, (self.router, *self.workers) = process, name, clients

    def healthy(self, count):
        """Wait until so many workers are ready, and the router knows it."""
        wait_until(lambda: self.router.get("/readiness").json().get("healthy_workers") == count)

    def upload(self, worker, text):
        answer = self.workers[worker].post(FILES, files={"file": ("a.txt", text.encode())})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]

    def files(self, worker):
        return {file["id"] for file in self.workers[worker].get(FILES).json()["data"]}

    def tier(self, worker, file):
        return self.workers[worker].get(f"{FILES}/{file}").json()["tier"]

    def ask(self, file):
        """The text of the answer to a question on a document, and how many tokens were stored."""
        body = {"model": self.name, "messages": about({"file_id": file}, "When?"), "max_tokens": 6, "temperature": 0}
        answer = self.router.post(CHAT, json=body, headers={"x-session-id": file})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return answer.json()["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]

    def answered(self):
        """How many requests each worker has answered. Figures are computed anew after a while only."""
        time.sleep(FRESH_SECONDS)
        lines = [worker.get("/metrics").text.splitlines() for worker in self.workers]
        named = [[line for line in each if line.startswith("vllm:request_success_total{")] for each in lines]
        return [sum(float(line.split()[-1]) for line in each) for each in named]

    def ask_where(self, file):
        """The answer, and the worker that gave it."""
        before, answer = self.answered(), self.ask(file)
        [worker] = [worker for worker, count in enumerate(self.answered()) if count > before[worker]]
        return answer, worker

    def kill(self, port):
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        [worker] = [pid for pid in children if Path(f"/proc/{pid}/cmdline").read_text().endswith(f"\0{port}\0")]
        os.kill(int(worker), signal.SIGKILL)


@contextlib.contextmanager
def started(model, library, keys, log):
    ports = free_ports(4)
    command = [sys.executable, START, model, "--library", library, "--port", str(ports[0]), "--worker-ports"]
    command += [str(ports[1]), str(ports[2]), "--metrics-port", str(ports[3]), "--api-key-file", keys, *OPTIONS]
    settings = {"headers": {"Authorization": f"Bearer {KEY}"}, "timeout": 60}
    with log.open("w") as file, contextlib.ExitStack() as stack:
        process = stack.enter_context(ending(subprocess.Popen(command, stdout=file, stderr=file)))
        clients = [httpx2.Client(base_url=f"http://127.0.0.1:{port}", **settings) for port in ports[:3]]
        replicas = Replicas(process, [stack.enter_context(client) for client in clients], model.name)
        for worker in replicas.workers:
            wait_until(lambda worker=worker: worker.get("/ready").status_code == 200)
        replicas.healthy(2)
        yield replicas, ports


def test_what_the_router_adds_is_accepted_with_its_value_alone():
    chat = {"model": "m", "messages": [{"role": "assistant", "content": "x", "reasoning": "y"}]}
    for name, field in Routed.model_fields.items():
        assert ChatRequest.model_validate(chat | {name: field.default}).messages[0].reasoning_content == "y"
        with pytest.raises(ValidationError, match=name):
            ChatRequest.model_validate(chat | {name: not field.default})


def test_a_server_finds_what_others_have_put_into_the_store(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/objects"

    def refuse(*_):
        raise CheckpointError("the store refuses")

    with tiny_service(url) as service, client_of(service) as client:
        with jshadow.Library(url, PARAMS, SHADOW, capacity=service.library.capacity) as other:
            sea, sky, sun = (other.add(f"The {name} is calm. " * 6, title=name) for name in ("sea", "sky", "sun"))
            answer = client.get(f"{FILES}/{file_id_of(sea)}").json()
            assert (answer["filename"], answer["tier"]) == ("sea", "remote")
            cloud = other.add("The cloud is calm. " * 6, title="cloud")
            answer = client.post(FILES, files={"file": ("a.txt", b"The cloud is calm. " * 6)}).json()
            assert (answer["id"], answer["filename"]) == (file_id_of(cloud), "cloud")
            assert service.engine.report().counts.units == 0  # it was not read again
            other.remove(sky.key)
            assert sorted(file["filename"] for file in client.get(FILES).json()["data"]) == ["cloud", "sea", "sun"]
        monkeypatch.setattr(service.library.files.remote, "keys", refuse)
        assert client.get(f"{FILES}/{file_id_of(sun)}").status_code == 200
        for path in (FILES, f"{FILES}/file-unknown"):
            assert error_of(client.get(path)) == (503, "store_unavailable")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(not HAS_WHEEL, reason="vllm-router has wheels for Linux on x86_64 and aarch64 only")
def test_documents_stay_on_a_worker_and_move_when_it_dies(tmp_path):
    model, keys, log = tmp_path / "tiny", tmp_path / "keys", tmp_path / "log"
    jshadow.save(byte_models.PARAMS, model)
    keys.write_text(KEY)
    library = f"file://{tmp_path}/objects"
    with started(model, library, keys, log) as (replicas, ports):
        # All are read by the first worker. There are more if the router gives all to one worker.
        home, answers = {}, {}
        while len(home) < DOCUMENTS or len({*home.values()}) < 2:
            file = replicas.upload(0, f"Document {len(home)}: the bridge was closed in {1990 + len(home)}. " * 6)
            assert [replicas.tier(0, file), replicas.tier(1, file)] == ["host", "remote"]
            answers[file], home[file] = replicas.ask_where(file)
            assert answers[file][1] > 200
        for file in [*home] * (ROUNDS - 1):
            assert replicas.ask_where(file) == (answers[file], home[file])
        moved = [file for file in home if home[file] == 0]
        assert {replicas.tier(1, file) for file in moved} == {"remote"}  # the second worker has not had them
        assert replicas.files(0) == replicas.files(1) == {*home}

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asked = {pool.submit(replicas.ask, file): file for file in [*home] * 4}
            concurrent.futures.wait(list(asked)[:6])
            replicas.kill(ports[1])
            for answer, file in asked.items():
                assert answer.result() == answers[file]
        replicas.healthy(1)
        assert {replicas.tier(1, file) for file in moved} == {"host"}
        late = replicas.upload(1, "A document that was read while a worker was away. " * 6)
        answers[late] = replicas.ask(late)

        with server_process(model, "--library", library, "--api-key-file", keys, *OPTIONS, "--port", str(ports[1])):
            replicas.healthy(2)
            wait_until(lambda: replicas.ask_where(moved[0]) == (answers[moved[0]], 0))
            for file in home:
                assert replicas.ask_where(file) == (answers[file], home[file])
            assert replicas.ask(late) == answers[late]
            deleted = next(iter(home))
            assert replicas.workers[0].delete(f"{FILES}/{deleted}").status_code == 200
            assert replicas.files(0) == replicas.files(1) == {*home, late} - {deleted}
    assert replicas.process.returncode == 0, log.read_text()
