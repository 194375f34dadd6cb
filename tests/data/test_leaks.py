"""Characters that leak the label are reported; letters and words are not."""

from pathlib import Path

import numpy as np
import pytest

from data.inspection.leaks import CharacterLeak, check_leaks
from data.sources.generated import write_shards
from tests.data.conftest import kway_shard

WORDS = (
    *("the", "a", "sun", "sea", "night", "home", "work", "love", "fire", "rain"),
    *("cat", "dog", "tea", "run", "sing", "blue", "old", "new"),
)
NAMES = ("heart", "joy", "fire", "sparkles")


def write_texts(
    folder: Path, mark: str, *, rate: float = 0.6, num: int = 1200, elsewhere: float = 0
) -> Path:
    """Write texts of random words in four classes. Many texts of the first class contain `mark`."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(num):
        label = int(rng.integers(len(NAMES)))
        words = list(rng.choice(WORDS, 8))
        # A word that is correlated with its class, as in real texts.
        words += [WORDS[label]] * int(rng.random() < 0.2)
        if rng.random() < (rate if label == 0 else elsewhere):
            words.insert(3, mark)
        samples.append((" ".join(words), NAMES[label]))
    write_shards(samples, folder, modality="text", test_fraction=0, workers=0)
    return folder


@pytest.fixture(scope="module")
def leaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("leaking") / "in", "\ufe0f")


def test_a_remaining_variation_selector_is_the_only_suspect(leaking: Path) -> None:
    leaks = check_leaks(leaking)
    (suspect,) = suspects(leaking)
    assert suspect == leaks[0]
    assert suspect.name == "U+FE0F VARIATION SELECTOR-16"
    assert suspect.class_name == "heart"
    assert suspect.gain > 0.05


def suspects(shards: Path) -> list[CharacterLeak]:
    return [leak for leak in check_leaks(shards) if leak.suspect is not None]


def test_a_rare_character_is_suspicious(tmp_path: Path) -> None:
    shards = write_texts(tmp_path / "in", "†", rate=0.06, num=3000)
    assert [leak.char for leak in suspects(shards)] == ["†"]


def test_a_part_of_an_emoji_is_suspicious_at_a_lower_lift(tmp_path: Path) -> None:
    found = {}
    for mark in ("\U0001f1eb", "†"):
        shards = write_texts(tmp_path / mark, mark, rate=0.06, num=4000, elsewhere=0.01)
        found[mark] = [leak.suspect for leak in suspects(shards)]
    (reason,) = found["\U0001f1eb"]
    assert reason.startswith("part of an emoji")
    assert found["†"] == []


def test_the_check_command_exits_with_2_only_with_strict(leaking: Path, tmp_path: Path) -> None:
    loose = kway_shard("check", leaking)
    assert loose.exit_code == 0
    assert "suspect: U+FE0F VARIATION SELECTOR-16" in loose.stdout
    strict = kway_shard("check", leaking, "--strict")
    assert strict.exit_code == 2
    assert "U+FE0F" in strict.stderr
    clean = kway_shard("check", write_texts(tmp_path / "sound", "and"), "--strict")
    assert clean.exit_code == 0
    assert "duplicates: train: " in clean.stdout
    assert "no character leaks the label" in clean.stdout


def test_checking_images_or_too_few_texts_raises(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="contains images: pass a folder of text shards"):
        check_leaks(shards)
    few = write_texts(tmp_path / "in", "x", num=20)
    with pytest.raises(ValueError, match="split 'train' has 20 texts"):
        check_leaks(few)
