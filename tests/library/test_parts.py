"""`jshadow library add --part`: each document is read by one of several processes."""

import itertools
import json
import random
import subprocess
import sys

import pytest
from byte_models import CONFIG
from tiny_text import byte_tokenizer

import jshadow
from jshadow.cli.main import main
from jshadow.errors import CheckpointError, ConfigError
from jshadow.library.sources import paths_of_part
from jshadow.weights.params import Params, init_params

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
