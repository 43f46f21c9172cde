"""Files: names, equal uploads, restarts, clients that leave, and a full disk."""

import asyncio
import signal
import subprocess
import time

import pytest
from pdf_files import LARGE, pdf
from raw_http import ask, connected, message
from server_cases import NAME, client_of, tiny_service
from socket_cases import idle, listening, until

from jshadow.errors import CheckpointError
from jshadow.serving.http.uploads import Upload

TEXT = b"The sea is calm, and the lamp of the harbor burns. "


def put(client, data, name="a.txt"):
    answer = client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "user_data"})
    return answer.status_code, answer.json()


def form(data, name="a.txt"):
    head = f'--x\r\ncontent-disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode()
    kind = "content-type: multipart/form-data; boundary=x\r\n"
    return message("/v1/files", head + data + b"\r\n--x--\r\n", headers=kind)


def test_a_file_is_added_listed_read_asked_and_removed(client):
    before = int(time.time()) - 2
    status, made = put(client, TEXT)
    assert status == 200, made
    assert before <= made["created_at"] <= time.time() + 2
    assert client.get("/v1/files").json()["data"] == [made]
    assert client.get(f"/v1/files/{made['id']}").json() == made
    assert client.get(f"/v1/files/{made['id']}/content").content == TEXT
    content = [{"type": "file", "file": {"file_id": made["id"]}}, {"type": "text", "text": "What burns?"}]
    body = {"model": NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= len(TEXT)
    assert client.delete(f"/v1/files/{made['id']}").json() == {"id": made["id"], "object": "file", "deleted": True}
    assert client.get(f"/v1/files/{made['id']}").status_code == 404
    assert client.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [("../../etc/passwd", "passwd"), ("C:\\temp\\a.txt", "a.txt"), ("/a/b.md", "b.md"), ("~", "~"), ("é.txt", "é.txt")],
)
def test_a_name_is_no_path(client, folder, name, shown):
    files = sorted(folder.rglob("*"))
    status, made = put(client, TEXT + name.encode(), name)
    assert (status, made["filename"]) == (200, shown)
    assert len(set(folder.rglob("*")) - set(files)) <= 2  # the file, and a folder of all files
    client.delete(f"/v1/files/{made['id']}")


def test_two_files_of_one_name_are_two_and_one_file_of_two_names_is_one(client):
    first, second, third = put(client, TEXT), put(client, TEXT + b"Now."), put(client, TEXT, "b.txt")
    assert first[1]["id"] != second[1]["id"]
    assert [one["filename"] for one in client.get("/v1/files").json()["data"]] == ["a.txt", "a.txt"]
    assert third[1]["id"] == first[1]["id"]
    for made in (first, second):
        client.delete(f"/v1/files/{made[1]['id']}")


def test_ids_and_times_stay_after_a_restart(client, service, folder):
    made = put(client, TEXT + b"Again.")[1]
    with tiny_service(folder) as other, client_of(other) as second:
        [found] = second.get("/v1/files").json()["data"]
    keys = ("id", "created_at", "filename", "tokens")
    assert [found[key] for key in keys] == [made[key] for key in keys]
    client.delete(f"/v1/files/{made['id']}")


def test_equal_uploads_at_once_are_read_once(service):
    before = service.engine.report().counts.finished

    async def run():
        uploads = [Upload(f"{index}.txt", TEXT + b"Once.") for index in range(20)]
        return await asyncio.gather(*(service.add(upload) for upload in uploads))

    found = asyncio.run(run())
    assert len({one.key for one in found}) == 1
    assert service.engine.report().counts.finished == before + 1
    service.library.remove(found[0].key)


def test_a_client_that_leaves_its_upload_ends_the_reading_and_the_next_one_reads_it(service, monkeypatch):
    data, submit, sent = TEXT * 5, service.engine.submit_all, []

    def held(requests):
        sent.append(requests)
        return submit(requests)

    monkeypatch.setattr(service.engine, "submit_all", held)

    async def leave(address):
        async with connected(address) as (_, writer):
            writer.write(form(data))
            second = asyncio.create_task(ask(address, form(data)))
            while not sent:
                await asyncio.sleep(0.001)
            writer.transport.abort()
        return await second

    with listening(service) as server:
        status, body = asyncio.run(leave(server.address))
        until(lambda: idle(service))
    assert status == 200, body
    [stored] = [one for one in service.library.documents() if one.tokens > len(data)]
    service.library.remove(stored.key)


@pytest.mark.parametrize("where", ["limit", "disk", "upload"])
def test_a_full_disk_is_told_and_the_next_upload_is_stored(client, service, monkeypatch, where):
    directory = service.library.files.directory

    def full(*_):
        raise CheckpointError("[Errno 28] No space left on device")

    def full_folder(*_, **__):
        raise OSError(28, "No space left on device")

    if where == "limit":
        monkeypatch.setattr(directory, "limit", 1000)
    elif where == "disk":
        monkeypatch.setattr(type(directory), "write", full)
    else:
        monkeypatch.setattr("tempfile.TemporaryDirectory", full_folder)
    status, body = put(client, TEXT + where.encode())
    assert status == 503, body
    assert body["error"]["code"] == "storage_full"
    assert ("limits.disk=1000 bytes" if where == "limit" else "No space left") in body["error"]["message"]
    monkeypatch.undo()
    status, made = put(client, TEXT + where.encode())
    assert status == 200, made
    assert [one["id"] for one in client.get("/v1/files").json()["data"]] == [made["id"]]
    client.delete(f"/v1/files/{made['id']}")


def test_a_server_without_a_library_has_no_files():
    with tiny_service() as service, client_of(service) as client:
        for answer in (client.get("/v1/files"), client.delete("/v1/files/file-0")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_library")
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
    assert {process.returncode for process in processes} == {-signal.SIGKILL}
    assert len(processes) == 2
