"""Fixtures for all tests, and pytest options and hooks.

Modules are imported where they are used, so that pytest-xdist's main process, which runs no tests,
starts its workers without importing torch.
"""

import fcntl
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

pytest_plugins = ["tests.ending"]

# The tests start hundreds of processes. Without cached bytecode, each of them compiles the packages
# again, and each of pytest-xdist's workers rewrites the assertions of all test modules again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The trainer, torchrun and torch itself otherwise use all cores in each process. While tests run in
# parallel, the OpenMP threads of a process then wait for each other in busy loops.
os.environ["OMP_NUM_THREADS"] = "1"
# The test modules import half a million objects. Collections during these imports would take a
# fifth of their time. `_frozen_objects` enables the collector again.
gc.disable()
# Without a GPU, Triton's interpreter runs the kernels. Triton reads this when `heads` is imported.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# How long a test takes depends on the machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

_SLOW_SECONDS = 1800


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seconds-per-file",
        type=float,
        metavar="MINIMUM",
        help="print a table of the test files that took at least MINIMUM seconds",
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    minimum = config.getoption("--seconds-per-file")
    if minimum is None:
        return
    found = [report for reports in terminalreporter.stats.values() for report in reports]
    reports = [report for report in found if isinstance(report, pytest.TestReport)]
    for line in _seconds_per_file(reports, minimum):
        terminalreporter.write_line(line)


def _seconds_per_file(reports: list[pytest.TestReport], minimum: float) -> Iterator[str]:
    """Yield a Markdown table. The last row sums the files below `minimum` seconds."""
    seconds, tests = Counter[str](), Counter[str]()
    for report in reports:
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        tests[file] += report.when == "call"
    yield "| file | tests | seconds |"
    yield "|---|---|---|"
    for file, spent in seconds.most_common():
        if spent >= minimum:
            yield f"| {file} | {tests[file]} | {spent:.1f} |"
    others = [file for file in seconds if seconds[file] < minimum]
    num_tests, spent = (sum(count[file] for file in others) for count in (tests, seconds))
    yield f"| {len(others)} other files | {num_tests} | {spent:.1f} |"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(_RUN_FIRST))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _frozen_objects() -> Iterator[None]:
    """Exclude all objects imported for the tests from garbage collections.

    Each training run begins with a collection, freezes all objects and ends by unfreezing them. In
    this process, that would also unfreeze the imported objects, and later collections would take
    0.2 s each.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(gc, "freeze", lambda: None)
        patches.setattr(gc, "unfreeze", lambda: None)
        gc.enable()
        yield
    gc.unfreeze()  # nanobind reports objects that are not collected at exit


@pytest.fixture(scope="session", autouse=True)
def _characters_drawn_once() -> Iterator[None]:
    """Draw the characters of `Glyphs` once per process, because that takes three seconds."""
    from data.sources import glyphs

    draw = glyphs._draw_characters
    drawn = cache(lambda: draw(glyphs.face_characters()))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(glyphs, "_draw_characters", lambda _faces: drawn())
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread, because tests run in parallel and some of them start ranks."""
    import torch
    from threadpoolctl import threadpool_limits

    torch.set_num_threads(1)
    threadpool_limits(1)


# For each prefix, one worker runs all files whose path starts with it. These files share servers, a
# browser or rendered manifests, or start runs that would slow each other down.
_RUN_TOGETHER = (
    "tests/serving/live/",
    "tests/serving/page/",
    "tests/system/",
    "tests/k8s/",
)
# These take the longest, so they must not be the last to start.
_RUN_FIRST = ("tests/serving/live/", "tests/system/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more worker than cores, because tests wait for ranks and servers in other
    processes. These also need cores, so there are at most four workers."""
    return min(len(os.sched_getaffinity(0)) + 1, 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Like `--dist loadfile`, but also keep files together that share a prefix."""
    if config.getvalue("dist") != "loadfile":
        return None
    # By default, xdist starts the files with the fewest tests last, and these are the slowest.
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadFileScheduling

    class LoadFileOrFolder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:  # overridden by xdist's schedulers too
            prefix = next((one for one in _RUN_TOGETHER if nodeid.startswith(one)), None)
            if prefix == "tests/serving/live/":
                # A server on Ray and one without Ray. Together, they would take the longest.
                return f"{prefix}{'ray' if '[ray' in nodeid else 'no-ray'}"
            return prefix or super()._split_scope(nodeid)

    return LoadFileOrFolder(config, log)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of color images in 5 classes, without label vectors."""
    from tests.shards import image_shards

    return image_shards(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 13 characters, with label vectors."""
    from tests.shards import glyph_shards

    # Drawing the characters takes seconds, so the first of pytest-xdist's workers does it for all.
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "glyphs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "glyphs").exists():
            glyph_shards(folder / "unfinished-glyphs")
            (folder / "unfinished-glyphs").rename(folder / "glyphs")
    return folder / "glyphs" / "shards"


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `shards` of texts in 4 classes and a `tokenizer` for them."""
    from tests.shards import text_shards

    return text_shards(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Inject faults for the duration of a test."""
    import data.retry
    from tests.file_errors import inject

    monkeypatch.setattr(data.retry, "_LONGEST_SECONDS", 0.01)

    def put(call: str, path: str, fail: Callable[[], None], times: int = 1_000_000) -> None:
        inject(call, path, fail, times=times, put=monkeypatch.setattr)

    return put


@pytest.fixture
def kway(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `kway ARGUMENTS…` in this process, to avoid imports, and return its exit code."""
    import torch

    from launch.main import main

    threads = torch.get_num_threads()

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kway", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as exited:
                main()
        finally:
            torch.set_num_threads(threads)
        return int(exited.value.code or 0)

    return run


@pytest.fixture
def error_of(kway: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `kway ARGUMENTS…`, which must print only an error of one line and exit with 2, and return
    the line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        code, output = kway(*arguments), capsys.readouterr()
        assert (code, output.out, output.err.count("\n")) == (2, "", 1), output
        assert output.err.startswith("error: ")
        return output.err

    return run
