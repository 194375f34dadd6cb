"""The demo's server and the three queries that the demo sends it over HTTP."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.table import Table

from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from launch.terminal import table_cell

_START_SECONDS = 120
_STOP_SECONDS = 60


@dataclass(frozen=True)
class Question:
    """A held-out image, its class, and the class to ask the server about."""

    image: Path
    shows: str
    asked: str


def make_questions(shards: Path, folder: Path, *, seed: int = 0) -> list[Question]:
    """Draw three images at random and write them to `folder` as PNG.

    The first is queried for its own class, the second for a random other class, and the third for
    the class with the most similar name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    vectors = load_label_vectors(shards, Manifest.load(shards))
    questions = []
    with open_split(shards, "test") as split:
        names = [info.name for info in split.classes]
        for number, index in enumerate(rng.choice(len(split), 3, replace=False)):
            content, extension, label = split.read(int(index))
            path = folder / f"{number + 1}.{extension}"
            path.write_bytes(content)
            similarity = vectors @ vectors[label]
            similarity[label] = -np.inf
            other = (label + 1 + int(rng.integers(len(names) - 1))) % len(names)
            asked = [label, other, int(similarity.argmax())][number]
            questions.append(Question(path, names[label], names[asked]))
    return questions


@contextmanager
def server(bundle: Path, log: Path) -> Iterator[str]:
    """Run `kway serve` as a subprocess on a free port. Yields its URL once it is ready."""
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "launch", "serve", str(bundle), "--port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            yield _wait_until_ready(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ask(url: str, question: Question) -> dict[str, Any]:
    """Send one query over HTTP and return the response."""
    response = httpx.post(
        f"{url}/v1/query",
        data={"classes": question.asked, "recall": "0.9"},
        files={"images": question.image.read_bytes()},
        timeout=30,
    )
    response.raise_for_status()
    answer: dict[str, Any] = response.json()["results"][0]["verdicts"][0]
    return answer


def answers_table(questions: list[Question], answers: list[dict[str, Any]]) -> Table:
    """The queries, the server's answers, and whether they are correct."""
    table = Table(title="Three questions about held-out images, over HTTP")
    for column in ("image", "is it …?", "score", "threshold", "answer", "it shows", ""):
        table.add_column(column, overflow="fold")
    for question, answer in zip(questions, answers, strict=True):
        right = answer["match"] == (question.shows == question.asked)
        table.add_row(
            question.image.name,
            table_cell(question.asked),
            f"{answer['score']:.2f}",
            f"{answer['threshold']:.2f}",
            "yes" if answer["match"] else "no",
            table_cell(question.shows),
            "right" if right else "wrong",
        )
    return table


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ready = re.search(r"ready: (\S+)", log.read_text(encoding="utf-8"))
        if ready:
            return ready.group(1)
        if process.poll() is not None:
            raise ValueError(f"the server ended with code {process.returncode}: see {log}")
        time.sleep(0.2)
    raise TimeoutError(f"the server was not ready after {_START_SECONDS} s: see {log}")
