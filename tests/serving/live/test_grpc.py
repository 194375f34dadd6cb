"""The Open Inference Protocol over gRPC on each runner, called with tritonclient."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from tests.serving import in_process
from tests.serving.live.servers import (
    MAX_BODY,
    NEVER_QUERIED,
    OTHER_TOKEN,
    TOKEN,
)
from tests.serving.started import (
    Server,
    as_json,
    ask,
    of_each,
)
from tests.tiny_bundle import NAMES

WITH_TOKEN = (("authorization", f"Bearer {TOKEN}"),)
INFER = "/inference.GRPCInferenceService/ModelInfer"
CODE = grpc.StatusCode


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.Channel) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(channel)


@pytest.fixture
def triton(server: Server) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.grpc) as opened:
        yield opened


def infer_input(name: str, datatype: str, elements: list) -> InferInput:
    tensor = InferInput(name, [len(elements)], datatype)
    tensor.set_data_from_numpy(np.array(elements, object if datatype == "BYTES" else np.int64))
    return tensor


def infer(triton: InferenceServerClient, *inputs: InferInput, **more: Any) -> InferResult:
    return triton.infer("pets", list(inputs), headers=dict(WITH_TOKEN), **more)


def request_of(paths: list[Path], *class_ids: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="pets")
    request.inputs.add(name="images", datatype="BYTES", shape=[len(paths)])
    request.inputs.add(name="class_ids", datatype="INT64", shape=[len(class_ids)])
    images = [path.read_bytes() for path in paths]
    request.raw_input_contents.append(b"".join(map(with_length, images)))
    request.raw_input_contents.append(np.array(class_ids, np.int64).tobytes())
    return request


def with_length(element: bytes) -> bytes:
    return len(element).to_bytes(4, "little") + element


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return the status code, details and trailing metadata of a call, which must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert isinstance(error, grpc.Call)
    return error.code(), error.details(), dict(error.trailing_metadata() or ())


# ---------------------------------------------------------------------------- answers


def test_scores_and_decisions_match_those_of_rest_and_the_bundle(
    triton: InferenceServerClient, client: httpx.Client, bundle: Path, images: list[Path]
) -> None:
    three, classes = images[:3], [2, 6]
    names = ("--class", NAMES[2], "--class", NAMES[6])
    here = json.loads(ask(bundle, *names, "--recall", 0.9, *three, "--json"))["results"]
    there = client.post("/v1/query", json=as_json(three, classes=classes, recall=0.9)).json()
    files = infer_input("images", "BYTES", [path.read_bytes() for path in three])
    ids = infer_input("class_ids", "INT64", classes)
    options = {"request_id": "seven", "parameters": {"recall": 0.9}}
    found = infer(triton, files, ids, **options)
    response = found.get_response()
    assert response.id == "seven"
    assert response.parameters["aligned"].bool_param is there["aligned"]
    for results in (here, there["results"]):
        verdicts = [verdict for result in results for verdict in result["verdicts"]]
        scores = [verdict["score"] for verdict in verdicts]
        assert found.as_numpy("scores").shape == (3, 2)
        assert found.as_numpy("scores").ravel() == pytest.approx(scores, rel=1e-5, abs=1e-6)
        assert len(set(scores)) == 6
        thresholds = [verdict["threshold"] for verdict in verdicts[:2]]
        assert found.as_numpy("thresholds").tolist() == pytest.approx(thresholds)
        decided = [verdict["match"] for verdict in verdicts]
        assert found.as_numpy("matches").ravel().tolist() == decided


def test_server_and_model_metadata_are_the_same_over_grpc_and_rest(
    triton: InferenceServerClient, client: httpx.Client
) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    headers = dict(WITH_TOKEN)
    assert triton.is_model_ready("pets", headers=headers)
    with pytest.raises(InferenceServerException) as caught:
        triton.get_model_metadata("pets")
    assert caught.value.status() == str(CODE.UNAUTHENTICATED)
    metadata = triton.get_server_metadata(headers=headers, as_json=True)
    assert metadata == {key: value for key, value in client.get("/v2").json().items() if value}
    model, there = triton.get_model_metadata("pets", headers=headers), client.get("/v2/models/pets")
    assert (model.name, model.platform) == ("pets", there.json()["platform"])
    for tensors in ("inputs", "outputs"):
        found = [
            {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
            for one in getattr(model, tensors)
        ]
        assert found == there.json()[tensors]


# ---------------------------------------------------------------------------- errors


def test_invalid_requests_are_rejected_with_a_status_code(
    stub: GRPCInferenceServiceStub, images: list[Path]
) -> None:
    for ids, code, words in (
        ([99], CODE.NOT_FOUND, "99"),
        ([], CODE.INVALID_ARGUMENT, "contains no classes"),
        ([0] * 101, CODE.RESOURCE_EXHAUSTED, "the limit is 100"),
    ):
        request = request_of(images[:1], *ids)
        found = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))  # noqa: B023
        assert (found[0], words in found[1]) == (code, True)


def test_messages_beyond_the_size_limit_are_rejected_even_if_compressed(
    channel: grpc.Channel,
) -> None:
    call = channel.unary_unary(INFER)
    code, details, _ = refusal(lambda: call(bytes(MAX_BODY + 1), metadata=WITH_TOKEN))
    assert (code, str(MAX_BODY) in details) == (CODE.RESOURCE_EXHAUSTED, True)
    for size, compression in ((16 * MAX_BODY, None), (128 * MAX_BODY, grpc.Compression.Gzip)):
        options = {"metadata": WITH_TOKEN, "compression": compression}
        code, _, _ = refusal(lambda: call(bytes(size), **options))  # noqa: B023
        assert code == CODE.RESOURCE_EXHAUSTED
    code, details, _ = refusal(lambda: call(bytes(MAX_BODY), metadata=WITH_TOKEN))
    assert (code, "values" in details) == (CODE.RESOURCE_EXHAUSTED, True)  # was received


OPEN = ("ServerLive", "ServerReady")
GUARDED = ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")


@pytest.mark.parametrize("method", GUARDED)
def test_only_liveness_and_readiness_calls_succeed_without_a_token(
    channel: grpc.Channel, method: str
) -> None:
    call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    wrong = [
        (),
        (("authorization", TOKEN),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", f"Bearer {OTHER_TOKEN}"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (*WITH_TOKEN, ("authorization", f"Bearer {OTHER_TOKEN}")),
    ]
    for metadata in wrong:
        code, details, _ = refusal(lambda: call(b"\xff", metadata=metadata))  # noqa: B023
        assert code == CODE.UNAUTHENTICATED
        assert TOKEN[:8] not in details
    for name in OPEN:
        assert channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(b"") == b"\x08\1"


# ---------------------------------------------------------------------------- the process


def test_an_internal_error_is_logged_and_not_shown_to_clients(
    stub: GRPCInferenceServiceStub,
    server: Server,
    client: httpx.Client,
    bundle: Path,
    images: list[Path],
) -> None:
    weights = bundle / "class_weights.safetensors"
    request = request_of(images[:1], NEVER_QUERIED)
    content = weights.read_bytes()
    os.truncate(weights, 100)
    try:
        code, details, _ = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))
        answer = client.post("/v1/query", json=as_json(images[:1], classes=[NEVER_QUERIED]))
    finally:
        weights.write_bytes(content)
    assert in_process.refusal(answer) == (500, "internal")
    assert code == CODE.INTERNAL
    assert str(weights) not in details
    deadline = time.monotonic() + 60
    while str(weights) not in server.errors.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    log = server.errors.read_text()
    assert str(weights) in log
    assert "Traceback" in log
    assert "ModelInfer failed" in log
    assert stub.ModelInfer(request, metadata=WITH_TOKEN).outputs


def test_tokens_do_not_appear_in_logs_or_arguments(
    stub: GRPCInferenceServiceStub, server: Server
) -> None:
    """This test comes after the tests that make all other kinds of calls."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    files = [path for path in folder.glob("kway-ray-*/**/*") if path.is_file()]
    for secret in (TOKEN, OTHER_TOKEN):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in server.errors.read_text()
        lines = of_each(server, lambda process: " ".join(process.cmdline()))
        assert [line for line in lines if secret in line] == []
    assert stub.ServerLive(pb.ServerLiveRequest()).live
