import pytest
from server_cases import NAME, tiny_service

from jshadow.server.app import make_app


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with tiny_service(tmp_path_factory.mktemp("library")) as service:
        yield service


@pytest.fixture
def client(service):
    from starlette.testclient import TestClient

    with TestClient(make_app(service)) as client:
        yield client


def test_a_completion(client):
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 4, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_files(client):
    answer = client.post(
        "/v1/files", files={"file": ("a.txt", b"The sea is calm. " * 10)}, data={"purpose": "user_data"}
    )
    assert answer.status_code == 200, answer.text
    assert client.get("/v1/files").json()["data"][0]["id"] == answer.json()["id"]
