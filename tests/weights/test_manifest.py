"""The manifest of a converted checkpoint: changed, missing and unknown files are refused."""

import json
from pathlib import Path

import pytest
from checkpoint_files import assert_same, edit_json, refused, tiny_directory

from jshadow.errors import CheckpointError, ConfigError
from jshadow.weights.convert import convert
from jshadow.weights.params import load


def files(directory: Path) -> list[str]:
    """The names of all files below a directory."""
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest_file(directory: Path) -> Path:
    """The largest file below a directory."""
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def grow(path: Path) -> None:
    """Append a byte to a file."""
    path.write_bytes(path.read_bytes() + b"x")


@pytest.fixture(params=["huggingface", "orbax"])
def converted(request, tmp_path):
    """A converted directory of either format."""
    directory, _ = tiny_directory(tmp_path / "m", "bfloat16")
    convert(directory, tmp_path / "c", format=request.param)
    return tmp_path / "c"


CHANGES = {
    "a bit": (flip, "other bytes than when it was written"),
    "a byte more": (grow, "bytes when it was written"),
    "gone": (Path.unlink, "missing"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["weights", "config"])
def test_a_manifest_that_does_not_match_is_refused_with_the_file_s_name(converted, tmp_path, change, which):
    path = converted / "config.json" if which == "config" else largest_file(converted)
    act, told = CHANGES[change]
    act(path)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        load(converted)
    assert path.name in str(caught.value)
    if which == "weights" and (converted / "weights").exists():
        assert told in str(caught.value)
    before = files(tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=path.name):
        convert(converted, tmp_path / "out")
    assert files(tmp_path) == before


def test_what_the_manifest_does_not_name_may_change(converted):
    params = load(converted)
    (converted / "notes.txt").write_text("mine")
    assert_same(load(converted), params)
    edit_json(converted / "config.json", note="mine")
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes when it was written"):
        load(converted)
    assert_same(load(converted, verify=False), params)


BAD_MANIFESTS = {
    "version": ({"version": 2}, "version=2"),
    "format": ({"format": "zip"}, "format='zip'"),
    "no files": ({"files": {}}, "files must map"),
    "files kind": ({"files": {"config.json": 3}}, "files must map"),
    "outside": ({"files": {"../x": {"bytes": 1, "sha256": ""}}}, "'../x'"),
}


@pytest.mark.parametrize("case", BAD_MANIFESTS)
def test_a_bad_manifest_is_refused(converted, case):
    changes, told = BAD_MANIFESTS[case]
    edit_json(converted / "manifest.json", **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json") as caught:
        load(converted)
    assert told in str(caught.value)


def test_an_orbax_directory_in_part_is_refused(tmp_path):
    directory, _ = tiny_directory(tmp_path / "m")
    convert(directory, tmp_path / "c", "float32", format="orbax")
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="written or copied in part"):
        load(tmp_path / "c")
    refused(tmp_path / "c", tmp_path / "out", CheckpointError, ("written or copied in part",))


def test_weights_that_the_manifest_does_not_name(converted):
    told = json.loads((converted / "manifest.json").read_text())
    kept = {name: entry for name, entry in told["files"].items() if name == "config.json"}
    edit_json(converted / "manifest.json", files=kept)
    with pytest.raises(CheckpointError, match="not in the manifest"):
        load(converted)
    edit_json(converted / "manifest.json", files=told["files"] | {"x" * 300: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match="xxx: missing"):
        load(converted)
