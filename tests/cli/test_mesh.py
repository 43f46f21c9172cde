"""The option --mesh: its text, and the mesh of this process's devices."""

import jax
import pytest

from jshadow.cli.mesh import mesh_of, parse_mesh
from jshadow.errors import ConfigError


def test_axes_that_are_left_out_have_size_1():
    assert parse_mesh("tp=4, sp=2") == {"data": 1, "sp": 2, "tp": 4}
    assert list(parse_mesh("data=3")) == ["data", "sp", "tp"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mesh must have axes among data, sp, tp, such as tp=4, got ''"),
        ("pp=2", "mesh must have axes among data, sp, tp, such as tp=4, got 'pp=2'"),
        ("tp=2,", "mesh must have axes among data, sp, tp, such as tp=4, got ''"),
        ("tp=2,tp=2", "mesh must name each axis once, got tp twice"),
        ("tp", "mesh must have a size of at least 1 for tp, got ''"),
        ("tp=0", "mesh must have a size of at least 1 for tp, got '0'"),
        ("sp=-1", "mesh must have a size of at least 1 for sp, got '-1'"),
        ("sp=2.0", "mesh must have a size of at least 1 for sp, got '2.0'"),
        ("sp=²", "mesh must have a size of at least 1 for sp, got '²'"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_mesh(text)
    assert str(caught.value).startswith(message)


def test_the_mesh_has_all_devices():
    sizes = {"data": 1, "sp": 1, "tp": jax.device_count()}
    mesh = mesh_of(sizes)
    assert mesh.axis_names == ("data", "sp", "tp")
    assert dict(mesh.shape) == sizes
    with pytest.raises(ConfigError, match=r"mesh must have as many devices as there are, got data=2 \* sp=1"):
        mesh_of(sizes | {"data": 2})


class Device:
    """A device of another process."""

    def __init__(self, process_index, number):
        self.process_index, self.id = process_index, number


@pytest.mark.parametrize(
    ("held", "sizes", "message"),
    [
        ([4, 2], {"data": 1, "sp": 2, "tp": 3}, r"devices must be as many in each process, got \[4, 2\]"),
        ([2, 2, 2], {"data": 1, "sp": 2, "tp": 3}, r"tp must divide the 2 devices of a process .* got 3"),
        ([4, 4], {"data": 1, "sp": 1, "tp": 4}, r"= 4; there are 8, and it must have all of them \(processes: 2"),
    ],
)
def test_meshes_of_several_processes(held, sizes, message, monkeypatch):
    devices = [Device(process, number) for process, count in enumerate(held) for number in range(count)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=message):
        mesh_of(sizes)
