"""All measurements of the heads in one table: `python -m benchmarks.heads [SECTION ...]`.

Ratios of one run, medians over rounds in which the contenders take turns; what was to be reached
stands beside what was measured. The million-class cover tree is `python -m benchmarks.cover_tree`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import cover_tree, factored, head_step, peak_memory, slc, smooth_topk
from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows, write_markdown

SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {
    "trees": head_step.trees,
    "engine": head_step.engine,
    "losses": head_step.losses,
    "sampled": head_step.sampled,
    "smooth_topk": smooth_topk.costs,
    "gradient_errors": smooth_topk.errors,
    "factored": factored.rows,
    "peak_memory": peak_memory.peaks,
    "cover_tree": cover_tree.rows,
    "slc": slc.rows,
}


def main() -> None:
    """Measure the sections that are asked for, all by default, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    unknown = sorted({*options.sections} - {*SECTIONS})
    if unknown:
        parser.error(f"{unknown[0]} is no section: choose of {', '.join(SECTIONS)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    header = machine()
    CONSOLE.print(header)
    rows, began = [], time.perf_counter()
    for name in options.sections or SECTIONS:
        started = time.perf_counter()
        rows.extend(SECTIONS[name]())
        CONSOLE.print(f"{name}: {time.perf_counter() - started:.0f} s")
    print_rows(rows)
    CONSOLE.print(f"in {(time.perf_counter() - began) / 60:.1f} minutes")
    if options.markdown is not None:
        write_markdown(options.markdown, header, rows)


if __name__ == "__main__":
    main()
