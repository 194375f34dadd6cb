"""Command line for a set of benchmarks: select the sections to run and print the table."""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from benchmarks.machine import machine
from benchmarks.timing import CONSOLE, Row, print_rows, write_markdown

Sections = Mapping[str, Callable[[], Iterator[Row]]]


def command_line(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all sets of benchmarks share."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help="sections to run; default: all"
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="torch threads"
    )
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    return parser


def report(options: argparse.Namespace, sections: Sections) -> None:
    """Run the requested sections and print the table."""
    unknown = sorted({*options.sections} - {*sections})
    if unknown:
        raise SystemExit(f"unknown section {unknown[0]}: choose from {', '.join(sections)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    header = machine()
    CONSOLE.print(header)
    rows, began = [], time.perf_counter()
    for section in options.sections or sections:
        started = time.perf_counter()
        for row in sections[section]():
            CONSOLE.print(f"{row.what}, {row.case}: {row.measured} ({row.details})")
            rows.append(row)
        CONSOLE.print(f"{section}: {time.perf_counter() - started:.0f} s")
    print_rows(rows)
    CONSOLE.print(f"finished in {(time.perf_counter() - began) / 60:.1f} minutes")
    if options.markdown is not None:
        write_markdown(options.markdown, header, rows)
