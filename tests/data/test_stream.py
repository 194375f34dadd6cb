"""Streams: training on tars that have no index and are read sequentially."""

import gzip
import itertools
import json
import random
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from pydantic import ValidationError

from data.augment.mix import Mix
from data.augment.training import AugmentConfig
from data.config import DataConfig, StreamConfig, TextConfig
from data.images.config import ImageConfig
from data.loading.batch import Batch, Cursor
from data.loading.stream import Stream, StreamLoader, open_stream
from data.loading.stream_reader import _Buffered, shuffled
from data.remote.config import CacheConfig
from data.shards.manifest import Manifest
from data.tars.headers import BLOCK
from data.tars.indexing import index_shards
from data.tars.labels import ClassList
from data.tars.stream import StreamSample, TarReader, _number
from tests.data.file_server import serving
from tests.data.foreign_tars import bomb, images, planted_shards, png, write_tar

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
    rank: int = 0,
    world_size: int = 1,
    cursor: Cursor = Cursor(0),  # noqa: B008 (it is frozen)
    stream: dict[str, Any] | None = None,
    **config: Any,
) -> StreamLoader:
    named = shards if isinstance(shards, str) else tuple(shards)
    data = DataConfig(
        shards=classes,
        stream=StreamConfig(shards=named, samples=100, **(stream or {})),
        **{"image": IMAGE, **config},
    )
    assert data.stream is not None
    opened = open_stream(data.stream, Manifest.load(classes))
    return StreamLoader(
        opened, data, global_batch=global_batch, rank=rank, world_size=world_size, cursor=cursor
    )


def take(loader: StreamLoader, count: int) -> list[Batch]:
    with loader:
        return list(itertools.islice(loader, count))


def numbers(batches: Sequence[Batch]) -> list[int]:
    return [number for batch in batches for number in batch.indices.tolist()]


def test_ranks_and_workers_read_disjoint_tars_and_a_pass_has_every_sample_once(
    classes: Path, eight: Path
) -> None:
    passes: list[list[int]] = [[], []]
    for rank in range(2):
        loader = stream_loader(
            classes,
            f"{eight}/t{{0..7}}.tar",
            global_batch=8,
            rank=rank,
            world_size=2,
            workers=2,
            stream={"buffer": 5},
        )
        batches = take(loader, 12)
        assert [len(batch.labels) for batch in batches] == [4] * 12
        for number in range(2):
            passes[number] += numbers(batches[6 * number : 6 * number + 6])
    assert len(set(passes[0])) == 48
    assert sorted(passes[0]) == sorted(passes[1])
    assert passes[0] != passes[1]


def pixels_by_number(batches: Sequence[Batch]) -> dict[int, tuple[int, bytes]]:
    return {
        number: (label, pixels.numpy().tobytes())
        for batch in batches
        for number, label, pixels in zip(
            batch.indices.tolist(), batch.labels.tolist(), batch.inputs["pixel_values"], strict=True
        )
    }


def test_pixels_and_labels_of_a_pass_do_not_depend_on_workers_or_buffer(
    classes: Path, eight: Path
) -> None:
    shards = f"{eight}/t{{0..7}}.tar"
    one = take(stream_loader(classes, shards), 8)
    other = take(stream_loader(classes, shards, workers=2, stream={"buffer": 3}), 8)
    assert pixels_by_number(one) == pixels_by_number(other)
    assert numbers(one) != numbers(other)
    assert sorted(label for label, _ in pixels_by_number(one).values()) == [0] * 16 + [1] * 16 + (
        [2] * 16
    )
    again = take(stream_loader(classes, shards), 8)
    assert numbers(again) == numbers(one)


def test_resuming_starts_a_new_order_and_new_draws(classes: Path, eight: Path) -> None:
    shards = f"{eight}/t{{0..7}}.tar"
    loader = stream_loader(classes, shards)
    first = take(loader, 3)
    assert loader.cursor == first[-1].cursor == Cursor(0, 18)
    cursor = Cursor.from_json(loader.cursor.to_json())
    resumed = take(stream_loader(classes, shards, cursor=cursor, stream={"buffer": 1}), 8)
    assert len(set(numbers(resumed))) == 48
    whole = take(stream_loader(classes, shards, stream={"buffer": 1}), 8)
    assert numbers(resumed) != numbers(whole)
    before, after = pixels_by_number(whole), pixels_by_number(resumed)
    assert sum(before[number] == after[number] for number in before) < 5


def test_a_batch_smaller_than_the_world_leaves_ranks_empty_but_reads_all_tars(
    classes: Path, eight: Path
) -> None:
    shards = [f"{eight}/t{number}.tar" for number in range(2)]
    found = []
    for rank in range(3):
        loader = stream_loader(classes, shards, global_batch=2, rank=rank, world_size=3)
        batches = take(loader, 6)
        assert len({len(batch.labels) for batch in batches}) == 1
        found += numbers(batches)
    assert len(found) == len(set(found)) == 12


def waiting(passes: Sequence[int]) -> list[_Buffered]:
    return [
        _Buffered(epoch, StreamSample(number, "", b"", 0))
        for epoch, count in enumerate(passes)
        for number in range(count)
    ]


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_a_buffer_is_bounded_and_does_not_mix_passes(size: int) -> None:
    passes = [5, 5, 1, 30, 1, 1, 90, 90]
    num_read = 0

    def counted() -> Any:
        nonlocal num_read
        for sample in waiting(passes):
            num_read += 1
            yield sample

    epochs, given = [], []
    for sample in shuffled(counted(), size, random.Random(0)):
        epochs.append(sample.epoch)
        given.append(sample.sample.number)
        assert num_read - len(given) < max(size, 2)
    assert epochs == sorted(epochs)
    for epoch, count in enumerate(passes[:-1]):
        some = [number for e, number in zip(epochs, given, strict=True) if e == epoch]
        assert sorted(some) == list(range(count))
        assert count < 30 or size == 1 or some != sorted(some)


def with_bytes(tar: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(tar.read_bytes())
    changed = change(content)
    tar.write_bytes(content if changed is None else changed)


def header_of(tar: Path, name: str) -> int:
    with tarfile.open(tar) as opened:
        return opened.getmember(name).offset


def overwritten(tar: Path) -> None:
    start = header_of(tar, "00003.png")
    with_bytes(tar, lambda content: content.__setitem__(slice(start, start + BLOCK), b"\xff" * 512))


def zeroed(tar: Path) -> None:
    start = header_of(tar, "00003.png")
    with_bytes(tar, lambda content: content.__setitem__(slice(start, start + BLOCK), bytes(BLOCK)))


def cut_inside(tar: Path) -> None:
    start = header_of(tar, "00003.png")
    with_bytes(tar, lambda content: content[: start + 700])


def cut_in_a_header(tar: Path) -> None:
    start = header_of(tar, "00003.png")
    with_bytes(tar, lambda content: content[: start + 100])


def cut_between_samples(tar: Path) -> None:
    start = header_of(tar, "00003.png")
    with_bytes(tar, lambda content: content[:start])


def members_with(number: int, members: list[tuple[str, bytes]]) -> Callable[[Path], None]:
    key = f"{number:05d}"
    others = [member for member in images(0, 6) if not member[0].startswith(key)]
    return lambda tar: write_tar(tar, [*others, *((f"{key}.{e}", data) for e, data in members)])


NOT_3 = {0, 1, 2, 4, 5}
DAMAGE = {
    "overwritten header": (overwritten, NOT_3, ["at byte 9,216: invalid", "00003: no .jpg, "]),
    "header of zeros": (zeroed, NOT_3, ["at byte 9,216: invalid", "00003: no .jpg, "]),
    "cut in a member": (cut_inside, {0, 1, 2}, ["00003.png is truncated"]),
    "cut in a header": (cut_in_a_header, {0, 1, 2}, ["invalid tar header, skipped 100 bytes"]),
    "cut between samples": (cut_between_samples, {0, 1, 2}, ["zero blocks at the end are missing"]),
    "no member": (lambda tar: write_tar(tar, []), set(), ["the tar is empty"]),
    "no tar": (lambda tar: tar.write_bytes(b"<html>" * 100), set(), ["skipped 600 bytes"]),
    "no label": (members_with(3, [("png", png(3))]), NOT_3, ["00003: no .cls or .json, only"]),
    "no image": (members_with(3, [("cls", b"1")]), NOT_3, ["00003: no .jpg, .jpeg, .png"]),
    "label without class": (
        members_with(3, [("png", png(3)), ("cls", b"3")]),
        NOT_3,
        ["00003: label 3 is out of range: there are 3 classes"],
    ),
    "not decodable": (
        members_with(3, [("png", png(3)[:200]), ("cls", b"0")]),
        NOT_3,
        ["00003: "],
    ),
    "bomb": (
        members_with(3, [("png", bomb()), ("cls", b"0")]),
        NOT_3,
        ["00003: the image has 60000"],
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_logged_once_counted_and_skipped(
    classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    damage, intact, messages = DAMAGE[kind]
    write_tar(tmp_path / "a.tar", images(0, 6))
    write_tar(tmp_path / "b.tar", images(10, 2))
    damage(tmp_path / "a.tar")
    loader = stream_loader(classes, f"{tmp_path}/{{a,b}}.tar", global_batch=2, stream={"buffer": 1})
    expected = {number_of(tmp_path / "a.tar", number) for number in sorted(intact)} | {
        number_of(tmp_path / "b.tar", number) for number in (10, 11)
    }
    found = take(loader, 3 * len(expected))  # several passes
    assert set(numbers(found)) == expected
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(loader.cursor.bad) == len(messages)
    for line, part in zip(lines, messages, strict=True):
        assert line.startswith(f"skipped {tmp_path}/a.tar: ")
        assert part in line


def test_an_empty_tar_keeps_the_number_that_checkpoints_store_for_it(
    classes: Path, tmp_path: Path
) -> None:
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", images(10, 2))
    loader = stream_loader(classes, f"{tmp_path}/{{a,b}}.tar", global_batch=2, stream={"buffer": 1})
    take(loader, 4)
    assert set(loader.cursor.bad) == {_number(f"{tmp_path}/a.tar: the whole of it")}


def number_of(tar: Path, number: int) -> int:
    return _number(f"{tar}: {number:05d}")


def test_more_damage_than_the_limit_raises_an_error_that_lists_it(
    classes: Path, tmp_path: Path
) -> None:
    members = images(0, 8)
    for number in (1, 4, 6):
        members[2 * number] = (f"{number:05d}.png", b"no image")
    write_tar(tmp_path / "a.tar", members)
    with pytest.raises(ValueError, match=r"3 bad samples in training, but .* is 2: .*0000[146]: "):
        take(stream_loader(classes, f"{tmp_path}/a.tar", max_bad_samples=2), 20)
    loader = stream_loader(classes, f"{tmp_path}/a.tar", max_bad_samples=3)
    take(loader, 3)
    resumed = stream_loader(
        classes, f"{tmp_path}/a.tar", max_bad_samples=3, cursor=loader.cursor, workers=1
    )
    take(resumed, 3)  # bad samples in the cursor are not counted twice
    assert resumed.cursor.bad == loader.cursor.bad
    cursor = Cursor(0, 6, bad=(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"number 1 was skipped before this run was resumed; "):
        take(stream_loader(classes, f"{tmp_path}/a.tar", cursor=cursor, max_bad_samples=3), 1)
    with pytest.raises(ValueError, match=r"4 bad samples.*number 7 was skipped on another rank"):
        resumed.add_bad([7])


def test_tars_without_a_usable_sample_raise(classes: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("1.png", b"x"), ("1.cls", b"0")])
    for stream, message in (({}, "a.tar: 1: "), ({"sample": "webp"}, r"1: no \.webp, only")):
        loader = stream_loader(classes, f"{tmp_path}/a.tar", stream=stream)
        with pytest.raises(ValueError, match=f"1 tar.* no usable samples: .*{message}"):
            take(loader, 1)


def test_a_tar_without_samples_does_not_stop_readers_of_other_tars(
    classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", [*images(0, 2), ("3.png", b"x"), ("3.cls", b"0")])
    loader = stream_loader(classes, f"{tmp_path}/{{a,b}}.tar", global_batch=2, workers=2)
    assert len(set(numbers(take(loader, 20)))) == 2
    # Each of the two workers has read both tars.
    lines = sorted(record.getMessage().partition(f"{tmp_path}/")[2] for record in caplog.records)
    assert [line.partition(":")[0] for line in lines] == ["a.tar", "b.tar"]


def test_a_missing_tar_raises(classes: Path, eight: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"t8\.tar does not exist: check data\.stream\.shards"
    ):
        stream_loader(classes, f"{eight}/t{{7..8}}.tar")
    loader = stream_loader(classes, f"file://{eight}/t{{7..8}}.tar", stream={"buffer": 100})
    with pytest.raises(FileNotFoundError, match=r"t8\.tar does not exist: check data\.stream"):
        take(loader, 9)


def test_a_compressed_tar_raises(classes: Path, eight: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(gzip.compress((eight / "t0.tar").read_bytes()))
    with pytest.raises(ValueError, match=r"a\.tar is compressed.*gunzip"):
        take(stream_loader(classes, f"{tmp_path}/a.tar"), 1)


def test_a_member_that_is_too_large_is_skipped(
    classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.tars.stream._MAX_MEMBER", 5_000)
    noise = png(3, side=100)
    assert len(noise) > 5_000
    write_tar(
        tmp_path / "a.tar",
        [*images(0, 1), ("00000.mp4", noise), ("1.png", noise), ("1.cls", b"0"), *images(2, 1)],
    )
    found = take(stream_loader(classes, f"{tmp_path}/a.tar", global_batch=2), 2)
    assert set(numbers(found)) == {number_of(tmp_path / "a.tar", n) for n in (0, 2)}
    assert "1: 1.png has " in caplog.text
    assert len(caplog.records) == 1


def test_skipped_members_do_not_use_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.tars.stream._MAX_MEMBER", 5_000)
    write_tar(tmp_path / "a.tar", [("0.film", bytes(30_000_000)), *images(0, 3)])
    reader = TarReader(("png",), "label", ClassList(("0", "1", "2"), positions=True), attempts=1)
    tracemalloc.start()
    try:
        found = list(reader.samples(str(tmp_path / "a.tar")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 4  # including the key of the film, a sample without an image
    assert peak < 6_000_000


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_labels_in_json_are_read(classes: Path, tmp_path: Path, form: int) -> None:
    key = "a.b/" + "long/" * (40 if form != tarfile.USTAR_FORMAT else 3) + "0"
    label = json.dumps({"meta": {"class": "class 2"}}).encode()
    write_tar(tmp_path / "a.tar", [(f"{key}.PNG", png(0)), (f"{key}.json", label)], form)
    options = {"label_field": "meta.class"}
    batch = take(stream_loader(classes, f"{tmp_path}/a.tar", global_batch=1, stream=options), 1)[0]
    assert batch.labels.tolist() == [2]


def test_tars_written_by_webdataset_are_read(classes: Path, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number in range(4):
            writer.write({"__key__": f"{number:05d}", "png": png(number), "cls": number % 3})
    found = take(stream_loader(classes, f"{tmp_path}/a.tar", global_batch=4), 2)
    assert [len(set(numbers([batch]))) for batch in found] == [4, 4]


def test_reading_resumes_at_the_same_byte_after_a_broken_connection(
    classes: Path, eight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = stream_loader(classes, f"{eight}/t{{0..1}}.tar")
    with serving(eight) as server:
        server.failures = {"t0.tar": ["cut", 503, "hang up"], "t1.tar": [500]}
        loader = stream_loader(classes, f"{server.url}/t{{0..1}}.tar", stream={"buffer": 1})
        found = take(loader, 2)
        assert server.requests == {"t0.tar": 4, "t1.tar": 2}
    assert len(set(numbers(found))) == 12
    ours, theirs = (
        sorted(value for value in pixels_by_number(batches).values())
        for batches in (take(local, 2), found)
    )
    assert [label for label, _ in ours] == [label for label, _ in theirs]
    assert re.search(r"t0\.tar at byte [\d,]+: 503 Service Unavailable", caplog.text)
    assert "t1.tar at byte 0: 500 Internal Server Error; attempt 2 of 8" in caplog.text


def test_a_server_with_range_support_sends_only_the_rest(classes: Path, tmp_path: Path) -> None:
    tar = tmp_path / "t.tar"  # larger than the read-ahead buffer
    write_tar(tar, [("00000.film", bytes(20_000_000)), *images(0, 6)])
    with serving(tmp_path) as server:
        server.ranges = True
        server.failures = {"t.tar": ["cut", "cut"]}
        # Two attempts suffice, because the count restarts whenever part of the file is received.
        twice = CacheConfig(attempts=2)
        loader = stream_loader(classes, f"{server.url}/t.tar", cache=twice, stream={"buffer": 1})
        found = take(loader, 1)
        first, second, rest = server.sent["t.tar"][:3]
    assert len(set(numbers(found))) == 6
    assert first == tar.stat().st_size // 2
    assert first // 2 <= second < first
    assert first // 2 <= rest < tar.stat().st_size - first


def test_a_server_that_keeps_failing_raises(classes: Path, eight: Path) -> None:
    with serving(eight) as server:
        server.failures = {"t0.tar": ["cut", 503, 503]}
        loader = stream_loader(
            classes, f"{server.url}/t0.tar", cache=CacheConfig(attempts=2), stream={"buffer": 1}
        )
        with pytest.raises(OSError, match=r"t0\.tar at byte \d.*2 attempts"):
            take(loader, 2)


def test_fewer_tars_than_readers_raise(classes: Path, eight: Path) -> None:
    for world_size, workers, is_valid in ((2, 4, True), (3, 3, False), (9, 0, False)):
        options: dict[str, Any] = {"workers": workers, "world_size": world_size, "global_batch": 9}
        if is_valid:
            stream_loader(classes, f"{eight}/t{{0..7}}.tar", **options)
            continue
        with pytest.raises(ValueError, match=r"lists 8 tar.*lower data\.workers"):
            stream_loader(classes, f"{eight}/t{{0..7}}.tar", **options)


def test_adjacent_rows_are_mixed(classes: Path, eight: Path) -> None:
    augment = AugmentConfig(mix=Mix(mixup_alpha=1.0), crop_area=None, flip=0)
    mixing = stream_loader(classes, f"{eight}/t0.tar", global_batch=5, augment=augment)
    plain_augment = augment.model_copy(update={"mix": None})
    plain = stream_loader(classes, f"{eight}/t0.tar", global_batch=5, augment=plain_augment)
    mixed, unmixed = take(mixing, 1)[0], take(plain, 1)[0]
    assert mixed.mixed is not None
    assert unmixed.mixed is None
    labels, partners = mixed.labels.tolist(), [1, 0, 3, 2, 4]
    assert labels == unmixed.labels.tolist()
    assert mixed.mixed.labels.tolist() == [labels[row] for row in partners]
    weights = mixed.mixed.weights
    assert weights[0] == weights[1] != weights[2] == weights[3]
    pixels = unmixed.inputs["pixel_values"].float()
    blend = weights[:, None, None, None]
    wanted = blend * pixels + (1 - blend) * pixels[partners]
    assert torch.allclose(mixed.inputs["pixel_values"].float(), wanted, atol=1)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"shards": "pipe:cat x.tar"}, "would run a command"),
        ({"shards": "ftp://x/a.tar"}, "has an unsupported URL scheme"),
        ({"shards": "a-{000..1.tar"}, "Unbalanced braces"),
        ({"shards": ("a.tar", "{a,b}.tar")}, "a.tar is listed twice"),
        ({"shards": ()}, "the list of tars is empty"),
        ({"samples": 0}, "greater than 0"),
        ({"buffer": 0}, "greater than or equal to 1"),
    ],
)
def test_an_invalid_stream_config_raises(stream: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        StreamConfig(**{"shards": "a.tar", "samples": 1, **stream})


def test_shuffle_shards_and_stream_are_mutually_exclusive() -> None:
    with pytest.raises(ValidationError, match=r"set data\.stream\.buffer"):
        DataConfig(shards="x", shuffle_shards=2, stream=StreamConfig(shards="a.tar", samples=1))


def test_numeric_labels_have_the_same_meaning_as_in_the_manifest(tmp_path: Path) -> None:
    members = [
        (f"{n}.{e}", d)
        for n, label in enumerate((b"9", b"10", b"700"))
        for e, d in (("png", png(n)), ("cls", label))
    ]
    write_tar(tmp_path / "set" / "test-0.tar", members)
    index_shards(tmp_path / "set")
    found = take(stream_loader(tmp_path / "set", f"{tmp_path}/set/test-0.tar", global_batch=3), 1)
    assert sorted(found[0].labels.tolist()) == [0, 1, 2]


def test_the_digest_depends_on_the_tars_and_the_classes(classes: Path) -> None:
    manifest = Manifest.load(classes)

    def digest(shards: str | tuple[str, ...], classes: Manifest = manifest) -> str:
        return Stream(StreamConfig(shards=shards, samples=1), classes).digest()

    assert digest("{a,b}.tar") == digest(("a.tar", "b.tar"))
    assert digest("{a,b}.tar") != digest("{b,a}.tar")
    renamed = manifest.classes[0].model_copy(update={"name": "other"})
    other = manifest.model_copy(update={"classes": (renamed, *manifest.classes[1:])})
    assert digest("a.tar") != digest("a.tar", other)


def test_a_stream_of_texts_yields_tokens(texts: Path) -> None:
    tars = sorted(str(tar) for tar in (texts / "shards").glob("train-*.tar"))
    loader = stream_loader(
        texts / "shards",
        tars,
        global_batch=8,
        text=TextConfig(tokenizer=str(texts / "tokenizer"), max_length=24),
    )
    batch = take(loader, 1)[0]
    assert batch.inputs["input_ids"].shape == batch.inputs["attention_mask"].shape
    assert len(np.unique(batch.labels)) > 1
