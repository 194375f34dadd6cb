"""Names of emoji in the languages of the `emoji` library: thousands of texts without a download.

A text is the name of an emoji in one language. Its class is the emoji without skin tone. Some
languages are held out for the test split.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.option import Option
from data.sources.source import STRICT, Sample, Source
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import fold, fully_qualified, load_languages, name_in

# The training split contains related languages: Spanish, Portuguese and French are related to
# Italian, and Arabic shares its script with Persian.
TEST_LANGUAGES = ("it", "fa")


class _Task(NamedTuple):
    emoji: str
    language: str
    label: int


@dataclass(frozen=True, config=STRICT)
class EmojiNames(Source):
    """Names of emoji in 14 languages. No download is required.

    A class is an emoji without skin tone. Version 2.16 of the emoji library contains 1,923 classes
    and 3,953 emoji including skin tones. If a language uses the same name for several emoji of a
    class, the name becomes a single sample.
    """

    kind = "emoji-names"
    modality = "text"
    reads = "the names in the emoji package"
    held_out = "the languages of --test-languages"

    classes_limit: Annotated[int | None, Option("--classes")] = Field(
        default=None,
        ge=2,
        description="maximum number of classes (the first in code point order are kept); "
        "default: all",
    )
    languages: tuple[str, ...] = Field(
        default=(),
        description="comma-separated language codes; default: all languages that have names",
    )
    test_languages: tuple[str, ...] = Field(
        default=TEST_LANGUAGES, description="languages held out for the test split"
    )

    def __post_init__(self) -> None:
        load_languages(self._all_languages + self.test_languages)
        if not set(self.test_languages) < set(self._all_languages):
            raise ValueError(
                "emoji-names: pass some, but not all, of --languages as --test-languages, not "
                f"{','.join(self.test_languages)}"
            )

    def parameters(self) -> dict[str, Any]:
        return {
            "classes": self.classes_limit,
            "languages": ",".join(self._all_languages),
            "test_languages": ",".join(self.test_languages),
            "tones": True,  # an option of earlier versions, whose shards are still resumed
            # The version of the package determines the names.
            "emoji": emoji.__version__,
        }

    def classes(self) -> tuple[ClassInfo, ...]:
        return emoji_classes(self._labels)

    def label_vectors(self) -> np.ndarray:
        return emoji_vectors(self._labels)

    def splits(self) -> dict[str, Sequence[_Task]]:
        train = [one for one in self._all_languages if one not in self.test_languages]
        splits = {"train": self._tasks(train), "test": self._tasks(self.test_languages)}
        return {split: tasks for split, tasks in splits.items() if tasks}

    def render(self, task: _Task) -> Sample:
        # A spawned worker starts without the names in languages other than English.
        load_languages((task.language,))
        codes = "-".join(f"{ord(char):x}" for char in task.emoji)
        name = name_in(task.emoji, task.language)
        return Sample(f"{task.language}/{codes}", name.encode(), "txt", task.label)

    def _tasks(self, languages: Sequence[str]) -> list[_Task]:
        label = {one: i for i, one in enumerate(self._labels)}
        members = [one for one in fully_qualified() if fold(one) in label]
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
