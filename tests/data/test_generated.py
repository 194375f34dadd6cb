"""Shards from the samples of a user's own generator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from data.shards.manifest import Manifest
from data.sources.generated import LabeledSample, write_shards
from tests.data.conftest import contents, read
from tests.noise_images import image


def pictures(number: int = 12) -> Iterator[LabeledSample]:
    for i in range(number):
        yield LabeledSample(image(i), f"class {i % 2}", "val" if i % 4 == 3 else "train", "things")


def test_generated_images_become_shards_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.sources.first_pass._CHUNK_BYTES", 5000)  # several batches
    out = tmp_path / "out"
    manifest = write_shards(pictures(), out, original=True, samples_per_shard=4, workers=2)
    assert manifest == Manifest.load(out)
    assert [info.attributes for info in manifest.classes] == [{"path": "things"}] * 2
    found = {**read(out, "train"), **read(out, "test")}
    assert found == {sample.content: sample.label for sample in pictures()}
    assert len(read(out, "test")) == 3
    assert not (tmp_path / "out.first-pass").exists()
    before = contents(out)
    assert write_shards(pictures(), out, original=True, samples_per_shard=4) == manifest
    assert contents(out) == before
    with pytest.raises(ValueError, match="out"):  # other samples
        write_shards(pictures(10), out, original=True, samples_per_shard=4)


def test_plain_tuples_of_texts_are_split_by_a_hash(tmp_path: Path) -> None:
    texts = [(f"text {i}", "ab"[i % 2]) for i in range(100)]
    write_shards(texts, tmp_path / "out", modality="text", test_fraction=0.3)
    train, test = read(tmp_path / "out", "train"), read(tmp_path / "out", "test")
    assert {**train, **test} == {text.encode(): label for text, label in texts}
    assert 15 < len(test) < 45


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([("a text", "a"), (b"", "b")], "sample 0: the content 'a text' and the label 'a' must be"),
        ([(b"x", "a"), (b"x", "b")], "sample 0 and sample 1: the same image has the labels"),
        ([(b"x", "a"), (b"y", "a")], "found 1 classes"),
        ([(b"x", "a"), (b"y", "b", "val")], "class 'b' has no training samples"),
        ([(b"x", "a"), (b"y", "b")], r"sample \d: not an image"),
    ],
)
def test_invalid_samples_raise_and_leave_no_files(
    tmp_path: Path, samples: list[tuple], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(samples, tmp_path / "out", test_fraction=0, workers=0)
    assert list(tmp_path.iterdir()) == []
