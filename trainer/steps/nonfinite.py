"""Skips steps whose loss or gradients are not finite, and stops the run if there are too many.

All ranks see the same loss and the same global norm, so they make the same decision. The samples
of a skipped step are logged with their keys, because a bad sample is often the cause.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from data.loading.batch import Batch
from trainer.telemetry.jsonl import JsonLines, drop_lines_after

_SUGGESTION = (
    "lower optimizer.lr, increase schedule.warmup, set train.clip_norm, or inspect the samples"
)


class NonFiniteSteps:
    """Counts the skipped updates of a run, of which at most `cap` are allowed.

    `skipped`, the count so far, is part of the checkpoint. `key_of` returns the key of a sample;
    pass None if samples do not have keys.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        cap: int,
        skipped: int = 0,
        key_of: Callable[[int], str] | None = None,
    ) -> None:
        self.path = run / f"nonfinite-rank{rank}.jsonl"
        self.cap, self.skipped, self._key_of = cap, skipped, key_of

    @staticmethod
    def trim(run: Path, step: int) -> None:
        """Drop the lines after `step` from the files of all ranks, including ranks that existed
        only in earlier starts.
        """
        for path in run.glob("nonfinite-rank*.jsonl"):
            drop_lines_after(path, step)

    def skip(self, step: int, batch: Batch, reason: str) -> str:
        """Count a skipped step, log this rank's samples and return a message.

        Raises FloatingPointError if more than `cap` updates have been skipped.
        """
        self._write(step, batch)
        self.skipped += 1
        files = self.path.with_name("nonfinite-rank*.jsonl")
        line = f"step {step}: {reason}; the update was skipped, and its samples are in {files}"
        if self.skipped > self.cap:
            cap = f" (train.max_skipped_steps is {self.cap})"
            raise FloatingPointError(f"{line}: {_SUGGESTION}{cap}")
        return f"{line} ({self.skipped} of at most {self.cap} skipped)"

    def _write(self, step: int, batch: Batch) -> None:
        samples = batch.indices.tolist()
        record: dict[str, object] = {"step": step, "samples": samples}
        if self._key_of is not None:
            record["keys"] = [self._key_of(sample) for sample in samples]
        with closing(JsonLines(self.path)) as lines:
            lines.write(record)
