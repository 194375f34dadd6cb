"""Which samples each step took, for an audit."""

import json
from pathlib import Path
from typing import Any

from data.files import explained
from data.loading.batch import Batch
from trainer.telemetry.jsonl import drop_lines_after


class SampleLog:
    """If asked for, the ids of every step's samples, a file a rank: what an audit needs."""

    def __init__(self, run: Path, *, rank: int, wanted: bool) -> None:
        self.path = run / f"samples-rank{rank}.jsonl" if wanted else None

    @staticmethod
    def trim(run: Path, step: int) -> None:
        """Drop the lines after `step` from the files of all ranks there ever were."""
        for path in run.glob("samples-rank*.jsonl"):
            drop_lines_after(path, step)

    def __enter__(self) -> "SampleLog":
        self.file = self.path.open("a", encoding="utf-8") if self.path else None
        return self

    def write(self, step: int, batch: Batch) -> None:
        if self.file is not None and self.path is not None:
            record: dict[str, Any] = {"step": step, "samples": batch.indices.tolist()}
            with explained(self.path):
                self.file.write(json.dumps(record) + "\n")
                self.file.flush()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
