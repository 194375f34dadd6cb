"""Bodies with huge numbers of small values are rejected before the values are created, without
blocking the event loop.
"""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.http import query_body
from serving.http.query_body import QueryBody
from serving.http.request_body import check_num_values, parse_json
from serving.inference.methods import inference_of, parsed
from tests.serving import in_process
from tests.serving.in_process import post, refusal

MANY = 50_000


@pytest.fixture(scope="module")
def api(bundle: Path) -> FastAPI:
    return in_process.application(bundle)


# --- JSON ---


def joined(one: str, count: int = MANY) -> bytes:
    return ",".join([one] * count).encode()


@pytest.mark.parametrize("one", ["[]", "{}", "1", '""', "[[]]", '"\\""', '"\\\\"', '{"a":"\\\\"}'])
@pytest.mark.parametrize("ends", [(b"[", b"]"), (b'{"a":[', b"]}"), (b'{"a":"x","b":[', b"")])
def test_many_small_values_are_rejected_before_they_are_created(
    one: str, ends: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueryBody, "model_validate_json", None)
    with pytest.raises(ApiError, match="more than 10164 values") as caught:
        parse_json(QueryBody, ends[0] + joined(one) + ends[1], ServingConfig(), "invalid_query")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "text", ["," * MANY, '[{",' * MANY, "\\" * MANY + ",[" * MANY, '\\",' * MANY]
)
def test_delimiters_in_strings_are_not_counted_as_values(text: str) -> None:
    check_num_values(json.dumps([text, {"a": text}]).encode(), 10)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='a,[{"\\:'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a,[{"\\:'), inner),
    )
)
def test_no_more_values_are_created_than_allowed(value: Any) -> None:
    def count(one: Any) -> int:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        return 1 + sum(map(count, inner))

    with suppress(ApiError):
        check_num_values(json.dumps(value).encode(), 5)
        assert count(value) <= 2 * 5 + 1


@pytest.mark.parametrize("path", ["/v1/query", "/v2/models/pets/infer"])
def test_every_endpoint_rejects_too_many_values(api: FastAPI, path: str) -> None:
    body = b'{"id": [' + joined("[]", MANY // 4) + b"]}"
    assert "more than 10164 values" in post(api, path, body, "application/json").text


def test_too_many_images_are_rejected_before_any_is_decoded(
    api: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_body, "image_bytes", None)
    body = json.dumps({"classes": ["husky"], "images": [""] * 5000}).encode()
    answer = post(api, "/v1/query", body, "application/json")
    assert refusal(answer) == (413, "too_many_pictures")


# --- gRPC ---


def with_length(number: int, content: bytes) -> bytes:
    length, rest = b"", len(content)
    while rest > 127:
        length, rest = length + bytes([rest & 127 | 128]), rest >> 7
    return bytes([number << 3 | 2]) + length + bytes([rest]) + content


NAMED = with_length(1, b"pets")
LARGE = {
    "inputs": NAMED + b"*\0" * MANY,
    "parameters": b"".join(with_length(4, with_length(1, b"%x" % i)) for i in range(MANY)),
    "outputs": with_length(6, b"") * MANY,
    "raw": with_length(7, b"") * MANY,
    "shape": with_length(5, with_length(3, b"\1" * MANY)),
    "shape, not packed": with_length(5, b"\x18\1" * MANY),
    "elements": with_length(5, with_length(5, with_length(8, b"") * MANY)),
    "numbers": with_length(5, with_length(5, with_length(3, b"\1" * MANY))),
    "unknown": with_length(15, b"") * MANY,
}


class _NotParsed(Message):
    DESCRIPTOR = pb.ModelInferRequest.DESCRIPTOR


@pytest.mark.parametrize("what", LARGE)
def test_a_message_with_many_small_values_is_rejected_before_it_is_parsed(what: str) -> None:
    pb.ModelInferRequest.FromString(LARGE[what])  # the message is valid
    with pytest.raises(ApiError) as caught:
        parsed(_NotParsed, LARGE[what])
    assert (caught.value.status, caught.value.code) == (413, "too_many_values")


@given(st.integers(0, 50), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_a_message_within_the_limits_is_accepted(count: int, ids: list[int]) -> None:
    request = pb.ModelInferRequest(model_name="pets", raw_input_contents=[b"x" * 9999] * count)
    one = request.inputs.add(name="class_ids", datatype="INT64", shape=[len(ids)])
    one.contents.int64_contents.extend(ids)
    one.contents.fp32_contents.extend([0.5] * 3)
    one.parameters["a"].double_param = 0.5
    request.parameters["b"].string_param = "c"
    raw = request.SerializeToString()
    assert parsed(pb.ModelInferRequest, raw) == request


@pytest.mark.parametrize("datatype", ["BYTES", "INT64"])
def test_many_raw_elements_are_rejected_before_a_list_is_created(datatype: str) -> None:
    request = pb.ModelInferRequest(raw_input_contents=[struct.pack("<I", 0) * 2 * MANY])
    request.inputs.add(name="classes", datatype=datatype, shape=[MANY])
    with pytest.raises(ApiError, match="classes has more than 100 elements"):
        inference_of(request, 100)
    request.raw_input_contents[0] = bytes(400 if datatype == "BYTES" else 800)
    assert len(inference_of(request, 100).inputs[0].data) == 100
