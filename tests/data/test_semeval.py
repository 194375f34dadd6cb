"""Text folders in the layout of SemEval 2018: us_trial.text, us_trial.labels and us_mapping.txt."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from data.shards.manifest import Manifest
from data.skipped import SKIPPED
from data.sources import LabeledTexts
from launch.commands.shard import app
from tests.data.test_tweets import read


def kway(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write(folder: Path, *names: str) -> Path:
    """Write a text and a label file for each name, and the mapping."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".text").write_text(f"{path.name} one …\n{path.name} two\n")
        path.with_suffix(".labels").write_text("0\n1\n")
    (folder / "us_mapping.txt").write_text("0\t❤\t_red_heart_\n1\t😂\t_face_with_tears_of_joy_\n")
    return folder


def splits(folder: Path) -> set[tuple[str, str]]:
    return {(split, text.split()[0]) for split, _, text, _ in read(folder)}


def test_semeval_folders_are_sharded_with_one_command(tmp_path: Path) -> None:
    write(tmp_path / "in", "us_train", "us_trial", "us_test")
    done = kway("tweets", tmp_path / "in", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert splits(tmp_path / "out") == {
        ("train", "us_train"),
        ("validation", "us_trial"),
        ("test", "us_test"),
    }
    assert Manifest.load(tmp_path / "out").class_names == (
        "red heart",
        "face with tears of joy",
    )
    assert not (tmp_path / "out" / SKIPPED).exists()


def test_trial_data_is_used_for_training_if_there_is_no_other(tmp_path: Path) -> None:
    """The published archives contain trial/ and test/, but not the training texts."""
    write(tmp_path / "in", "trial/us_trial", "test/us_test", "train/tweet_by_ID")
    (tmp_path / "in/mapping").mkdir()
    (tmp_path / "in/us_mapping.txt").rename(tmp_path / "in/mapping/us_mapping.txt")
    done = kway("tweets", tmp_path / "in", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert splits(tmp_path / "out") == {("train", "us_trial"), ("test", "us_test")}
    assert "us_trial.text is used for training" in done.stderr
    (line,) = (tmp_path / "out" / SKIPPED).read_text().splitlines()
    assert json.loads(line)["name"] == "train/tweet_by_ID.text"
    assert "'train/tweet_by_ID.text': its name does not end in one of the splits" in done.stderr


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("us_train", "es_train"), r"es_train\.text and us_train\.text, which are different data"),
        (("us_train", "more/us_train"), r"are the same split: remove one"),
        (("us_test",), r"train_text\.txt is missing: pass a folder that contains"),
    ],
)
def test_other_folders_raise(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LabeledTexts(write(tmp_path / "in", *names), tmp_path / "work")


def test_missing_labels_raise(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "us_train", "us_test")
    (folder / "us_test.labels").write_text("0\n")
    with pytest.raises(ValueError, match=r"us_test\.labels contains 1 labels, but .*: add one"):
        LabeledTexts(folder, tmp_path / "work").classes()
    (folder / "us_test.labels").unlink()
    with pytest.raises(FileNotFoundError, match=r"us_test\.labels is missing: add the labels"):
        LabeledTexts(folder, tmp_path / "work")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("us_train.text", b"", r"us_train\.text contains no texts for training: add some"),
        ("us_train.labels", b"0\n\xff\n", r"us_train\.labels, line 2 is not UTF-8 text: save"),
        ("us_train.labels", b"0\r1\r", r"us_train\.labels, line 1 contains a carriage return"),
        ("us_mapping.txt", b"0\ta\n1\t\xff\n", r"us_mapping\.txt, line 2 is not UTF-8 text: save"),
        ("us_train.labels", b"0\n" + b"9" * 5000, r"label '9{60}…' is missing from .*us_mapping"),
    ],
)
def test_invalid_files_raise_one_line_that_names_the_file(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    folder = write(tmp_path / "in", "us_train", "us_test")
    (folder / name).write_bytes(content)
    if not content:
        (folder / name).with_suffix(".labels").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        LabeledTexts(folder, tmp_path / "work").classes()


def test_a_label_of_5000_digits_is_a_name(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "us_train")
    (folder / "us_mapping.txt").unlink()
    (folder / "us_train.labels").write_text(f"10\n{'9' * 5000}\n")
    classes = LabeledTexts(folder, tmp_path / "work").classes()
    assert [len(one.name) for one in classes] == [2, 5000]
