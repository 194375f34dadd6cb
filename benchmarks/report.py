"""The command around a set of measurements: which sections to run, and the table of all rows."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows, write_markdown

Sections = Mapping[str, Callable[[], Iterator[Row]]]


def command_line(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options of every set of measurements; a set may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="some of them; default: all")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser


def report(options: argparse.Namespace, sections: Sections) -> None:
    """Measure the sections that are asked for, and print the table."""
    unknown = sorted({*options.sections} - {*sections})
    if unknown:
        raise SystemExit(f"{unknown[0]} is no section: choose of {', '.join(sections)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    header = machine()
    CONSOLE.print(header)
    rows, began = [], time.perf_counter()
    for section in options.sections or sections:
        started = time.perf_counter()
        rows.extend(sections[section]())
        CONSOLE.print(f"{section}: {time.perf_counter() - started:.0f} s")
    print_rows(rows)
    CONSOLE.print(f"in {(time.perf_counter() - began) / 60:.1f} minutes")
    if options.markdown is not None:
        write_markdown(options.markdown, header, rows)
