"""The plugin that ends tests and processes, in pytest runs of its own on planted tests."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process_tree import left_after
from tests.system.processes import ROOT

_SECONDS = 60
_PLANTED = """
import itertools, os, subprocess, time
from pathlib import Path

import pytest

from tests import ending

ending._GRACE_SECONDS = 0.5

def sleep(file, **options):
    process = subprocess.Popen(["sleep", "1000"], **options)
    Path(__file__).with_name(file).write_text(str(process.pid))
    return process

@pytest.fixture(scope="module")
def server():
    process = sleep("server")
    yield process
    process.kill()
    process.wait()

def test_of_a_server(server):
    assert server.poll() is None

def test_of_a_process():
    sleep("left")

def test_of_a_daemon():
    if os.fork() == 0:
        sleep("daemon", start_new_session=True)
        os._exit(0)
    os.wait()

@pytest.mark.timeout(0.5)
def test_of_a_wait():
    time.sleep(1000)

@pytest.mark.timeout(0.5)
def test_of_code_that_no_exception_interrupts():
    sum(itertools.repeat(0))

@pytest.fixture
def endless():
    yield
    time.sleep(1000)

@pytest.mark.timeout(0.5)
def test_of_a_teardown_after_a_failure(endless):
    assert False

def test_of_the_killed():
    sleep("killed")
    os.kill(os.getppid(), 9)
    time.sleep(1000)
"""


def run(folder: Path, *tests: str, workers: int = 0) -> "subprocess.CompletedProcess[str]":
    planted = folder / "test_planted.py"
    planted.write_text(_PLANTED)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder)]
    command += ["-p", "tests.ending", "-p", "pytest_timeout", "-p", "xdist"]
    command += ["-c", os.devnull, "-p", "no:cacheprovider", "-rA", "--numprocesses", str(workers)]
    command += [f"{planted}::test_of_{name}" for name in tests]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS
    )


def ended(folder: Path, file: str) -> bool:
    return not left_after([int((folder / file).read_text())], _SECONDS)


def test_a_test_that_leaves_a_process_fails_and_a_server_of_a_file_may_stay(tmp_path):
    done = run(tmp_path, "a_process", "a_server")
    assert re.search("2 passed.* 1 error", done.stdout)
    assert "ERROR at teardown of test_of_a_process" in done.stdout
    assert "sleep 1000" in done.stdout
    assert ended(tmp_path, "left")
    assert ended(tmp_path, "server")


def test_a_daemon_is_found_at_the_end_of_the_run(tmp_path):
    done = run(tmp_path, "a_daemon")
    assert "1 passed" in done.stdout
    assert "sleep 1000" in done.stdout
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert ended(tmp_path, "daemon")


def test_tests_and_teardowns_that_do_not_end_fail_and_the_others_run(tmp_path):
    endless = ("a_wait", "code_that_no_exception_interrupts", "a_teardown_after_a_failure")
    done = run(tmp_path, *endless, "a_server", workers=1)
    failed = set(re.findall(r"^(?:FAILED|ERROR) \S+::test_of_(\w+)", done.stdout, re.MULTILINE))
    assert failed == set(endless)
    assert re.findall(r"^PASSED \S+::test_of_(\w+)", done.stdout, re.MULTILINE) == ["a_server"]


def test_if_pytest_is_killed_its_processes_are_killed(tmp_path):
    done = run(tmp_path, "the_killed", workers=1)
    assert done.returncode == -signal.SIGKILL
    assert ended(tmp_path, "killed")
