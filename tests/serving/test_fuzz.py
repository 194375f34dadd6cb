"""Generated bodies, parameters and headers cause no 5xx and no crash, and all errors have the same
format.

The application raises internal errors here, so any 500 fails the test.
"""

import asyncio
import base64
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.bad_images import encoded
from tests.serving.in_process import application, refusal
from tests.tiny_bundle import NAMES, write, write_of_texts

LIMITS = {"max_body_bytes": 20_000, "max_pixels": 100_000, "max_inputs": 3, "max_classes": 4}
FILES = [
    encoded(Image.radial_gradient("L").resize((24, 20)).convert(mode), kind)
    for mode, kind in (
        ("L", "png"),
        ("RGBA", "png"),
        ("RGB", "jpeg"),
        ("P", "gif"),
        ("RGBA", "webp"),
        ("RGB", "webp"),
        ("RGB", "bmp"),
        ("1", "png"),
    )
]
BASE64 = [base64.b64encode(file).decode() for file in FILES]


@pytest.fixture(scope="module")
def apis(tmp_path_factory: pytest.TempPathFactory) -> list[FastAPI]:
    folder = tmp_path_factory.mktemp("bundles")
    return [
        application(write(folder / "images"), **LIMITS),
        application(write_of_texts(folder / "texts"), **LIMITS),
    ]


# ---------------------------------------------------------------------------- requests

any_text = st.text(max_size=30) | st.sampled_from(
    ["\ud800", "\0", "\u202e", "x" * 5000, "http://a"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | any_text
    | st.sampled_from([10**400, -(10**25), 1e308, "9" * 4400, *NAMES, *BASE64, 0, 0.9])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=3),
)
classes = st.lists(st.sampled_from([*NAMES, 0, "#1"]), min_size=1, max_size=5) | values
images = (
    st.lists(st.sampled_from([*BASE64, "data:image/png;base64," + BASE64[0]]), max_size=4) | values
)
texts = st.lists(st.sampled_from(["a cat", "", "猫 🐶"]) | any_text, max_size=4) | values
numbers = st.sampled_from([0.9, 0.99, 1, -1.5]) | values
bodies = st.fixed_dictionaries(
    {"classes": classes},
    optional={
        "images": images,
        "texts": texts,
        "recall": numbers,
        "threshold": numbers,
        "x": values,
    },
)
valid = st.fixed_dictionaries(
    {"classes": st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)},
    optional={"recall": st.sampled_from([0.9, 0.99])},
) | st.just({"classes": ["husky"], "threshold": 0})
valid_bodies = st.builds(
    lambda query, inputs: {**query, **inputs},
    valid,
    st.builds(lambda n: {"images": BASE64[n:][:3]}, st.integers(0, len(BASE64) - 1))
    | st.builds(lambda text: {"texts": [text]}, st.sampled_from(["a cat", "", "猫 🐶"])),
)


def as_json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


@st.composite
def damaged(draw: st.DrawFn, original: st.SearchStrategy[bytes]) -> bytes:
    """Draw a copy of `original` with up to four runs of bytes replaced, removed or inserted."""
    body = bytearray(draw(original))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(len(body), start + 40)))
        body[start:end] = draw(st.binary(max_size=40))
    return bytes(body)


@st.composite
def forms(draw: st.DrawFn) -> bytes:
    parts = []
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(["classes", "images", "texts", "recall", "threshold", "", "é"]))
        file = draw(
            st.sampled_from(["", '; filename="a.png"', '; filename=""', "; filename*=x''%ff"])
        )
        plain = st.sampled_from([b"husky", b"0.9", b"a cat", b"", b"\xff", b"#2", b"1e400"])
        content = draw(plain | st.sampled_from(FILES) | st.binary(max_size=60))
        head = f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts.append(head.encode() + content + b"\r\n")
    return b"".join(parts) + b"--b--\r\n"


requests = st.one_of(
    st.tuples(st.just("application/json"), valid_bodies.map(as_json)),
    st.tuples(st.just("application/json"), damaged(valid_bodies.map(as_json))),
    st.tuples(st.just("application/json"), damaged(bodies.map(as_json))),
    st.tuples(st.just("application/json"), bodies.map(as_json)),
    st.tuples(st.just("application/json"), st.binary(max_size=200)),
    st.tuples(st.just("multipart/form-data; boundary=b"), damaged(forms())),
    st.tuples(st.just("multipart/form-data; boundary=b"), forms()),
    st.tuples(
        st.sampled_from(["image/png", "application/octet-stream"]), damaged(st.sampled_from(FILES))
    ),
    st.tuples(
        st.sampled_from(["text/plain", "text/plain; charset=latin-1"]), st.binary(max_size=99)
    ),
    st.tuples(
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40),
        st.binary(max_size=99),
    ),
)
parameters = st.lists(
    st.tuples(
        st.sampled_from(["classes"] * 4 + ["recall", "threshold", "all", "x"]),
        st.sampled_from([*NAMES, "#0", "0.9", "1e9", "true"]) | any_text,
    ),
    max_size=4,
)


def encoded_parameters(pairs: list[tuple[str, str]]) -> str:
    return str(
        httpx.QueryParams(
            [(name, value.encode("utf-8", "replace").decode()) for name, value in pairs]
        )
    )


# ---------------------------------------------------------------------------- responses


def send(
    apis: list[FastAPI], method: str, url: str, body: bytes, kind: str
) -> list[httpx.Response]:
    async def sent() -> list[httpx.Response]:
        answers = []
        for api in apis:
            transport = httpx.ASGITransport(app=api)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                headers = {"content-type": kind.encode("latin-1")}
                answers.append(await client.request(method, url, content=body, headers=headers))
        return answers

    return asyncio.run(sent())


def check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        return
    status, code = refusal(answer)
    assert status in (400, 404, 413, 415, 422), answer.text
    assert code != "refused"  # each of our errors has its own code
    assert len(answer.content) < 2000


def test_generated_bodies_never_cause_an_internal_error(apis: list[FastAPI]) -> None:
    seen = set()

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,  # the same bodies in every run
        suppress_health_check=list(HealthCheck),
    )
    @given(request=requests, query=st.just([]) | parameters)
    def queries(request: tuple[str, bytes], query: list[tuple[str, str]]) -> None:
        kind, body = request
        for answer in send(apis, "POST", f"/v1/query?{encoded_parameters(query)}", body, kind):
            check(answer)
            seen.add(answer.status_code)

    queries()
    assert {200, 400, 422} <= seen
