"""Tweets: the label is an emoji found in the text or a column, and all emoji are removed from the
text.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, one_line, shown, silent
from data.option import Argument, Option, Supplied
from data.remote.input_path import Input
from data.shards.manifest import ClassInfo, SourceInfo
from data.shards.split_names import split_name
from data.sources.first_pass import FirstPassSource
from data.sources.names import class_name
from data.sources.selection import (
    DAMAGED,
    FIRST_DAMAGED,
    SPAN_BYTES,
    Row,
    Rules,
    Span,
    Task,
)
from data.sources.source import STRICT, Sample
from data.text.cleaning import Cleaning, Replacement, is_retweet
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import find_emoji, fold
from data.text.records import RecordFile, digest, open_records, text_field

# In Twitter's native JSON, the `text` of a long tweet is truncated.
_TEXT_NAMES = ("extended_tweet.full_text", "full_text", "text", "tweet")
_LANGUAGE_NAMES = ("lang", "language")
_ID_NAMES = ("id_str", "id", "tweet_id")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}(?:-[A-Za-z0-9]{1,8})*")
_UNKNOWN_LANGUAGE = "und"
_ID = re.compile(r"[A-Za-z0-9_-]{1,32}")
_RETWEETED = "retweeted_status"


@dataclass(frozen=True, config=STRICT)
class Tweets(FirstPassSource):
    """Tweets labeled by their emoji. All emoji and parts of emoji are removed from the texts.

    A key has the form `<language>/<id>-<file>-<offset>`; an unknown language is `und`. By default,
    columns and fields are found by their common names, such as the ones in Twitter's native JSON.
    """

    kind = "tweets"
    modality = "text"
    reads = "raw tweets"
    held_out = "--test-fraction of the texts, chosen by a hash of the text"

    files: Annotated[
        tuple[Input, ...],
        Argument(),
        Field(description="files of tweets (.jsonl, .csv, .tsv, or .txt with one tweet per line)"),
    ]
    work: Annotated[Path, Supplied()]
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
    split: str | None = Field(
        default=None,
        description="column or field that contains the split; default: --test-fraction is held out",
    )
    languages: tuple[str, ...] = Field(
        default=(), description="comma-separated languages to use; default: all"
    )
    policy: Literal["first", "each", "only-if-single", "most-frequent"] = Field(
        default="first", description="rule that selects the label of a tweet with several emoji"
    )
    emoji_form: Annotated[Literal["fold", "keep"], Option("--emoji")] = Field(
        default="fold",
        description="how to treat skin tones and variants in labels: use the fully qualified emoji "
        "without skin tone (fold), or the emoji as written (keep)",
    )
    users: Replacement = Field(
        default="replace",
        description="how to treat user names: replace them with @user, remove them, or keep them",
    )
    urls: Replacement = Field(
        default="replace",
        description="how to treat URLs: replace them with http, remove them, or keep them",
    )
    retweets: Annotated[Literal["drop", "keep"], Option("--keep-retweets", flag="keep")] = Field(
        default="drop", description="keep retweets"
    )
    duplicates: Annotated[Literal["drop", "keep"], Option("--keep-duplicates", flag="keep")] = (
        Field(default="drop", description="keep duplicate texts within the same class and split")
    )
    across: Annotated[Literal["drop", "keep"], Option("--drop-across", flag="drop")] = Field(
        default="keep", description="drop training texts that also occur in another split"
    )
    min_count: int = Field(
        default=1, ge=1, description="minimum number of texts per class, not counting duplicates"
    )
    top: int | None = Field(
        default=None,
        ge=2,
        description="maximum number of classes (the most frequent are kept); default: all",
    )
    test_fraction: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="fraction of texts to hold out, chosen by a hash of the text",
    )
    workers: Annotated[int | None, Supplied()] = None
    ray: Annotated[str | None, Supplied()] = field(default=None, compare=False, repr=False)
    report: Annotated[Report, Supplied()] = field(default=silent, compare=False, repr=False)

    def __post_init__(self) -> None:
        for one in self._opened:
            if one.columns is not None:
                self._check_columns(one)

    def describe(self) -> SourceInfo:
        parameters: dict[str, Any] = {
            "files": digest(self.files),
            "text": self.text,
            "language": self.language,
            "identity": self.identity,
            "languages": ",".join(sorted(self.languages)) or None,
            "policy": self.policy,
            "emoji_form": self.emoji_form,
            "users": self.users,
            "urls": self.urls,
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
        return SourceInfo(kind=self.kind, parameters=parameters)

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

    def announcement(self) -> str | None:
        if self.split is not None or not self.test_fraction:
            return None
        return (
            f"random split, because there is no --split: {self.test_fraction:.0%} of the texts, "
            "by a hash of the text, become `test`"
        )

    def render(self, task: Task) -> Sample:
        # A record with several labels becomes several samples.
        key = f"{task.key}-{task.label}" if self.policy == "each" else task.key
        return Sample(key, task.content, "txt", task.label)

    def spans(self) -> list[Span]:
        return [
            Span(number, first, last, last - first)
            for number, one in enumerate(self._opened)
            for first, last in one.spans(SPAN_BYTES)
        ]

    def rows(self, span: Span, counts: Counter[str]) -> Iterator[Row]:
        one = self._opened[span.file]
        for offset, data in one.records(span.first, span.last):
            counts["records read"] += 1
            try:
                fields = one.parse(data)
                text = self._text(fields)
                labels, cleaned = self._labels_and_text(text, fields, counts)
            except ValueError as error:
                if not counts[DAMAGED]:
                    counts[f"{FIRST_DAMAGED}{one.path}, byte {offset}: {one_line(error, 120)}"] += 1
                counts[DAMAGED] += 1
                continue
            if not labels:
                continue
            key = self._key(fields, span.file, offset)
            split = self._split_of(one, offset, fields)
            for label in labels:
                yield Row(span.file, offset, key, cleaned.encode(), label, label, split)

    @cached_property
    def _opened(self) -> list[RecordFile]:
        return [open_records(path) for path in self.files]

    def _split_of(self, one: RecordFile, offset: int, fields: dict[str, Any]) -> str | None:
        if self.split is None:
            return None
        name = (text_field(fields, self.split) or "").strip().lower()
        if not name.isidentifier():
            raise ValueError(
                f"{one.path}, line {one.line(offset)}: {shown(name)} is not the name of a split: "
                "use names such as train and test"
            )
        return split_name(name)

    def _labels_and_text(
        self, text: str | None, fields: dict[str, Any], counts: Counter[str]
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
            cleaned = self._cleaning.clean(text)
            if not labels:
                reason = "texts with several emoji skipped by --policy"
            elif not cleaned:
                reason = "texts that contain only emoji, user names and URLs"
        if reason is not None:
            counts[reason] += 1
            return [], ""
        return labels, cleaned

    def _found(self, text: str, fields: dict[str, Any]) -> list[str]:
        """Return the emoji in the text, or the label of a column."""
        if self.label is None:
            found = find_emoji(text)
        else:
            name = class_name(text_field(fields, self.label) or "")
            found = [name] if name else []
        if self.emoji_form == "keep":
            return found
        return [fold(one) if one in emoji.EMOJI_DATA else one for one in found]

    def _text(self, fields: dict[str, Any]) -> str | None:
        return _first(fields, self.text, _TEXT_NAMES)

    def _language(self, fields: dict[str, Any]) -> str:
        return _plain(fields, self.language, _LANGUAGE_NAMES, _LANGUAGE) or _UNKNOWN_LANGUAGE

    def _key(self, fields: dict[str, Any], file: int, offset: int) -> str:
        """Return a key that is unique for each location."""
        identity = _plain(fields, self.identity, _ID_NAMES, _ID)
        suffix = f"{file:x}-{offset:x}"
        if identity is not None:
            suffix = f"{identity}-{suffix}"
        return f"{self._language(fields)}/{suffix}"

    def _check_columns(self, one: RecordFile) -> None:
        assert one.columns is not None
        chosen = (self.text, self.language, self.identity, self.label, self.split)
        named = [name for name in chosen if name is not None]
        missing = [name for name in named if name not in one.columns]
        shown = ", ".join(one.columns)[:200]
        if self.text is None and not set(_TEXT_NAMES) & set(one.columns):
            raise ValueError(
                f"{one.path}: column 'text' does not exist: pass the column that contains the text "
                f"as --text; the columns are {shown}"
            )
        if missing:
            raise ValueError(
                f"{one.path}: column {missing[0]!r} does not exist: choose one of {shown}"
            )

    def _choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the classes, most frequent first. Ties are sorted by code points."""
        names = [name for name in trained if trained[name] and samples[name] >= self.min_count]
        names.sort(key=lambda name: (-samples[name], name))
        if len(names) < 2:
            raise ValueError(
                f"{self.files[0]}{' and others' if self.files[1:] else ''}: found {len(names)} "
                f"classes with a training text and at least {self.min_count} texts in total, but "
                "at least 2 are required: check --text, --label, --languages and --min-count"
            )
        return names[: self.top]

    @property
    def _cleaning(self) -> Cleaning:
        return Cleaning(self.users, self.urls)

    def rules(self) -> Rules:
        drop = self.duplicates == "drop"
        return Rules(self._choose, self.test_fraction, drop, drop_across=self.across == "drop")


def _first(fields: dict[str, Any], name: str | None, usual: Sequence[str]) -> str | None:
    names = usual if name is None else (name,)
    for one in names:
        if (found := text_field(fields, one)) is not None:
            return found
    return None


def _plain(
    fields: dict[str, Any], name: str | None, usual: Sequence[str], pattern: re.Pattern[str]
) -> str | None:
    """Return the value of a field for use in a key, or None if it does not match `pattern`."""
    try:
        found = _first(fields, name, usual) or ""
    except ValueError:
        return None
    return found if pattern.fullmatch(found) else None


_POLICIES: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "first": lambda found: list(found[:1]),
    "each": lambda found: list(dict.fromkeys(found)),
    # There is only one distinct emoji, possibly repeated.
    "only-if-single": lambda found: list(found[:1]) if len(set(found)) == 1 else [],
    # Ties are resolved in favor of the first emoji in the text, because a Counter keeps insertion
    # order.
    "most-frequent": lambda found: [one for one, _ in Counter(found).most_common(1)],
}


def labels_by_policy(policy: str, found: Sequence[str]) -> list[str]:
    """Return the labels, possibly none, of a text whose emoji, in order, are `found`."""
    return _POLICIES[policy](found)
