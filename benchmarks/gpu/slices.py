"""Defines the slices of the benchmark, most valuable first, and runs them.

Each slice runs in its own process, which is killed when the time is up, so a slice that hangs or
breaks the CUDA context does not affect the next one. Its result is one JSON file.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import correctness, heads, plans, serving, training
from benchmarks.gpu.sizes import Size
from benchmarks.machine import hardware
from data.files import commit

Result = dict[str, Any]

_ROOT = Path(__file__).parents[2]
_SOURCES = ("heads", "data", "trainer", "serving", "launch", "benchmarks", "tests/heads")
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "pydantic",
    "liger-kernel",
    "cut-cross-entropy",
)
# Children are forked from a server that has already imported this module.
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Slice:
    """A measurement. `seconds` is an estimate of its duration on one H100."""

    name: str
    run: Callable[[Size, torch.device], Result]
    seconds: float


def slices_of(size: Size) -> list[Slice]:
    """Return all slices, most valuable first. At toy size, they take a few seconds each."""
    named: list[tuple[str, Callable[..., Result], float]] = [
        ("losses", correctness.losses, 90),
        ("synchronizations", training.synchronizations, 75),
        ("images", training.images, 45),
        ("texts", training.texts, 45),
        ("collectives", correctness.collectives, 30),
        ("checkpoint", correctness.checkpoint, 20),
    ]
    for classes in size.head_classes:
        for rows in size.head_rows:
            run = partial(heads.head, classes=classes, rows=rows)
            named.append((f"head-{classes}-{rows}", run, 30 + classes / 2e5))
    named.append(("losses-with-tiles", heads.losses_with_tiles, 60))
    named.append(("fused", heads.fused, 90))
    named.append(("plan", plans.plans, 20))
    for classes in size.serving_classes:
        run = partial(serving.serving, classes=classes)
        named.append((f"serving-{classes}", run, 12 + classes / 1e6))
    named.append(("serving-backbone", serving.backbone, 12))
    scale = 1.0 if size.name == "full" else 0.1
    return [Slice(name, run, seconds * scale) for name, run, seconds in named]


def key_of(size: Size, device: torch.device) -> dict[str, Any]:
    """Return the key of a result. A slice with a result of the same key does not run again."""
    return {
        "size": size.name,
        "code": _digest_of_sources(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else hardware(),
        "python": ".".join(map(str, sys.version_info[:2])),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def stored(folder: Path, name: str) -> Result | None:
    """Return the stored record of a slice: its key, its seconds, and either `result` or `error`."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def records_in(folder: Path) -> dict[str, Result]:
    """Return all stored records by the name of their slice."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def is_complete(folder: Path, name: str, key: dict[str, Any]) -> bool:
    record = stored(folder, name)
    return record is not None and record["key"] == key and "result" in record


def run_slices(
    slices: Sequence[Slice], folder: Path, size: Size, device: torch.device, *, seconds: float
) -> bool:
    """Run the slices that are not complete and whose estimates fit in the remaining time.

    Returns False if a slice fails, or if a new or a stored result is wrong.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _context.set_forkserver_preload([__name__])
    key, end, succeeded, left = key_of(size, device), time.monotonic() + seconds, True, []
    for each in slices:
        remaining = end - time.monotonic()
        if is_complete(folder, each.name, key):
            print(f"{each.name}: complete", flush=True)
            succeeded &= _is_right(stored(folder, each.name))
        elif each.seconds > remaining:
            left.append(each.name)
        else:
            print(f"{each.name}: about {each.seconds:.0f} s …", flush=True)
            record = _run(each, folder, size, device, seconds=remaining)
            commit(folder / f"{each.name}.json", _as_json({"key": key, **record}))
            print(f"{each.name}: {_outcome(record)}", flush=True)
            succeeded &= _is_right(record)
    if left:
        print(f"no time for {', '.join(left)}: run the same command again", flush=True)
    return succeeded


def _run(each: Slice, folder: Path, size: Size, device: torch.device, *, seconds: float) -> Result:
    ours, theirs = _context.Pipe()
    log = folder / f"{each.name}.log"
    process = _context.Process(target=_child, args=(theirs, each.run, size, device, log))
    started = time.monotonic()
    process.start()
    theirs.close()
    record: Result
    try:
        record = ours.recv() if ours.poll(seconds) else {"error": f"not done after {seconds:.0f} s"}
    except EOFError:
        process.join()
        record = {"error": f"the process died with exit code {process.exitcode}; see {log.name}"}
    process.kill()  # a process group or a CUDA context may prevent a regular exit
    process.join()
    return {"seconds": time.monotonic() - started, "machine": hardware(), **record}


def _child(
    pipe: Connection,
    run: Callable[[Size, torch.device], Result],
    size: Size,
    device: torch.device,
    log: Path,
) -> None:
    """Send `{"result": ...}` or `{"error": ...}`. The output goes to the file `log`."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    record: dict[str, Any]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        elif size.name == "toy":
            torch.set_num_threads(1)
        record = {"result": run(size, device)}
    except Exception as error:
        traceback.print_exc()
        record = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(record)


def _outcome(record: Result) -> str:
    outcome = f"{record['seconds']:.0f} s"
    if "error" in record:
        return f"failed after {outcome}: {record['error'].splitlines()[0]}"
    wrong = record["result"].get("wrong")
    return f"{outcome}, {len(wrong)} wrong results" if wrong else outcome


def _is_right(record: Result | None) -> bool:
    return record is not None and "result" in record and not record["result"].get("wrong")


def _as_json(record: Result) -> bytes:
    return (json.dumps(record, indent=1) + "\n").encode()


def _digest_of_sources() -> str:
    paths = sorted(path for folder in _SOURCES for path in (_ROOT / folder).rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(_ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
