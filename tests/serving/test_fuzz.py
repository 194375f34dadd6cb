"""Generated bodies, parameters and content types cause no 5xx and no crash, and all errors have the
same format.

The application raises internal errors here, so any 500 fails the test.
"""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.bad_images import encoded
from tests.serving.in_process import application, ask, refusal
from tests.tiny_bundle import NAMES, write, write_of_texts

LIMITS = {"max_body_bytes": 20_000, "max_pixels": 100_000, "max_inputs": 3, "max_classes": 4}
FILES = [
    encoded(Image.radial_gradient("L").resize((24, 20)).convert(mode), kind)
    for mode, kind in (("L", "png"), ("RGB", "jpeg"), ("P", "gif"), ("RGBA", "webp"), ("1", "bmp"))
]
BASE64 = [base64.b64encode(file).decode() for file in FILES]


texts = st.text(max_size=30) | st.sampled_from(["\ud800", "\0", "\u202e", "x" * 5000, "http://a"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
scalars |= st.sampled_from([10**400, -(10**25), 1e308, "9" * 4400, *NAMES, *BASE64, 0, 0.9])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3)
)
optional = {
    "images": st.lists(st.sampled_from(BASE64), max_size=4) | values,
    "texts": st.lists(texts, max_size=4) | values,
    "recall": st.sampled_from([0.9, 0.99, 1, -1.5]) | values,
    "threshold": values,
    "x": values,
}
classes = st.lists(st.sampled_from([*NAMES, 0, "#1"]), min_size=1, max_size=4)
valid = st.builds(
    lambda names, inputs: {"classes": names, "recall": 0.9, **inputs},
    classes,
    st.builds(lambda file: {"images": [file]}, st.sampled_from(BASE64)) | st.just({"texts": ["a"]}),
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
        body[start : start + draw(st.integers(0, 40))] = draw(st.binary(max_size=40))
    return bytes(body)


parts = st.builds(
    '--b\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'.format,
    st.sampled_from(["classes", "images", "texts", "recall", "", "é"]),
    st.sampled_from(["", '; filename="a.png"', '; filename=""', "; filename*=x''%ff"]),
)
contents = st.sampled_from([b"husky", b"0.9", b"\xff", b"1e400", *FILES]) | st.binary(max_size=60)
forms = st.lists(st.tuples(parts, contents), max_size=6).map(
    lambda found: b"".join(head.encode() + body + b"\r\n" for head, body in found) + b"--b--\r\n"
)
bodies = st.fixed_dictionaries({"classes": classes | values}, optional=optional)
requests = st.one_of(
    st.tuples(st.just("application/json"), valid.map(as_json)),
    st.tuples(st.just("application/json"), damaged(valid.map(as_json))),
    st.tuples(st.just("application/json"), damaged(bodies.map(as_json))),
    st.tuples(st.just("multipart/form-data; boundary=b"), damaged(forms)),
    st.tuples(st.sampled_from(["image/png", "text/plain"]), damaged(st.sampled_from(FILES))),
    st.tuples(
        st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40),
        st.binary(max_size=99),
    ),
)
names = st.sampled_from(["classes", "recall", "threshold", "x"])
parameters = st.lists(st.tuples(names, st.sampled_from([*NAMES, "#0", "0.9"]) | texts), max_size=4)


def test_generated_bodies_never_cause_an_internal_error(tmp_path: Path) -> None:
    bundles = [write(tmp_path / "images"), write_of_texts(tmp_path / "texts")]
    apis, seen = [application(bundle, **LIMITS) for bundle in bundles], set()

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
        pairs = [(name, value.encode("utf-8", "replace").decode()) for name, value in query]
        headers = {"content-type": kind.encode("latin-1")}
        for api in apis:
            url = f"/v1/query?{httpx.QueryParams(pairs)}"
            answer = ask(api, "POST", url, content=body, headers=headers)
            seen.add(answer.status_code)
            if answer.status_code != 200:
                status, code = refusal(answer)
                assert status in (400, 404, 413, 415, 422), answer.text
                assert code != "refused"  # each of our errors has its own code
                assert len(answer.content) < 2000

    queries()
    assert {200, 400, 422} <= seen
