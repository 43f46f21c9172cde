"""A server over the tiny model in the process of the tests. The tests of a file share it."""

import pytest
from server_cases import client_of, tiny_service


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the server's library."""
    return tmp_path_factory.mktemp("library")


@pytest.fixture(scope="module")
def service(folder):
    with tiny_service(folder) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    with client_of(service, raise_server_exceptions=False) as client:
        yield client
