"""The Open Inference Protocol with tritonclient over REST and gRPC, and health checks: one server
behind HAProxy, with two replicas.
"""

import time
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

from serving.inference.statistics import ModelStatistics
from tests.serving.live.servers import BATCH_WAIT, REPLICAS, TOKEN
from tests.serving.started import Server, as_json

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


def test_the_model_config_is_the_same_over_rest_and_grpc(rest: Any, over_grpc: Any) -> None:
    there = rest.get_model_config("pets", headers=HEADERS)
    here = over_grpc.get_model_config("pets", headers=HEADERS).config
    metadata = rest.get_model_metadata("pets", headers=HEADERS)
    for config in (there["input"], there["output"]):
        assert [sorted(one) for one in config] == [["data_type", "dims", "name"]] * len(config)
    assert [(one["name"], one["dims"]) for one in there["input"]] == [
        (one["name"], one["shape"]) for one in metadata["inputs"]
    ]
    assert [(one.name, list(one.dims)) for one in here.input] == [
        (one["name"], one["dims"]) for one in there["input"]
    ]
    assert [GRPC.model_config_pb2.DataType.Name(one.data_type) for one in here.output] == [
        one["data_type"] for one in there["output"]
    ]
    assert (here.name, here.platform, here.max_batch_size) == ("pets", there["platform"], 0)
    assert there["instance_group"] == [{"name": "pets", "kind": "KIND_CPU", "count": REPLICAS}]
    delay = here.dynamic_batching.max_queue_delay_microseconds
    assert delay == BATCH_WAIT * 1e6 == there["dynamic_batching"]["max_queue_delay_microseconds"]


def test_the_repository_index_lists_the_served_model(rest: Any, over_grpc: Any) -> None:
    model = {"name": "pets", "version": "", "state": "READY", "reason": ""}
    assert rest.get_model_repository_index(headers=HEADERS) == [model]
    found = over_grpc.get_model_repository_index(headers=HEADERS).models
    assert [(one.name, one.state) for one in found] == [("pets", "READY")]


def test_an_unknown_model_or_version_is_reported_to_the_client(rest: Any, over_grpc: Any) -> None:
    for triton in (rest, over_grpc):
        for call in (triton.get_model_config, triton.get_inference_statistics):
            with pytest.raises(InferenceServerException, match="unknown model 'cars'"):
                call("cars", headers=HEADERS)
            with pytest.raises(InferenceServerException, match="Remove version '2'"):
                call("pets", "2", headers=HEADERS)


# ---------------------------------------------------------------------------- statistics


def statistics(rest: Any) -> ModelStatistics:
    (found,) = rest.get_inference_statistics("pets", headers=HEADERS)["model_stats"]
    return ModelStatistics.model_validate(found)


def wait_for_successes(rest: Any, count: int) -> ModelStatistics:
    """Replicas report every second."""
    deadline = time.monotonic() + 60
    while (found := statistics(rest)).inference_stats.success.count < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def growth(before: ModelStatistics, after: ModelStatistics) -> dict[str, tuple[int, int]]:
    """Return how much the count and the nanoseconds of each stage have increased."""
    return {
        stage: (
            one.count - getattr(before.inference_stats, stage).count,
            one.ns - getattr(before.inference_stats, stage).ns,
        )
        for stage, one in after.inference_stats
    }


def num_executed(found: ModelStatistics) -> tuple[int, int]:
    """Return the number of forward passes and the number of their inputs, from the batches."""
    counts = [(one.batch_size, one.compute_infer.count) for one in found.batch_stats]
    return sum(count for _, count in counts), sum(size * count for size, count in counts)


def test_statistics_are_consistent_with_the_requests_sent(
    rest: Any, over_grpc: Any, client: httpx.Client, images: list[Path]
) -> None:
    files = [path.read_bytes() for path in images[:3]]
    time.sleep(3)  # until the requests of other tests have been reported
    before, started = statistics(rest), time.time()
    elapsed = 0.0
    for triton, library in ((rest, REST), (over_grpc, GRPC)) * 2:
        sent = time.perf_counter()
        infer(triton, library, files, [2, 6])
        elapsed += time.perf_counter() - sent
        with pytest.raises(InferenceServerException, match=r"images\[1\]"):
            infer(triton, library, [files[0], b"no image"], [2])
    assert client.post("/v1/query", json=as_json(images[:2], classes=[2])).status_code == 200
    after = wait_for_successes(rest, before.inference_stats.success.count + 5)
    time.sleep(3)  # until the failed requests have been reported too
    after = statistics(rest)
    grown = growth(before, after)
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    assert {stage: count for stage, (count, _) in grown.items()} == {
        "success": 5, "fail": 4, **dict.fromkeys(stages, 5), "cache_hit": 0, "cache_miss": 0
    }  # fmt: skip
    assert after.inference_count - before.inference_count == 4 * 3 + 2
    executions, inputs = np.subtract(num_executed(after), num_executed(before))
    assert after.execution_count - before.execution_count == executions
    assert 1 <= executions <= 5
    assert inputs == 4 * 3 + 2
    # The server's part of a request is shorter than what the client measures.
    assert sum(grown[stage][1] for stage in stages) == pytest.approx(grown["success"][1], abs=100)
    assert all(grown[stage][1] > 0 for stage in (*stages, "fail"))
    assert before.last_inference <= 1e3 * started <= after.last_inference <= 1e3 * time.time()


def test_statistics_are_the_same_over_rest_and_grpc(rest: Any, over_grpc: Any) -> None:
    time.sleep(3)  # until the requests of other tests have been reported
    (here,) = over_grpc.get_inference_statistics("pets", headers=HEADERS).model_stats
    (of_all,) = over_grpc.get_inference_statistics(headers=HEADERS).model_stats
    there = statistics(rest)
    (all_there,) = rest.get_inference_statistics(headers=HEADERS)["model_stats"]
    assert (here, there) == (of_all, ModelStatistics.model_validate(all_there))
    for stage, one in there.inference_stats:
        found = getattr(here.inference_stats, stage)
        assert (found.count, found.ns) == (one.count, one.ns)
    assert [one.batch_size for one in here.batch_stats] == [
        one.batch_size for one in there.batch_stats
    ]
    assert (here.inference_count, here.last_inference) == (
        there.inference_count, there.last_inference
    )  # fmt: skip


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
    assert {"/v2/models/{name}/config", "/v2/models/{name}/stats", "/v2/repository/index"} < set(
        document["paths"]
    )
