"""Files: names, equal uploads, restarts, clients that leave, and a full disk."""

import asyncio
import signal
import subprocess
import time

import pytest
from pdf_files import LARGE, pdf
from raw_http import ask, connected, message
from server_cases import CHAT, FILES, about, client_of, error_of, idle, listening, posted, tiny_service, until

from jshadow.errors import CheckpointError
from jshadow.serving.http.uploads import Upload

TEXT = b"The sea is calm, and the lamp of the harbor burns. "


@pytest.fixture(autouse=True)
def empty(service):
    """The tests share a library. Each leaves it without files."""
    yield
    for stored in service.library.documents():
        service.library.remove(stored.key)


def put(client, data, name="a.txt"):
    answer = client.post(FILES, files={"file": (name, data)}, data={"purpose": "user_data"})
    return answer.status_code, answer.json()


def listed(client):
    return client.get(FILES).json()["data"]


def test_a_file_is_added_listed_read_asked_and_removed(client):
    before = int(time.time()) - 2
    status, made = put(client, TEXT)
    assert status == 200, made
    assert before <= made["created_at"] <= time.time() + 2
    assert listed(client) == [made]
    path = f"{FILES}/{made['id']}"
    assert client.get(path).json() == made
    assert client.get(f"{path}/content").content == TEXT
    usage = posted(client, CHAT, messages=about({"file_id": made["id"]}, "What burns?"), max_tokens=2)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(TEXT)
    assert client.delete(path).json() == {"id": made["id"], "object": "file", "deleted": True}
    assert client.get(path).status_code == 404
    assert listed(client) == []


NAMES = {"../../etc/passwd": "passwd", "C:\\temp\\a.txt": "a.txt", "/a/b.md": "b.md", "~": "~", "é.txt": "é.txt"}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_path(client, folder, name):
    files = sorted(folder.rglob("*"))
    status, made = put(client, TEXT, name)
    assert (status, made["filename"]) == (200, NAMES[name])
    assert len(set(folder.rglob("*")) - set(files)) <= 2  # the file, and a folder of all files


def test_two_files_of_one_name_are_two_and_stay_after_a_restart_and_one_file_of_two_names_is_one(client, folder):
    first, second, third = (put(client, *args)[1]["id"] for args in ((TEXT,), (TEXT[1:],), (TEXT, "b.txt")))
    assert third == first != second
    made = listed(client)
    assert [one["filename"] for one in made] == ["a.txt", "a.txt"]
    with tiny_service(folder) as other, client_of(other) as restarted:
        found = listed(restarted)
    for key in ("created_at", "filename", "tokens"):
        assert {one["id"]: one[key] for one in found} == {one["id"]: one[key] for one in made}, key


def test_equal_uploads_at_once_are_read_once(service):
    before = service.engine.report().counts.finished

    async def run():
        return await asyncio.gather(*(service.add(Upload(f"{index}.txt", TEXT), "") for index in range(20)))

    assert len({one.key for one in asyncio.run(run())}) == 1
    assert service.engine.report().counts.finished == before + 1


def test_a_client_that_leaves_its_upload_ends_the_reading_and_the_next_one_reads_it(service, monkeypatch):
    submit, sent = service.engine.submit_all, []
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'
    kind = "content-type: multipart/form-data; boundary=x\r\n"
    form = message(FILES, head + TEXT * 5 + b"\r\n--x--\r\n", headers=kind)

    def held(requests):
        sent.append(requests)
        return submit(requests)

    monkeypatch.setattr(service.engine, "submit_all", held)

    async def leave(address):
        async with connected(address) as (_, writer):
            writer.write(form)
            second = asyncio.create_task(ask(address, form))
            while not sent:
                await asyncio.sleep(0.001)
            writer.transport.abort()
        return await second

    with listening(service) as server:
        status, body = asyncio.run(leave(server.address))
        until(lambda: idle(service))
    assert status == 200, body
    [stored] = service.library.documents()
    assert stored.tokens > len(TEXT * 5)


def refuse(error):
    def full(*_, **__):
        raise error

    return full


FULL = "No space left on device"


@pytest.mark.parametrize("where", ["limit", "disk", "upload"])
def test_a_full_disk_is_told_and_the_next_upload_is_stored(client, service, monkeypatch, where):
    directory = service.library.files.directory
    with monkeypatch.context() as disk:
        if where == "limit":
            disk.setattr(directory, "limit", 1000)
        elif where == "disk":
            disk.setattr(type(directory), "write", refuse(CheckpointError(f"[Errno 28] {FULL}")))
        else:
            disk.setattr("tempfile.TemporaryDirectory", refuse(OSError(28, FULL)))
        status, body = put(client, TEXT)
    assert (status, body["error"]["code"]) == (503, "storage_full")
    assert ("limits.disk=1000 bytes" if where == "limit" else FULL) in body["error"]["message"]
    status, made = put(client, TEXT)
    assert status == 200, made
    assert [one["id"] for one in listed(client)] == [made["id"]]


def test_a_server_without_a_library_has_no_files():
    with tiny_service() as service, client_of(service) as client:
        for answer in (client.get(FILES), client.delete(f"{FILES}/file-0")):
            assert error_of(answer) == (404, "no_library")
        assert put(client, TEXT)[0] == 404


def test_a_request_that_ends_kills_the_process_that_reads_its_pdf(service, monkeypatch):
    """Two files are read at once. A third waits for them, and other work does not."""
    processes = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)

    async def run():
        tasks = [asyncio.create_task(service.text_of(Upload("a.pdf", pdf(LARGE)))) for _ in range(3)]
        while len(processes) < 2:
            await asyncio.sleep(0.01)
        assert await service.slowly(service.encode, "Hi")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        while None in [process.poll() for process in processes]:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2
