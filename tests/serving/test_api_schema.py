"""The OpenAPI document describes every body and every error."""

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.serving.in_process import application, ask

JSON = "application/json"


@pytest.fixture(scope="module")
def document(bundle: Path) -> Any:
    return ask(application(bundle), "GET", "/openapi.json").json()


def test_the_document_is_valid_openapi(document: Any) -> None:
    OpenAPIV31SpecValidator(document).validate()
    assert "$defs" not in json.dumps(document)


def test_every_operation_documents_its_errors_as_error_bodies(document: Any) -> None:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, described in operation["responses"].items():
                if status >= "400" and path.startswith("/v1/"):
                    schema = described["content"][JSON]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_every_kind_of_body_is_documented(document: Any) -> None:
    query = document["paths"]["/v1/query"]["post"]
    assert query["requestBody"]["content"].keys() == {
        *(JSON, "multipart/form-data", "image/*", "application/octet-stream", "text/plain")
    }
    assert query["responses"].keys() >= {"400", "404", "408", "413", "415", "422", "429", "503"}
    names = {one["name"] for one in query["parameters"]}
    assert names == {"classes", "recall", "threshold", "require"}
