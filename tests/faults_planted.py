"""`python -m tests.faults_planted [ID|AREA …]`: checks that the tests catch planted faults.

`tests/planted/faults.yaml` lists faults: small mistakes of the kind that a refactoring introduces.
For each fault, this script applies it to a copy of the checkout, runs the tests that are recorded
to catch it, and expects one of them to fail. The checkout itself never changes.

Before that, the same tests run once without a fault: a test that always fails catches nothing. The
exit code is 1 if one of them fails, if a fault no longer applies to its file, or if a fault that is
recorded as caught is missed. To find the tests that catch a new fault, pass `--tests`, which runs
other tests instead of the recorded ones: `python -m tests.faults_planted ID --tests tests/heads`.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import psutil
import yaml

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests/planted/faults.yaml"
# A fault may make the tests hang. This also counts as caught.
_LIMIT_SECONDS = 240
_BASELINE_SECONDS = 3600
# Set in all processes of a copy, to find those that have left the process group, too.
_MARK = "KWAY_PLANTED_FAULTS"
_PASSED, _FAILED, _STOPPED, _TIMEOUT = 0, 1, 2, -1


@dataclass(frozen=True)
class Fault:
    """A mistake in `file`: `new` replaces `old`, which occurs once.

    `caught_by` are the files or node IDs of the tests that catch it, the fastest first. It is empty
    for a fault that the suite does not catch; `reason` then states why.
    """

    area: str
    id: str
    fault: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...]
    reason: str = ""

    def apply(self, root: Path) -> str:
        """Return the content of the file with the fault. Raises ValueError if it does not apply."""
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if (found := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(
                f"{self.id} does not apply: {self.old!r} occurs {found} times in {self.file}"
            )
        return text.replace(self.old, self.new)


def read_faults() -> list[Fault]:
    areas = yaml.safe_load(FAULTS.read_text(encoding="utf-8"))
    return [
        Fault(area, **{**one, "caught_by": tuple(one["caught_by"])})
        for area, faults in areas.items()
        for one in faults
    ]


class Outcome(NamedTuple):
    """The exit code of pytest or `_TIMEOUT`, and the first test that failed."""

    code: int
    first_failed: str
    seconds: float
    output: str

    @property
    def result(self) -> str:
        if self.code == _PASSED:
            return "MISSED"
        # pytest stops with code 2 if the fault makes the import of a test module fail. It returns
        # another code if there is no such test, or if all of them were skipped.
        is_caught = self.code in (_FAILED, _STOPPED, _TIMEOUT)
        return "caught" if is_caught else f"not run: {self.output}"


class Copy:
    """A copy of the checkout in `folder`, whose tests import the packages of the copy.

    All child processes inherit an environment whose PYTHONPATH is the copy. A process for which a
    test sets another PYTHONPATH runs the checkout, so it cannot catch a fault.
    """

    # Python reuses bytecode if the size and the modification time (in seconds) of a file are the
    # same, as they may be for two faults. Therefore each change gets a different second.
    _seconds = count(1_000_000_000)

    def __init__(self, folder: Path) -> None:
        self.root, self._temporary = folder / "kway", folder / "tmp"
        self._temporary.mkdir(parents=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(
            command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
        )
        extensions = [path for name in ("heads", "data") for path in (ROOT / name).rglob("*.so")]
        for name in [*filter(None, listed.stdout.split("\0")), *extensions]:
            path = ROOT / name
            if path.is_file():  # git also lists deleted files
                target = self.root / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "TMPDIR": str(self._temporary),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # saves a second per start
            _MARK: str(folder),
        }

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.root / fault.file
        original = path.read_text(encoding="utf-8")
        self._write(path, fault.apply(self.root))
        try:
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        second = next(self._seconds)
        os.utime(path, (second, second))

    def run(self, tests: Iterable[str], *options: str, limit: float = _LIMIT_SECONDS) -> Outcome:
        """Run pytest, and end all processes that it has started."""
        started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
        command += ["-p", "no:cacheprovider", "-p", "pytest_timeout"]
        with subprocess.Popen(
            [*command, "-m", "not slow", *options, *tests],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
                code = process.returncode
            except subprocess.TimeoutExpired:
                output, code = "", _TIMEOUT
            finally:
                end_processes(self._environment[_MARK])
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        failed = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
        first = "time limit" if code == _TIMEOUT else failed[0] if failed else ""
        return Outcome(code, first, time.monotonic() - started, output)


def end_processes(folder: str) -> None:
    """End all processes of the copies in `folder`."""
    for process in psutil.process_iter():
        try:
            if f"{process.environ().get(_MARK, '')}/".startswith(f"{folder}/"):
                process.kill()
        except psutil.Error:  # it has ended, or belongs to another user
            continue


def run_faults(
    faults: Sequence[Fault], folder: Path, tests: Sequence[str] | None, *, jobs: int
) -> bool:
    """Try the faults and print the results. Return whether they are as recorded."""
    copies: SimpleQueue[Copy] = SimpleQueue()
    for number in range(jobs):
        copies.put(Copy(folder / str(number)))
    results = Counter[tuple[str, str]]()

    def attempt(fault: Fault) -> bool:
        copy = copies.get()
        try:
            with copy.planted(fault):
                outcome = copy.run(tests or fault.caught_by, "-x")
        except ValueError as error:
            print(error, flush=True)
            results[fault.area, "does not apply"] += 1
            return False
        finally:
            copies.put(copy)
        result, by = outcome.result, outcome.first_failed or ", ".join(tests or fault.caught_by)
        print(f"{fault.id:<44} {result} {outcome.seconds:4.0f} s  {by}", flush=True)
        results[fault.area, result.partition(":")[0]] += 1
        return result == "caught"

    tried = [fault for fault in faults if fault.caught_by or tests]
    for fault in faults:
        if fault not in tried:
            print(f"{fault.id:<44} not caught today: {fault.reason}")
            results[fault.area, "not caught today"] += 1
    needed = dict.fromkeys(test for fault in tried for test in tests or fault.caught_by)
    parallel = ("-p", "xdist.plugin", "-n", str(jobs), "--dist", "loadfile")
    copy = copies.get()
    without = copy.run(needed, *parallel, limit=_BASELINE_SECONDS)
    copies.put(copy)
    print(f"without a fault: {len(needed)} tests or files, {without.seconds:.0f} s", flush=True)
    if without.code != _PASSED:
        print(f"{without.output}\nthese tests must pass without a fault")
        return False
    with ThreadPoolExecutor(jobs) as pool:
        try:
            as_recorded = list(pool.map(attempt, tried))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_processes(str(folder))
            raise
    for area in dict.fromkeys(fault.area for fault in faults):
        of_area = [f"{num} {result}" for (of, result), num in results.items() if of == area]
        print(f"{area}: {', '.join(of_area)}")
    return all(as_recorded)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults_planted")
    parser.add_argument("only", nargs="*", metavar="ID|AREA", help="default: all faults")
    parser.add_argument("--tests", nargs="+", metavar="TEST", help="instead of the recorded ones")
    parser.add_argument("--jobs", type=int, default=1, help="faults to try in parallel (1)")
    options = parser.parse_args()
    faults = read_faults()
    unknown = set(options.only) - {name for fault in faults for name in (fault.id, fault.area)}
    if unknown:
        parser.error(f"no fault or area has the name {min(unknown)}")
    if options.only:
        faults = [fault for fault in faults if {fault.id, fault.area} & set(options.only)]
    # SIGTERM, like Ctrl-C, ends the tests and removes the copies.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        return 0 if run_faults(faults, Path(folder), options.tests, jobs=options.jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
