"""The OpenAPI schema against the server: schemathesis sends requests that fit it and requests that do not."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from server_cases import NAME, tiny_service

from jshadow.serving.http.app import make_app

pytestmark = pytest.mark.slow

EXAMPLES = 40


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    with tiny_service(tmp_path_factory.mktemp("library"), body_bytes=2**16, allowed_hosts=("testserver",)) as service:
        yield schemathesis.openapi.from_asgi("/openapi.json", make_app(service))


schema = schemathesis.pytest.from_fixture("api")
load_all_checks()
# A body that fits the schema may be refused, such as a prompt that is too long.
NOT_CHECKED = CHECKS.get_by_names(["positive_data_acceptance"])
NOT_REFUSED = CHECKS.get_by_names(["negative_data_rejection"])


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_response_is_as_the_schema_says(case):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = NAME  # the others are refused before anything else is looked at
    # In a form everything is text, so a number in place of a file is a file.
    answer, form = case.call(), case.operation.path == "/v1/files"
    refused = answer.status_code == 413  # schemathesis does not take it for a refusal
    case.validate_response(answer, excluded_checks=NOT_CHECKED + (NOT_REFUSED if form or refused else []))
