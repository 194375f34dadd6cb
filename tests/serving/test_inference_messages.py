"""The protocol's gRPC messages, without a server."""

import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import serialize_byte_tensor

from serving.api_error import ApiError
from serving.config import ServingConfig
from serving.inference.methods import inference_of, parsed
from serving.inference.tensors import ResponseOutput, check_inference

INT64 = st.integers(-(2**63), 2**63 - 1)
ELEMENTS = st.one_of(
    st.tuples(st.just("BYTES"), st.lists(st.binary(max_size=40), min_size=1, max_size=8)),
    st.tuples(st.just("INT64"), st.lists(INT64, min_size=1, max_size=8)),
)


def raw_of(datatype: str, elements: list) -> bytes:
    """Encode elements as tritonclient does."""
    if datatype == "INT64":
        return np.array(elements, np.int64).tobytes()
    return serialize_byte_tensor(np.array(elements, dtype=object)).item()


def request_of(*tensors: tuple[str, list], is_raw: bool = True) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="pets")
    for position, (datatype, elements) in enumerate(tensors):
        one = request.inputs.add(name=f"t{position}", datatype=datatype, shape=[len(elements)])
        if is_raw:
            request.raw_input_contents.append(raw_of(datatype, elements))
        else:
            field = {"BYTES": "bytes_contents", "INT64": "int64_contents"}[datatype]
            getattr(one.contents, field).extend(elements)
    return request


@given(st.lists(ELEMENTS, min_size=1, max_size=3), st.booleans())
def test_elements_survive_a_round_trip(tensors: list[tuple[str, list]], is_raw: bool) -> None:
    sent = request_of(*tensors, is_raw=is_raw).SerializeToString()
    found = inference_of(parsed(pb.ModelInferRequest, sent)).inputs
    assert [(one.datatype, one.data) for one in found] == tensors
    assert [one.shape for one in found] == [[len(elements)] for _, elements in tensors]


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_parsed_or_rejected(raw: bytes) -> None:
    with suppress(ApiError):  # any other exception is a bug
        check_inference(inference_of(parsed(pb.ModelInferRequest, raw)), "images", ServingConfig())


def test_typed_contents_of_another_type_or_besides_raw_ones_are_rejected() -> None:
    request = request_of(("INT64", [1]))
    request.inputs[0].contents.fp32_contents.append(1)
    with pytest.raises(ApiError, match="or of all in their contents"):
        inference_of(request)
    del request.raw_input_contents[:]
    with pytest.raises(ApiError, match="Send its elements as int64_contents"):
        inference_of(request)


def test_a_threshold_beyond_fp32_is_infinite() -> None:
    thresholds = ResponseOutput(name="thresholds", datatype="FP32", shape=[2], data=[1e300, -1e300])
    assert struct.unpack("<2f", thresholds.array().tobytes()) == (float("inf"), float("-inf"))


def test_parameters_of_all_kinds_are_read() -> None:
    request = request_of(("INT64", [1]))
    request.parameters["binary_data_output"].bool_param = True
    request.parameters["threshold"].int64_param = -3
    request.parameters["recall"].double_param = 0.5
    request.parameters["require"].string_param = "guaranteed"
    assert inference_of(request).parameters.model_dump() == {
        "binary_data_output": True,
        "threshold": -3.0,
        "recall": 0.5,
        "require": "guaranteed",
    }
    request.parameters["recall"].string_param = "0.5"  # KServe's client sends only strings
    assert inference_of(request).parameters.recall == 0.5


def test_a_shape_with_too_many_dimensions_is_rejected_without_computing_its_size() -> None:
    request = request_of(("INT64", [1]))
    request.inputs[0].name = "class_ids"
    request.inputs[0].shape.extend([2**62] * 50_000)
    images = request.inputs.add(name="images", datatype="BYTES", shape=[0])
    request.raw_input_contents.append(b"")
    with pytest.raises(ApiError, match="50001 dimensions"):
        check_inference(inference_of(request), "images", ServingConfig())
    del request.inputs[0].shape[1:]
    images.shape[0] = -1
    with pytest.raises(ApiError, match="greater than or equal to 0"):
        inference_of(request)
