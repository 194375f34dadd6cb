"""The BentoML peer of `benchmarks.serving peers`. Arguments: KIND BUNDLE PORT.

BentoML needs versions of packages that conflict with those of kway, so it has an environment of its
own, which `make bench-serving` creates. BentoML batches only the items of a list, so the body is a
list with one query, and so is the response.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import bentoml
import torch
from bentoml.exceptions import InvalidArgument
from fastapi import HTTPException

from benchmarks.serving_peers import (
    BATCH,
    MAX_QUEUED,
    PATH,
    QueryBody,
    images_of,
    prepared,
    query_of,
)
from serving.answer import answer
from serving.model import Model
from serving.schemas import Answer

_BUNDLE = "KWAY_BENCHMARK_BUNDLE"


@bentoml.service(workers=1, traffic={"max_concurrency": MAX_QUEUED})
class Images:
    """Answers queries with one image each."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._model = Model.open(Path(os.environ[_BUNDLE]))

    @bentoml.api(route=PATH, batchable=True, max_batch_size=BATCH)
    def query(self, queries: list[QueryBody], /) -> list[Answer]:
        try:
            inputs = [prepared(self._model, images_of(one))[0] for one in queries]
            asked = [query_of(self._model, one) for one in queries]
        except HTTPException as error:
            raise InvalidArgument(error.detail) from error
        return list(self._answers(inputs, asked))

    def _answers(self, inputs: list, asked: list) -> Iterator[Answer]:
        features = self._model.features(inputs)
        for row, query in zip(features, asked, strict=True):
            yield answer(self._model.bundle, row[None], query)


if __name__ == "__main__":
    _, bundle, port = sys.argv[1:]
    os.environ |= {_BUNDLE: bundle, "BENTOML_DO_NOT_TRACK": "True"}
    command = [sys.executable, "-m", "bentoml", "serve", "--quiet", "--host", "127.0.0.1"]
    os.execv(sys.executable, [*command, "--port", port, "benchmarks.serving_bentoml:Images"])
