"""A model of texts: in this process, over HTTP, and by the command; answers and refusals.

The routes and the service are real and listen on a port; only Ray, which starts them, is not there.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from serving.answer import ask
from serving.model import Model
from tests.serving import started
from tests.serving.in_process import application, listening
from tests.tiny_bundle import (
    DIM,
    NAMES,
    rows,
    tiny_text_backbone,
    tiny_tokenizer,
    write,
    write_of_texts,
)

TEXTS = ["a cat", "", "a dog and a cat and 猫 🐶", "hund " * 50, "[PAD] nothing of this is known"]
MAX_INPUTS, MAX_CHARS = 3, 300


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_of_texts(tmp_path_factory.mktemp("bundles") / "texts")


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    api = application(bundle, max_inputs=MAX_INPUTS, max_text_chars=MAX_CHARS)
    with listening(api) as url:
        yield url


def logits(texts: list[str], class_ids: list[int]) -> list[list[float]]:
    """One text at a time, without padding."""
    backbone, found = tiny_text_backbone(), []
    for ids in tiny_tokenizer().encode(texts):
        tokens = torch.tensor([ids])
        with torch.no_grad():
            features = backbone({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
        weight = rows()
        logits = torch.nn.functional.linear(features, weight[:, :-1], weight[:, -1])
        found += logits[:, class_ids].tolist()
    return found


def assert_equal(found: dict, wanted: list[list[float]]) -> None:
    theirs = [[verdict["score"] for verdict in result["verdicts"]] for result in found["results"]]
    torch.testing.assert_close(torch.tensor(theirs), torch.tensor(wanted))
    assert torch.tensor(theirs).std(0).min() > 1e-3


def test_a_batch_of_texts_of_any_lengths_has_the_logits_of_each_alone(bundle: Path) -> None:
    model = Model.open(bundle)
    model.self_check()
    found = model.answer([model.prepare(text) for text in TEXTS], ask(model.bundle, ["samoyed", 0]))
    assert_equal(found.model_dump(), logits(TEXTS, [2, 0]))


def test_json_a_form_and_the_command_give_the_answer_of_the_bundle(
    url: str, bundle: Path, tmp_path: Path
) -> None:
    wanted = logits(TEXTS, [2, 6])
    fields = {"classes": ["samoyed", "7"], "texts": TEXTS[:3]}
    assert_equal(httpx.post(f"{url}/v1/query", json=fields).json(), wanted[:3])
    parts = [(name, (None, value)) for name, values in fields.items() for value in values]
    assert_equal(httpx.post(f"{url}/v1/query", files=parts).json(), wanted[:3])

    (tmp_path / "texts").write_bytes("\n".join(TEXTS[1:]).replace("猫 🐶", "猫 🐶\r").encode())
    for source in (url, bundle):  # more texts than a request may hold
        asked = ("--class", "samoyed", "--class", "7", "--json", "--texts", tmp_path / "texts")
        found = json.loads(started.ask(source, *asked, "--text", TEXTS[0]))
        assert [result["input"] for result in found["results"]] == list(range(5))
        assert_equal(found, wanted)


def test_requests_of_texts_of_different_lengths_share_batches(url: str) -> None:
    asked = [(place % 3, place % len(NAMES)) for place in range(42)]
    wanted = logits(TEXTS[:3], list(range(len(NAMES))))

    async def all_at_once() -> list[float]:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            answers = await asyncio.gather(
                *(
                    client.post("/v1/query", json={"classes": [one], "texts": [TEXTS[text]]})
                    for text, one in asked
                )
            )
        return [answer.json()["results"][0]["verdicts"][0]["score"] for answer in answers]

    found = asyncio.run(all_at_once())
    assert found == pytest.approx([wanted[text][one] for text, one in asked], rel=1e-4, abs=1e-5)


def test_the_model_says_that_it_reads_texts_and_how_long_they_may_be(url: str) -> None:
    model = httpx.get(f"{url}/v1/model").json()
    assert (model["reads"], model["image"], model["text"]) == ("texts", None, {"max_length": 12})
    assert model["limits"]["max_text_chars"] == MAX_CHARS


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "empty_body"),
        (b'{"classes": ["husky"]}', 400, "no_input"),
        (b'{"classes": ["husky"], "texts": []}', 400, "no_input"),
        (b'{"classes": ["husky"], "texts": [7]}', 422, "invalid_query"),
        (b'{"classes": ["husky"], "texts": ["\xff"]}', 400, "invalid_json"),
        (b'{"classes": ["husky"], "texts": ["\\ud83d"]}', 400, "invalid_json"),
        (b'{"classes": ["husky"], "images": ["AAAA"]}', 422, "not_a_picture_model"),
        (b'{"classes": ["husky"], "images": ["*"], "texts": ["a"]}', 422, "not_a_picture_model"),
        (b'{"classes": ["hsky"], "texts": ["a"]}', 404, "unknown_class"),
        (b'{"classes": ["husky"], "texts": ["a", "b", "c", "d"]}', 413, "too_many_texts"),
        (
            json.dumps({"classes": [0], "texts": ["a", "x" * (MAX_CHARS + 1)]}).encode(),
            413,
            "text_too_long",
        ),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(
    url: str, body: bytes, status: int, code: str
) -> None:
    answer = httpx.post(
        f"{url}/v1/query", content=body, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([("images", ("a.png", b"x"))], 422, "not_a_picture_model"),
        ([("texts", ("a.txt", b"x"))], 422, "invalid_query"),
        ([("texts", (None, "x" * (MAX_CHARS + 1)))], 413, "text_too_long"),
        ([("texts", (None, "x"))] * 4, 413, "too_many_texts"),
        ([("texts", (None, b"caf\xe9"))], 400, "invalid_form"),
        ([("texts", (None, "a")), ("classes", (None, b"\xff"))], 400, "invalid_form"),
        ([], 400, "no_input"),
    ],
)
def test_bad_forms_are_refused_with_a_reason(url: str, parts: list, status: int, code: str) -> None:
    answer = httpx.post(f"{url}/v1/query", files=[("classes", (None, "husky")), *parts])
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(("charset", "status"), [("latin-1", 200), ("utf-8", 400)])
def test_a_form_is_read_in_the_encoding_that_it_states(url: str, charset: str, status: int) -> None:
    part = 'Content-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
    lines = [f"--x\r\n{part.format(*field)}" for field in (("classes", "husky"), ("texts", "café"))]
    kind = {"content-type": f"multipart/form-data; boundary=x; charset={charset}"}
    body = ("".join(lines) + "--x--\r\n").encode("latin-1")
    answer = httpx.post(f"{url}/v1/query", content=body, headers=kind)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["message"].endswith("cannot be read: 'texts' is no utf-8")


def test_a_model_whose_positions_do_not_reach_its_longest_text_fails_its_check(
    tmp_path: Path,
) -> None:
    model = Model.open(write_of_texts(tmp_path / "texts"))
    model.self_check()
    model._backbone.encoder.embeddings.position_embeddings = nn.Embedding(8, DIM)
    assert len(model.prepare("a cat")) < 8
    with pytest.raises(ValueError, match=r"fails at any of the texts .*: its files do not fit"):
        model.self_check()


def test_a_refused_text_is_named_by_its_place(url: str) -> None:
    body = {"classes": [0], "texts": ["a", "x" * (MAX_CHARS + 1)]}
    message = httpx.post(f"{url}/v1/query", json=body).json()["error"]["message"]
    assert re.match(r"texts\[1\] has 301 characters, at most 300: ", message)


def test_the_command_names_a_long_text_of_a_file_by_its_place_and_asks_nothing(
    url: str, tmp_path: Path
) -> None:
    (tmp_path / "texts").write_text("a\nb\nc\nd\n" + "long " * 61)
    message = (
        rf"^texts\[5\] \(long .*\) has 305 characters, but {url} accepts at most 300: shorten it$"
    )
    with pytest.raises(ValueError, match=message):
        started.ask(url, "--class", "husky", "--text", "e", "--texts", tmp_path / "texts")


def test_controls_in_texts_and_class_names_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.tiny_bundle.NAMES", ("hu\x1bsky", *NAMES[1:]))
    bundle = write_of_texts(tmp_path / "texts")
    table = started.ask(bundle, "--class", "#0", "--text", "a\x9bcat\x07\u202edog")
    assert "aU+009BcatU+0007U+202Edog" in table
    assert "huU+001Bsky" in table
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(table)


def test_the_table_shows_texts(bundle: Path) -> None:
    table = started.ask(bundle, "--class", "husky", "--threshold", "-1000", "--text", "a [cat]")
    assert re.search(r"a \[cat\] .* husky .* -1000\.000 .* yes", table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{texts}",), "give images, or texts by --text or --texts, and not both"),
        (("{texts}", "--text", "a", "{file}"), "and not both"),
        (("{texts}", "{file}"), "texts reads texts: give --text or --texts"),
        (("{url}", "{file}"), "reads texts: give --text or --texts"),
        (("{images}", "--text", "a"), "images reads images: name image files"),
        (("{texts}", "--texts", "{file}"), "file is not UTF-8 from its byte 1 on"),
        (("{texts}", "--text", "a\udcff"), "text 0 is no Unicode"),
        (("{url}", "--text", "a\udcff"), "rejected the request: Invalid JSON"),
        (("{url}", "--text", "a", "--threshold", "nan"), "rejected the request: threshold"),
        (("{url}", "--text", "x" * 301), "has 301 characters, but http://127.0.0.1"),
        (("{texts}", "--texts", "{empty}"), "empty holds no text: write one a line"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(
    url: str, bundle: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_bytes(b"a\xff")
    (tmp_path / "empty").touch()
    places = {
        "texts": bundle,
        "images": write(tmp_path / "images"),
        "url": url,
        "file": tmp_path / "file",
        "empty": tmp_path / "empty",
    }
    with pytest.raises((ValueError, OSError), match=re.escape(message)) as caught:
        started.ask("--class", "husky", *(argument.format(**places) for argument in arguments))
    assert "\n" not in str(caught.value)
