"""Requests generated from the OpenAPI document, sent to a server behind HAProxy."""

import pytest
import schemathesis

from tests.serving.live.servers import TOKEN
from tests.serving.started import Server
from tests.serving.test_api_schema import assert_all_called, check_document

HEADERS = {"authorization": f"Bearer {TOKEN}"}


@pytest.mark.slow
def test_responses_of_the_server_match_its_openapi_document(server: Server) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=HEADERS)
    answers = check_document(document, 5, headers=HEADERS)
    assert_all_called(answers)
    assert "GET /v2 200" in answers
