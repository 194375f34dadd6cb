"""Tweets, labeled by an emoji in the text or by a column. All emoji are removed from the text."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.classes.class_list import ClassInfo
from data.messages import one_line
from data.option import Option
from data.sources.names import class_name
from data.sources.record_source import RecordSource
from data.sources.records import AnyFile, Fields, Record, digest, text_field
from data.sources.rows import DAMAGED, FIRST_DAMAGED, Row, Task
from data.sources.source import STRICT, Sample
from data.text.cleaning import clean, is_retweet
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import find_emoji, fold

# In Twitter's native JSON, the `text` of a long tweet is truncated.
_TEXT_NAMES = ("extended_tweet.full_text", "full_text", "text", "tweet")
_LANGUAGE_NAMES = ("lang", "language")
_ID_NAMES = ("id_str", "id", "tweet_id")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8})*")
_UNKNOWN_LANGUAGE = "und"
_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_RETWEETED = "retweeted_status"


@dataclass(frozen=True, config=STRICT)
class Tweets(RecordSource):
    """Tweets labeled by their emoji. All emoji and parts of emoji are removed from the texts.

    A key has the form `<language>/<id>-<file>-<offset>`; an unknown language is `und`. By default,
    columns and fields are found by their common names, such as the ones in Twitter's native JSON.
    """

    kind = "tweets"
    modality = "text"
    needs_training = False
    reads = "raw tweets"
    held_out = "--test-fraction of the texts, chosen by a hash of the text"

    text: str | None = Field(
        default=None,
        description="column or field that contains the text; dots select nested fields",
    )
    language: str | None = Field(
        default=None, description="column or field that contains the language"
    )
    identity: Annotated[str | None, Option("--id")] = Field(
        default=None, description="column or field that contains the ID"
    )
    label: str | None = Field(
        default=None,
        description="column or field that contains the label, such as an emoji; default: the emoji "
        "in the text",
    )
    languages: tuple[str, ...] = Field(
        default=(), description="comma-separated languages to use; default: all"
    )
    policy: Literal["first", "each", "all", "only-if-single", "most-frequent"] = Field(
        default="first",
        description="rule that selects the label of a tweet with several emoji; each: one sample "
        "per emoji; all: one sample with the set of its emoji",
    )
    retweets: Annotated[Literal["drop", "keep"], Option("--keep-retweets", flag="keep")] = Field(
        default="drop", description="keep retweets"
    )
    duplicates: Annotated[Literal["drop", "keep"], Option("--keep-duplicates", flag="keep")] = (
        Field(default="drop", description="keep duplicate texts within the same class and split")
    )
    top: int | None = Field(
        default=None,
        ge=2,
        description="maximum number of classes (the most frequent are kept); default: all",
    )

    def __post_init__(self) -> None:
        for one in self._opened:
            columns = one.columns or _TEXT_NAMES
            if self.text is None and not {*_TEXT_NAMES} & {*columns}:
                raise ValueError(
                    f"{one.path}: column 'text' does not exist: pass the column that contains the "
                    f"text as --text; the columns are {', '.join(columns)[:200]}"
                )
        chosen = (self.text, self.language, self.identity, self.label, self.split)
        self._check_columns([name for name in chosen if name is not None])

    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "files": digest(self.files),
            "text": self.text,
            "language": self.language,
            "identity": self.identity,
            "languages": ",".join(sorted(self.languages)) or None,
            "policy": self.policy,
            # Options of earlier versions, whose shards are still resumed.
            "emoji_form": "fold",
            "users": "replace",
            "urls": "replace",
            "retweets": self.retweets,
            "duplicates": self.duplicates,
            "min_count": self.min_count,
            "top": self.top,
            "test_fraction": self.test_fraction,
            # The version of the package determines the set of emoji.
            "emoji": emoji.__version__,
        }
        if self.label is not None or self.split is not None:
            parameters |= {"label": self.label, "split": self.split, "across": self.across}
        return parameters

    def classes(self) -> tuple[ClassInfo, ...]:
        if self._are_emoji:
            return emoji_classes(self._selected.labels)
        return super().classes()

    def label_vectors(self) -> np.ndarray | None:
        return emoji_vectors(self._selected.labels) if self._are_emoji else None

    @property
    def _are_emoji(self) -> bool:
        """Whether all classes are emoji. The labels of a column may be names."""
        return set(self._selected.labels) <= emoji.EMOJI_DATA.keys()

    def render(self, task: Task) -> Sample:
        # A record with several labels becomes several samples.
        key = f"{task.key}-{task.label}" if self.policy == "each" else task.key
        return Sample(key, task.content, "txt", task.label)

    def row(
        self, number: int, file: AnyFile, record: Record, counts: Counter[str]
    ) -> Iterator[Row]:
        counts["records read"] += 1
        try:
            fields = file.fields(record)
            text = _first(fields, self.text, _TEXT_NAMES)
            labels, cleaned = self._labels_and_text(text, fields, counts)
        except ValueError as error:
            if not counts[DAMAGED]:
                where = f"{file.path}, byte {record.position}"
                counts[f"{FIRST_DAMAGED}{where}: {one_line(error, 120)}"] += 1
            counts[DAMAGED] += 1
            return
        if not labels:
            return
        try:
            split = self._split_of(fields)
        except ValueError as error:
            raise ValueError(f"{file.where(record.position)} {error}") from error
        key = self._key(fields, number, record.position)
        for label in ["\n".join(sorted(labels))] if self.has_sets else labels:
            yield Row(number, record.position, key, cleaned.encode(), label, label, split)

    @property
    def has_sets(self) -> bool:  # type: ignore[override]
        return self.policy == "all"

    def _labels_and_text(
        self, text: str | None, fields: Fields, counts: Counter[str]
    ) -> tuple[list[str], str]:
        """Return the labels and the cleaned text of a record.

        For a record that is skipped, count the reason and return no labels.
        """
        reason, labels, cleaned = None, [], ""
        if text is None:
            reason = "records without text"
        elif self.languages and self._language(fields) not in self.languages:
            reason = "texts in other languages"
        elif self.retweets == "drop" and (is_retweet(text) or fields.get(_RETWEETED)):
            reason = "retweets dropped"
        elif not (found := self._found(text, fields)):
            reason = "texts without emoji" if self.label is None else "texts without a label"
        else:
            labels = labels_by_policy(self.policy, found)
            cleaned = clean(text)
            if not labels:
                reason = "texts with several emoji skipped by --policy"
            elif not cleaned:
                reason = "texts that contain only emoji, user names and URLs"
        if reason is not None:
            counts[reason] += 1
            return [], ""
        return labels, cleaned

    def _found(self, text: str, fields: Fields) -> list[str]:
        """Return the emoji in the text, or the label of a column."""
        if self.label is None:
            found = find_emoji(text)
        else:
            found = [name for name in [class_name(text_field(fields, self.label) or "")] if name]
        return [fold(one) if one in emoji.EMOJI_DATA else one for one in found]

    def _language(self, fields: Fields) -> str:
        return _plain(fields, self.language, _LANGUAGE_NAMES, _LANGUAGE) or _UNKNOWN_LANGUAGE

    def _key(self, fields: Fields, file: int, offset: int) -> str:
        """Return a key that is unique for each location."""
        identity = _plain(fields, self.identity, _ID_NAMES, _ID)
        suffix = f"{file:x}-{offset:x}"
        if identity is not None:
            suffix = f"{identity}-{suffix}"
        return f"{self._language(fields)}/{suffix}"

    def choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the classes, most frequent first. Ties are sorted by code points."""
        names = super().choose(samples, trained)
        return sorted(names, key=lambda name: (-samples[name], name))[: self.top]


def _first(fields: Fields, name: str | None, usual: Sequence[str]) -> str | None:
    names = usual if name is None else (name,)
    for one in names:
        if (found := text_field(fields, one)) is not None:
            return found
    return None


def _plain(
    fields: Fields, name: str | None, usual: Sequence[str], pattern: re.Pattern[str]
) -> str | None:
    """Return the value of a field for use in a key, or None if it does not match `pattern`."""
    try:
        found = _first(fields, name, usual) or ""
    except ValueError:
        return None
    return found if pattern.fullmatch(found) else None


def labels_by_policy(policy: str, found: Sequence[str]) -> list[str]:
    """Return the labels, possibly none, of a text whose emoji, in order, are `found`."""
    match policy:
        case "each" | "all":
            return list(dict.fromkeys(found))
        case "only-if-single":  # one distinct emoji, possibly repeated
            return [*found[:1]] if len(set(found)) == 1 else []
        case "most-frequent":  # the first one of equally frequent emoji
            return [one for one, _ in Counter(found).most_common(1)]
        case _:
            return [*found[:1]]
