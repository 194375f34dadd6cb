"""The Open Inference Protocol with tritonclient over REST and gRPC, and health checks: one server
behind HAProxy, with two replicas.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from openapi_spec_validator import OpenAPIV31SpecValidator
from tritonclient.utils import InferenceServerException

from tests.serving.live.servers import REPLICAS, TOKEN
from tests.serving.started import Server

HEADERS = {"authorization": f"Bearer {TOKEN}"}
STATUS = HealthCheckResponse
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


# ---------------------------------------------------------------------------- health and OpenAPI


@pytest.fixture
def health(server: Server) -> Iterator[HealthStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield HealthStub(channel)


@pytest.mark.parametrize("service", ["", "inference.GRPCInferenceService"])
def test_health_checks_need_no_token(health: HealthStub, service: str) -> None:
    request = HealthCheckRequest(service=service)
    assert health.Check(request).status == STATUS.SERVING
    watching = health.Watch(request)
    assert next(watching).status == STATUS.SERVING
    watching.cancel()


def test_the_health_of_an_unknown_service_is_unknown(health: HealthStub) -> None:
    request = HealthCheckRequest(service="ray.serve.RayServeAPIService")
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(request)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    watching = health.Watch(request)
    assert next(watching).status == STATUS.SERVICE_UNKNOWN
    watching.cancel()


def test_excess_health_watches_are_rejected(health: HealthStub) -> None:
    watches = [health.Watch(HealthCheckRequest()) for _ in range(40 * REPLICAS)]
    found = []
    for watch in watches:
        try:
            found.append(next(watch).status)
        except grpc.RpcError as error:
            found.append(error.code())
    assert set(found) == {STATUS.SERVING, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert health.Check(HealthCheckRequest()).status == STATUS.SERVING
    for watch in watches:
        watch.cancel()


def test_the_served_openapi_document_is_valid(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    OpenAPIV31SpecValidator(document).validate()
    assert {"/v2/models/{name}", "/v2/models/{name}/infer"} < set(document["paths"])
