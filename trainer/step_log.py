"""JSONL files whose lines belong to steps: a resumed run writes later steps anew."""

import json
from pathlib import Path
from typing import Any

from data import Batch


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`, so that each step stands in the file once.

    What is no record of a step, such as the cut last line of a killed run, goes too.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [f"{line}\n" for line in lines if _belongs(line, step)]
    aside = path.with_suffix(".partial")
    aside.write_text("".join(kept), encoding="utf-8")
    aside.rename(path)


def _belongs(line: str, last_step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    step = record.get("step") if isinstance(record, dict) else None
    return isinstance(step, int) and step <= last_step


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
        if self.file is not None:
            record: dict[str, Any] = {"step": step, "samples": batch.indices.tolist()}
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()
