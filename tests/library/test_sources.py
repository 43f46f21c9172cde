"""Sources of documents: ids, texts, and text, Markdown and PDF files, good and bad, and parts for several processes."""

import contextlib
import datetime
import io
import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from byte_models import BARE, CONFIG, PARAMS
from hypothesis import given, settings
from hypothesis import strategies as st
from pdf_files import LARGE, PAGES, pdf
from tiny_text import byte_tokenizer
from transformers.utils import chat_template_utils

import jshadow
from jshadow.cli.main import main
from jshadow.errors import CapacityError, CheckpointError, ConfigError, PromptError
from jshadow.library.library import ids_of, paths_of_part, read_document, text_ids
from jshadow.library.pdf import PdfLimits, read_pdf
from jshadow.library.pdf_worker import Refusal, text_of
from jshadow.weights.params import Params, init_params
from jshadow.weights.templates import frame

PLAIN = pdf()


def written(tmp_path, name, content) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-8"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT", "a name.md"])
def test_text_files(tmp_path, name, encoding):
    """A mark of byte order is no part of a document."""
    text = "# A title\n\nÜber 10 €.\n"
    path = written(tmp_path, name, text.encode(encoding))
    assert read_document(path) == text
    assert ids_of(path, PARAMS)[1] == name
    assert ids_of(path, PARAMS)[0].tolist() == ids_of(text, PARAMS)[0].tolist()


DATED = "\n{% set form = '%Y' %}{% macro told() %}{{ strftime_now('%Y') }}{% endmacro %}"
DATED += "{% set day = strftime_now('%d %b %Y') if strftime_now is defined else 'never' %}"
DATED += 'Today is {{ day }} {{ strftime_now("%Y") }}.'
DATED += "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


WAYS = {
    "literal": 'strftime_now("%Y")',
    "variable": "strftime_now(form)",
    "keyword": "strftime_now(format=form)",
    "macro": "told()",
    "many": "strftime_now('%Y-%m-%d %A, %-d %B%% %H:%M')[:4]",
    "rare codes": "(strftime_now('%C%y') if strftime_now('%%d %R %D %u%U %-m%h %_d') in RARE else strftime_now('%B'))",
}


# What the codes say on the fixed day. On other days, the test asks for the year alone.
RARE = "['%d 00:00 07/26/24 529 7Jul 26', strftime_now('%%d %R %D %u%U %-m%h %_d') if strftime_now('%Y') != '2024']"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("document", ["The sea is calm.", "x", "</s> first words"])
def test_a_document_has_the_same_tokens_on_every_day(monkeypatch, document, way):
    """A template that names today's date is told the same date for each document and for each question about it."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = DATED.replace('strftime_now("%Y")', WAYS[way].replace("RARE", RARE))
    params = Params(PARAMS.weights, PARAMS.config, tokenizer)
    found = set()
    for day in (datetime.datetime(2026, 5, 1), datetime.datetime(2026, 9, 30, 23, 59), datetime.datetime(2031, 1, 1)):
        monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda day=day: day))
        today = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert str(day.year) in today, "the date of the chat without a document"
        before, after = frame(tokenizer, "why?")
        found.add((tuple(text_ids(document, params).tolist()), tuple(before), tuple(after)))
    [(ids, before, _)] = found
    assert tokenizer.decode(ids) == f"\nToday is 26 Jul 2024 2024.<user>{document}"
    assert tokenizer.decode(ids[len(before) :]) == document


def test_ids_and_texts():
    ids, title = ids_of("abc", PARAMS)
    assert (ids.dtype, title) == (np.int32, "")
    assert PARAMS.tokenizer.decode(ids[-3:]) == "abc"
    for same in ([1, 2], (1, 2), np.array([1, 2])):
        assert ids_of(same, BARE)[0].tolist() == [1, 2]


def test_a_pdf_has_an_empty_line_between_its_pages(tmp_path):
    assert read_document(written(tmp_path, "a.pdf", PLAIN)) == "\n\n".join(PAGES)
    assert read_document(written(tmp_path, "b.PDF", pdf(["", "One line."]))).strip() == "One line."


@pytest.mark.parametrize(("line", "text"), [("xAB", "x\U0001f600"), ("xA", "x\ufffd"), ("BAx", "\ufffd\ufffdx")])
def test_halves_of_surrogate_pairs_in_a_pdf_are_mended(tmp_path, line, text):
    path = written(tmp_path, "a.pdf", pdf([line], letters={"A": 0xD83D, "B": 0xDE00}))
    assert read_document(path) == text
    assert ids_of(path, PARAMS)[0].tolist() == ids_of(text, PARAMS)[0].tolist()


FOLDER = object()  # in place of a file's content
BAD_FILES = [
    ("a.pdf", pdf(password="secret"), "must not be encrypted"),
    ("a.pdf", pdf(password=""), "must not be encrypted, got"),
    ("a.pdf", pdf(["", ""]), "must have text in it, got none"),
    ("a.pdf", pdf([]), "must have text in it"),
    ("a.pdf", PLAIN[: len(PLAIN) // 2], "must be a PDF file, got one that does not parse"),
    ("a.pdf", b"", "must be a PDF file"),
    ("a.pdf", b"%PDF-1.7\nnothing else", "a PDF file, got one"),
    ("a.txt", "Grün".encode("latin-1"), "must be UTF-8 text, got other bytes"),
    ("a.txt", b"\xff\xfea", "must be UTF-8 text"),
    ("a.txt", b"\xfe\xff\xd8\x3d", "must be UTF-8 text"),
    ("a.txt", b"", "must have text in it, got none"),
    ("a.txt", b" \n\t\n", "must have text"),
    ("a.md", b"\x80", "must be UTF-8"),
    ("a.docx", b"x", r"must be a .txt, .md or .pdf file, got '.docx'"),
    ("a", b"x", "got 'no ending'"),
    *((f"none.{ending}", None, "cannot be read") for ending in ("txt", "md", "pdf")),
    *((f"folder.{ending}", FOLDER, "cannot be read") for ending in ("txt", "pdf")),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_that_cannot_be_a_document(tmp_path, name, content, message):
    path = tmp_path / name
    if content is FOLDER:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        ids_of(path, PARAMS)
    assert str(path) in str(caught.value)


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, len(PLAIN) - 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_pdf_gives_a_text_or_is_refused(place, value, cut):
    content = PLAIN[:place] if cut else PLAIN[:place] + bytes([value]) + PLAIN[place + 1 :]
    with contextlib.suppress(Refusal):
        assert isinstance(text_of(io.BytesIO(content), 10, 1000), str)


@pytest.mark.parametrize(
    ("pages", "limits", "message"),
    [
        (PAGES, {"pages": 1}, "must have at most 1 pages, got 2"),
        (PAGES, {"characters": 20}, "must have at most 20 characters, got more after 2 pages"),
        (PAGES, {"memory": 2**25}, f"with {2**25} bytes of memory, got a PDF that needs more|ends its reader"),
        (LARGE, {"seconds": 1}, r"must be read within (1 CPU|3) seconds"),
    ],
)
def test_a_pdf_that_takes_more_than_the_limits(tmp_path, pages, limits, message):
    path = written(tmp_path, "a.pdf", pdf(pages))
    with pytest.raises(CheckpointError, match=message):
        read_pdf(path, PdfLimits(**limits))


def test_a_reading_ends_with_its_process(tmp_path):
    with pytest.raises(CheckpointError, match="the reading was stopped"):
        read_pdf(written(tmp_path, "a.pdf", pdf(LARGE)), begun=lambda process: process.kill())


A_FILE = r"must be a pathlib\.Path to be read as a file"
BAD_SOURCES = [
    ("", PARAMS, "must have text in it"),
    (" \n", PARAMS, "must have text in it"),
    ([], PARAMS, "at least 1 token"),
    ([257], PARAMS, r"source must lie in \[0, vocab_size=257\), got 257"),
    ("a text", BARE, "must be token ids, because the checkpoint has no tokenizer"),
    (Path("a.txt"), BARE, "must be token ids"),
    *((name, PARAMS, A_FILE) for name in ("notes.txt", "/a/b.md", "paper.PDF")),
]


@pytest.mark.parametrize(("source", "params", "message"), BAD_SOURCES)
def test_bad_sources(source, params, message):
    with pytest.raises(PromptError, match=message):
        ids_of(source, params)
    if message == A_FILE:
        assert len(ids_of(f"{source}\n is a file", params)[0])


def test_a_package_that_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(ConfigError, match=r"needs the package pypdf: pip install 'jshadow\[pdf\]'"):
        read_document(written(tmp_path, "a.pdf", PLAIN))


def test_a_document_is_longer_than_the_library(tmp_path):
    """Nothing is read, and the error has both numbers."""
    with jshadow.Library(tmp_path / "library", PARAMS, capacity=40) as library:
        path = written(tmp_path, "long.txt", "x" * 41)
        with pytest.raises(CapacityError, match=r"at most capacity=40 tokens, got 4[1-9]"):
            library.add(path)
        assert library.documents() == []


SMALL = ["--dtype", "float32", "--capacity", "400", "--fetch", "device_put", "--set", "rank=8", "--set", "budget=64"]
SIZES = {"a": 10, "b": 300, "c": 20, "d": 200, "e": 280}


@pytest.fixture
def files(tmp_path):
    """Documents of some sizes."""
    paths = [tmp_path / f"{name}.txt" for name in SIZES]
    for path in paths:
        path.write_text(f"document {path.stem} ".ljust(SIZES[path.stem], "."))
    return paths


def parts_of(paths, count):
    return [paths_of_part(paths, f"{index}/{count}") for index in range(1, count + 1)]


def test_every_file_is_in_one_part(files, tmp_path):
    """Wherever the files lie, and in whichever order they are named."""
    assert paths_of_part(files, None) == files
    for count in range(1, 8):
        parts = parts_of(files, count)
        assert sorted(itertools.chain(*parts)) == files
        assert sum(not part for part in parts) == max(count - len(files), 0)
    assert [[path.stem for path in part] for part in parts_of(files, 2)] == [["a", "b", "d"], ["c", "e"]]
    wanted = [{path.name for path in part} for part in parts_of(files, 3)]
    shuffled = random.Random(0).sample(files, len(files))
    assert [{path.name for path in part} for part in parts_of(shuffled, 3)] == wanted
    assert [part == [path for path in shuffled if path in part] for part in parts_of(shuffled, 3)] == [True] * 3
    (tmp_path / "other").mkdir()
    moved = [path.rename(tmp_path / "other" / path.name) for path in files]
    assert [{path.name for path in part} for part in parts_of(moved, 3)] == wanted


def test_files_of_one_name_or_one_size_and_a_file_named_twice(tmp_path):
    paths = [tmp_path / folder / "same.txt" for folder in "abc"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("some text")
    assert [len(part) for part in parts_of(paths, 3)] == [1, 1, 1]
    parts = parts_of([paths[0], *paths], 3)
    assert sorted(itertools.chain(*map(set, parts))) == paths


def test_a_bad_part_and_a_missing_file_are_refused(files, tmp_path):
    for part in ("0/2", "3/2", "2", ""):
        with pytest.raises(ConfigError, match="part must be I/N with I from 1 to N"):
            paths_of_part(files, part)
    for part in ("1/2", "2/2"):
        with pytest.raises(CheckpointError, match=r"none\.txt cannot be read"):
            paths_of_part([*files, tmp_path / "none.txt"], part)


@pytest.mark.slow
@pytest.mark.process
def test_two_processes_read_a_library_in_parts(files, tmp_path, capsys):
    """At the same time. A third part of six documents that has none is done at once."""
    model, place = str(tmp_path / "model"), str(tmp_path / "store")
    params = init_params(CONFIG)
    jshadow.save(Params(params.weights, params.config, byte_tokenizer()), model)
    words = ["library", "add", place, *map(str, files), "--model", model, *SMALL, "--json"]
    commands = [[sys.executable, "-m", "jshadow", *words, "--part", f"{index}/2"] for index in (1, 2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    printed = [json.loads(one.communicate()[0])["documents"] for one in running]
    assert [one.returncode for one in running] == [0, 0]
    assert [[found["title"] for found in part] for part in printed] == [["a.txt", "b.txt", "d.txt"], ["c.txt", "e.txt"]]
    assert main(["library", "list", place, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["documents"]
    assert sorted(found["title"] for found in listed) == [path.name for path in files]
    assert {found["key"] for found in listed} == {found["key"] for part in printed for found in part}
    assert main([*words[:3], str(files[0]), "--model", "nowhere", "--part", "2/2"]) == 0
    assert capsys.readouterr().out == "part 2/2 has no file\n"
    assert main([*words[:3], str(files[0]), "--model", "nowhere", "--part", "2/2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"documents": []}
