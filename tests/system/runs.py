"""Starts, disturbs and compares training runs. Processes are stopped by process ID."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.process_tree import children
from tests.system.processes import KWAY, ROOT, environment

_TIMEOUT_SECONDS = 180


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_folder: Path) -> dict[int, float]:
    """Return the loss of each logged step. Fails if a step was logged twice."""
    records = read_lines(run_folder / "metrics.jsonl")
    pairs = [(r["step"], r["loss"]) for r in records if r["event"] == "step"]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def last_step(run_folder: Path) -> int:
    """Return the last logged step, or 0 if there is none. The last line of the log may be
    incomplete.
    """
    path = run_folder / "metrics.jsonl"
    if not path.exists():
        return 0
    for line in reversed(path.read_text().splitlines()):
        try:
            record = json.loads(line)
        except ValueError:  # being written
            continue
        if record["event"] == "step":
            return int(record["step"])
    return 0


def final_tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    folder = max((run_folder / "checkpoints").glob("step-*"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def samples_by_step(run_folder: Path) -> dict[int, list[int]]:
    """Return the sample IDs of all ranks by step."""
    steps: dict[int, list[int]] = {}
    for path in run_folder.glob("samples-rank*.jsonl"):
        lines = read_lines(path)
        assert len({line["step"] for line in lines}) == len(lines)
        for line in lines:
            steps.setdefault(line["step"], []).extend(line["samples"])
    return steps


@dataclass(frozen=True)
class Launched:
    """A running `kway train` in its own session, with its output in `log`."""

    process: "subprocess.Popen[bytes]"
    log: Path
    run: Path

    @property
    def ranks(self) -> list[int]:
        """The process IDs of the ranks, in the order of their local ranks."""
        return children(self.process.pid)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not is_true():
            assert self.process.poll() is None, f"exited before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what}:\n{self.output}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: last_step(self.run) >= step, f"step {step}")

    def end(self, seconds: float = _TIMEOUT_SECONDS) -> int:
        """Wait for the run to exit and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the run has not exited after {seconds} s:\n{self.output}"
            ) from None


@contextmanager
def launched(
    recipe: Path,
    run_folder: Path,
    *options: str,
    num: int = 2,
    before: tuple[str, ...] = (),
    log: Path | None = None,
) -> Iterator[Launched]:
    """Start `kway train recipe run=… --nproc num options…`, and kill it when the context ends.

    `before` is a command prefix, such as `ip netns exec NAME`.
    """
    run_folder.parent.mkdir(parents=True, exist_ok=True)
    log = log or run_folder.with_suffix(".log")
    command = [*before, *KWAY, "train", str(recipe), f"run={run_folder}", "--nproc", str(num)]
    with log.open("ab") as file:
        process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env=environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield Launched(process, log, run_folder)
    finally:
        kill(process)


def kill(process: "subprocess.Popen[Any]") -> None:
    """Kill a launcher, which also makes its ranks exit."""
    process.kill()
    process.wait(60)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may already have exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
