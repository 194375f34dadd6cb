"""Answers and errors of a text model, over HTTP and with `kway query`.

The real routes and service run in this process and listen on a port, but without Ray.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from serving.answer import make_query
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
    """Compute logits for one text at a time, without padding."""
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


def test_a_text_of_any_length_has_the_same_logits_in_a_batch_as_on_its_own(bundle: Path) -> None:
    model = Model.open(bundle)
    model.self_check()
    found = model.answer(
        [model.prepare(text) for text in TEXTS], make_query(model.bundle, ["samoyed", 0])
    )
    assert_equal(found.model_dump(), logits(TEXTS, [2, 0]))


def test_json_forms_and_the_command_give_the_same_answer_as_the_bundle(
    url: str, bundle: Path, tmp_path: Path
) -> None:
    wanted = logits(TEXTS, [2, 6])
    fields = {"classes": ["samoyed", "7"], "texts": TEXTS[:3]}
    assert_equal(httpx.post(f"{url}/v1/query", json=fields).json(), wanted[:3])
    parts = [(name, (None, value)) for name, values in fields.items() for value in values]
    assert_equal(httpx.post(f"{url}/v1/query", files=parts).json(), wanted[:3])

    (tmp_path / "texts").write_bytes("\n".join(TEXTS[1:]).replace("猫 🐶", "猫 🐶\r").encode())
    for source in (url, bundle):  # more texts than one request may contain
        options = ("--class", "samoyed", "--class", "7", "--json", "--texts", tmp_path / "texts")
        found = json.loads(started.ask(source, *options, "--text", TEXTS[0]))
        assert [result["input"] for result in found["results"]] == list(range(5))
        assert_equal(found, wanted)


def test_a_model_with_too_few_position_embeddings_fails_its_self_check(
    tmp_path: Path,
) -> None:
    model = Model.open(write_of_texts(tmp_path / "texts"))
    model.self_check()
    model._backbone.encoder.embeddings.position_embeddings = nn.Embedding(8, DIM)
    assert len(model.prepare("a cat")) < 8
    with pytest.raises(ValueError, match="cannot process its example inputs"):
        model.self_check()


def test_control_characters_in_texts_and_class_names_do_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.tiny_bundle.NAMES", ("hu\x1bsky", *NAMES[1:]))
    bundle = write_of_texts(tmp_path / "texts")
    table = started.ask(bundle, "--class", "#0", "--text", "a\x9bcat\x07\u202edog")
    assert "aU+009BcatU+0007U+202Edog" in table
    assert "huU+001Bsky" in table
    assert not {"\x1b", "\x9b", "\x07", "\u202e"} & set(table)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{texts}",), "--texts"),
        (("{texts}", "{file}"), "reads texts"),
        (("{url}", "{file}"), "reads texts"),
        (("{images}", "--text", "a"), "reads images"),
        (("{texts}", "--text", "a\udcff"), "text 0"),
        (("{url}", "--text", "x" * 301), "has 301 characters"),
        (("{texts}", "--texts", "{empty}"), "empty"),
    ],
)
def test_an_invalid_query_prints_a_one_line_error(
    url: str, bundle: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").write_bytes(b"a\xff")
    (tmp_path / "empty").touch()
    values = {
        "texts": bundle,
        "images": write(tmp_path / "images"),
        "url": url,
        "file": tmp_path / "file",
        "empty": tmp_path / "empty",
    }
    with pytest.raises((ValueError, OSError), match=re.escape(message)) as caught:
        started.ask("--class", "husky", *(argument.format(**values) for argument in arguments))
    assert "\n" not in str(caught.value)
