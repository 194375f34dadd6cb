"""Label vectors from a file, matched by name and attributes to the classes of any source."""

from pathlib import Path

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from tests.data.conftest import kway_shard, write_image

ZWJ = "\u200d"


def tweets(folder: Path, *texts: str) -> Path:
    (folder / "a.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return folder / "a.txt"


def vectors(folder: Path) -> dict[str, list[float]]:
    manifest = Manifest.load(folder)
    rows = load_label_vectors(folder, manifest).tolist()
    return dict(zip(manifest.class_names, rows, strict=True))


def test_vectors_of_emoji_are_found_for_any_variation_tone_or_sequence(tmp_path: Path) -> None:
    file = tmp_path / "e.txt"
    file.write_text("❤️ 1 0\n☀ 0 1\n🤷 3 3\n👍 5 5\n", encoding="utf-8")
    texts = ("a ❤", "b ☀️", f"c 🤷🏽{ZWJ}♀️", "d 👍🏿", "e 🔥")
    options = ("-o", tmp_path / "out", "--vectors", file, "--test-fraction", 0)
    done = kway_shard("tweets", tweets(tmp_path, *texts), *options)
    assert done.exit_code == 0, done.output
    assert vectors(tmp_path / "out") == {
        "red heart": [1, 0],
        "sun": [0, 1],
        "woman shrugging": [3, 3],
        "thumbs up": [5, 5],
        "fire": [2.25, 2.25],
    }
    assert "1 classes without a vector use the mean: 🔥" in done.stderr


def test_unreadable_vectors_raise_and_no_shards_are_written(tmp_path: Path) -> None:
    """tests/heads/test_label_vectors.py covers each kind of damage."""
    (tmp_path / "v.bin").write_bytes(b"1 1\nx 1234")
    options = ("-o", tmp_path / "out", "--vectors", tmp_path / "v.bin", "--test-fraction", 0)
    done = kway_shard("tweets", tweets(tmp_path, "a 🔥", "b 🎉"), *options)
    assert isinstance(done.exception, ValueError)
    assert "for any of the 4 class names, such as " in str(done.exception)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_class_folders_are_matched_by_name_and_changed_vectors_need_another_folder(
    tmp_path: Path,
) -> None:
    for i, name in enumerate(("red_fox", "okapi")):
        write_image(tmp_path / "in" / name / "0.png", i)
    file = tmp_path / "glove.txt"
    file.write_text("red 1 0\nfox 3 2\nokapi 0 5\n")
    arguments = ("imagefolder", tmp_path / "in", "-o", tmp_path / "out", "--test-fraction", 0)
    assert kway_shard(*arguments, "--vectors", file).exit_code == 0
    assert vectors(tmp_path / "out") == {"red_fox": [2, 1], "okapi": [0, 5]}
    file.write_text("red 1 0\nfox 3 2\nokapi 0 6\n")
    assert "choose another folder" in str(kway_shard(*arguments, "--vectors", file).exception)
