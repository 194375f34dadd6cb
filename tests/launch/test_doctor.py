"""`kway doctor`: each test causes a problem, often in a new process, and checks the finding."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.doctor.checks import CHECKS, Finding, Workload, shared_memory
from launch.doctor.collectives import run_collectives
from tests.system.processes import KWAY, ROOT, environment, run


def found(check: str, workload: Workload) -> list[Finding]:
    return list(CHECKS[check](workload))


def found_elsewhere(check: str, workload: Workload, *, before: str = "", **variables: str) -> Any:
    """Run a check in a new process after the shell command `before`; return its first finding."""
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path; "
        "from launch.doctor.checks import CHECKS, Workload; "
        f"found = CHECKS[{check!r}](Workload(Path({str(workload.run)!r}))); "
        "print(json.dumps([asdict(finding) for finding in found]))"
    )
    done = subprocess.run(
        ["bash", "-c", f'{before} exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**environment(), **variables},
        timeout=120,
    )
    return json.loads(done.stdout)[0]


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload(tmp_path)


@contextmanager
def listening() -> Iterator[int]:
    """Yield a port on which this process is listening."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(("limit", "level"), [(300, "error"), (1024, "warning"), (8192, "ok")])
def test_doctor_finds_a_low_open_file_limit(workload, limit, level, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (limit, 65536))
    (finding,) = found("open files", workload)
    assert finding.level == level
    assert str(limit) in finding.found


def test_doctor_finds_too_little_shared_memory_for_the_loaders(workload):
    (finding,) = shared_memory(replace(workload, shared_bytes=1 << 60))
    assert finding.level == "error"
    assert "--shm-size" in finding.fix
    (finding,) = shared_memory(replace(workload, shared_bytes=1))
    assert finding.level == "ok"


def test_doctor_finds_a_folder_that_cannot_store_a_checkpoint(workload):
    finding = found_elsewhere("run folder", workload, before="ulimit -f 1000;")
    assert (finding["level"], "ulimit -f" in finding["fix"]) == ("error", True)


def test_the_folder_check_neither_leaves_files_nor_creates_folders(tmp_path):
    (finding,) = found("run folder", Workload(tmp_path / "runs" / "one"))
    assert "MiB/s" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_a_used_rendezvous_port_and_an_unreachable_peer(workload):
    with listening() as port:
        needs = replace(workload, port=port, peers=(("127.0.0.1", port),))
        used, reachable, *_ = found("network", needs)
    assert (used.level, reachable.level) == ("error", "ok")
    free, gone, *_ = found("network", needs)
    assert (free.level, gone.level) == ("ok", "error")


def fake_package(folder: Path, name: str, version: str, code: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    (folder / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


def test_doctor_finds_an_old_package(workload, tmp_path):
    fake_package(tmp_path, "webdataset", "0.1")
    finding = found_elsewhere("versions", workload, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert finding["level"] == "error"
    assert "webdataset 0.1 is installed" in finding["found"]
    assert finding["fix"].startswith("pip install 'webdataset>=")


def test_doctor_finds_a_torch_that_cannot_be_imported(workload, tmp_path):
    fake_package(tmp_path, "torch", "2.13", "raise ImportError('libcudart.so.13: no such file')")
    finding = found_elsewhere("torch", workload, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (finding["level"], "libcudart" in finding["found"]) == ("error", True)


def test_three_ranks_run_every_collective():
    is_correct, line = run_collectives("gloo", 3)
    assert is_correct, line


def test_without_a_terminal_each_finding_is_one_line_and_errors_set_the_exit_code(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    done = run([*KWAY, "doctor"], cwd=tmp_path)
    *lines, summary = done.stdout.splitlines()
    assert all(line.split(": ")[0] in ("ok", "warning", "error") for line in lines), done.stdout
    (collectives,) = [line for line in lines if line.startswith("error: ")]
    assert collectives.startswith("error: collectives: gloo, 2 ranks: rank ")
    assert "nope0" in collectives
    assert summary.startswith("1 error, ")
    assert (done.returncode, done.stderr) == (1, "")


def test_a_peer_without_a_port_is_rejected(error_of):
    assert "HOST:PORT" in error_of("doctor", "--peer", "node2")
