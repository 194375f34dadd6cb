"""tritonclient over REST and gRPC, and clients generated from the OpenAPI document."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.serving.live.servers import TOKEN
from tests.serving.started import Server
from tests.serving.test_api_schema import assert_all_called, check_document

HEADERS = {"authorization": f"Bearer {TOKEN}"}
REST, GRPC = tritonclient.http, tritonclient.grpc


@pytest.fixture
def rest(server: Server) -> Iterator[tritonclient.http.InferenceServerClient]:
    with REST.InferenceServerClient(server.url.removeprefix("http://")) as opened:
        yield opened


@pytest.fixture
def over_grpc(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with GRPC.InferenceServerClient(server.grpc) as opened:
        yield opened


def infer(triton: Any, library: Any, images: list[bytes], class_ids: list[int]) -> np.ndarray:
    """Return the scores. tritonclient sends binary tensors by default."""
    inputs = []
    for name, datatype, values in (("images", "BYTES", images), ("class_ids", "INT64", class_ids)):
        tensor = library.InferInput(name, [len(values)], datatype)
        dtype = object if datatype == "BYTES" else np.int64
        tensor.set_data_from_numpy(np.array(values, dtype))
        inputs.append(tensor)
    # A copy, because tritonclient.http adds to the headers.
    return triton.infer("pets", inputs, headers=dict(HEADERS)).as_numpy("scores")


def test_binary_tensors_get_the_same_scores_over_rest_and_grpc(
    rest: Any, over_grpc: Any, images: list[Path]
) -> None:
    files = [path.read_bytes() for path in images[:3]]
    scores = infer(rest, REST, files, [2, 6])
    assert scores == pytest.approx(infer(over_grpc, GRPC, files, [2, 6]), rel=1e-4, abs=1e-5)
    assert scores.shape == (3, 2)


def test_an_unknown_model_or_version_is_reported_to_the_client(rest: Any, over_grpc: Any) -> None:
    for triton in (rest, over_grpc):
        with pytest.raises(InferenceServerException, match="unknown model 'cars'"):
            triton.get_model_metadata("cars", headers=HEADERS)
        with pytest.raises(InferenceServerException, match="Remove version '2'"):
            triton.get_model_metadata("pets", "2", headers=HEADERS)


@pytest.mark.slow
def test_responses_of_the_server_match_its_openapi_document(server: Server) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=HEADERS)
    answers = check_document(document, 5, headers=HEADERS)
    assert_all_called(answers)
    assert "GET /v2 200" in answers
