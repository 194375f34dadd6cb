"""Measure kway on one GPU: `python -m benchmarks.gpu --out DIR --minutes 9`.

Each measurement is a slice. Run the command again with the same DIR to continue with the slices
that are missing or failed. The exit code is 1 if a slice failed or found a wrong result, and 0
otherwise.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.gpu.page import expected_text, write_page
from benchmarks.gpu.sizes import FULL, TOY
from benchmarks.gpu.slices import (
    Slice,
    is_complete,
    key_of,
    records_in,
    run_slices,
    slices_of,
    stored,
)


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.expected:
        print(expected_text())
        return 0
    has_gpu = torch.cuda.is_available()
    size = FULL if has_gpu and not options.toy else TOY
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    slices = slices_of(size)
    if options.page:
        write_page(options.page, {} if options.out is None else records_in(options.out))
        return 0
    if options.out is None:
        parser.error("--out is missing: pass a folder for the results")
    unknown = sorted({*options.slice} - {each.name for each in slices})
    if unknown:
        names = ", ".join(each.name for each in slices)
        parser.error(f"--slice {unknown[0]} is unknown: choose from {names}")
    if options.list:
        _list(slices, options.out, key_of(size, device))
        return 0
    if size is TOY:
        print("toy sizes: the results show only that the code runs", flush=True)
    chosen = [each for each in slices if not options.slice or each.name in options.slice]
    succeeded = run_slices(chosen, options.out, size, device, seconds=60 * options.minutes)
    write_page(options.out / "gpu.md", records_in(options.out))
    return 0 if succeeded else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--minutes", type=float, default=9, help="limit for the time of all slices (default: 9)"
    )
    parser.add_argument(
        "--slice", action="append", default=[], metavar="NAME", help="run only this slice (repeat)"
    )
    parser.add_argument("--list", action="store_true", help="list the slices and their state")
    parser.add_argument(
        "--toy", action="store_true", help="use toy sizes; the default if there is no GPU"
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE",
        help="write the page with the results in --out, or only the expected figures without --out",
    )
    parser.add_argument("--expected", action="store_true", help="print the expected figures")
    return parser


def _list(slices: list[Slice], folder: Path, key: dict[str, object]) -> None:
    for each in slices:
        record = stored(folder, each.name)
        state = "not run"
        if is_complete(folder, each.name, key):
            state = "complete"
        elif record is not None:
            state = f"failed: {record['error']}" if "error" in record else "outdated"
        print(f"{each.name:24} {each.seconds:4.0f} s  {state}")


if __name__ == "__main__":
    raise SystemExit(main())
