"""Versions of a text model that give different answers, how to publish them, and a server in this
process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from fastapi import FastAPI

from serving.answer import make_query
from serving.app import build_app
from serving.client import Client
from serving.config import ServingConfig
from serving.metrics import RELOADS, Metrics
from serving.model import Model
from serving.schemas import Answer
from serving.tokens import Clients
from serving.versions import ServedModel
from tests.serving import in_process
from tests.tiny_bundle import NAMES, classes, rows, thresholds, write_of_texts

TEXTS = ("a cat", "und hund", "cat and dog", "猫 a 🐶")
# The second version does not have this class, but another one.
REMOVED, ADDED = "samoyed", "poodle"
_TOLERANCE = 1e-3  # of scores, whose rounding depends on the batch


def write_versions(folder: Path, *, extra_bytes: int = 0) -> list[Path]:
    """Write two versions whose backbones have `extra_bytes` of unused weights.

    The second version has its classes in another order, other weights, and thresholds that are less
    by 10.
    """
    first = write_of_texts(folder / "v1", extra_bytes=extra_bytes)
    entries = [
        entry if entry.name != REMOVED else entry.model_copy(update={"name": ADDED})
        for entry in reversed(classes())
    ]
    second = write_of_texts(
        folder / "v2",
        weight=-2 * rows(),
        entries=entries,
        measured=replace(thresholds(), thresholds=thresholds().thresholds - 10),
        extra_bytes=extra_bytes,
    )
    return [first, second]


def publish(target: Path, path: Path) -> None:
    """Replace the symbolic link `path` atomically."""
    link = path.with_name(f"{path.name}.new")
    link.symlink_to(target)
    link.rename(path)


@dataclass(frozen=True)
class Question:
    """A query of one text."""

    text: str
    class_name: str
    recall: float | None

    @property
    def body(self) -> dict[str, object]:
        decided = {} if self.recall is None else {"recall": self.recall}
        return {"classes": [self.class_name], "texts": [self.text], **decided}


QUESTIONS = [
    Question(text, name, recall)
    for text in TEXTS
    for name in NAMES
    if name not in (REMOVED, "#3", "7")
    for recall in (None, 0.9)
]


class Expected:
    """The answers of some bundles to `QUESTIONS`, by version."""

    def __init__(self, bundles: Sequence[Path]) -> None:
        self._answers: dict[str, dict[Question, Answer]] = {}
        self.versions: list[str] = []
        for path in bundles:
            model = Model.open(path)
            self.versions.append(model.bundle.version)
            self._answers[model.bundle.version] = {
                question: model.answer(
                    [model.prepare(question.text)],
                    make_query(model.bundle, [question.class_name], recall=question.recall),
                )
                for question in QUESTIONS
            }

    def problem(self, question: Question, found: Answer, header: str | None) -> str | None:
        """Return how an answer differs from that of the version which it names, or None."""
        if found.version != header:
            return f"the header has version {header}, but the answer has {found.version}"
        if found.version not in self._answers:
            return f"there is no version {found.version}"
        expected = self._answers[found.version][question]
        if abs(_score(found) - _score(expected)) > _TOLERANCE:
            return f"score {_score(found)} instead of {_score(expected)}, {question}"
        if _without_score(found) != _without_score(expected):
            return f"{found} instead of {expected}"
        return None


def _score(answer: Answer) -> float:
    return answer.results[0].verdicts[0].score


def _without_score(answer: Answer) -> Answer:
    verdict = answer.results[0].verdicts[0].model_copy(update={"score": 0.0})
    result = answer.results[0].model_copy(update={"verdicts": [verdict]})
    return answer.model_copy(update={"results": [result]})


@dataclass
class Published:
    """A server in this process, and the two versions that can be published at its path."""

    path: Path
    versions: list[Path]
    model: ServedModel
    api: FastAPI
    recorder: in_process.Recorder
    url: str

    @property
    def reloads(self) -> list[str]:
        """The outcomes of the loaded versions."""
        return [labels["outcome"] for labels in self.recorder.labels_of(RELOADS)]

    def client(self) -> Client:
        return Client(self.url)

    def publish(self, target: Path) -> None:
        """Publish a bundle at the path, and wait until the replica has noticed it."""
        publish(target, self.path)
        self.model.poll()

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60)


@contextmanager
def serving(folder: Path, bundle: Path | None = None, **limits: object) -> Iterator[Published]:
    """Serve the first version, or `bundle`, at a symbolic link. The paths are checked only by
    `model.poll`."""
    versions, path = write_versions(folder), folder / "pets"
    publish(bundle or versions[0], path)
    config = ServingConfig.model_validate({"threads": 1, **limits})
    recorder = in_process.Recorder()
    model = ServedModel(path, config, Metrics(recorder))
    api = build_app(model, Clients(config.token_file))
    with in_process.listening(api) as url:
        yield Published(path, versions, model, api, recorder, url)
