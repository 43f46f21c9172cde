"""A server over the tiny model in the process of the tests. The tests of a file share it."""

import pytest
from server_cases import tiny_service

from jshadow.serving.http.app import make_app


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with tiny_service(tmp_path_factory.mktemp("library")) as service:
        yield service


@pytest.fixture(scope="module")
def client(service):
    from starlette.testclient import TestClient

    with TestClient(make_app(service)) as client:
        yield client
