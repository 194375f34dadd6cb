"""Requests generated from the OpenAPI document get the responses that it describes, and never a
5xx.
"""

import base64
import json
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from tests.data.bad_images import encoded
from tests.serving.in_process import application, ask
from tests.tiny_bundle import write

CHECKS = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)


JSON = "application/json"
PNG = encoded(Image.radial_gradient("L"), "png")
INPUT = {"images": [base64.b64encode(PNG).decode()]}
BOUNDED = settings(
    deadline=None,
    database=None,
    derandomize=True,  # the same requests in every run
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def check(api: FastAPI, examples: int) -> set[str]:
    document = schemathesis.openapi.from_asgi("/openapi.json", api, headers={"host": "localhost"})
    return check_document(document, examples, headers={"host": "localhost"})


def check_document(document: Any, examples: int, **options: Any) -> set[str]:
    """For each operation, send `examples` requests that match its description and as many that do
    not match it. `options` are passed to each call.

    Returns the outcomes as "METHOD /path status".
    """
    answers: set[str] = set()
    for operation in (found.ok() for found in document.get_all_operations()):
        answers |= call_operation(operation, GenerationMode.POSITIVE, examples, options)
        if [*operation.body, *operation.query]:  # otherwise there is nothing that could be invalid
            answers |= call_operation(operation, GenerationMode.NEGATIVE, examples, options)
    return answers


def call_operation(
    operation: Any, mode: GenerationMode, examples: int, options: dict[str, Any]
) -> set[str]:
    answers: set[str] = set()

    @settings(parent=BOUNDED, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: schemathesis.Case) -> None:
        for sent in (case, answerable(case)) if mode.is_positive else (case,):
            answer = sent.call(**options)
            sent.validate_response(answer, checks=CHECKS)
            answers.add(f"{operation.label} {answer.status_code}")

    call()
    return answers


def answerable(case: schemathesis.Case) -> schemathesis.Case:
    """Return the request with an existing class and a valid input instead of the generated values,
    which are almost never valid.
    """
    query, body = dict(case.query), case.body
    if case.path == "/v1/query" and case.media_type != JSON:
        query["classes"] = ["husky"]
    if case.path == "/v1/query" and case.media_type == JSON and isinstance(body, dict):
        body = {**body, **INPUT, "classes": [0]}
    elif case.path == "/v1/query" and (case.media_type or "").startswith("image/"):
        body = PNG
    return case.operation.Case(
        path_parameters=case.path_parameters, query=query, body=body, media_type=case.media_type
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return application(write(tmp_path_factory.mktemp("bundles") / "b"), max_inputs=4)


def assert_all_called(answers: set[str]) -> None:
    """Check that valid and invalid requests were sent and that none caused a 5xx."""
    for label in ("POST /v1/query", "GET /v1/classes"):
        assert {f"{label} 200", f"{label} 422"} <= answers
    assert "GET /health 200" in answers
    assert not [answer for answer in answers if answer.split()[-1] >= "500"]


def test_responses_match_the_openapi_document(images: FastAPI) -> None:
    assert_all_called(check(images, 5))


def test_the_document_is_valid_openapi(images: FastAPI) -> None:
    document = ask(images, "GET", "/openapi.json").json()
    OpenAPIV31SpecValidator(document).validate()
    assert "$defs" not in json.dumps(document)


def test_every_operation_documents_its_errors_as_error_bodies(images: FastAPI) -> None:
    document = ask(images, "GET", "/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for status, described in operation["responses"].items():
                if status >= "400" and path.startswith("/v1/"):
                    schema = described["content"]["application/json"]["schema"]
                    assert schema == {"$ref": "#/components/schemas/ErrorBody"}, (path, status)


def test_every_kind_of_body_is_documented(images: FastAPI) -> None:
    paths = ask(images, "GET", "/openapi.json").json()["paths"]
    query = paths["/v1/query"]["post"]
    assert {JSON, "multipart/form-data", "image/jpeg", "application/octet-stream", "text/plain"} < (
        query["requestBody"]["content"].keys()
    )
    assert query["responses"].keys() >= {"400", "404", "408", "413", "415", "422", "429", "503"}
    names = {one["name"] for one in query["parameters"]}
    assert names == {"classes", "recall", "threshold", "require"}
