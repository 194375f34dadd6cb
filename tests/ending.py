"""A pytest plugin that ensures that every test ends and leaves no process behind.

Three limits apply to a test. pytest-timeout raises an exception in it after `timeout` seconds
(pyproject.toml), so that fixtures clean up and the other tests of the file run. If that does not
end the test, for example because it waits in C code, faulthandler prints the stack of each thread
and exits. pytest-xdist then reports the test as failed and runs the others in a new worker. The
same limit applies again to the teardown.

A process that a test starts must exit before the test ends, unless a fixture of a wider scope
started it or its PID is in `shared`. Daemons are found at the end of the run. If pytest itself is
killed, another process kills every process that it has started.
"""

import faulthandler
import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests import process_tree
from tests.process_tree import RUN, children, command_line, descendants, left_after

_EXIT_FACTOR = 1.2  # of the timeout, so that the exception comes first
_EXIT_SECONDS = 60  # for the end of pytest itself, after all tests
_GRACE_SECONDS = 10  # for processes that are about to exit, such as the workers of a pool

# The PIDs of servers that several tests share and that the first of these tests starts.
shared: set[int] = set()

_seconds = pytest.StashKey[float]()
_standard_error = pytest.StashKey[int]()
_killer = pytest.StashKey["subprocess.Popen[bytes]"]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_standard_error] = os.dup(2)  # pytest redirects descriptor 2 during a test
    if _is_worker(config):  # it belongs to the run that started it
        return
    run = uuid.uuid4().hex
    command = [sys.executable, "-I", "-S", process_tree.__file__, run]
    # In its own session, it does not receive the signals that the terminal sends to pytest.
    config.stash[_killer] = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    os.environ[RUN] = run


def pytest_unconfigure(config: pytest.Config) -> None:
    if killer := config.stash.get(_killer, None):
        try:
            killer.communicate(timeout=_EXIT_SECONDS)
        except subprocess.TimeoutExpired:  # a forked daemon has inherited the pipe
            killer.kill()
            killer.wait(timeout=_EXIT_SECONDS)
    if not _is_worker(config):  # a worker waits for the others, and pytest-xdist ends it
        _exit_after(_EXIT_SECONDS, config)  # Python waits for threads before it exits


def _is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of pytest-xdist."""
    return hasattr(config, "workerinput")


def _exit_after(seconds: float, config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_standard_error])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_seconds] = _EXIT_FACTOR * settings.timeout
    _exit_after(item.stash[_seconds], item.config)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    if seconds := item.stash.get(_seconds, None):  # pytest cancels all timers if a test fails
        _exit_after(seconds, item.config)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    if fixturedef.scope not in ("package", "session"):
        return (yield)
    before = _own()
    try:
        return (yield)
    finally:
        shared.update(_own() - before)


@pytest.fixture(scope="module", autouse=True)
def _no_process_left_by_file() -> Iterator[None]:
    yield from _no_process_left()


@pytest.fixture(autouse=True)
def _no_process_left_by_test() -> Iterator[None]:
    yield from _no_process_left()


def _no_process_left() -> Iterator[None]:
    before = _own()
    yield
    if not (started := _own() - before - shared):
        return
    gc.collect()  # the workers of a DataLoader exit when its iterator is collected
    if left := left_after(started, _GRACE_SECONDS):
        below = [process for pid in left for process in descendants(pid)]
        pytest.fail(_killed([*left, *below]), pytrace=False)


def _own() -> set[int]:
    """Return the processes that this one and its fork server have started."""
    started = children(os.getpid())
    servers = _of_multiprocessing(started)
    forked = (child for server in servers for child in children(server))
    return {*started, *forked} - servers


def _of_multiprocessing(pids: list[int]) -> set[int]:
    """Return the helpers that multiprocessing starts on first use and does not stop."""
    modules = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    return {pid for pid in pids if any(module in command_line(pid) for module in modules)}


def _killed(pids: list[int]) -> str:
    """Kill processes and return a message with their command lines."""
    lines = [f"{pid}: {command_line(pid)}" for pid in pids]
    process_tree.kill_all(pids)
    return "\n".join(["these processes were left running:", *lines])


@pytest.hookimpl(trylast=True)  # pytest-xdist has stopped its workers
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _is_worker(session.config):
        return
    own = {os.getpid(), *_of_multiprocessing(children(os.getpid()))}
    found = {*process_tree.processes_of(os.environ[RUN])} - own
    if left := left_after(found, _GRACE_SECONDS):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"\n{_killed(left)}", red=True)
