"""The Open Inference Protocol over gRPC: a real server behind HAProxy, asked by its own client."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from serving.config import ServingConfig
from tests.serving.live.servers import (
    BATCH_WAIT,
    MAX_BODY,
    NEVER_ASKED,
    OTHER_TOKEN,
    REPLICAS,
    TIMEOUT,
    TOKEN,
    write_tokens,
)
from tests.serving.started import (
    Server,
    as_json,
    ask,
    counts,
    error_of,
    of_each,
    replicas_of,
    session_of,
    wait_for_counts,
)
from tests.system.processes import ROOT
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


def images_of(paths: list[Path]) -> InferInput:
    return infer_input("images", "BYTES", [path.read_bytes() for path in paths])


def infer(triton: InferenceServerClient, *inputs: InferInput, **more: Any) -> InferResult:
    return triton.infer("pets", list(inputs), headers=dict(WITH_TOKEN), **more)


def typed(paths: list[Path], *class_ids: int, **parameters: float) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="pets")
    images = request.inputs.add(name="images", datatype="BYTES", shape=[len(paths)])
    images.contents.bytes_contents.extend(path.read_bytes() for path in paths)
    ids = request.inputs.add(name="class_ids", datatype="INT64", shape=[len(class_ids)])
    ids.contents.int64_contents.extend(class_ids)
    for name, value in parameters.items():
        request.parameters[name].double_param = value
    return request


def raw(paths: list[Path], *class_ids: int) -> pb.ModelInferRequest:
    """The same with raw_input_contents."""
    request = typed(paths, *class_ids)
    for tensor in request.inputs:
        tensor.ClearField("contents")
    images = (path.read_bytes() for path in paths)
    request.raw_input_contents.extend(
        [
            b"".join(len(one).to_bytes(4, "little") + one for one in images),
            b"".join(one.to_bytes(8, "little", signed=True) for one in class_ids),
        ]
    )
    return request


def refusal(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """The status of a call that is refused, with its trailing metadata."""
    with pytest.raises(grpc.RpcError) as refused:
        call()
    error = refused.value
    assert isinstance(error, grpc.Call)
    return error.code(), error.details(), dict(error.trailing_metadata() or ())


# ---------------------------------------------------------------------------- answers


def test_scores_and_decisions_are_those_of_rest_and_of_the_bundle_in_process(
    stub: GRPCInferenceServiceStub,
    triton: InferenceServerClient,
    client: httpx.Client,
    bundle: Path,
    images: list[Path],
) -> None:
    three, classes = images[:3], [2, 6]
    names = ("--class", NAMES[2], "--class", NAMES[6])
    here = json.loads(ask(bundle, *names, "--recall", 0.9, *three, "--json"))["results"]
    there = client.post("/v1/query", json=as_json(three, classes=classes, recall=0.9)).json()
    ids = infer_input("class_ids", "INT64", classes)
    asked = {"request_id": "seven", "parameters": {"recall": 0.9}}
    found = infer(triton, images_of(three), ids, **asked)
    assert found.get_response().id == "seven"
    by_types = stub.ModelInfer(typed(three, *classes, recall=0.9), metadata=WITH_TOKEN)
    outputs = {one.name: one for one in by_types.outputs}
    assert {name: list(one.shape) for name, one in outputs.items()} == {
        "scores": [3, 2],
        "thresholds": [2],
        "matches": [3, 2],
    }
    for results in (here, there["results"]):
        verdicts = [verdict for result in results for verdict in result["verdicts"]]
        scores = [verdict["score"] for verdict in verdicts]
        assert found.as_numpy("scores").ravel() == pytest.approx(scores, rel=1e-5, abs=1e-6)
        contents = outputs["scores"].contents.fp32_contents
        assert list(contents) == pytest.approx(scores, rel=1e-5, abs=1e-6)
        assert len(set(scores)) == 6
        bars = [verdict["threshold"] for verdict in verdicts[:2]]
        assert list(outputs["thresholds"].contents.fp32_contents) == pytest.approx(bars)
        decided = [verdict["match"] for verdict in verdicts]
        assert list(outputs["matches"].contents.bool_contents) == decided
        assert found.as_numpy("matches").ravel().tolist() == decided
    assert by_types.parameters["aligned"].bool_param is there["aligned"]
    assert not by_types.raw_output_contents


def test_names_serve_as_well_and_only_the_wanted_outputs_come(
    triton: InferenceServerClient, client: httpx.Client, images: list[Path]
) -> None:
    one = images[:1]
    asked = {"classes": NAMES[:3], "threshold": 0}
    verdicts = client.post("/v1/query", json=as_json(one, **asked)).json()["results"][0]["verdicts"]
    names = infer_input("classes", "BYTES", [name.encode() for name in NAMES[:3]])
    wanted = [InferRequestedOutput("matches")]
    found = infer(triton, images_of(one), names, outputs=wanted, parameters={"threshold": 0})
    assert [output.name for output in found.get_response().outputs] == ["matches"]
    assert found.as_numpy("matches").tolist() == [[verdict["match"] for verdict in verdicts]]
    assert found.as_numpy("matches").dtype == bool


def test_server_and_model_say_over_grpc_what_they_say_over_rest(
    triton: InferenceServerClient, client: httpx.Client
) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    headers = dict(WITH_TOKEN)
    assert triton.is_model_ready("pets", headers=headers)
    said = triton.get_server_metadata(headers=headers, as_json=True)
    assert said == {key: value for key, value in client.get("/v2").json().items() if value}
    model, there = triton.get_model_metadata("pets", headers=headers), client.get("/v2/models/pets")
    assert (model.name, model.platform) == ("pets", there.json()["platform"])
    for tensors in ("inputs", "outputs"):
        found = [
            {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
            for one in getattr(model, tensors)
        ]
        assert found == there.json()[tensors]


# ---------------------------------------------------------------------------- refusals

Change = Callable[[pb.ModelInferRequest], None]


def set_to(**fields: Any) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        for name, value in fields.items():
            setattr(request, name, value)

    return change


def set_input(place: int, **fields: Any) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        for name, value in fields.items():
            setattr(request.inputs[place], name, value)

    return change


def set_parameter(name: str, kind: str, value: Any) -> Change:
    return lambda request: setattr(request.parameters[name], kind, value)


def set_ids(*ids: int) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[1].contents.int64_contents[:] = ids
        request.inputs[1].shape[:] = [len(ids)]

    return change


def set_images(*images: bytes) -> Change:
    def change(request: pb.ModelInferRequest) -> None:
        request.inputs[0].contents.bytes_contents[:] = images
        request.inputs[0].shape[:] = [len(images)]

    return change


def ask_for_a_long_name(request: pb.ModelInferRequest) -> None:
    classes = request.inputs[1]
    classes.name, classes.datatype = "classes", "BYTES"
    classes.contents.Clear()
    classes.contents.bytes_contents.append(("猫" * 5000).encode())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (set_to(model_name="cars"), CODE.NOT_FOUND, "'cars' is unknown"),
        (set_to(model_version="1"), CODE.NOT_FOUND, "has no versions"),
        (set_ids(99), CODE.NOT_FOUND, "99"),
        (ask_for_a_long_name, CODE.NOT_FOUND, "猫"),
        (set_ids(), CODE.INVALID_ARGUMENT, "no classes"),
        (set_ids(*[0] * 101), CODE.RESOURCE_EXHAUSTED, "at most 100"),
        (set_images(*[b"x"] * 5), CODE.RESOURCE_EXHAUSTED, "at most 4"),
        (set_images(b"hello"), CODE.INVALID_ARGUMENT, "images[0]: not an image"),
        (set_input(0, name="photos"), CODE.INVALID_ARGUMENT, "is unknown"),
        (set_input(0, name="猫" * 3000), CODE.INVALID_ARGUMENT, "is unknown"),
        (set_input(1, name="images"), CODE.INVALID_ARGUMENT, "stands twice"),
        (set_input(1, datatype="INT32"), CODE.INVALID_ARGUMENT, "INT32"),
        (set_input(1, datatype="BYTES"), CODE.INVALID_ARGUMENT, "as bytes_contents"),
        (lambda r: r.inputs[1].shape.append(2), CODE.INVALID_ARGUMENT, "do not agree"),
        (lambda r: r.inputs[1].shape.append(-1), CODE.INVALID_ARGUMENT, "negative"),
        (lambda r: r.inputs.pop(), CODE.INVALID_ARGUMENT, "exactly one"),
        (lambda r: r.outputs.add(name="matches"), CODE.INVALID_ARGUMENT, "without recall"),
        (set_parameter("recall", "string_param", "0.9"), CODE.INVALID_ARGUMENT, "finite number"),
        (set_parameter("recall", "double_param", 0.123), CODE.INVALID_ARGUMENT, "0.123"),
        (
            set_parameter("threshold", "double_param", float("nan")),
            CODE.INVALID_ARGUMENT,
            "finite number",
        ),
        (lambda r: r.parameters["recall"].SetInParent(), CODE.INVALID_ARGUMENT, "no value"),
        (lambda r: r.raw_input_contents.append(b""), CODE.INVALID_ARGUMENT, "send one"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_code(
    stub: GRPCInferenceServiceStub,
    images: list[Path],
    change: Change,
    code: grpc.StatusCode,
    words: str,
) -> None:
    request = typed(images[:1], 2)
    change(request)
    found = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))
    assert found[0] == code, found
    assert words in found[1]


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, lambda whole: whole[:-1], "images[1] is cut off"),
        (0, lambda whole: whole + b"\1\0", "images[2] is cut off within its 4 length bytes"),
        (0, lambda whole: b"\xff\xff\xff\xff" + whole, "4294967295 bytes are declared"),
        (0, lambda whole: whole + b"\0\0\0\0", "do not agree"),
        (0, lambda _: b"", "do not agree"),
        (1, lambda whole: whole[:-1], "INT64 element takes 8"),
        (1, lambda whole: whole + bytes(8), "do not agree"),
    ],
)
def test_raw_contents_that_are_cut_off_or_too_long_are_refused(
    stub: GRPCInferenceServiceStub,
    images: list[Path],
    place: int,
    change: Callable[[bytes], bytes],
    words: str,
) -> None:
    request = raw(images[:2], 1, 2)
    assert stub.ModelInfer(request, metadata=WITH_TOKEN).raw_output_contents
    request.raw_input_contents[place] = change(request.raw_input_contents[place])
    code, details, _ = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))
    assert code == CODE.INVALID_ARGUMENT
    assert words in details


def test_raw_contents_are_one_for_each_input(
    stub: GRPCInferenceServiceStub, images: list[Path]
) -> None:
    request = raw(images[:1], 2)
    del request.raw_input_contents[1]
    code, details, _ = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))
    assert (code, "1 raw_input_contents for 2 inputs" in details) == (CODE.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_refused(channel: grpc.Channel, body: bytes) -> None:
    call = channel.unary_unary(INFER)
    code, details, _ = refusal(lambda: call(body, metadata=WITH_TOKEN))
    assert (code, details) == (CODE.INVALID_ARGUMENT, "this is no ModelInferRequest")


def test_messages_over_the_limit_are_refused_also_when_they_come_compressed(
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
    assert (code, details) == (CODE.INVALID_ARGUMENT, "this is no ModelInferRequest")


OPEN = ("ServerLive", "ServerReady")
GUARDED = ("ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")


@pytest.mark.parametrize("method", GUARDED)
def test_without_the_token_only_liveness_and_readiness_are_told(
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


def test_tokens_change_while_the_server_runs(stub: GRPCInferenceServiceStub, tokens: Path) -> None:
    def ready(token: str) -> bool:
        metadata = [("authorization", f"Bearer {token}")]
        return stub.ModelReady(pb.ModelReadyRequest(name="pets"), metadata=metadata).ready

    try:
        write_tokens(tokens, OTHER_TOKEN)
        assert ready(OTHER_TOKEN)
        assert refusal(lambda: ready(TOKEN))[0] == CODE.UNAUTHENTICATED
        tokens.chmod(0o644)
        code, details, trailing = refusal(lambda: ready(OTHER_TOKEN))
        assert (code, trailing["retry-after"]) == (CODE.UNAVAILABLE, "1")
        assert str(tokens) not in details
    finally:
        write_tokens(tokens, TOKEN)
    assert ready(TOKEN)


SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
NOT_OFFERED = [
    f"/{SERVICE.full_name}/{method.name}"
    for method in SERVICE.methods
    if method.name not in (*OPEN, *GUARDED)
]


@pytest.mark.parametrize(
    "path",
    [
        *NOT_OFFERED,
        "/inference.GRPCInferenceService/check_health",
        "/inference.GRPCInferenceService/__init__",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/ray.serve.RayServeAPIService/ListApplications",
        "/ray.serve.RayServeAPIService/Healthz",
        "/nowhere",
    ],
)
def test_what_is_not_offered_is_unimplemented(channel: grpc.Channel, path: str) -> None:
    code, _, _ = refusal(lambda: channel.unary_unary(path)(b"", metadata=WITH_TOKEN))
    assert code == CODE.UNIMPLEMENTED


def test_a_stream_is_unimplemented_at_once(stub: GRPCInferenceServiceStub) -> None:
    assert any(path.endswith("ModelStreamInfer") for path in NOT_OFFERED)
    never = Event()

    def requests() -> Iterator[pb.ModelInferRequest]:
        yield pb.ModelInferRequest(model_name="pets")
        never.wait(60)

    try:
        answers = stub.ModelStreamInfer(requests(), metadata=WITH_TOKEN, timeout=TIMEOUT - 1)
        assert refusal(lambda: next(answers))[0] == CODE.UNIMPLEMENTED
    finally:
        never.set()


def test_a_message_that_does_not_arrive_is_given_up(channel: grpc.Channel) -> None:
    never = Event()

    def parts() -> Iterator[bytes]:
        never.wait(60)
        yield b""

    try:
        code, details, _ = refusal(
            lambda: channel.stream_unary(INFER)(parts(), metadata=WITH_TOKEN, timeout=30)
        )
    finally:
        never.set()
    assert (code, "in time" in details) == (CODE.DEADLINE_EXCEEDED, True)


def test_metadata_that_ray_would_obey_is_not_passed_on(stub: GRPCInferenceServiceStub) -> None:
    for metadata in ([("application", "other")], [("request_id", "a b")]):
        live, call = stub.ServerLive.with_call(pb.ServerLiveRequest(), metadata=metadata)
        assert live.live
        assert metadata[0] not in list(call.trailing_metadata())


# ---------------------------------------------------------------------------- load and counts


def test_a_deadline_ends_the_work_and_excess_is_shed_and_both_are_counted(
    stub: GRPCInferenceServiceStub, client: httpx.Client, images: list[Path]
) -> None:
    request = raw(images[:1], 2, 3)
    right = stub.ModelInfer(request, metadata=WITH_TOKEN).raw_output_contents[0]
    time.sleep(3)  # reports are a second apart
    before = counts(client)

    def ask_once(seconds: float) -> pb.ModelInferResponse | grpc.RpcError:
        try:
            return stub.ModelInfer(request, metadata=WITH_TOKEN, timeout=seconds)
        except grpc.RpcError as error:
            return error

    late = ask_once(BATCH_WAIT / 2)
    assert late.code() == CODE.DEADLINE_EXCEEDED
    refusal(lambda: stub.ModelInfer(pb.ModelInferRequest(), metadata=WITH_TOKEN))
    with ThreadPoolExecutor(60) as threads:
        found = list(threads.map(ask_once, [30.0] * 60))
    refused = [one for one in found if isinstance(one, grpc.RpcError)]
    assert 0 < len(refused) < len(found)
    for one in refused:
        assert one.code() == CODE.RESOURCE_EXHAUSTED
        assert dict(one.trailing_metadata())["retry-after"] == "1"
    for one in found:
        if not isinstance(one, grpc.RpcError):
            scores = np.frombuffer(one.raw_output_contents[0], "<f4")
            assert scores == pytest.approx(np.frombuffer(right, "<f4"), rel=1e-4, abs=1e-5)
    expected = {
        "kway_query_requests_total:client_left": 1,
        "kway_query_requests_total:unknown_model": 1,
        "kway_query_requests_total:too_busy": len(refused),
        "kway_query_requests_total:ok": len(found) - len(refused),
        "kway_query_inputs_total": len(found) - len(refused),
    }
    grown = wait_for_counts(client, before, expected)
    assert {key: grown[key] for key in expected} == expected


# ---------------------------------------------------------------------------- the process


def test_nothing_listens_beyond_loopback(server: Server) -> None:
    listening = [
        (connection.laddr.ip, connection.laddr.port)
        for connections in of_each(server, psutil.Process.net_connections)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]
    ports = {port for _, port in listening}
    assert {address for address, _ in listening} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert {int(url.rpartition(":")[2]) for url in (server.url, server.grpc)} < ports


def test_a_grpc_port_in_use_is_one_line_and_exit_code_2(
    kway: Callable[..., int], capsys: pytest.CaptureFixture[str], server: Server, bundle: Path
) -> None:
    port = server.grpc.rpartition(":")[2]
    assert kway("serve", bundle, "--port", 0, "--grpc-port", port) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"error: .* port {port} .*--grpc-port\n", shown.err), shown.err
    with pytest.raises(ValueError, match="both 9000"):
        ServingConfig(port=9000, grpc_port=9000)


_WRITE_AND_READ = """
import json, yaml
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema
from serving.config import ServingConfig
from serving.deploy.cluster import config_file
texts = [
    config_file("/pets", ServingConfig(port=8000, grpc_port=port, max_body_bytes=8 * 2**20))
    for port in (9000, None)
]
read = [ServeDeploySchema.model_validate(yaml.safe_load(text)).grpc_options for text in texts]
options = [gRPCOptions(**one.model_dump()) for one in read]
print(json.dumps({
    "variable": ["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=8388608" in text for text in texts],
    "port": options[0].port,
    "reflection": options[0].enable_reflection,
    "functions": [[f.__name__ for f in one.grpc_servicer_func_callable] for one in options],
}))
"""


@pytest.mark.slow
def test_the_config_file_for_clusters_has_grpc_where_it_is_asked_for() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _WRITE_AND_READ], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "variable": [True, False],
        "port": 9000,
        "reflection": False,
        "functions": [["add_methods_to_server"], []],
    }


def test_when_a_replica_is_killed_calls_are_answered_by_the_other(
    stub: GRPCInferenceServiceStub, server: Server, images: list[Path]
) -> None:
    request = raw(images[:1], 2)
    right = np.frombuffer(
        stub.ModelInfer(request, metadata=WITH_TOKEN).raw_output_contents[0], "<f4"
    )

    def ask_until_answered(place: int) -> np.ndarray:
        if place == 10:
            next(iter(replicas_of(server).values())).kill()
        for _ in range(100):
            try:
                found = stub.ModelInfer(request, metadata=WITH_TOKEN, timeout=20)
            except grpc.RpcError as error:
                if error.code() not in (CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED):
                    raise
                time.sleep(0.2)
                continue
            return np.frombuffer(found.raw_output_contents[0], "<f4")
        raise AssertionError("no answer")

    with ThreadPoolExecutor(4) as threads:
        for scores in threads.map(ask_until_answered, range(40)):
            assert scores == pytest.approx(right, rel=1e-4, abs=1e-5)
    until = time.monotonic() + 60
    while len(replicas_of(server)) < REPLICAS:  # other tests need both
        assert time.monotonic() < until
        time.sleep(0.2)


def test_a_fault_of_the_server_is_told_in_its_log_and_not_to_clients(
    stub: GRPCInferenceServiceStub,
    server: Server,
    client: httpx.Client,
    bundle: Path,
    images: list[Path],
) -> None:
    weights = bundle / "class_weights.safetensors"
    request = typed(images[:1], NEVER_ASKED)
    whole = weights.read_bytes()
    os.truncate(weights, 100)
    try:
        code, details, _ = refusal(lambda: stub.ModelInfer(request, metadata=WITH_TOKEN))
        answer = client.post("/v1/query", json=as_json(images[:1], classes=[NEVER_ASKED]))
    finally:
        weights.write_bytes(whole)
    assert error_of(answer)[:2] == (500, "internal")
    assert (code, details) == (CODE.INTERNAL, "the server failed; its log says why")
    deadline = time.monotonic() + 10
    while str(weights) not in server.errors.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    said = server.errors.read_text()
    assert str(weights) in said
    assert "Traceback" in said
    assert "ModelInfer failed" in said
    assert stub.ModelInfer(request, metadata=WITH_TOKEN).outputs


def test_no_token_stands_in_a_log_or_an_argument(
    stub: GRPCInferenceServiceStub, server: Server
) -> None:
    """Late: calls of all kinds were made."""
    session = session_of(server)
    files = [path for path in session.rglob("*") if path.is_file()]
    assert len(files) > 10
    for secret in (TOKEN, OTHER_TOKEN):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert secret not in server.errors.read_text()
        lines = of_each(server, lambda process: " ".join(process.cmdline()))
        assert [line for line in lines if secret in line] == []
    assert stub.ServerLive(pb.ServerLiveRequest()).live


def test_tritonclient_tells_a_refusal_by_its_status(triton: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as refused:
        triton.get_model_metadata("pets")
    assert refused.value.status() == str(CODE.UNAUTHENTICATED)
