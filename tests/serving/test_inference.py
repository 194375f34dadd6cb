"""The Open Inference Protocol over REST, in JSON and with tritonclient's binary tensors."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from tests.noise_images import image
from tests.serving.in_process import application, ask, listening
from tests.tiny_bundle import NAMES, write, write_of_texts

MAX_INPUTS, MAX_CLASSES, MAX_CHARS = 4, 5, 300


def api_of(bundle: Path) -> FastAPI:
    return application(
        bundle, max_inputs=MAX_INPUTS, max_classes=MAX_CLASSES, max_text_chars=MAX_CHARS
    )


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return api_of(write(tmp_path_factory.mktemp("bundles") / "pets"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    return api_of(write_of_texts(tmp_path_factory.mktemp("bundles") / "texts"))


def tensor(name: str, datatype: str, data: list, shape: list[int] | None = None) -> dict:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data}


FILES = [image(seed) for seed in range(3)]
ENCODED = [base64.b64encode(one).decode() for one in FILES]
IMAGES = tensor("images", "BYTES", ENCODED)
CLASS_IDS = tensor("class_ids", "INT64", [2, 0])


def inferred(api: FastAPI, *inputs: dict, model: str = "pets", **more: Any) -> httpx.Response:
    body = {"inputs": list(inputs), **more}
    return ask(api, "POST", f"/v2/models/{model}/infer", json=body)


def queried(api: FastAPI, **body: Any) -> list[dict]:
    found = ask(api, "POST", "/v1/query", json=body).json()
    return [verdict for result in found["results"] for verdict in result["verdicts"]]


def test_results_match_those_of_the_query_api(pets: FastAPI) -> None:
    expected = queried(pets, classes=[2, 0], images=ENCODED, recall=0.9)
    answer = inferred(pets, IMAGES, CLASS_IDS, id="seven", parameters={"recall": 0.9})
    assert answer.status_code == 200
    found = answer.json()
    assert (found["model_name"], found["id"]) == ("pets", "seven")
    assert found["parameters"]["aligned"] in (True, False)
    outputs = {output["name"]: output for output in found["outputs"]}
    assert list(outputs) == ["scores", "thresholds", "matches"]
    assert [outputs[name]["shape"] for name in outputs] == [[3, 2], [2], [3, 2]]
    assert outputs["scores"]["data"] == pytest.approx([v["score"] for v in expected])
    assert outputs["thresholds"]["data"] == [v["threshold"] for v in expected[:2]]
    assert outputs["matches"]["data"] == [v["match"] for v in expected]


@pytest.mark.parametrize("recall", ["0.9", "9e-1", "+0.90"])
def test_a_recall_may_be_a_string(pets: FastAPI, recall: str) -> None:
    """KServe's gRPC client cannot send floating-point parameters."""
    found, expected = (
        inferred(pets, IMAGES, CLASS_IDS, parameters={"recall": one}).json()["outputs"]
        for one in (recall, 0.9)
    )
    assert found == expected


def test_class_names_are_accepted_and_only_requested_outputs_are_returned(pets: FastAPI) -> None:
    names = tensor("classes", "BYTES", [NAMES[2], NAMES[0]])
    options = {"parameters": {"threshold": 0.1}, "outputs": [{"name": "matches"}]}
    (matches,) = inferred(pets, IMAGES, names, **options).json()["outputs"]
    expected = queried(pets, classes=[2, 0], images=ENCODED, threshold=0.1)
    assert matches["data"] == [verdict["match"] for verdict in expected]
    (scores,) = inferred(pets, IMAGES, names).json()["outputs"]
    assert scores["name"] == "scores"


def test_data_may_be_nested_and_optional_members_may_be_null(pets: FastAPI) -> None:
    options: dict[str, Any] = {"id": None, "parameters": None, "outputs": None}
    nested = [
        tensor("images", "BYTES", [[one] for one in ENCODED], [3, 1]) | {"parameters": None},
        tensor("class_ids", "INT64", [[[2, 0]]], [1, 1, 2]),
    ]
    found = inferred(pets, *nested, **options)
    assert found.json()["outputs"] == inferred(pets, IMAGES, CLASS_IDS).json()["outputs"]
    mixed = tensor("class_ids", "INT64", [[2], 0], [2])
    assert inferred(pets, IMAGES, mixed).status_code == 400


@pytest.mark.parametrize("name", ["parameters", "images", "scores"])
def test_an_unknown_parameter_is_rejected(pets: FastAPI, name: str) -> None:
    unknown = {"parameters": {"recal": 0.9}}
    inputs = [IMAGES | unknown if name == "images" else IMAGES, CLASS_IDS]
    options: dict[str, Any] = unknown if name == "parameters" else {}
    if name == "scores":
        options = {"outputs": [{"name": "scores", **unknown}]}
    found = inferred(pets, *inputs, **options)
    assert found.status_code == 400
    assert "recal: Extra inputs are not permitted" in found.json()["error"]
    assert "\n" not in found.json()["error"]


@pytest.mark.parametrize(
    ("inputs", "more", "status", "words"),
    [
        (
            [IMAGES, CLASS_IDS, tensor("classes", "BYTES", ["a"])],
            {},
            400,
            "either the input class_ids",
        ),
        ([CLASS_IDS], {}, 400, "'images' is missing"),
        ([IMAGES, CLASS_IDS, CLASS_IDS], {}, 400, "duplicate input"),
        ([IMAGES, tensor("class_ids", "INT32", [1])], {}, 400, "INT32: send INT64"),
        ([IMAGES, tensor("class_ids", "INT64", [True])], {}, 400, "not INT64"),
        ([IMAGES, tensor("class_ids", "INT64", [1, 2], [3])], {}, 400, "does not match"),
        ([IMAGES, tensor("class_ids", "INT64", [1, 2, 3, 4], [2, 2])], {}, 400, "one-dimensional"),
        ([tensor("images", "BYTES", ENCODED[:1] * 5), CLASS_IDS], {}, 413, "the limit is 4"),
        ([tensor("images", "BYTES", ["?"]), CLASS_IDS], {}, 400, "not valid base64"),
        ([tensor("images", "BYTES", [7]), CLASS_IDS], {}, 400, "not strings"),
        ([tensor("photos", "BYTES", ENCODED), CLASS_IDS], {}, 400, "unknown input 'photos'"),
        ([IMAGES, CLASS_IDS], {"outputs": [{"name": "matches"}]}, 400, "without recall"),
        ([IMAGES, CLASS_IDS], {"parameters": {"recall": "high"}}, 400, "a valid number"),
        ([IMAGES, CLASS_IDS], {"parameters": {"threshold": "nan"}}, 400, "a finite number"),
    ],
)
def test_invalid_requests_are_rejected_in_the_error_format_of_the_protocol(
    inputs: list[dict], more: dict, status: int, words: str, pets: FastAPI
) -> None:
    answer = inferred(pets, *inputs, **more)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert words in answer.json()["error"]


def test_malformed_bodies_are_rejected(pets: FastAPI, texts: FastAPI) -> None:
    path = "/v2/models/pets/infer"
    for body in (b"", b"{", b"[]", b"\xff", b'{"inputs": 1}', b"[" * 100_000):
        answer = ask(pets, "POST", path, content=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"])
    long = tensor("texts", "BYTES", ["x" * (MAX_CHARS + 1)])
    assert inferred(texts, long, CLASS_IDS, model="texts").status_code == 413


# ---------------------------------------------------------------------------- binary tensors


HEADER = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def client(pets: FastAPI) -> Iterator[InferenceServerClient]:
    with listening(pets) as url, InferenceServerClient(url.removeprefix("http://")) as opened:
        yield opened


def infer_input(name: str, values: list, datatype: str, *, binary: bool = True) -> InferInput:
    dtype = np.int64 if datatype == "INT64" else object
    tensor = InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(np.array(values, dtype=dtype), binary_data=binary)
    return tensor


BINARY_IMAGES = infer_input("images", FILES, "BYTES")
BINARY_IDS = infer_input("class_ids", [2, 0], "INT64")


def assert_as_queried(answer: Any, pets: FastAPI) -> None:
    expected = queried(pets, classes=[2, 0], images=ENCODED, recall=0.9)
    for output, field in (("scores", "score"), ("matches", "match")):
        wanted = np.array([one[field] for one in expected]).reshape(3, 2)
        np.testing.assert_allclose(answer.as_numpy(output), wanted, rtol=1e-5, atol=1e-5)
    thresholds = [one["threshold"] for one in expected[:2]]
    np.testing.assert_allclose(answer.as_numpy("thresholds"), thresholds)
    assert answer.as_numpy("scores").dtype == np.float32
    assert answer.as_numpy("matches").dtype == np.bool_


def test_a_client_with_binary_tensors_gets_the_same_results_as_the_query_api(
    client: InferenceServerClient, pets: FastAPI
) -> None:
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.is_model_ready("pets")
    answer = client.infer(
        "pets",
        [BINARY_IMAGES, BINARY_IDS],
        request_id="7",
        parameters={"recall": 0.9},
    )
    assert_as_queried(answer, pets)
    assert answer.get_response()["id"] == "7"
    sizes = {one["name"]: one["parameters"] for one in answer.get_response()["outputs"]}
    assert sizes["scores"] == {"binary_data_size": 4 * 3 * 2}
    assert answer.get_response()["parameters"]["aligned"] is True


def test_binary_and_json_may_be_mixed_in_inputs_and_outputs(
    client: InferenceServerClient, pets: FastAPI
) -> None:
    names = infer_input("classes", [NAMES[2], NAMES[0]], "BYTES", binary=False)
    outputs = [
        InferRequestedOutput("thresholds", binary_data=False),
        InferRequestedOutput("scores"),
        InferRequestedOutput("matches", binary_data=False),
    ]
    answer = client.infer(
        "pets", [BINARY_IMAGES, names], outputs=outputs, parameters={"recall": 0.9}
    )
    assert_as_queried(answer, pets)
    forms = {one["name"]: "data" in one for one in answer.get_response()["outputs"]}
    assert forms == {"thresholds": True, "scores": False, "matches": True}


IDS = np.array([2], "<i8").tobytes()
IMAGE = len(FILES[0]).to_bytes(4, "little") + FILES[0]


def body_of(sizes: tuple[Any, Any], binary: bytes, **more: Any) -> tuple[bytes, int]:
    inputs = [
        {"name": name, "datatype": kind, "shape": [1], "parameters": {"binary_data_size": size}}
        for name, kind, size in zip(("images", "class_ids"), ("BYTES", "INT64"), sizes, strict=True)
    ]
    inputs[0] |= more
    text = json.dumps({"inputs": inputs}).encode()
    return text + binary, len(text)


VALID = body_of((len(IMAGE), 8), IMAGE + IDS)


def sent(api: FastAPI, body: bytes, length: object) -> httpx.Response:
    headers = {} if length is None else {HEADER: str(length)}
    return ask(api, "POST", "/v2/models/pets/infer", content=body, headers=headers)


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (VALID[0], "", "Inference-Header-Content-Length is ''"),
        (VALID[0], "9" * 5000, "is '9999"),
        (VALID[0], len(VALID[0]) + 1, "but the body has"),
        (VALID[0], VALID[1] - 1, "Invalid JSON"),
        (VALID[0][:-1], VALID[1], "class_ids has binary_data_size 8, but only 7 bytes"),
        (VALID[0] + b"x", VALID[1], "1 bytes follow the last input"),
        (VALID[0][: VALID[1]], None, "0 bytes remain .* binary_data=False"),
        (*body_of((len(IMAGE), 8.0), IMAGE + IDS), "binary_data_size: .* valid integer"),
        (*body_of((len(IMAGE), 8), IMAGE + IDS, data=["x"]), "images must have either data or"),
        (*body_of((len(IMAGE) - 1, 9), IMAGE + IDS), r"images\[0\] is truncated"),
        (
            *body_of((len(IMAGE) + 1, 7), IMAGE + IDS),
            r"images\[1\] is truncated within its 4-byte length",
        ),
        (*body_of((8, 8), b"\xff" * 8 + IDS), r"images\[0\] is truncated: .* 4294967295 bytes"),
        (*body_of((len(IMAGE), 7), IMAGE + IDS[:7]), "class_ids has 7 raw bytes"),
    ],
)
def test_a_body_with_inconsistent_lengths_is_rejected_with_the_reason(
    pets: FastAPI, body: bytes, length: object, words: str
) -> None:
    answer = sent(pets, body, length)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"])


def test_the_number_of_elements_is_limited(pets: FastAPI) -> None:
    empty = bytes(4) * 20_000
    answer = sent(pets, *body_of((len(empty), 8), empty + IDS))
    assert answer.status_code == 413
    assert "images has more than" in answer.json()["error"]
