"""`jshadow library`: documents that are added, listed, asked about and removed."""

import pytest
from command_line import CAPACITY, FULL, HALF, QUEST
from few import slow

import jshadow
from jshadow.cli.main import main
from jshadow.library import library

SIZES = ["--dtype", "float32", *CAPACITY]
POLICIES = {"full": (FULL, jshadow.Full(), "auto"), "quest": (QUEST, jshadow.Quest(**HALF), "device_put")}


@pytest.fixture(scope="module", params=["full", slow("quest")])
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
    assert main([*add, *SIZES, *POLICIES[name][0]]) == 0
    return place


@pytest.fixture
def listed(answer):
    return lambda place: answer("library", "list", place)["documents"]


def test_a_document_is_read_once(stored, answer, printed, listed, tiny_model, monkeypatch):
    """The second time, no option is needed: they are those of the stored states."""
    lines = printed("library", "list", stored).splitlines()
    for line, title in zip(lines, ("book.txt", "notes.md"), strict=True):
        assert all(told in line for told in (f"  {title}  ", " tokens  ", " bytes  disk"))
    before = listed(stored)
    assert [one["title"] for one in before] == ["book.txt", "notes.md"]
    assert before[0]["tokens"] == len("<user>" + "a document " * 20)
    monkeypatch.setattr(library, "prefill_many", None)
    again = answer("library", "add", stored, f"{stored}/../book.txt", "--model", tiny_model)["documents"]
    assert again == before[:1]
    assert listed(stored) == before


def test_an_answer_is_the_library_s_by_title_and_by_beginning(stored, answer, printed, listed, tiny_model, name):
    book = listed(stored)[0]
    about = ["one?", "--model", tiny_model, "--max-new-tokens", "4"]
    text = printed("library", "ask", stored, book["title"], *about)
    asked = answer("library", "ask", stored, book["key"][:8], *about)
    assert asked["text"] in text
    assert (asked["key"], asked["stored_tokens"]) == (None, book["tokens"])
    assert "tokens were stored" not in text
    _, policy, fetch = POLICIES[name]
    params = jshadow.load(tiny_model, dtype="float32")
    with jshadow.Library(stored, params, policy, capacity=400, fetch=fetch) as opened:
        assert opened.ask(book["key"], "one?", max_new_tokens=4).tokens == asked["tokens"]


@pytest.mark.slow
def test_an_answer_is_stored_asked_and_removed(stored, answer, printed, listed, tiny_model, monkeypatch):
    model = ["--model", tiny_model, "--max-new-tokens", "4"]
    before = listed(stored)
    first = answer("library", "ask", stored, "book.txt", "one?", *model, "--store")
    [found] = [one for one in listed(stored) if one["key"] == first["key"]]
    assert (found["ends"], found["title"]) == ("answer", "book.txt")
    assert answer("library", "ask", stored, first["key"][:10], "two?", *model)["key"] is None
    with monkeypatch.context() as patch:  # the template leaves the last two tokens of the answer out
        patch.setattr(library, "changed_turn", lambda tokenizer, held, question: [*held[:-2], 5])
        text, count = printed("library", "ask", stored, first["key"][:10], "two?", *model), before[0]["tokens"]
    assert f"last answer: {count} tokens were stored, {found['tokens'] - 1 - count} were read" in text
    assert answer("library", "remove", stored, first["key"][:10]) == {"removed": first["key"]}
    assert listed(stored) == before


def test_damaged_files_are_listed_and_removed_one_by_one(answer, printed, listed, refused, tmp_path, tiny_model):
    (tmp_path / "folder").mkdir()
    for name in ("abc", "abd"):
        (tmp_path / "folder" / f"{name}.safetensors").write_bytes(b"no state")
    damaged, _ = listed(tmp_path)
    assert (damaged["key"], damaged["tokens"], damaged["bytes"]) == ("abc", 0, 8)
    assert "abc.safetensors" in damaged["problem"]
    assert "(cannot be used: " in printed("library", "list", tmp_path)
    refused("abc.safetensors", "library", "ask", tmp_path, "abc", "one?", "--model", tiny_model)
    refused("got 'ab', which is that of abc, abd", "library", "remove", tmp_path, "ab")
    assert answer("library", "remove", tmp_path, "abc") == {"removed": "abc"}
    assert [one["key"] for one in listed(tmp_path)] == ["abd"]


M = ["--model", "m"]
TINY = ["--model", "TINY"]
BAD = [
    (["list", "nowhere"], "nowhere must be a directory"),
    (["ask", "STORE", "zz", "one?", *M], "got 'zz', which no stored state has"),
    (["remove", "STORE", ""], "got '', which no stored state has"),
    (["add", "new", "book.doc", *M], "book.doc must be a .txt, .md or .pdf file"),
    (["add", "new", "book.txt", *M], "book.txt cannot be read"),
    (["ask", "STORE", "book.txt", "?", *M, "--max-new-tokens", "0"], "--max-new-tokens must be"),
    (["list", "s3://bucket/path"], "--model must be given for the object store s3://bucket/path"),
    (["add", "new", "NOTES", *TINY, "--capacity", "40"], "capacity=40"),
    (["add", "new", "NOTES", *TINY, "--disk-bytes", "9", *SIZES, *FULL], "limits.disk=9 bytes must"),
    (["ask", "STORE", "book.txt", "?", *TINY, "--dtype", "bfloat16"], "dtype"),
]


@pytest.mark.parametrize(("words", "told"), BAD)
def test_bad_use_is_one_error(stored, tiny_model, refused, words, told, tmp_path, monkeypatch):
    names = {"STORE": stored, "TINY": tiny_model, "NOTES": f"{stored}/../notes.md"}
    monkeypatch.chdir(tmp_path)
    refused(told, "library", *(names.get(word, word) for word in words))
    assert not list(tmp_path.rglob("*.safetensors"))
