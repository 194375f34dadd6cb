"""Times contenders in turn and reports the ratios of their times: shared by all benchmarks.

Because the contenders take turns, all of them are exposed to the same load on the machine. Ratios
are computed within each round, and their median over rounds is reported. Any row of a report can
have a target.
"""

import argparse
import gc
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class Row:
    """One line of a report: what was measured, in which case, the result, and its target."""

    what: str
    case: str
    measured: str = ""
    target: str = ""
    details: str = ""


Sections = Mapping[str, Callable[[], Iterator[Row]]]


# ------------------------------------------------------------------------ time


def take_turns(
    contenders: Mapping[str, Callable[[], object]],
    *,
    title: str,
    rounds: int = 9,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, np.ndarray]:
    """Return the seconds that each contender took in each round, as measured by `clock`.

    There is one warm-up round. The measurement stops early if another round would exceed the limit
    of `seconds`, but at least one round is completed.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    began = 0.0
    for done in track(range(-1, rounds), title, console=Console(stderr=True), transient=True):
        if done == 0:
            began = time.perf_counter()
        elapsed = time.perf_counter() - began
        if done > 0 and elapsed * (done + 1) / done > seconds:
            break
        for name, contender in contenders.items():
            started = clock()
            contender()
            if done >= 0:
                found[name].append(clock() - started)
    return {name: np.array(times) for name, times in found.items()}


def take_turns_on(
    device: torch.device, contenders: Mapping[str, Callable[[], object]], *, seconds: float
) -> dict[str, np.ndarray]:
    """Time contenders as `take_turns` does, and wait for the device after each of them."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return take_turns(contenders, title="measuring", seconds=seconds, rounds=20, clock=clock)


def ratio_row(
    what: str, case: str, ours: np.ndarray, theirs: np.ndarray, at_most: float | None = None
) -> Row:
    """Return a row with the median ratio of `ours` / `theirs`, its quartiles, and both medians."""
    times = " / ".join(f"{1e3 * np.median(seconds):,.1f}" for seconds in (ours, theirs))
    target = "" if at_most is None else f"<= {at_most:.2f}"
    return _row_of_ratios(what, case, ours / theirs, target, f"{times} ms")


def rate_row(
    what: str,
    case: str,
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    at_least: float | None,
    count: int,
    unit: str,
) -> Row:
    """Return a row with the median ratio of the rates, `ours` / `theirs`.

    `count` items, such as images, are processed per round.
    """
    rates = " / ".join(f"{count / np.median(seconds):,.0f}" for seconds in (ours, theirs))
    target = "" if at_least is None else f">= {at_least:.2f}"
    return _row_of_ratios(what, case, theirs / ours, target, f"{rates} {unit}")


def _row_of_ratios(what: str, case: str, ratios: np.ndarray, target: str, details: str) -> Row:
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    details = f"{details}, quartiles {low:.2f}-{high:.2f} of {len(ratios)}"
    return Row(what, case, f"{middle:.2f}", target, details)


# ------------------------------------------------------------------------ memory


def restart_high_water_mark() -> int:
    """Reset VmHWM to the current memory of this process and return it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """Return this process's current (VmRSS) or peak (VmHWM) memory in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def allocated_bytes(device: torch.device) -> int:
    return resident("VmRSS") if device.type == "cpu" else torch.cuda.memory_allocated(device)


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak of the memory that `work` allocates in addition to what is allocated now."""
    gc.collect()
    if device.type == "cpu":
        before = restart_high_water_mark()
        work()
        return resident("VmHWM") - before
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - start


def free(device: torch.device) -> None:
    """Return the memory of freed tensors to the device, for contenders that need all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def numbers_of_a_process(module: str, *arguments: str) -> list[float]:
    """Run a module in a process of its own and return the numbers that it prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(each) for each in done.stdout.split()]


# ------------------------------------------------------------------------ report


def machine() -> str:
    """Return the hardware, its load and the torch version, as the header of a report."""
    return (
        f"{hardware()}, load {os.getloadavg()[0]:.1f} at the start; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )


def hardware() -> str:
    """Return the processor, its number of cores, and the GPU if there is one."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    model = platform.machine() if found is None else found[1]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{gpu}"


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
    """Run the requested sections and print the table. The file of `--markdown` is written after
    each section, and a section that fails does not end the others, because the time on a machine
    may be limited. The exit code is then 1.
    """
    unknown = sorted({*options.sections} - {*sections})
    if unknown:
        raise SystemExit(f"unknown section {unknown[0]}: choose from {', '.join(sections)}")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    header = machine()
    CONSOLE.print(header)
    rows, failed, text, began = [], [], "", time.perf_counter()
    for section in options.sections or sections:
        started = time.perf_counter()
        try:
            for row in sections[section]():
                CONSOLE.print(f"{row.what}, {row.case}: {row.measured} ({row.details})")
                rows.append(row)
        except Exception:
            CONSOLE.print_exception()
            failed.append(section)
        CONSOLE.print(f"{section}: {time.perf_counter() - started:.0f} s")
        text = "\n".join([header, "", *markdown(rows), ""])
        if options.markdown is not None:
            options.markdown.write_text(text, encoding="utf-8")
    CONSOLE.print(text)
    CONSOLE.print(f"finished in {(time.perf_counter() - began) / 60:.1f} minutes")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def markdown(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table for the docs."""
    table = [("what", "case", "measured", "target", "details"), ("---",) * 5]
    table += [(row.what, row.case, row.measured, row.target, row.details) for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in table]
