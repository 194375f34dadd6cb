"""`python -m tests.baseline`: records what must stay the same and prints what has changed.

Exits with 1 if there is a difference that no line of `accepted.txt` explains, or a line that
explains none. Record on a tested commit and compare bit by bit on the same machine:

    python -m tests.baseline --out /tmp/before
    python -m tests.baseline --against /tmp/before --bits
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path

from tests.baseline.sections import SECTIONS, record_section
from tests.baseline.values import Record, differences

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
ACCEPTED = FOLDER / "accepted.txt"


def main() -> int:
    options = _options()
    sections = options.section or SECTIONS
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch in the sections' processes
    records = {}
    # A process of its own for each section, because commands and heads set global state of torch.
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        started = [pool.submit(record_section, section) for section in sections]
        for future in as_completed(started):
            section, records[section], seconds = future.result()
            print(f"{section}: {len(records[section]):,} entries, {seconds:.0f} s", flush=True)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                write(options.out / f"{section}.json", records[section])
    if options.out is not None:
        return 0
    found = [
        (f"{section}/{key}", what)
        for section in sections
        for key, what in differences(
            read(options.against / f"{section}.json"), records[section], bits=options.bits
        )
    ]
    explained = accepted(ACCEPTED.read_text(encoding="utf-8"), sections)
    return report(found, {} if options.against != RECORDED else explained)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--out", type=Path, help="write the record to this folder; do not compare")
    parser.add_argument("--against", type=Path, default=RECORDED, help="record to compare with")
    parser.add_argument("--bits", action="store_true", help="floats must be equal too")
    return parser.parse_args()


def write(path: Path, record: Record) -> None:
    """Write one entry per line, so that version control shows which ones change."""
    entries = [
        f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(entry, ensure_ascii=False)}"
        for key, entry in sorted(record.items())
    ]
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n", encoding="utf-8")


def read(path: Path) -> Record:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def accepted(text: str, sections: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return the reasons in `accepted.txt` by pattern. A line is `section/pattern: reason`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {}
    for line in lines:
        pattern, separator, reason = line.partition(": ")
        if not separator or not reason.strip():
            raise ValueError(f"{ACCEPTED}: {line!r}: write `section/pattern: reason`")
        if pattern.partition("/")[0] in sections:
            found[pattern] = reason.strip()
    return found


def report(found: list[tuple[str, str]], explained: dict[str, str]) -> int:
    """Print the differences and return the exit code."""
    used, num_unexplained = set(), 0
    for key, what in found:
        pattern = next((each for each in explained if fnmatchcase(key, each)), None)
        if pattern is None:
            num_unexplained += 1
            print(f"DIFFERS  {key}: {what}")
        elif pattern not in used:
            used.add(pattern)
            count = sum(fnmatchcase(other, pattern) for other, _ in found)
            print(f"accepted {pattern}: {count:,} differences: {explained[pattern]}")
    unused = [pattern for pattern in explained if pattern not in used]
    for pattern in unused:
        print(f"UNUSED   {pattern}: nothing differs, so remove this line from {ACCEPTED.name}")
    print(f"{num_unexplained:,} unexplained differences, {len(unused):,} unused lines")
    return 1 if num_unexplained or unused else 0


if __name__ == "__main__":
    sys.exit(main())
