"""`jshadow library`: documents that are added, listed, asked about and removed."""

import json

import pytest
from command_line import FULL, HALF, QUEST

from jshadow.cli.main import main

SIZES = ["--dtype", "float32", "--capacity", "400"]


@pytest.fixture(scope="module", params=["full", pytest.param("quest", marks=pytest.mark.slow)])
def name(request):
    """The name of a policy."""
    return request.param


@pytest.fixture(scope="module")
def stored(name, tiny_model, tmp_path_factory):
    """A directory with two documents, which is only read."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "book.txt").write_text("a document " * 20)
    (folder / "notes.md").write_text("some notes " * 16)
    place = str(folder / "store")
    add = ["library", "add", place, str(folder / "book.txt"), str(folder / "notes.md"), "--model", tiny_model]
    assert main([*add, *SIZES, *(FULL if name == "full" else QUEST)]) == 0
    return place


@pytest.fixture
def run(capsys):
    """Runs a command with --json, and gives what it prints."""

    def run(*words):
        assert main(["library", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_document_is_read_once(stored, run, tiny_model, capsys, monkeypatch):
    """The second time, no option is needed: they are those of the stored states."""
    from jshadow.library import library

    assert main(["library", "list", stored]) == 0
    book, notes = capsys.readouterr().out.splitlines()
    for line, title in ((book, "book.txt"), (notes, "notes.md")):
        assert f"  {title}  " in line
        assert " tokens  " in line
        assert " bytes  disk" in line
    before = run("list", stored)["documents"]
    assert [one["title"] for one in before] == ["book.txt", "notes.md"]
    assert before[0]["tokens"] == len("<user>" + "a document " * 20)
    monkeypatch.setattr(library, "prefill_many", None)
    again = run("add", stored, f"{stored}/../book.txt", "--model", tiny_model)["documents"]
    assert again == [one for one in before if one["title"] == "book.txt"]
    assert run("list", stored)["documents"] == before


@pytest.mark.parametrize("way", ["title", "beginning"])
def test_an_answer_is_the_library_s(stored, run, tiny_model, name, way, capsys):
    from jshadow import Full, Library, Quest, load

    book = run("list", stored)["documents"][0]
    words = ["ask", stored, book["title"] if way == "title" else book["key"][:8], "one?", "--model", tiny_model]
    assert main(["library", *words, "--max-new-tokens", "4"]) == 0
    text = capsys.readouterr().out
    asked = run(*words, "--max-new-tokens", "4")
    assert asked["text"] in text
    assert asked["key"] is None
    params = load(tiny_model, dtype="float32")
    policy, fetch = (Full(), "auto") if name == "full" else (Quest(**HALF), "device_put")
    with Library(stored, params, policy, capacity=400, fetch=fetch) as library:
        assert library.ask(book["key"], "one?", max_new_tokens=4).tokens == asked["tokens"]


@pytest.mark.slow
def test_an_answer_is_stored_asked_and_removed(stored, run, tiny_model):
    model = ["--model", tiny_model, "--max-new-tokens", "4"]
    before = run("list", stored)["documents"]
    first = run("ask", stored, "book.txt", "one?", *model, "--store")
    documents = run("list", stored)["documents"]
    [answer] = [one for one in documents if one["key"] == first["key"]]
    assert (answer["ends"], answer["title"]) == ("answer", "book.txt")
    assert run("ask", stored, first["key"][:10], "two?", *model)["key"] is None
    assert run("remove", stored, first["key"][:10]) == {"removed": first["key"]}
    assert run("list", stored)["documents"] == before


def test_a_damaged_file_is_listed_and_removed(run, tmp_path, tiny_model, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "abc.safetensors").write_bytes(b"no state")
    [damaged] = run("list", str(tmp_path))["documents"]
    assert (damaged["key"], damaged["tokens"], damaged["bytes"]) == ("abc", 0, 8)
    assert "abc.safetensors" in damaged["problem"]
    assert main(["library", "list", str(tmp_path)]) == 0
    assert "(cannot be used: " in capsys.readouterr().out
    assert main(["library", "ask", str(tmp_path), "abc", "one?", "--model", tiny_model]) == 2
    assert "abc.safetensors" in capsys.readouterr().err
    assert run("remove", str(tmp_path), "abc") == {"removed": "abc"}
    assert run("list", str(tmp_path)) == {"documents": []}


def test_a_key_that_two_have_removes_none(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    for name in ("abc", "abd"):
        (tmp_path / "folder" / f"{name}.safetensors").write_bytes(b"no state")
    assert main(["library", "remove", str(tmp_path), "ab"]) == 2
    assert "got 'ab', which is that of abc, abd" in capsys.readouterr().err
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


BAD = {
    "no_directory": (["list", "nowhere"], "nowhere must be a directory"),
    "no_key": (["ask", "STORE", "zz", "one?", "--model", "m"], "got 'zz', which no stored state has"),
    "empty_key": (["remove", "STORE", ""], "got '', which no stored state has"),
    "kind": (["add", "new", "book.doc", "--model", "m"], "book.doc must be a .txt, .md or .pdf file"),
    "absent": (["add", "new", "book.txt", "--model", "m"], "book.txt cannot be read"),
    "tokens": (["ask", "STORE", "book.txt", "?", "--model", "m", "--max-new-tokens", "0"], "--max-new-tokens must be"),
    "url": (["list", "s3://bucket/path"], "--model must be given for the object store s3://bucket/path"),
    "small": (["add", "new", "NOTES", "--model", "TINY", "--capacity", "40"], "capacity=40"),
    "disk": (
        ["add", "new", "NOTES", "--model", "TINY", "--disk-bytes", "9", *SIZES, *FULL],
        "limits.disk=9 bytes must",
    ),
    "other": (["ask", "STORE", "book.txt", "?", "--model", "TINY", "--dtype", "bfloat16"], "dtype"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_use_is_one_error(stored, tiny_model, case, tmp_path, monkeypatch, capsys):
    words, told = BAD[case]
    names = {"STORE": stored, "TINY": tiny_model, "NOTES": f"{stored}/../notes.md"}
    monkeypatch.chdir(tmp_path)
    assert main(["library", *(names.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").rglob("*.safetensors"))
