"""Bearer tokens: accepted, rejected, and changed in the token file while the server runs."""

import logging
import os
import re
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from openapi_spec_validator import OpenAPIV31SpecValidator

from serving.tokens import Clients
from tests.serving.in_process import application, ask, refusal

OLD, NEW = "old-" + "o" * 30, "new-" + "n" * 30
WRONG = "wrong-" + "w" * 28
# The first byte of its digest is that of `OLD`.
SIMILAR = next(
    token
    for token in (f"{WRONG}{number}" for number in count())
    if sha256(token.encode()).digest()[0] == sha256(OLD.encode()).digest()[0]
)


def save(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace the file by renaming a new one, as an operator would."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.chmod(mode)
    temporary.replace(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save(tmp_path / "tokens", f"# the cameras\n{OLD}\n\n  {'b' * 24}  \r\n")
    return tmp_path / "tokens"


@pytest.fixture
def api(bundle: Path, file: Path) -> FastAPI:
    built = application(bundle, token_file=file)

    @built.get("/who")
    async def who(request: Request) -> str:
        return request.state.client

    return built


def get(api: FastAPI, url: str, *tokens: str, scheme: str = "Bearer ") -> httpx.Response:
    headers = [("Authorization", (scheme + token).encode("latin-1")) for token in tokens]
    return ask(api, "GET", url, headers=headers)


# ---------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER   "])
@pytest.mark.parametrize("token", [OLD, "b" * 24])
def test_a_token_in_the_file_is_accepted_and_identifies_the_client(
    api: FastAPI, token: str, scheme: str
) -> None:
    answer = get(api, "/who", token, scheme=scheme)
    assert (answer.status_code, answer.json()) == (200, sha256(token.encode()).hexdigest()[:8])


@pytest.mark.parametrize(
    "url",
    [
        "/v1/query",
        "/metrics",
        "/docs/",
        "/openapi.json",
        "/v2/health/ready/",
        "/health/",
        "/health/../v1/model",
    ],
)
def test_only_health_checks_are_answered_without_a_token(api: FastAPI, url: str) -> None:
    answer = get(api, url)
    assert refusal(answer) == (401, "no_token")
    assert answer.headers["www-authenticate"] == "Bearer"
    for open_path in ("/health", "/v2/health/live", "/v2/health/ready"):
        assert get(api, open_path, WRONG).status_code == 200
        document = get(api, "/openapi.json", OLD).json()
        assert "security" not in document["paths"][open_path]["get"]


@pytest.mark.parametrize(
    "token",
    [
        WRONG,
        SIMILAR,
        "",
        OLD + "x",
        "x" * 100_000,
        sha256(OLD.encode()).hexdigest(),
    ],
)
def test_an_unknown_token_is_rejected(api: FastAPI, token: str) -> None:
    answer = get(api, "/v1/model", token)
    assert refusal(answer) == (401, "wrong_token")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert token[:20] not in answer.text or not token


def test_two_tokens_or_a_scheme_other_than_bearer_are_rejected(api: FastAPI) -> None:
    assert refusal(get(api, "/v1/model", OLD, scheme="Basic "))[0] == 401
    assert refusal(get(api, "/v1/model", OLD, scheme=""))[0] == 401
    assert refusal(get(api, "/v1/model", OLD, OLD))[0] == 401
    assert refusal(ask(api, "GET", f"/v1/model?token={OLD}&access_token={OLD}"))[0] == 401


def test_a_request_without_a_token_is_rejected_before_its_body_is_read(api: FastAPI) -> None:
    async def body():
        raise AssertionError("the body was read")
        yield b""

    assert refusal(ask(api, "POST", "/v1/query", content=body())) == (401, "no_token")


def test_without_a_token_file_clients_are_told_apart_by_their_addresses(bundle: Path) -> None:
    built = application(bundle)

    @built.get("/who")
    async def who(request: Request) -> str:
        return request.state.client

    assert get(built, "/who").json() == "127.0.0.1"
    assert get(built, "/who", WRONG).json() == "127.0.0.1"
    assert "securitySchemes" not in ask(built, "GET", "/openapi.json").text


def test_without_tokens_other_hosts_than_loopback_are_rejected(bundle: Path, api: FastAPI) -> None:
    """A web page could query the server under a name of its own that resolves to loopback."""
    open_api = application(bundle)
    for host in ("localhost", "localhost:8000", "127.0.0.1:80", "[::1]", "[::1]:8000", "LOCALHOST"):
        assert ask(open_api, "GET", "/v1/model", headers={"host": host}).is_success
    for host in ("attacker.example", "attacker.example:8000", "localhost.attacker.example", ""):
        answer = ask(open_api, "GET", "/v1/model", headers={"host": host})
        assert refusal(answer) == (400, "wrong_host")
        with_token = {"host": host, "authorization": f"Bearer {OLD}"}
        assert ask(api, "GET", "/v1/model", headers=with_token).is_success


def test_the_openapi_document_includes_the_token(api: FastAPI) -> None:
    document = get(api, "/openapi.json", OLD).json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    query = document["paths"]["/v1/query"]["post"]
    assert query["security"] == [{"token": []}]
    assert "401" in query["responses"]
    OpenAPIV31SpecValidator(document).validate()


# ---------------------------------------------------------------------------- the file changes


def in_place(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize("change", [save, in_place])
def test_a_changed_token_file_takes_effect_on_the_next_request(
    api: FastAPI, file: Path, change: Callable[[Path, str], None]
) -> None:
    for _ in range(3):  # with the same length, within one tick of the file system's clock
        assert get(api, "/who", OLD).status_code == 200
        change(file, NEW)
        assert refusal(get(api, "/who", OLD)) == (401, "wrong_token")
        assert get(api, "/who", NEW).status_code == 200
        change(file, OLD)
        assert get(api, "/who", OLD).status_code == 200


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "No such file"),
        (lambda file: save(file, ""), "does not contain any tokens"),
        (lambda file: save(file, NEW, mode=0o640), r"mode 0640\)\. Run chmod 600"),
        (lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
    ],
)
def test_all_requests_are_rejected_while_the_file_is_unreadable_and_one_line_is_logged(
    api: FastAPI,
    file: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    damage(file)
    for token in (OLD, NEW, OLD):
        answer = get(api, "/v1/model", token)
        assert refusal(answer) == (503, "no_tokens")
        assert answer.headers["retry-after"] == "1"
    assert refusal(get(api, "/v1/model")) == (503, "no_tokens")
    assert get(api, "/health").status_code == 200
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("kway")]
    assert len(messages) == 1
    assert re.search(reason, messages[0])
    if file.is_dir():
        file.rmdir()
    save(file, NEW)
    assert get(api, "/v1/model", NEW).status_code == 200
    assert OLD not in caplog.text
    assert NEW not in caplog.text


# ---------------------------------------------------------------------------- files at start-up


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (OLD, 0o644, "(mode 0644). Run chmod 600"),
        ("", 0o600, "openssl rand -hex 32"),
        (f"{OLD}\n{'s' * 23}", 0o600, "line 2: the token has 23 characters"),
        ("l" * 513, 0o600, "513 characters"),
        ("two words, in one line of tokens", 0o600, "line 1: "),
        ("ünïcödé-" * 5, 0o600, "line 1: "),
        (f"{OLD}\n" * 40_000, 0o600, "1048576 bytes"),
    ],
)
def test_the_error_for_an_invalid_token_file_contains_a_fix_but_no_tokens(
    tmp_path: Path, text: str, mode: int, reason: str
) -> None:
    save(tmp_path / "tokens", text, mode)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        Clients(tmp_path / "tokens")
    assert "\n" not in str(caught.value)
    for line in text.split():
        assert len(line) < 20 or line not in str(caught.value)
