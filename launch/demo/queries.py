"""The demo's server, and three queries that the demo sends to it over HTTP."""

import os
import re
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
class DemoQuery:
    """A held-out image, its true class, and the class to query."""

    image: Path
    true_class: str
    queried_class: str


def make_queries(shards: Path, folder: Path, *, seed: int = 0) -> list[DemoQuery]:
    """Select three held-out images at random and write them to `folder` as PNG files.

    The first is queried for its own class, the second for a random other class, and the third for
    the class with the most similar name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    vectors = load_label_vectors(shards, Manifest.load(shards))
    queries = []
    with open_split(shards, "test") as split:
        names = [info.name for info in split.classes]
        for number, index in enumerate(rng.choice(len(split), 3, replace=False)):
            content, extension, label = split.read(int(index))
            path = folder / f"{number + 1}.{extension}"
            path.write_bytes(content)
            similarity = vectors @ vectors[label]
            similarity[label] = -np.inf
            other = (label + 1 + int(rng.integers(len(names) - 1))) % len(names)
            queried = [label, other, int(similarity.argmax())][number]
            queries.append(DemoQuery(path, names[label], names[queried]))
    return queries


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
            process.terminate()  # it may ignore SIGINT
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def send(url: str, query: DemoQuery) -> dict[str, Any]:
    """Send a query over HTTP and return the server's verdict."""
    response = httpx.post(
        f"{url}/v1/query",
        data={"classes": query.queried_class, "recall": "0.9"},
        files={"images": query.image.read_bytes()},
        timeout=30,
    )
    response.raise_for_status()
    verdict: dict[str, Any] = response.json()["results"][0]["verdicts"][0]
    return verdict


def verdict_table(queries: list[DemoQuery], verdicts: list[dict[str, Any]]) -> Table:
    """A table of the queries and the server's verdicts, what the thresholds promise, and whether
    the verdicts are correct."""
    table = Table(title="Single-class queries for three held-out images, recall 0.9")
    for column in ("image", "queried class", "score", "threshold", "kind", "match", "true class"):
        is_number = column in ("score", "threshold")
        table.add_column(column, overflow="fold", justify="right" if is_number else "left")
    table.add_column("correct")
    for query, verdict in zip(queries, verdicts, strict=True):
        is_correct = verdict["match"] == (query.true_class == query.queried_class)
        table.add_row(
            query.image.name,
            table_cell(query.queried_class),
            f"{verdict['score']:.2f}",
            f"{verdict['threshold']:.2f}",
            verdict["threshold_source"],
            "yes" if verdict["match"] else "no",
            table_cell(query.true_class),
            "yes" if is_correct else "no",
        )
    return table


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ready = re.search(r"ready: (\S+)", log.read_text(encoding="utf-8"))
        if ready:
            return ready.group(1)
        if process.poll() is not None:
            raise ValueError(f"the server exited with code {process.returncode}: see {log}")
        time.sleep(0.2)
    raise TimeoutError(f"the server was not ready after {_START_SECONDS} s: see {log}")
