"""Names of emoji in the languages of the `emoji` library: thousands of texts and no download.

A text is the name in a language, its class the emoji without skin tone. Some languages are held
out for the test split.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import emoji
import numpy as np

from data.shards.manifest import ClassInfo, SourceInfo
from data.sources.emoji_classes import emoji_classes, emoji_vectors
from data.sources.source import Modality, Sample
from data.text.emoji_table import fold, fully_qualified, load_languages, name_in

# Each has near relatives in training: Spanish, Portuguese and French; Arabic script; German.
TEST_LANGUAGES = ("it", "fa")


class _Task(NamedTuple):
    emoji: str
    language: str
    label: int


@dataclass(frozen=True)
class EmojiNames:
    """The source `emoji-names`.

    classes_limit: keep the first N classes by code points; None keeps all (1,923 with 3,953 emoji
    of all skin tones, 14 languages, in emoji 2.16). languages: those to take; empty takes all.
    tones: also the names of emoji with a skin tone, which are of the class without one. Where one
    language calls two emoji of a class the same, the name is there once.
    """

    classes_limit: int | None = None
    languages: tuple[str, ...] = ()
    test_languages: tuple[str, ...] = TEST_LANGUAGES
    tones: bool = True

    modality: ClassVar[Modality] = "text"

    def __post_init__(self) -> None:
        if self.classes_limit is not None and self.classes_limit < 2:
            raise ValueError(f"emoji-names: classes is {self.classes_limit}: choose 2 or more")
        load_languages(self._all_languages + self.test_languages)
        if outside := [one for one in self.test_languages if one not in self._all_languages]:
            raise ValueError(
                f"emoji-names: test language {outside[0]!r} is not among the languages: add it"
            )
        if not set(self._all_languages) - set(self.test_languages):
            raise ValueError("emoji-names: every language is held out: leave one for training")

    def describe(self) -> SourceInfo:
        parameters: dict[str, Any] = {
            "classes": self.classes_limit,
            "languages": ",".join(self._all_languages),
            "test_languages": ",".join(self.test_languages),
            "tones": self.tones,
            # It brings the names.
            "emoji": emoji.__version__,
        }
        return SourceInfo(kind="emoji-names", parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        return emoji_classes(self._labels)

    def label_vectors(self) -> np.ndarray:
        return emoji_vectors(self._labels)

    def splits(self) -> dict[str, Sequence[_Task]]:
        train = [one for one in self._all_languages if one not in self.test_languages]
        splits = {"train": self._tasks(train), "test": self._tasks(self.test_languages)}
        return {split: tasks for split, tasks in splits.items() if tasks}

    def render(self, task: _Task) -> Sample:
        # A spawned worker starts without the names of other languages.
        load_languages((task.language,))
        codes = "-".join(f"{ord(char):x}" for char in task.emoji)
        name = name_in(task.emoji, task.language)
        return Sample(f"{task.language}/{codes}", name.encode(), "txt", task.label)

    def _tasks(self, languages: Sequence[str]) -> list[_Task]:
        label = {one: i for i, one in enumerate(self._labels)}
        members = [one for one in fully_qualified() if fold(one) in label]
        if not self.tones:
            members = [one for one in members if fold(one) == one]
        tasks: dict[tuple[str, str, int], _Task] = {}
        for language in languages:
            for one in members:
                if language in emoji.EMOJI_DATA[one]:
                    key = (language, name_in(one, language), label[fold(one)])
                    tasks.setdefault(key, _Task(one, *key[::2]))
        return list(tasks.values())

    @property
    def _all_languages(self) -> tuple[str, ...]:
        return self.languages or tuple(emoji.LANGUAGES)

    @cached_property
    def _labels(self) -> list[str]:
        return sorted({fold(one) for one in fully_qualified()})[: self.classes_limit]

    def __getstate__(self) -> dict[str, Any]:
        # Workers name; they need no class list.
        return {k: v for k, v in self.__dict__.items() if not k.startswith("_")}
