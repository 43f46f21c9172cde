"""Files: names, equal uploads, restarts, clients that leave, and a full disk."""

import asyncio
import datetime
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pdf_files import LARGE, pdf
from raw_http import NAME, ask, connected, message
from server_cases import (
    CHAT,
    FILES,
    PARAMS,
    SHADOW,
    about,
    client_of,
    error_of,
    idle,
    listening,
    posted,
    tiny_service,
    until,
)
from transformers.utils import chat_template_utils

from jshadow.engine.sampling import NO_TOKEN
from jshadow.errors import CheckpointError
from jshadow.library import Library
from jshadow.serving.http import uploads
from jshadow.serving.http.service import Caller
from jshadow.serving.http.uploads import Upload
from jshadow.serving.requests import DrawnToken
from jshadow.weights.templates import document_ids, frame

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


@pytest.mark.parametrize("less", [-300, -1, 0, 1])
def test_a_file_that_is_added_can_be_asked_about(client, service, less):
    """The shortest question fits behind it. A longer file is refused before it is read."""
    tokenizer, longest = service.params.tokenizer, max(plan.row_class.prompt for plan in service.engine.plans)
    most = longest - len(frame(tokenizer, "?")[1])
    text = "x" * (most - len(document_ids(tokenizer, "x")) + 1 - less)
    status, made = put(client, text.encode())
    if less < 0:
        assert (status, made["error"]["code"], made["error"]["param"]) == (400, "context_length_exceeded", "file")
        assert f"at most {most} tokens" in made["error"]["message"]
        assert listed(client) == []
        return
    assert (status, made["tokens"]) == (200, most - less)
    usage = posted(client, CHAT, messages=about({"file_id": made["id"]}, "?"), max_tokens=1)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (longest - less, most - less)


DATED = (
    "Today is {{ strftime_now('%d %b %Y') }}.{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)


@pytest.mark.parametrize("data", [TEXT, b"\xef\xbb\xbf" + TEXT, TEXT.decode().encode("utf-16")])
def test_a_file_is_one_document_on_every_day(client, monkeypatch, data):
    """A question on the next day finds the stored document, and no word of it is lost."""
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", DATED)
    made = []
    for day in (datetime.datetime(2026, 5, 31), datetime.datetime(2026, 9, 1), datetime.datetime(2026, 12, 24)):
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda day=day: day))
        status, told = put(client, data)
        assert status == 200
        made.append(told["id"])
        assert client.get(f"{FILES}/{told['id']}/content").content == TEXT
        for question in ("What burns?", "</s>?", "x") if data == TEXT else ["x"]:
            messages = about({"file_id": told["id"]}, question)
            usage = posted(client, CHAT, messages=messages, max_tokens=1)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= len(TEXT)
    assert len(set(made)) == len(listed(client)) == 1


@pytest.mark.parametrize("names", [["default", "tool_use"], ["default"], ["rag"]])
def test_a_file_is_framed_by_the_template_of_chats_without_tools(client, monkeypatch, names):
    """Of several named templates. A question on it finds it."""
    whole = "{% for m in messages %}<NAME {{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", {name: whole.replace("NAME", name) for name in names})
    status, made = put(client, TEXT)
    assert status == 200, made
    assert client.get(f"{FILES}/{made['id']}/content").content == TEXT
    usage = posted(client, CHAT, messages=about({"file_id": made["id"]}, "x"), max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == made["tokens"] == len(f"<{names[0]} user>") + len(TEXT)


@pytest.mark.parametrize(
    "template", ["New: " + DATED, "{% for m in messages %}{{ m['content'] }}{% endfor %}[more text here]"]
)
def test_a_file_that_began_in_another_way_is_told_and_not_cut(client, monkeypatch, template):
    _, made = put(client, TEXT)
    monkeypatch.setattr(PARAMS.tokenizer, "chat_template", "before the document: " + template)
    answer = client.get(f"{FILES}/{made['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "other_beginning")
    answer = client.post(CHAT, json={"model": NAME, "messages": about({"file_id": made["id"]}, "x")})
    assert answer.status_code == 409


def test_a_file_whose_logits_are_nan_is_refused_each_time(client, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("jshadow.serving.loop.read_drawn", lambda *_: [DrawnToken(NO_TOKEN)])
        for data in (TEXT, TEXT, TEXT[:20]):
            status, answer = put(client, data)
            assert (status, answer["error"]["code"]) == (500, "not_a_number")
            assert listed(client) == []
    assert put(client, TEXT)[0] == 200


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
        return await asyncio.gather(*(service.add(Upload(f"{index}.txt", TEXT), Caller("", "")) for index in range(20)))

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
            disk.setattr(uploads, "private_folder", refuse(OSError(28, FULL)))
        status, body = put(client, TEXT)
    assert (status, body["error"]["code"]) == (503, "storage_full")
    assert ("limits.disk=1000 bytes" if where == "limit" else FULL) in body["error"]["message"]
    status, made = put(client, TEXT)
    assert status == 200, made
    assert [one["id"] for one in listed(client)] == [made["id"]]


def leaked(text, folder):
    """Whether a text for a client names a folder of the server's disk."""
    return any(str(path) in text for path in (folder, tempfile.gettempdir(), Path.home()))


@pytest.mark.parametrize("where", ["form", "file", "reader"])
def test_a_full_temporary_folder_is_the_server_s_fault(client, monkeypatch, folder, where):
    """The form of a large upload, its file, or the process that reads it."""
    place = f"{tempfile.gettempdir()}/jshadow-upload-1/upload.pdf"
    full = refuse(OSError(28, FULL, place))
    data = pdf(["The sea is calm."] * 2) + b"%" * 2**21
    with monkeypatch.context() as disk:
        if where == "form":
            disk.setattr("tempfile.SpooledTemporaryFile.write", full)
        elif where == "file":
            disk.setattr(Path, "write_bytes", full)
        else:
            disk.setattr(subprocess, "Popen", full)
        status, body = put(client, data, "a.pdf")
    assert (status, body["error"]["code"]) == (503, "storage_full")
    assert FULL in body["error"]["message"]
    assert not leaked(body["error"]["message"], folder)


def test_a_file_on_a_disk_that_is_read_only_cannot_be_removed(client, folder, monkeypatch):
    made = put(client, TEXT)[1]["id"]
    with monkeypatch.context() as disk:
        disk.setattr(Path, "unlink", lambda path, **_: refuse(OSError(30, "Read-only file system", str(path)))())
        answer = client.delete(f"{FILES}/{made}")
    assert error_of(answer) == (503, "store_unavailable")
    assert "Read-only file system" in answer.text
    assert not leaked(answer.text, folder)
    assert client.delete(f"{FILES}/{made}").status_code == 200


def elsewhere(service):
    """Another server on the same folder."""
    return Library(service.library.files.directory.root, PARAMS, SHADOW, capacity=service.library.capacity)


@pytest.mark.parametrize("moment", ["before its tokens are taken", "before it is submitted", "before its file is read"])
def test_a_question_during_a_deletion_elsewhere(client, service, folder, monkeypatch, moment):
    """It is answered from its text, which is there, or told to be asked again."""
    made = put(client, TEXT)[1]["id"]
    service.library.tiers.held.clear()
    place = {"before its tokens are taken": service, "before it is submitted": service.engine}
    owner = place.get(moment, service.library)
    name = {service: "file", service.engine: "submit_all"}.get(owner, "prepare")
    real = getattr(owner, name)

    def removed_meanwhile(*args):
        found = real(*args) if owner is service else None
        with elsewhere(service) as other:
            for one in other.documents():
                other.remove(one.key)
        return found or real(*args)

    monkeypatch.setattr(owner, name, removed_meanwhile)
    body = {"model": NAME, "messages": about({"file_id": made}, "What burns?"), "max_tokens": 2}
    answer = client.post(CHAT, json=body)
    if owner is service.engine:
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    else:
        assert error_of(answer) == (409, "damaged_file")
    assert not leaked(answer.text, folder)


def test_no_error_about_a_file_names_a_folder(client, service, folder):
    """The log does."""
    made = put(client, TEXT)[1]["id"]
    [path] = folder.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    service.library.tiers.held.clear()
    messages = about({"file_id": made}, "What burns?")
    told = [client.post(CHAT, json={"model": NAME, "messages": messages, "max_tokens": 2}) for _ in range(2)]
    told += [client.get(f"{FILES}/{made}"), client.get(FILES), client.get(f"{FILES}/{made}/content")]
    assert [answer.status_code for answer in told] == [409, 409, 200, 200, 409]
    assert "is damaged" in told[2].json()["status_details"]
    path.write_bytes(b"no state")
    with tiny_service(folder) as other, client_of(other) as restarted:
        told += [restarted.get(FILES)]
    assert "must be a saved KV state" in told[-1].text
    for answer in told:
        assert not leaked(answer.text, folder), answer.text


def test_what_a_killed_server_left_of_an_upload_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def killed(path, begun):
        assert path.parent.stat().st_mode & 0o777 == 0o700
        shutil.copytree(path.parent, f"{path.parent}1")  # nothing locks it, as after a kill
        return "text"

    with monkeypatch.context() as once:
        once.setattr(uploads, "read_document", killed)
        uploads.text_of(Upload("a.txt", TEXT))
    assert len(list(tmp_path.iterdir())) == 1
    assert uploads.text_of(Upload("b.txt", TEXT)) == TEXT.decode()
    assert list(tmp_path.iterdir()) == []


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
