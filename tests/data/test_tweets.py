"""Writing shards from tweets: emoji labels, duplicates, splits, damage, and the two passes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources import Tweets
from tests.data.conftest import contents, kway_shard, read_sets

ZWJ = "\u200d"


def jsonl(path: Path, *tweets: dict | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(tweet)}\n" for tweet in tweets))
    return path


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def write(folder: Path, *files: Path, **options: object) -> tuple[Tweets, list[tuple[str, ...]]]:
    """Write shards. Returns the source and the (split, key, text, emoji) of every sample."""
    source = Tweets(files, folder / "work", **options)
    write_shards(source, folder / "out", workers=0)
    return source, read(folder / "out")


def read(shards: Path) -> list[tuple[str, ...]]:
    found = []
    for name in Manifest.load(shards).splits:
        with open_split(shards, name) as split:
            for i in range(len(split)):
                data, extension, label = split.read(i)
                assert extension == "txt"
                about = split.classes[label].attributes
                found.append((name, split.key(i), data.decode(), about.get("emoji", "")))
    return sorted(found)


def labeled(samples: list[tuple[str, ...]]) -> set[tuple[str, str]]:
    return {(text, one) for _, _, text, one in samples}


def test_raw_tweets_become_labels_and_texts_without_emoji(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "a.jsonl",
        {"id_str": "17", "text": "@ana so good 👍🏽👍🏽 https://t.co/x1", "lang": "en"},
        {"id_str": "18", "text": f"क्{ZWJ}ष मजेदार ❤", "lang": "hi"},
        {"id_str": "19", "text": "cut…", "extended_tweet": {"full_text": "long one ❤️"}},
        {"id_str": "20", "text": "nothing here", "lang": "en"},
        {"id_str": "21", "text": "❤️ @ana https://t.co/x1", "lang": "en"},
        {"id_str": "22", "text": "RT @bo: wow ❤️", "lang": "en"},
        {"id_str": "23", "text": "again 👍", "retweeted_status": {"id": 1}},
        {"id_str": "24", "lang": "en"},
    )
    source, samples = write(tmp_path, file, test_fraction=0)
    assert labeled(samples) == {
        ("@user so good http", "👍"),
        (f"क्{ZWJ}ष मजेदार", "❤️"),
        ("long one", "❤️"),
    }
    assert {key.split("-")[0] for _, key, _, _ in samples} == {"en/17", "hi/18", "und/19"}
    assert [info.name for info in source.classes()] == ["red heart", "thumbs up"]
    assert set(source.notes()) == {
        "records read: 8",
        "texts without emoji: 1",
        "texts that contain only emoji, user names and URLs: 1",
        "retweets dropped: 2",
        "records without text: 1",
    }
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.modality == "text"
    assert load_label_vectors(tmp_path / "out", manifest).shape[0] == 2


def test_csv_tsv_and_plain_text_give_the_same_samples(tmp_path: Path) -> None:
    texts = ['say "hi", twice 🔥', "two 🎉 words", "plain 🔥"]
    quoted = [text.replace('"', '""') for text in texts]
    files = (
        lines(tmp_path / "a.csv", "id,tweet", *(f'{i},"{text}"' for i, text in enumerate(quoted))),
        lines(tmp_path / "a.tsv", "tweet\tlabel", *(f"{text}\tpositive" for text in texts)),
        lines(tmp_path / "a.txt", *texts),
        jsonl(tmp_path / "a.jsonl", *({"tweet": text} for text in texts)),
    )
    found = []
    for file in files:
        _, samples = write(tmp_path / file.suffix[1:], file, test_fraction=0)
        found.append(labeled(samples))
    assert found[0] == {('say "hi", twice', "🔥"), ("two words", "🎉"), ("plain", "🔥")}
    assert found[1:] == found[:1] * 3


def test_all_emoji_of_a_tweet_can_become_a_set(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.txt", "a 😂🙏🏽😂", "b 🙏", "c 🔥", "d", "a 🙏😂", "e 😂 🔥🔥")
    source = Tweets((file,), tmp_path / "work", policy="all", test_fraction=0, min_count=2)
    write_shards(source, tmp_path / "out", workers=0)
    fire, joy, hands = "fire", "face with tears of joy", "folded hands"
    assert [info.name for info in source.classes()] == [fire, joy, hands]
    assert read_sets(tmp_path / "out") == {
        "a": [joy, hands],
        "b": [hands],
        "c": [fire],
        "e": [fire, joy],
    }
    assert {"texts without emoji: 1", "duplicates dropped: 1"} <= set(source.notes())


def test_every_emoji_of_a_tweet_can_become_a_label(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.txt", "a 😂🙏🏽😂", "b 🙏", "c 🔥")
    _, samples = write(tmp_path, file, policy="each", test_fraction=0)
    assert labeled(samples) == {("a", "😂"), ("a", "🙏"), ("b", "🙏"), ("c", "🔥")}
    assert len({key for _, key, _, _ in samples}) == 4


def test_duplicates_are_dropped_by_text_and_label_and_counted(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.txt", "@a hi 🔥", "@b hi 🔥🔥", "@a hi 🎉", "other 🎉", "@a hi 🔥")
    source, samples = write(tmp_path, file, test_fraction=0)
    assert sorted(labeled(samples)) == sorted(s[2:] for s in samples)
    assert labeled(samples) == {("@user hi", "🔥"), ("@user hi", "🎉"), ("other", "🎉")}
    # The first of several duplicates is kept.
    assert ("train", "und/0-0", "@user hi", "🔥") in samples
    assert "duplicates dropped: 2" in source.notes()
    source, kept = write(tmp_path / "2", file, duplicates="keep", test_fraction=0)
    assert len(kept) == 5
    assert "duplicates kept: 2" in source.notes()


def test_identical_texts_are_in_the_same_split(tmp_path: Path) -> None:
    texts = [f"text {i} {one}" for i in range(200) for one in ("🔥", "🎉", "😂")]
    _, samples = write(tmp_path, lines(tmp_path / "a.txt", *texts), test_fraction=0.3)
    splits: dict[str, set[str]] = {}
    for split, _, text, _ in samples:
        splits.setdefault(text, set()).add(split)
    assert len(splits) == 200
    assert all(len(where) == 1 for where in splits.values())
    assert 0.2 < np.mean([where == {"test"} for where in splits.values()]) < 0.4


def test_classes_are_selected_by_count_and_language(tmp_path: Path) -> None:
    tweets = [
        {"text": f"{one} {i}", "lang": lang}
        for one, lang, count in (("🔥", "en", 9), ("🎉", "fr", 6), ("😂", "en", 3), ("🙏", "yo", 1))
        for i in range(count)
    ]
    file = jsonl(tmp_path / "a.jsonl", *tweets)

    def classes(name: str, **options: object) -> list[str]:
        source, _ = write(tmp_path / name, file, test_fraction=0, **options)
        return [info.attributes["emoji"] for info in source.classes()]

    assert classes("all") == ["🔥", "🎉", "😂", "🙏"]
    assert classes("top", top=2) == ["🔥", "🎉"]
    assert classes("count", min_count=3) == ["🔥", "🎉", "😂"]
    assert classes("languages", languages=("en",)) == ["🔥", "😂"]
    with pytest.raises(ValueError, match="1 classes with training samples and at least 7"):
        classes("few", min_count=7)


def test_damaged_records_are_counted_and_the_first_is_reported(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"text": "a 🔥"}, {"text": "b 🎉"})
    good = file.read_bytes()
    bad = b'{"text": "cut \n"no object"\n{"text": "caf\xe9"}\n{"text": "half \\ud83d"}\n'
    bad += b"[" * 100_000 + b"\n"
    bad += '{"text": "odd id 🔥", "id": "\\ud83d", "lang": "../x"}\n'.encode()
    file.write_bytes(good + bad)
    source, samples = write(tmp_path, file, test_fraction=0)
    assert labeled(samples) == {("a", "🔥"), ("b", "🎉"), ("odd id", "🔥")}
    assert all(key.startswith("und/0-") for _, key, _, _ in samples)
    assert "damaged records: 5" in source.notes()
    assert any(f"first damaged: {file}, byte {len(good)}: " in note for note in source.notes())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", "x", "unsupported extension '.gz': unpack it, or use one of .jsonl"),
        ("a.tsv", "id\tbody\n1\thi 🔥\n", r"column 'text' does not exist: .* are id, body"),
        ("a.csv", "id,id\n1,2\n", "a unique name for every column"),
        ("a.txt", "no emoji\nat all\n", "0 classes with training samples"),
    ],
)
def test_a_file_without_tweets_raises(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    done = kway_shard("tweets", tmp_path / name, "-o", tmp_path / "out")
    assert re.search(f"^.*{message}.*$", str(done.exception))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_shards_do_not_depend_on_chunks_or_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    texts = [f"text {rng.integers(300)} {rng.choice(list('🔥🎉😂🙏'))}" for _ in range(1500)]
    file = lines(tmp_path / "a.txt", *texts)
    _, whole = write(tmp_path / "whole", file)
    monkeypatch.setattr("data.sources.first_pass._CHUNK_ROWS", 70)
    monkeypatch.setattr("data.sources.first_pass._FETCHED", 100)
    _, in_parts = write(tmp_path / "parts", file, workers=2)
    assert len(whole) == len(set(whole)) > 800
    assert in_parts == whole
    assert contents(tmp_path / "parts/out") == contents(tmp_path / "whole/out")


def test_the_description_depends_on_inputs_and_options(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.txt", "a 🔥", "b 🎉")
    source = Tweets((file,), tmp_path / "work", test_fraction=0)
    before = source.describe()
    assert source.describe() == Tweets((file,), tmp_path / "other", test_fraction=0).describe()
    assert Tweets((file,), tmp_path / "work", policy="each").describe() != before
    assert len(source.splits()["train"]) == 2
    lines(file, "a 🔥", "c 🎉", "d 🎉")
    changed = Tweets((file,), tmp_path / "work", test_fraction=0)
    assert changed.describe() != before
    assert len(changed.splits()["train"]) == 3


def test_labels_that_are_not_emoji_become_class_names(tmp_path: Path) -> None:
    rows = ["good day,happy", "bad day, sad ", "no label,"]
    file = lines(tmp_path / "a.csv", "text,label", *rows)
    source, samples = write(tmp_path, file, label="label", test_fraction=0)
    assert [info.name for info in source.classes()] == ["happy", "sad"]
    assert source.label_vectors() is None
    assert len(samples) == 2
    assert "texts without a label: 1" in source.notes()


def test_an_invalid_split_raises_an_error_that_names_the_line(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.csv", "text,label,part", "a,❤,train", "b,❤,?")
    with pytest.raises(ValueError, match=r"a\.csv, line 3 has the split '\?': use names"):
        write(tmp_path, file, label="label", split="part")
