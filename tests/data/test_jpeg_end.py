"""A JPEG without its end marker is repaired if its pixels are complete, and rejected otherwise."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.images.decode import decode
from data.images.jpeg_end import completed, lacks_end
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.skipped import REPAIRED, SKIPPED
from data.sources import ImageFolder
from data.sources.packing import packed
from launch.commands.shard_source import write
from tests.data.conftest import write_image


def jpeg(seed: int = 0, mode: str = "RGB", **options: object) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(buffer, "JPEG", **options)
    return buffer.getvalue()


KINDS = pytest.mark.parametrize(
    "data",
    [
        jpeg(),
        jpeg(mode="L"),
        jpeg(mode="CMYK"),
        jpeg(progressive=True),
        jpeg(restart_marker_blocks=2),
        jpeg(comment=b"\xff\xd9" * 9),
    ],
    ids=["color", "gray", "cmyk", "progressive", "restart", "comment"],
)


@KINDS
@pytest.mark.parametrize("tail", [b"", b"\xff", bytes(100)])
def test_a_missing_end_marker_is_added(data: bytes, tail: bytes) -> None:
    assert completed(data[:-2] + tail) == data
    assert np.array_equal(decode(data[:-2] + tail, 3), decode(data, 3))
    assert decode(data[:-2] + tail, 1).shape == (40, 60, 1)


@KINDS
def test_missing_pixels_are_an_error(data: bytes) -> None:
    scans = [at for at in range(len(data)) if data[at : at + 2] == b"\xff\xda"]
    restarts = [match.start() for match in re.finditer(rb"\xff[\xd0-\xd7]", data)]
    cuts = np.linspace(scans[0] + 20, len(data) - 5, 20).astype(int).tolist()
    for cut in [*cuts, *scans[1:], *restarts[-3:-1]]:
        for tail in (b"", bytes(100)):
            assert completed(data[:cut] + tail) is None, cut
            with pytest.raises(ValueError, match=r"jpg data is damaged|truncated"):
                packed(data[:cut] + tail, short_side=None, quality=90)


def test_zeros_that_stand_in_for_missing_pixels_are_detected() -> None:
    rows, columns = np.linspace(0, 50, 64), np.linspace(0, 200, 96)
    pixels = np.repeat((rows[:, None] + columns)[:, :, None], 3, 2).astype(np.uint8)
    pixels[:40] = np.random.default_rng(0).integers(0, 256, (40, 96, 3))
    pixels[60, 90] = 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    wrong = []
    for padding in range(3, 17):
        repaired = completed(whole[:-3] + bytes(padding))
        if repaired is not None and not np.array_equal(decode(repaired, 3), decode(whole, 3)):
            wrong.append(padding)
    # A scan that is padded with exactly the number of missing bytes looks complete.
    assert wrong in ([], [15])


def test_a_scan_that_ends_with_zeros_is_complete() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (104, 104), "white").save(buffer, "JPEG", optimize=True)
    data = buffer.getvalue()
    ends = [at for at in range(len(data) - 3) if data[at:].strip(b"\0") == b"\x0f\xff\xd9"]
    assert ends
    assert completed(data[:-2]) == data


def test_a_jpeg_with_very_many_scans_is_not_completed() -> None:
    data = jpeg(progressive=True)[:-2]
    scan = data[data.rindex(b"\xff\xda") :]
    assert completed(data + 5 * scan) is not None
    assert completed(data + 20 * scan) is None


def test_an_intact_jpeg_is_not_changed() -> None:
    for data in (jpeg(), jpeg() + b"appended video", jpeg(comment=b"\xff\xda")):
        assert not lacks_end(data)


@pytest.mark.parametrize("seed", range(3))
def test_damaged_headers_do_not_raise_in_the_repair(seed: int) -> None:
    rng, data = np.random.default_rng(seed), jpeg(progressive=True)[:-2]
    for _ in range(100):
        broken = bytearray(data)
        for at in rng.integers(2, min(700, len(data)), 4):
            broken[at] = rng.integers(256)
        completed(bytes(broken)[: rng.integers(1, len(data))])


def test_repaired_images_are_written_counted_and_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    write_image(folder / "a/0.png", 0)
    write_image(folder / "b/0.png", 1)
    (folder / "a/open.jpg").write_bytes(jpeg(1)[:-2])
    (folder / "b/large.jpg").write_bytes(jpeg(2)[:-2])
    (folder / "b/cut.jpg").write_bytes(jpeg(3)[:1000])
    with pytest.raises(ValueError, match=r"cut\.jpg: .* damaged: remove the file"):
        write_shards(ImageFolder(folder, test_fraction=0), tmp_path / "out", workers=0)
    source = ImageFolder(folder, test_fraction=0, short_side=40, skip_bad=True)
    for _ in range(2):  # the second run finds complete shards
        write(source, tmp_path / "out", workers=0)
        assert f"repaired 2 samples, listed in {tmp_path / 'out' / REPAIRED}" in (
            capsys.readouterr().err
        )
    lines = [json.loads(line) for line in (tmp_path / "out" / REPAIRED).read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == ["a/open", "b/large"]
    assert {line["shard"] for line in lines} == {"train-000000.tar"}
    assert "end marker" in lines[0]["reason"]
    (skipped,) = (tmp_path / "out" / SKIPPED).read_text().splitlines()
    assert json.loads(skipped)["name"] == "b/cut.jpg"
    with open_split(tmp_path / "out", "train") as split:
        found = {split.key(i): split.read(i)[0] for i in range(len(split))}
    assert found["a/open"] == jpeg(1)
    assert found.keys() == {"a/0", "b/0", "a/open", "b/large"}
