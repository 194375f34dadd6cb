"""Measure kway on one GPU: `python -m benchmarks.gpu --out DIR --minutes 9`.

Each measurement is a slice, most valuable first, and runs in a process of its own. Run the command
again with the same DIR to continue with the slices that are missing or failed, and remove a slice's
JSON file to repeat it. DIR/gpu.md contains all results. The exit code is 1 if a slice failed.
Without a GPU, the sizes are so small that the results show only that the code runs.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import heads, training
from benchmarks.gpu.heads import RowsSize
from benchmarks.gpu.tasks import IMAGES, TEXTS, TaskSize
from benchmarks.timing import Row, machine, markdown
from data.files import commit
from tests.tiny_networks import TINY_BERT, TINY_RESNET


@dataclass(frozen=True)
class Sizes:
    """The sizes of all measurements. seconds: the time for each of them."""

    images: TaskSize
    texts: TaskSize
    dim: int
    heads: tuple[tuple[int, int], ...]  # classes, rows
    fused: tuple[RowsSize, ...]
    seconds: float


FULL = Sizes(
    # transformers' default configuration is ResNet-50.
    images=TaskSize({"model_type": "resnet"}, classes=1000, batch=256, side=224),
    texts=TaskSize(
        {"model_type": "bert", "vocab_size": 119_547}, classes=1000, batch=512, tokens=96
    ),
    dim=768,
    heads=tuple((k, b) for k in (100_000, 1_000_000, 10_000_000) for b in (1024, 8192)),
    fused=(
        *(RowsSize(dtype, 1_000_000, dim=768, batch=8192) for dtype in ("fp32", "bf16", "fp8")),
        RowsSize("bf16", 10_000_000, dim=768, batch=1024),
        RowsSize("fp8", 100_000_000, dim=512, batch=1024),
    ),
    seconds=8,
)
TOY = Sizes(
    images=TaskSize(TINY_RESNET, classes=13, batch=12, side=16),
    texts=TaskSize(TINY_BERT, classes=13, batch=12, tokens=8),
    dim=16,
    heads=((1000, 32),),
    fused=tuple(RowsSize(dtype, 1000, dim=16, batch=32) for dtype in ("fp32", "bf16", "fp8")),
    seconds=0.1,
)

Slice = Callable[[torch.device], Iterator[Row]]


def slices_of(sizes: Sizes) -> dict[str, tuple[Slice, float]]:
    """Return each slice and an estimate of its seconds on one H100, most valuable first."""
    seconds = sizes.seconds
    found: dict[str, tuple[Slice, float]] = {
        "images": (partial(training.step, IMAGES, sizes.images, seconds=2 * seconds), 45),
        "texts": (partial(training.step, TEXTS, sizes.texts, seconds=2 * seconds), 45),
    }
    for classes, rows in sizes.heads:
        run = partial(heads.head, classes, rows, sizes.dim, seconds=seconds)
        found[f"head-{classes}-{rows}"] = run, 30 + classes / 2e5
    found["fused"] = partial(heads.fused, sizes.fused, seconds=seconds / 2), 90
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="result folder")
    parser.add_argument("--minutes", type=float, default=9, help="limit for the time of all slices")
    parser.add_argument("--slice", metavar="NAME", help="run only this slice, in this process")
    options = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    slices = slices_of(FULL if has_gpu else TOY)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.slice is not None:
        if options.slice not in slices:
            parser.error(f"--slice {options.slice} is unknown: choose from {', '.join(slices)}")
        device = torch.device("cuda" if has_gpu else "cpu")
        rows = [asdict(row) for row in slices[options.slice][0](device)]
        result = json.dumps({"machine": machine(), "rows": rows}, indent=1)
        commit(options.out / f"{options.slice}.json", f"{result}\n".encode())
        return 0
    end, failed = time.monotonic() + 60 * options.minutes, []
    for name, (_, estimate) in slices.items():
        remaining = end - time.monotonic()
        if (options.out / f"{name}.json").exists():
            continue
        if has_gpu and estimate > remaining:
            print(f"{name}: no time left: run the same command again", flush=True)
        elif not _run(name, options.out, remaining):
            failed.append(name)
    _write_table(slices, options.out)
    return 1 if failed else 0


def _run(name: str, folder: Path, seconds: float) -> bool:
    """Run a slice in a new process, because it may hang or break the CUDA context."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(folder), "--slice", name]
    log, started = folder / f"{name}.log", time.monotonic()
    print(f"{name} …", flush=True)
    with log.open("w") as output:
        try:
            code = subprocess.run(command, stdout=output, stderr=output, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = -1
    outcome = f"failed, see {log}" if code else "done"
    print(f"{name}: {outcome} after {time.monotonic() - started:.0f} s", flush=True)
    return code == 0


def _write_table(slices: dict[str, tuple[Slice, float]], folder: Path) -> None:
    """Write the results of all complete slices as Markdown."""
    lines: list[str] = []
    for name in slices:
        path = folder / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            rows = [Row(**row) for row in result["rows"]]
            lines += [f"## {name}", "", result["machine"], "", *markdown(rows), ""]
    (folder / "gpu.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
