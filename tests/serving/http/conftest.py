"""A server over the tiny model in the process of the tests. The tests of a file share it."""

import pytest
from server_cases import tiny_service
from starlette.testclient import TestClient

from jshadow.serving.http.app import make_app


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
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        yield client
