"""Raw tweets: the label is an emoji found in the text, and all emoji are removed from the text.

The files are read twice. The first pass selects the texts; its result stays on disk next to the
shards until they are written. The second pass writes the shards. `labeled_texts.py` reads texts
that already have labels.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import emoji
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from data.messages import Report, one_line, silent
from data.option import Argument, Option, Supplied
from data.remote.input_path import Input, InputPath
from data.shards.manifest import ClassInfo, SourceInfo
from data.sources.first_pass import FirstPassSource
from data.sources.labeled_texts import LabeledTexts
from data.sources.source import STRICT, CommandSource, Sample
from data.text.cleaning import Cleaning, Replacement, is_retweet
from data.text.emoji_classes import emoji_classes, emoji_vectors
from data.text.emoji_table import find_emoji, fold
from data.text.records import RecordFile, digest, open_records, text_field
from data.text.references import DAMAGED, FIRST_DAMAGED, SPAN_BYTES, LabeledText, Span, record_spans
from data.text.selection import SelectionRules, Task

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
    for_folder: ClassVar[type[CommandSource] | None] = LabeledTexts

    files: Annotated[
        tuple[Input, ...],
        Argument(),
        Field(
            description="files of raw tweets (.jsonl, .csv, .tsv, or .txt with one tweet per "
            "line), or one folder that contains train_text.txt, train_labels.txt and "
            "mapping.txt, as in tweeteval, or us_train.text, us_train.labels and us_mapping.txt, "
            "as in SemEval 2018"
        ),
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
        for one in map(open_records, self.files):
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
        return SourceInfo(kind=self.kind, parameters=parameters)

    def classes(self) -> tuple[ClassInfo, ...]:
        return emoji_classes(self._selection.labels)

    def label_vectors(self) -> np.ndarray:
        return emoji_vectors(self._selection.labels)

    def render(self, task: Task) -> Sample:
        fields = self.record_file(task.file).read(task.offset, task.length)
        text = self._cleaning.clean(self._text(fields) or "")
        return Sample(self._key(fields, task), text.encode(), "txt", task.label)

    def spans(self) -> list[Span]:
        records = [self.record_file(number) for number in range(len(self.files))]
        return record_spans(records, SPAN_BYTES)

    def labeled_texts(self, span: Span, counts: Counter[str]) -> Iterator[LabeledText]:
        one = self.record_file(span.file)
        for offset, data in one.records(span.first, span.last):
            counts["records read"] += 1
            try:
                fields = one.parse(data)
                text = self._text(fields)
                labels, cleaned = self._labels_and_text(text, fields, counts)
            except ValueError as error:
                if not counts[DAMAGED]:
                    counts[f"{FIRST_DAMAGED}{one.name}, byte {offset}: {one_line(error, 120)}"] += 1
                counts[DAMAGED] += 1
                continue
            for label in labels:
                yield LabeledText(offset, len(data), cleaned, label, None)

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
        elif not (found := find_emoji(text)):
            reason = "texts without emoji"
        else:
            found = [fold(one) for one in found] if self.emoji_form == "fold" else found
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

    def _text(self, fields: dict[str, Any]) -> str | None:
        return _first(fields, self.text, _TEXT_NAMES)

    def _language(self, fields: dict[str, Any]) -> str:
        return _plain(fields, self.language, _LANGUAGE_NAMES, _LANGUAGE) or _UNKNOWN_LANGUAGE

    def _key(self, fields: dict[str, Any], task: Task) -> str:
        """Return a key that is unique for each location, and for each label if a record has several
        labels.
        """
        identity = _plain(fields, self.identity, _ID_NAMES, _ID)
        suffix = f"{task.file:x}-{task.offset:x}"
        if self.policy == "each":
            suffix = f"{suffix}-{task.label}"
        if identity is not None:
            suffix = f"{identity}-{suffix}"
        return f"{self._language(fields)}/{suffix}"

    def _check_columns(self, one: RecordFile) -> None:
        assert one.columns is not None
        named = [name for name in (self.text, self.language, self.identity) if name is not None]
        missing = [name for name in named if name not in one.columns]
        if self.text is None and not set(_TEXT_NAMES) & set(one.columns):
            missing = ["text"]
        if missing:
            raise ValueError(
                f"{one.name}: column {missing[0]!r} does not exist: pass the column that contains "
                f"the text as --text; the columns are {', '.join(one.columns)[:200]}"
            )

    def _choose(self, samples: Counter[str], trained: Counter[str]) -> list[str]:
        """Return the classes, most frequent first. Ties are sorted by code points."""
        names = [name for name in trained if trained[name] and samples[name] >= self.min_count]
        names.sort(key=lambda name: (-samples[name], name))
        if len(names) < 2:
            raise ValueError(
                f"{self.files[0]}{' and others' if self.files[1:] else ''}: found {len(names)} "
                f"emoji with {self.min_count} or more training texts, but at least 2 are required: "
                "check --text, --languages and --min-count"
            )
        return names[: self.top]

    @property
    def _cleaning(self) -> Cleaning:
        return Cleaning(self.users, self.urls)

    @property
    def pass_workers(self) -> int | None:
        return self.workers

    def pass_files(self) -> tuple[InputPath, ...]:
        return self.files

    def pass_rules(self) -> SelectionRules:
        return SelectionRules(self._choose, self.test_fraction, self.duplicates == "drop")


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
