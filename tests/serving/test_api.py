"""`POST /v1/query` with each kind of body, `GET /v1/classes` and `GET /v1/model`, and unusual
input.
"""

import base64
import json
import tempfile
from pathlib import Path

import pytest
from fastapi import FastAPI
from PIL import Image

from tests.data.bad_images import encoded, png
from tests.serving.in_process import application, ask, post, refusal
from tests.tiny_bundle import NAMES, write, write_of_texts

MAX_BODY = 100_000


def image(kind: str) -> bytes:
    return encoded(Image.radial_gradient("L").resize((40, 30)), kind)


PNG = image("png")
BOMB = png(20_000, 20_000)
BASE64 = base64.b64encode(PNG).decode()
VALID = json.dumps({"classes": [0], "images": [BASE64]}).encode()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    bundle = write(tmp_path_factory.mktemp("bundles") / "images")
    return application(bundle, max_body_bytes=MAX_BODY, max_inputs=4, max_classes=5)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    bundle = write_of_texts(tmp_path_factory.mktemp("bundles") / "texts")
    return application(bundle, max_body_bytes=MAX_BODY, max_text_chars=300)


def verdicts(api: FastAPI, body: dict) -> dict:
    answer = ask(api, "POST", "/v1/query", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---------------------------------------------------------------------------- kinds of bodies


@pytest.mark.parametrize(
    ("kind", "content_type"),
    [
        ("jpeg", "image/jpeg"),
        ("png", "application/octet-stream"),
        ("gif", "IMAGE/x-any; q=1"),
    ],
)
def test_a_raw_image_body_gets_the_same_answer_as_the_image_in_json(
    api: FastAPI, kind: str, content_type: str
) -> None:
    file = image(kind)
    url = "/v1/query?classes=tabby%20cat&classes=%235&recall=0.9"
    found = post(api, url, file, content_type)
    body = {"images": [base64.b64encode(file).decode()], "classes": ["tabby cat", "#5"]}
    assert found.json() == verdicts(api, {**body, "recall": 0.9})
    assert [one["class_id"] for one in found.json()["results"][0]["verdicts"]] == [3, 5]


def test_a_data_url_gets_the_same_answer_as_its_base64_content(api: FastAPI) -> None:
    plain = verdicts(api, {"classes": [0], "images": [BASE64]})
    for start in ("data:image/png;base64,", "data:;base64,", "DATA:Image/svg+xml;Base64,"):
        assert verdicts(api, {"classes": [0], "images": [start + BASE64]}) == plain


@pytest.mark.parametrize("kind", ["text/plain", 'Text/Plain;charset="UTF-8"'])
def test_a_raw_text_body_gets_the_same_answer_as_the_text_in_json(
    texts: FastAPI, kind: str
) -> None:
    text = "a dog and a cät"
    found = post(texts, "/v1/query?classes=husky&threshold=0.5", text.encode(), kind)
    wanted = verdicts(texts, {"classes": ["husky"], "texts": [text], "threshold": 0.5})
    assert found.json() == wanted
    assert wanted != verdicts(texts, {"classes": ["husky"], "texts": ["a"], "threshold": 0.5})


@pytest.mark.parametrize(
    "url",
    [
        "http://a.b/c.png",
        "file:///etc/passwd",
        " http://a",
        "//a.b/c.png",
        "data:image/png,AAAA",
        "data:text/html;base64,AAAA",
    ],
)
def test_an_image_url_is_rejected_with_a_suggestion(api: FastAPI, url: str) -> None:
    body = {"classes": [0], "images": [BASE64, url]}
    answer = ask(api, "POST", "/v1/query", json=body)
    assert refusal(answer) in ((422, "urls_refused"), (400, "invalid_base64"))
    assert answer.json()["error"]["message"].startswith("images[1] is ")
    if "://" in url:
        assert refusal(answer)[1] == "urls_refused"
        assert "base64" in answer.text


@pytest.mark.parametrize(
    ("url", "kind", "body", "status", "code"),
    [
        ("", "image/png", PNG, 422, "invalid_query"),
        ("?classes=husky", "image/png", b"", 400, "empty_body"),
        ("?classes=husky", "image/png", BOMB, 400, "not_a_picture"),
        ("?classes=hsky", "image/png", PNG, 404, "unknown_class"),
        ("?" + "classes=husky&" * 6, "image/png", PNG, 413, "too_many_classes"),
        ("?classes=husky&recal=0.9", "image/png", PNG, 422, "invalid_parameter"),
        ("?classes=husky", "text/plain", b"a", 422, "not_a_text_model"),
        ("?classes=husky", "text/html", b"a", 415, "unknown_content_type"),
        ("?classes=husky", "image/png", b"x" * (MAX_BODY + 1), 413, "body_too_large"),
        ("?classes=husky", "application/json", VALID, 422, "invalid_query"),
    ],
)
def test_invalid_raw_bodies_are_rejected_with_a_reason(
    api: FastAPI, url: str, kind: str, body: bytes, status: int, code: str
) -> None:
    assert refusal(post(api, "/v1/query" + url, body, kind)) == (status, code)


@pytest.mark.parametrize(
    ("kind", "body", "status", "code"),
    [
        ("text/plain", b"", 400, "empty_body"),
        ("text/plain", b"caf\xe9", 400, "not_a_text"),
        ("text/plain", b"x" * 301, 413, "text_too_long"),
        ("text/plain; charset=punycode", b"a", 415, "unknown_charset"),
        ("image/png", PNG, 422, "not_a_picture_model"),
        ("multipart/form-data; boundary=b; charset=punycode", b"--b--", 415, "unknown_charset"),
    ],
)
def test_invalid_text_bodies_are_rejected_with_a_reason(
    texts: FastAPI, kind: str, body: bytes, status: int, code: str
) -> None:
    url = "/v1/query" if kind.startswith("multipart") else "/v1/query?classes=husky"
    assert refusal(
        ask(texts, "POST", url, content=body, headers={"content-type": kind.encode("latin-1")})
    ) == (status, code)


# ---------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"classes": ["\\ud800"], "images": ["AAAA"]}', 400, "invalid_json"),
        (b'{"classes": ["\xff"]}', 400, "invalid_json"),
        (b"[" * 50_000, 400, "invalid_json"),
        (b'{"classes": [' + b"9" * 5000 + b"]}", 400, "invalid_json"),
        (b'{"classes": [0], "images": ["AAAA"], "threshold": Infinity}', 422, "invalid_query"),
        (b'{"classes": [true], "images": ["AAAA"]}', 422, "invalid_query"),
        (b'{"classes": [0], "images": ["\xc3\xa9AAA"]}', 400, "invalid_base64"),
    ],
)
def test_invalid_json_is_rejected_with_a_reason(
    api: FastAPI, body: bytes, status: int, code: str
) -> None:
    answer = post(api, "/v1/query", body, "application/json")
    assert refusal(answer) == (status, code)
    assert len(answer.text) < 1000


# ---------------------------------------------------------------------------- forms and lengths


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    head = "Content-Disposition: form-data; name="
    made = [f"--{boundary}\r\n{head}{name}\r\n\r\n".encode() + body for name, body in parts]
    return b"\r\n".join(made) + f"\r\n--{boundary}--\r\n".encode()


HUSKY = ('"classes"', b"husky")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (form(*[HUSKY] * 10_000)[:MAX_BODY], 400, "invalid_form"),
        (form(*[('"images"; filename="a"', b"")] * 1_100), 400, "invalid_form"),
        (form(HUSKY, ('"images"; filename="../../etc/passwd"', b"x")), 400, "not_a_picture"),
        (form(HUSKY, ('"images"', b"x")), 400, "invalid_form"),
        (form(HUSKY, ('"images"; filename="a"', PNG))[:-5], 400, "invalid_form"),
        (form(HUSKY, ('"\xff\xfe"', b"x")), 422, "invalid_query"),
        (form(('"classes"', b"caf\xe9")), 400, "invalid_form"),
        (form(HUSKY, ('"' + "n" * 90_000 + '"', b"x")), 400, "invalid_form"),
        (form(('"classes"' + "\r\nX-A: b" * 9_000, b"x")), 400, "invalid_form"),
        (form(HUSKY, ('"recall"', b"nan"), ('"images"; filename="a"', PNG)), 422, "invalid_query"),
    ],
)
def test_invalid_forms_are_rejected_with_a_reason(
    api: FastAPI, body: bytes, status: int, code: str
) -> None:
    assert refusal(post(api, "/v1/query", body, "multipart/form-data; boundary=b")) == (
        status,
        code,
    )


def test_files_in_a_form_are_not_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = application(write(tmp_path / "b"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    body = form(HUSKY, ('"images"; filename="a"', PNG + b"\0" * 2**21))
    assert post(large, "/v1/query", body, "multipart/form-data; boundary=b").status_code == 200


@pytest.mark.parametrize("length", ["-1", "1e9", "9" * 5000, "²", "0x10", "", "1, 2"])
def test_an_invalid_content_length_is_rejected(api: FastAPI, length: str) -> None:
    headers = {"content-type": "image/png", "content-length": length.encode("utf-8")}
    answer = ask(api, "POST", "/v1/query?classes=husky", content=PNG, headers=headers)
    assert refusal(answer) == (413, "body_too_large")


def test_a_body_without_a_content_length_is_rejected_once_it_is_too_long(api: FastAPI) -> None:
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 10_000
            yield b" " * 10_000

    for kind in ("application/json", "image/png", "multipart/form-data; boundary=b"):
        sent = 0
        answer = ask(
            api,
            "POST",
            "/v1/query?classes=husky" * (kind == "image/png") or "/v1/query",
            content=endless(),
            headers={"content-type": kind},
        )
        assert refusal(answer) == (413, "body_too_large")
        assert sent <= MAX_BODY + 10_000


# ---------------------------------------------------------------------------- classes and model


def test_classes_are_searched_by_substring_and_paged(api: FastAPI) -> None:
    found = ask(api, "GET", "/v1/classes?search=CAT&limit=1&offset=1").json()
    assert found["total"] == 2
    assert [one["name"] for one in found["classes"]] == ["siamese cat"]
    everything = ask(api, "GET", "/v1/classes").json()
    assert [one["name"] for one in everything["classes"]] == list(NAMES)
    assert everything["classes"][6] == {
        "id": 6,
        "name": "7",
        "attributes": {"kind": "pet"},
        "positives": 0,
    }


def test_the_model_endpoint_reports_the_logit_map_without_the_margin(
    api: FastAPI, tmp_path: Path
) -> None:
    assert ask(api, "GET", "/v1/model").json()["logits"] == {
        "kind": "dot",
        "scale": 1.0,
        "offset": 0.0,
    }
    arcface = {"kind": "arcface", "scale": 30, "offset": -2.5, "learn_scale": True, "m2": 0.4}
    bundle = write(tmp_path / "cosine", bias=False, changes={"logits": arcface})
    cosine = application(bundle)
    logits = ask(cosine, "GET", "/v1/model").json()["logits"]
    assert logits == {"kind": "cosine", "scale": 30.0, "offset": -2.5}


@pytest.mark.parametrize(
    ("method", "url", "status", "code"),
    [
        ("GET", "/v1/query", 405, "wrong_method"),
        ("GET", "/%2e%2e/%00", 404, "no_such_path"),
    ],
)
def test_unknown_paths_and_methods_are_rejected_in_the_error_format(
    api: FastAPI, method: str, url: str, status: int, code: str
) -> None:
    assert refusal(ask(api, method, url)) == (status, code)
