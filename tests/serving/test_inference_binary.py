"""Binary tensors over REST, as tritonclient.http sends them by default."""

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
from tritonclient.utils import InferenceServerException

from tests.serving.in_process import application, ask, listening
from tests.serving.page_driver import image
from tests.tiny_bundle import NAMES, write, write_of_texts

IMAGES = [image(seed) for seed in range(3)]
HEADER = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    bundle = write(tmp_path_factory.mktemp("bundles") / "pets")
    return application(bundle, max_inputs=4, max_body_bytes=100_000)


@pytest.fixture(scope="module")
def url(pets: FastAPI) -> Iterator[str]:
    with listening(pets) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(url.removeprefix("http://")) as opened:
        yield opened


def infer_input(name: str, values: list, datatype: str, *, binary: bool = True) -> InferInput:
    dtype = np.int64 if datatype == "INT64" else object
    tensor = InferInput(name, [len(values)], datatype)
    tensor.set_data_from_numpy(np.array(values, dtype=dtype), binary_data=binary)
    return tensor


def queried(url: str, **body: Any) -> list[dict]:
    files = [("images", one) for one in IMAGES]
    found = httpx.post(f"{url}/v1/query", data=body, files=files).json()
    return [verdict for result in found["results"] for verdict in result["verdicts"]]


def assert_as_queried(answer: Any, url: str, classes: list[int]) -> None:
    names = [f"#{one}" for one in classes]
    expected = queried(url, classes=names, recall="0.9")
    shape = (len(IMAGES), len(classes))
    for output, field in (("scores", "score"), ("matches", "match")):
        wanted = np.array([one[field] for one in expected]).reshape(shape)
        np.testing.assert_allclose(answer.as_numpy(output), wanted, rtol=1e-5, atol=1e-5)
    expected_thresholds = np.array([one["threshold"] for one in expected[: len(classes)]])
    np.testing.assert_allclose(answer.as_numpy("thresholds"), expected_thresholds)
    assert answer.as_numpy("scores").dtype == np.float32
    assert answer.as_numpy("matches").dtype == np.bool_


def test_a_client_with_default_settings_gets_the_same_results_as_the_query_api(
    client: InferenceServerClient, url: str
) -> None:
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    assert client.is_model_ready("pets")
    inputs = [infer_input("images", IMAGES, "BYTES"), infer_input("class_ids", [2, 6], "INT64")]
    answer = client.infer("pets", inputs, request_id="7", parameters={"recall": 0.9})
    assert_as_queried(answer, url, [2, 6])
    assert answer.get_response()["id"] == "7"
    sizes = {one["name"]: one["parameters"] for one in answer.get_response()["outputs"]}
    assert sizes["scores"] == {"binary_data_size": 4 * 3 * 2}
    assert answer.get_response()["parameters"]["aligned"] is True


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_gets_the_same_answer(
    client: InferenceServerClient, url: str, algorithm: str
) -> None:
    inputs = [infer_input("images", IMAGES, "BYTES"), infer_input("class_ids", [2, 6], "INT64")]
    answer = client.infer(
        "pets", inputs, parameters={"recall": 0.9}, request_compression_algorithm=algorithm
    )
    assert_as_queried(answer, url, [2, 6])


def test_binary_and_json_may_be_mixed_in_inputs_and_outputs(
    client: InferenceServerClient, url: str
) -> None:
    inputs = [
        infer_input("images", IMAGES, "BYTES"),
        infer_input("classes", [NAMES[2], NAMES[6]], "BYTES", binary=False),
    ]
    outputs = [
        InferRequestedOutput("thresholds", binary_data=False),
        InferRequestedOutput("scores"),
        InferRequestedOutput("matches", binary_data=False),
    ]
    answer = client.infer("pets", inputs, outputs=outputs, parameters={"recall": 0.9})
    assert_as_queried(answer, url, [2, 6])
    forms = {one["name"]: "data" in one for one in answer.get_response()["outputs"]}
    assert forms == {"thresholds": True, "scores": False, "matches": True}


def test_texts_are_accepted_as_bytes(tmp_path: Path) -> None:
    texts = ["a cat", "猫 und hund 🐶"]
    with (
        listening(application(write_of_texts(tmp_path / "texts"))) as url,
        InferenceServerClient(url.removeprefix("http://")) as client,
    ):
        raw = [one.encode() for one in texts]
        inputs = [infer_input("texts", raw, "BYTES"), infer_input("class_ids", [0], "INT64")]
        scores = client.infer("texts", inputs).as_numpy("scores")
        answer = httpx.post(f"{url}/v1/query", json={"classes": [0], "texts": texts}).json()
    wanted = [[one["verdicts"][0]["score"]] for one in answer["results"]]
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)


def test_the_client_receives_the_error_message(client: InferenceServerClient) -> None:
    inputs = [infer_input("images", [b"no image"], "BYTES"), infer_input("class_ids", [2], "INT64")]
    with pytest.raises(InferenceServerException, match=r"images\[0\]"):
        client.infer("pets", inputs)
    inputs = [infer_input("images", IMAGES * 2, "BYTES"), infer_input("class_ids", [2], "INT64")]
    with pytest.raises(InferenceServerException, match="6 images"):
        client.infer("pets", inputs)


IDS = np.array([2], "<i8").tobytes()
IMAGE = len(IMAGES[0]).to_bytes(4, "little") + IMAGES[0]


def body_of(sizes: tuple[Any, Any], binary: bytes, **more: Any) -> tuple[bytes, int]:
    inputs = [
        {"name": name, "datatype": kind, "shape": [1], "parameters": {"binary_data_size": size}}
        for name, kind, size in zip(("images", "class_ids"), ("BYTES", "INT64"), sizes, strict=True)
    ]
    inputs[0] |= more
    text = json.dumps({"inputs": inputs}).encode()
    return text + binary, len(text)


VALID = body_of((len(IMAGE), 8), IMAGE + IDS)


def inferred(api: FastAPI, body: bytes, length: object) -> httpx.Response:
    headers = {} if length is None else {HEADER: str(length)}
    return ask(api, "POST", "/v2/models/pets/infer", content=body, headers=headers)


def test_a_body_with_consistent_lengths_is_accepted(pets: FastAPI) -> None:
    assert inferred(pets, *VALID).status_code == 200


@pytest.mark.parametrize(
    ("body", "length", "words"),
    [
        (VALID[0], "", "Inference-Header-Content-Length is ''"),
        (VALID[0], "-5", "is '-5'"),
        (VALID[0], "9" * 5000, "is '9999"),
        (VALID[0], len(VALID[0]) + 1, "but the body has"),
        (VALID[0], 0, "invalid JSON"),
        (VALID[0], VALID[1] - 1, "invalid JSON"),
        (VALID[0][:-1], VALID[1], "class_ids has binary_data_size 8, but only 7 bytes"),
        (VALID[0] + b"x", VALID[1], "1 bytes follow the last input"),
        (VALID[0][: VALID[1]], None, "0 bytes remain .* binary_data=False"),
        (*body_of((len(IMAGE), 8.0), IMAGE + IDS), "binary_data_size 8.0"),
        (*body_of((len(IMAGE), True), IMAGE + IDS), "binary_data_size True"),
        (*body_of((len(IMAGE), -8), IMAGE + IDS), "binary_data_size -8"),
        (*body_of((len(IMAGE), 8), IMAGE + IDS, data=["x"]), "images must have either data or"),
        (*body_of((len(IMAGE) - 1, 9), IMAGE + IDS), r"images\[0\] is truncated"),
        (
            *body_of((len(IMAGE) + 1, 7), IMAGE + IDS),
            r"images\[1\] is truncated within its 4-byte length",
        ),
        (*body_of((8, 8), b"\xff" * 8 + IDS), r"images\[0\] is truncated: .* 4294967295 bytes"),
        (*body_of((len(IMAGE), 7), IMAGE + IDS[:7]), "class_ids has 7 raw bytes"),
        (*body_of((len(IMAGE), 8), IMAGE + IDS, datatype="FP32"), "images has datatype FP32"),
    ],
)
def test_a_body_with_inconsistent_lengths_is_rejected_with_the_reason(
    pets: FastAPI, body: bytes, length: object, words: str
) -> None:
    answer = inferred(pets, body, length)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"])


def test_the_number_of_elements_is_limited(pets: FastAPI) -> None:
    empty = bytes(4) * 20_000
    answer = inferred(pets, *body_of((len(empty), 8), empty + IDS))
    assert answer.status_code == 413
    assert "images has more than" in answer.json()["error"]
