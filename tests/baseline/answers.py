"""Answers of two servers, one for images and one for texts, to fixed requests."""

import base64
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.baseline.commands import must
from tests.baseline.values import Record, near
from tests.noise_images import image
from tests.serving.started import end, start
from tests.tiny_bundle import write, write_of_texts

_TOLERANCE = 1e-4
_TOKEN = "a-token-of-the-baseline-0123456789"
# Values that differ between releases, machines and starts.
_MASKED = {"version", "extensions", "kway", "created", "uptime_seconds", "seconds"}


@dataclass(frozen=True)
class Ask:
    """A request, and the name of its answer in the record."""

    name: str
    method: str
    path: str
    options: dict[str, Any] = field(default_factory=dict)


def record(folder: Path) -> Record:
    with chdir(folder):
        write(Path("pets"))
        write_of_texts(Path("texts"))
        images = _write_images(Path("images"))
        must("index", "pets", "images", "-o", "gallery")
        Path("tokens").write_text(f"{_TOKEN}\n")
        Path("tokens").chmod(0o600)
        with (
            _serving("pets", "--gallery", "pets=gallery", "--max-inputs", "4") as pets,
            _serving("texts", "--token-file", "tokens") as texts,
        ):
            asked = [("images", pets, ask) for ask in _about_images(images)]
            asked += [("texts", texts, ask) for ask in _about_texts()]
            return {f"{name}/{ask.name}": _answer(url, ask) for name, url, ask in asked}


def _write_images(folder: Path) -> list[bytes]:
    folder.mkdir()
    found = []
    for seed in range(3):
        found.append(image(seed, 20, 33))
        (folder / f"{seed}.png").write_bytes(found[-1])
    return found


@contextmanager
def _serving(bundle: str, *options: str) -> Iterator[str]:
    """Run `kway serve` on a free port and yield its URL."""
    kway = [sys.executable, "-P", "-m", "launch"]
    log = Path(f"{bundle}.log")
    server = start(Path(bundle), log, "--no-ray", *options, start=kway, cwd=Path.cwd())
    try:
        yield server.url
    finally:
        end(server)


def _answer(url: str, ask: Ask) -> dict[str, Any]:
    with httpx.Client(trust_env=False, timeout=60) as client:
        answer = client.request(ask.method, url + ask.path, **ask.options)
    kind = answer.headers.get("content-type", "").partition(";")[0]
    body: Any = None
    if kind == "application/json":
        body = _masked(answer.json())
    elif kind.startswith("text/"):
        body = "text"
    return near({"status": answer.status_code, "type": kind, "body": body}, _TOLERANCE)


def _masked(value: Any) -> Any:
    """Hide long texts and values that differ between releases. Keep only the code of an error."""
    if isinstance(value, dict):
        if value.keys() == {"error"}:
            error = value["error"]
            return {"error": error["code"] if isinstance(error, dict) else "…"}
        return {key: "…" if key in _MASKED else _masked(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_masked(part) for part in value]
    return "…" if isinstance(value, str) and len(value) > 100 else value


def _post(name: str, path: str, body: Any, **options: Any) -> Ask:
    return Ask(name, "POST", path, {"json": body, **options})


def _about_images(files: list[bytes]) -> Iterator[Ask]:
    images = [base64.b64encode(file).decode() for file in files]
    one = images[:1]
    query, classify, search = "/v1/query", "/v1/classify", "/v1/galleries/pets/search"
    raw = {"content": files[0], "headers": {"content-type": "image/png"}}

    for path in ("/health", "/v1/model", "/v1/classes", "/v1/galleries", "/", "/metrics", "/docs"):
        yield Ask(f"GET {path}", "GET", path)
    for name, parameters in {
        "search": {"search": "cat"},
        "page": {"limit": 2, "offset": 1},
        "limit 0": {"limit": 0},
        "unknown parameter": {"find": "cat"},
    }.items():
        yield Ask(f"classes, {name}", "GET", "/v1/classes", {"params": parameters})
    yield Ask("unknown path", "GET", "/v1/nothing")
    yield Ask("wrong method", "GET", query)

    for name, body in {
        "one class": {"classes": ["husky"], "images": one},
        "classes and images": {"classes": ["husky", 5, "#5"], "images": images, "recall": 0.9},
        "recall without a threshold": {"classes": ["7", "husky"], "images": one, "recall": 0.99},
        "threshold": {"classes": ["tabby cat"], "images": one, "threshold": 0.25},
        "recall that was not measured": {"classes": ["husky"], "images": one, "recall": 0.5},
        "recall and threshold": {"classes": [0], "images": one, "recall": 0.9, "threshold": 1},
        "recall of 2": {"classes": [0], "images": one, "recall": 2},
        "unknown class": {"classes": ["poodle"], "images": one},
        "class ID out of range": {"classes": [7], "images": one},
        "no class": {"classes": [], "images": one},
        "no image": {"classes": [0], "images": []},
        "missing images": {"classes": [0]},
        "unknown key": {"classes": [0], "images": one, "top": 3},
        "text for an image model": {"classes": [0], "texts": ["a husky"]},
        "too many images": {"classes": [0], "images": one * 5},
        "invalid base64": {"classes": [0], "images": ["!"]},
        "not an image": {"classes": [0], "images": [base64.b64encode(b"text").decode()]},
        "a list": [1],
    }.items():
        yield _post(f"query, {name}", query, body)
    parameters = {"classes": ["husky", "#4"], "recall": "0.9"}
    yield Ask("query, raw body", "POST", query, {"params": parameters, **raw})
    yield Ask("query, raw body without classes", "POST", query, raw)
    form = {
        "data": parameters,
        "files": [("images", (f"{n}.png", file)) for n, file in enumerate(files)],
    }
    yield Ask("query, form", "POST", query, form)
    kind = {"headers": {"content-type": "application/json"}}
    for name, content in {
        "empty body": b"",
        "broken JSON": b'{"classes": [',
        "invalid UTF-8": b'{"classes": ["\xff"]}',
        "deep JSON": b"[" * 100_000,
        "duplicate key": b'{"classes": [0], "classes": [1], "images": []}',
        "33 MiB": b" " * (33 << 20),
    }.items():
        yield Ask(f"query, {name}", "POST", query, {"content": content, **kind})
    plain = {"content": b"text", "headers": {"content-type": "application/xml"}}
    yield Ask("query, unknown content type", "POST", query, plain)

    for name, body in {
        "default": {"images": images},
        "top 2": {"images": one, "top": 2},
        "top 0": {"images": one, "top": 0},
    }.items():
        yield _post(f"classify, {name}", classify, body)
    yield Ask("classify, raw body", "POST", classify, {"params": {"top": 3}, **raw})

    for name, body in {
        "two classes": {"classes": ["husky", 4], "recall": 0.9},
        "threshold": {"classes": ["husky"], "threshold": -100.0, "limit": 2, "offset": 1},
        "unknown class": {"classes": ["poodle"]},
        "limit 0": {"classes": [0], "limit": 0},
    }.items():
        yield _post(f"search, {name}", search, body)
    yield _post("search, unknown gallery", "/v1/galleries/cats/search", {"classes": [0]})

    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/pets"):
        yield Ask(f"GET {path}", "GET", path)
    yield Ask("GET unknown model", "GET", "/v2/models/cats")
    given = {"name": "images", "datatype": "BYTES", "shape": [3], "data": images}
    classes = {"name": "class_ids", "datatype": "INT64", "shape": [2], "data": [2, 0]}
    for name, body in {
        "two classes": {"inputs": [given, classes], "id": "7"},
        "recall": {"inputs": [given, classes], "parameters": {"recall": 0.9}},
        "without classes": {"inputs": [given]},
        "wrong shape": {"inputs": [{**given, "shape": [2]}, classes]},
        "wrong type": {"inputs": [{**given, "datatype": "FP32"}, classes]},
    }.items():
        yield _post(f"infer, {name}", "/v2/models/pets/infer", body)


def _about_texts() -> Iterator[Ask]:
    query = "/v1/query"
    body = {"classes": ["husky", 5], "texts": ["a cat", "猫 und hund 🐶"], "recall": 0.9}
    token = {"headers": {"authorization": f"Bearer {_TOKEN}"}}
    yield _post("query", query, body, **token)
    yield _post("classify", "/v1/classify", {"texts": ["a cat"], "top": 3}, **token)
    yield _post("an empty text", query, {**body, "texts": [""]}, **token)
    yield _post("a long text", query, {**body, "texts": ["a cat " * 200]}, **token)
    yield _post("too long a text", query, {**body, "texts": ["a" * 200_000]}, **token)
    yield _post("an image for a text model", query, {"classes": [0], "images": ["AAAA"]}, **token)
    yield _post("without a token", query, body)
    for name, value in {
        "wrong token": "Bearer wrong",
        "prefix of the token": f"Bearer {_TOKEN[:-1]}",
        "another scheme": f"Basic {_TOKEN}",
    }.items():
        yield _post(name, query, body, headers={"authorization": value})
    for path in ("/health", "/v1/model", "/v1/classes", "/metrics", "/v2/health/ready", "/"):
        yield Ask(f"GET {path} without a token", "GET", path)
    raw = {"params": {"classes": "husky"}, "content": "a cat"}
    headers = {**token["headers"], "content-type": "text/plain"}
    yield Ask("raw text", "POST", query, {**raw, "headers": headers})
