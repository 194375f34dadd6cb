"""Streams: training on tars without an index, which webdataset reads sequentially."""

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from pydantic import ValidationError

from data.augment.mix import Mix
from data.augment.training import AugmentConfig
from data.config import DataConfig, StreamConfig, TextConfig
from data.images.config import ImageConfig
from data.loading.batch import Batch, Cursor
from data.loading.stream import Stream, StreamLoader, _number
from data.shards.manifest import Manifest
from data.tars.indexing import index_shards
from tests.data.file_server import serving
from tests.data.foreign_tars import bomb, images, planted_shards, png, write_tar
from tests.data.rank_batches import row_labels

IMAGE = ImageConfig(size=16)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder whose manifest has 3 classes."""
    return planted_shards(tmp_path_factory.mktemp("classes"), {}, count=3)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 8 tars, t0.tar to t7.tar, of 6 images each."""
    folder = tmp_path_factory.mktemp("eight")
    for number in range(8):
        write_tar(folder / f"t{number}.tar", images(6 * number, 6))
    return folder


def stream_loader(
    classes: Path,
    shards: str | Sequence[str],
    *,
    global_batch: int = 6,
    stream: dict[str, Any] | None = None,
    cursor: Cursor = Cursor(0),  # noqa: B008 (it is frozen)
    ranks: tuple[int, int] = (0, 1),
    **config: Any,
) -> StreamLoader:
    named = shards if isinstance(shards, str) else tuple(shards)
    settings = StreamConfig(shards=named, samples=100, **(stream or {}))
    data = DataConfig(shards=classes, stream=settings, **{"image": IMAGE, **config})
    opened = Stream(settings, Manifest.load(classes))
    rank, world_size = ranks
    return StreamLoader(
        opened, data, global_batch=global_batch, cursor=cursor, rank=rank, world_size=world_size
    )


def take(loader: StreamLoader, count: int) -> list[Batch]:
    with loader:
        return list(itertools.islice(loader, count))


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.indices.tolist()]


def pixels_by_number(batches: Sequence[Batch]) -> dict[int, tuple[int, bytes]]:
    return {
        number: (label, pixels.numpy().tobytes())
        for batch in batches
        for number, label, pixels in zip(
            batch.indices.tolist(), batch.labels.tolist(), batch.inputs["pixel_values"], strict=True
        )
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_is_read_sooner_or_later_with_its_label(
    classes: Path, eight: Path, workers: int
) -> None:
    shards = f"{eight}/t{{0..7}}.tar"
    found = take(stream_loader(classes, shards, workers=workers, stream={"buffer": 5}), 150)
    assert [len(batch.labels) for batch in found] == [6] * 150
    labels = {number: label for number, (label, _) in pixels_by_number(found).items()}
    wanted = {_number(f"{eight}/t{n // 6}.tar: {n:05d}"): n % 3 for n in range(48)}
    assert labels == wanted


def test_tars_without_an_index_have_sets_of_labels_if_data_shards_has(
    tmp_path: Path, label_sets: Path
) -> None:
    lists = [("a", "[2, 0]"), ("b", "[]"), ("c", '["class 1"]')]
    members = [
        (f"{key}.{ending}", data)
        for key, label in lists
        for ending, data in (("png", png(1)), ("json", f'{{"label": {label}}}'.encode()))
    ]
    write_tar(tmp_path / "a.tar", [*members, ("d.png", png(2)), ("d.cls", b"2 1")])
    found = take(stream_loader(label_sets, str(tmp_path / "a.tar")), 4)
    by_key = {
        number: labels
        for batch in found
        for number, labels in zip(batch.indices.tolist(), row_labels(batch), strict=True)
    }
    expected = {"a": [0, 2], "b": [], "c": [1], "d": [1, 2]}
    assert by_key == {_number(f"{tmp_path}/a.tar: {key}"): one for key, one in expected.items()}


def test_resuming_starts_a_new_order_and_new_draws(classes: Path, eight: Path) -> None:
    shards = f"{eight}/t{{0..7}}.tar"
    loader = stream_loader(classes, shards)
    first = take(loader, 3)
    assert loader.cursor == first[-1].cursor == Cursor(0, 18)
    assert numbers(take(stream_loader(classes, shards), 3)) == numbers(first)
    cursor = Cursor.from_json(loader.cursor.to_json())
    resumed = take(stream_loader(classes, shards, cursor=cursor), 30)
    whole = take(stream_loader(classes, shards), 30)
    assert numbers(resumed) != numbers(whole)
    before, after = pixels_by_number(whole), pixels_by_number(resumed)
    assert sum(before[n] == after[n] for n in before.keys() & after.keys()) < 5


def members_with(number: int, members: list[tuple[str, bytes]]) -> Callable[[Path], None]:
    key = f"{number:05d}"
    others = [member for member in images(0, 6) if not member[0].startswith(key)]
    return lambda tar: write_tar(tar, [*others, *((f"{key}.{e}", data) for e, data in members)])


NOT_3 = {0, 1, 2, 4, 5}
# How the first tar is damaged, the samples that can be read, and the logged line.
DAMAGE = {
    "cut": (lambda tar: os.truncate(tar, 7 * 1024 + 100), {0, 1}, "unexpected end of data"),
    "no tar": (lambda tar: tar.write_bytes(b"<html>" * 100), set(), "invalid header"),
    "no label": (members_with(3, [("png", png(3))]), NOT_3, "00003: its image, text or label is"),
    "label without class": (
        members_with(3, [("png", png(3)), ("cls", b"3")]),
        NOT_3,
        "00003: label 3 is out of range: there are 3 classes",
    ),
    "not decodable": (members_with(3, [("png", png(3)[:200]), ("cls", b"0")]), NOT_3, "00003: "),
    "bomb": (members_with(3, [("png", bomb()), ("cls", b"0")]), NOT_3, "00003: the image has 600"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_logged_once_counted_and_skipped(
    classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, intact, message = DAMAGE[kind]
    write_tar(tmp_path / "a.tar", images(0, 6))
    write_tar(tmp_path / "b.tar", images(10, 2))
    damage(tmp_path / "a.tar")
    loader = stream_loader(classes, f"{tmp_path}/{{a,b}}.tar", global_batch=2, stream={"buffer": 1})
    found = take(loader, 60)
    expected = {_number(f"{tmp_path}/a.tar: {number:05d}") for number in intact}
    expected |= {_number(f"{tmp_path}/b.tar: {number:05d}") for number in (10, 11)}
    assert expected <= set(numbers(found))
    (line,) = (record.getMessage() for record in caplog.records)
    assert len(loader.cursor.bad) == 1
    assert line.startswith(f"skipped {tmp_path}/a.tar: ")
    assert message in line


def test_more_damage_than_the_limit_raises_an_error_that_lists_it(
    classes: Path, tmp_path: Path
) -> None:
    members = images(0, 8)
    for number in (1, 4, 6):
        members[2 * number] = (f"{number:05d}.png", b"no image")
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=r"3 bad samples in training, but .* is 2: .*0000[146]: "):
        take(stream_loader(classes, f"{tmp_path}/a.tar", max_bad_samples=2), 20)
    cursor = Cursor(0, 6, bad=(1, 2, 3, 4))
    loader = stream_loader(classes, f"{tmp_path}/a.tar", cursor=cursor, max_bad_samples=3)
    with pytest.raises(ValueError, match=r"number 1 was skipped before this run was resumed; "):
        take(loader, 1)


def test_tars_without_a_usable_sample_raise(classes: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", b"x"), ("1.cls", b"0")])
    loader = stream_loader(classes, f"{tmp_path}/a.tar", stream={"buffer": 1})
    with pytest.raises(ValueError, match=r"no usable samples: .*a.tar: 1: not an image"):
        take(loader, 1)


def test_a_missing_tar_raises(classes: Path, eight: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"t8\.tar"):
        take(stream_loader(classes, f"{eight}/t8.tar"), 1)


def test_tars_at_a_url_and_compressed_tars_are_read(
    classes: Path, eight: Path, tmp_path: Path
) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar.gz")) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number:05d}", "png": png(number), "cls": number % 3})
    with serving(eight) as server:
        found = take(stream_loader(classes, [f"{server.url}/t0.tar", f"{tmp_path}/a.tar.gz"]), 20)
    assert len(set(numbers(found))) == 10


def test_a_file_above_the_limit_is_damage(
    classes: Path, eight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.loading.stream._MAX_BYTES", 100_000)
    write_tar(tmp_path / "a.tar", [("1.png", bytes(100_001)), ("1.cls", b"0")])
    loader = stream_loader(classes, [f"{tmp_path}/a.tar", f"{eight}/t0.tar"])
    take(loader, 10)
    assert loader.cursor.bad == (_number(f"{tmp_path}/a.tar"),)


def test_mixing_raises(classes: Path, eight: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.augment\.mix requires shards with an index"):
        stream_loader(classes, f"{eight}/t0.tar", augment=AugmentConfig(mix=Mix(mixup_alpha=1.0)))


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"shards": "pipe:cat x.tar"}, "would run a command"),
        ({"shards": "ftp://x/a.tar"}, "has an unsupported URL scheme"),
        ({"shards": "a-{000..1.tar"}, "Unbalanced braces"),
        ({"shards": ("a.tar", "{a,b}.tar")}, "a.tar is listed twice"),
        ({"shards": ()}, "the list of tars is empty"),
    ],
)
def test_an_invalid_stream_config_raises(stream: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StreamConfig(**{"shards": "a.tar", "samples": 1, **stream})


def test_numeric_labels_have_the_same_meaning_as_in_the_manifest(tmp_path: Path) -> None:
    members = [
        (f"{n}.{e}", d)
        for n, label in enumerate((b"9", b"10", b"700"))
        for e, d in (("png", png(n)), ("cls", label))
    ]
    write_tar(tmp_path / "set" / "test-0.tar", members)
    index_shards(tmp_path / "set")
    found = take(stream_loader(tmp_path / "set", f"{tmp_path}/set/test-0.tar"), 5)
    assert {label for label, _ in pixels_by_number(found).values()} == {0, 1, 2}


def test_a_stream_of_texts_yields_tokens(texts: Path) -> None:
    tars = sorted(str(tar) for tar in (texts / "shards").glob("train-*.tar"))
    text = TextConfig(tokenizer=str(texts / "tokenizer"), max_length=24)
    batch = take(stream_loader(texts / "shards", tars, global_batch=8, text=text), 1)[0]
    assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape
    assert len(np.unique(batch.labels)) > 1
