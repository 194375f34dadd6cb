"""`python -m tests.baseline`: computes results that must stay the same and prints what has changed.

Exits with 1 if there is a difference that no line of `accepted.txt` explains, or a line that
explains none. To compare two commits bit by bit on the same machine, run the first command at the
first commit and the second command at the second commit:

    python -m tests.baseline --out /tmp/before
    python -m tests.baseline --against /tmp/before --bits
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.baseline.sections import SECTIONS
from tests.baseline.values import differences, read

FOLDER = Path(__file__).parent
RECORDED = FOLDER / "recorded"
ACCEPTED = FOLDER / "accepted.txt"
_SECONDS = 1200  # for a section: ten times what an idle machine needs


def main() -> int:
    options = _options()
    sections = options.section or SECTIONS
    with TemporaryDirectory() as temporary:
        out = options.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda section: _record(section, out), sections))
        if options.out is not None:
            return 0
        records = {section: read(out / f"{section}.json") for section in sections}
    found = [
        (f"{section}/{key}", what)
        for section, record in records.items()
        for key, what in differences(
            read(options.against / f"{section}.json"), record, bits=options.bits
        )
    ]
    explained = accepted(ACCEPTED.read_text(encoding="utf-8"), sections)
    return report(found, explained if options.against.resolve() == RECORDED else {})


def _record(section: str, out: Path) -> None:
    # All processes of the section import this checkout, even if another one is installed.
    command = [sys.executable, "-m", "tests.baseline.sections", section, out / f"{section}.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])}
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what a section that failed has left
    if code:
        raise RuntimeError(f"the section {section} failed")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.baseline", description=__doc__)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--out", type=Path, help="write the record to this folder; do not compare")
    parser.add_argument("--against", type=Path, default=RECORDED, help="record to compare with")
    parser.add_argument("--bits", action="store_true", help="floats must be equal too")
    return parser.parse_args()


def accepted(text: str, sections: tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return the reasons in `accepted.txt` by pattern. A line is `section/pattern: reason`."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {}
    for line in lines:
        pattern, separator, reason = line.partition(": ")
        if not separator or not reason.strip() or pattern.partition("/")[0] not in SECTIONS:
            raise ValueError(
                f"{ACCEPTED}: {line!r}: write `section/pattern: reason` with one of the sections "
                f"{', '.join(SECTIONS)}"
            )
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
