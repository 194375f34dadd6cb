"""`kway doctor`: each test causes a problem, often in a new process, and checks the finding."""

import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from data.images.jpeg_crop import decoder
from launch.doctor import CHECKS, Finding, Workload
from launch.doctor.check import workload_of
from launch.doctor.collectives import smoke_test
from launch.doctor.limits import cpu_quota, memory_limit, process_limit, shared_memory
from launch.doctor.rank import names
from tests.shards import glyph_recipe, text_recipe
from tests.system.processes import KWAY, ROOT, environment, run

LEVELS = ("ok", "warning", "error")


def found(check: str, workload: Workload) -> list[Finding]:
    return list(CHECKS[check](workload))


def found_elsewhere(check: str, workload: Workload, *, before: str = "", **variables: str) -> Any:
    """Run a check in a new process after the shell command `before`; return its first finding."""
    code = (
        "import json, sys; from dataclasses import asdict; from pathlib import Path; "
        "from launch.doctor import CHECKS, Workload; "
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


@contextmanager
def machine_with_clock(seconds_ahead: float) -> Iterator[str]:
    """Yield the address of a web server whose `Date` header is this many seconds ahead of this
    machine's clock."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() + seconds_ahead)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize(("limit", "level"), [(300, "error"), (1024, "warning"), (8192, "ok")])
def test_doctor_finds_a_low_open_file_limit(workload, limit, level):
    finding = found_elsewhere("open files", workload, before=f"ulimit -n {limit};")
    assert finding["level"] == level
    assert f"{limit:,}".replace(",", "") in finding["found"].replace(",", "")


def test_doctor_finds_a_low_process_limit(workload):
    finding = found_elsewhere("processes", workload, before="ulimit -u 900;")
    assert finding["level"] == "warning"
    assert finding["found"].startswith("900")


def test_doctor_finds_too_little_shared_memory_for_the_loaders(workload, tmp_path):
    huge, tight = (replace(workload, shared_bytes=size) for size in (1 << 60, 1))
    (finding,) = shared_memory(huge)
    assert finding.level == "error"
    assert "--shm-size" in finding.remedy
    (finding,) = shared_memory(tight)
    assert finding.level == "ok"
    (finding,) = shared_memory(workload, tmp_path / "nothing")
    assert finding.level == "error"


@pytest.mark.parametrize(
    ("value", "level"), [("1000000", "warning"), ("many", "error"), ("0", "error")]
)
def test_doctor_finds_an_invalid_number_of_threads(workload, monkeypatch, value, level):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    (finding,) = found("threads", workload)
    assert (finding.level, value in finding.found) == (level, True)


def test_doctor_finds_a_cpu_limit(workload):
    if (os.cpu_count() or 1) < 2:
        pytest.skip("this machine has only one CPU")
    finding = found_elsewhere("CPUs", workload, before="taskset -p -c 0 $$ > /dev/null;")
    assert finding["level"] == "warning"
    assert finding["found"].startswith("1 of the machine's")


def test_container_limits_are_read_for_both_cgroup_versions(tmp_path):
    membership = tmp_path / "cgroup"
    new = tmp_path / "new" / "pod" / "box"
    new.mkdir(parents=True)
    (new / "memory.max").write_text("max\n")
    (new.parent / "memory.max").write_text("2147483648\n")
    (new / "cpu.max").write_text("150000 100000\n")
    (new / "pids.max").write_text("99\n")
    membership.write_text("0::/pod/box\n")
    tree = {"root": tmp_path / "new", "membership": membership}
    assert (memory_limit(**tree), cpu_quota(**tree), process_limit(**tree)) == (1 << 31, 1.5, 99)

    for controller, file, text in (
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("memory/box", "memory.limit_in_bytes", "1048576"),
        ("cpu", "cpu.cfs_quota_us", "-1"),
        ("cpu", "cpu.cfs_period_us", "100000"),
        ("cpu/box", "cpu.cfs_quota_us", "50000"),
        ("cpu/box", "cpu.cfs_period_us", "100000"),
    ):
        (tmp_path / "old" / controller).mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / controller / file).write_text(f"{text}\n")
    membership.write_text("4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n")
    (tmp_path / "old" / "cpu,cpuacct").symlink_to("cpu")
    tree["root"] = tmp_path / "old"
    assert (memory_limit(**tree), cpu_quota(**tree), process_limit(**tree)) == (1 << 20, 0.5, None)


def test_a_cgroup_outside_the_container_is_ignored(tmp_path):
    """/proc may contain the cgroup's path on the host, although that path is not mounted."""
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "membership").write_text("0::/../../host/box\n")
    assert memory_limit(tmp_path, tmp_path / "membership") == 4096


# ------------------------------------------------------------------ storage


def test_doctor_finds_a_folder_that_cannot_store_a_checkpoint(workload):
    finding = found_elsewhere("run folder", workload, before="ulimit -f 1000;")
    assert (finding["level"], "ulimit -f" in finding["remedy"]) == ("error", True)
    (finding,) = found("run folder", Workload(Path("/proc/runs")))
    assert (finding.level, "/proc (proc)" in finding.found) == ("error", True)


def test_the_folder_check_neither_leaves_files_nor_creates_folders(workload, tmp_path):
    (finding,) = found("run folder", Workload(tmp_path / "runs" / "one"))
    assert finding.level in ("ok", "warning")  # a warning if the tests run on tmpfs
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_a_run_folder_in_memory():
    if not any(mount.mountpoint == "/dev/shm" for mount in psutil.disk_partitions(all=True)):
        pytest.skip("this machine has no tmpfs")
    (finding,) = found("run folder", Workload(Path("/dev/shm/runs")))
    assert (finding.level, "tmpfs" in finding.found) == ("warning", True)


def test_doctor_finds_a_full_disk():
    (finding, *_) = found("disk space", Workload(Path("/proc")))
    assert finding.level == "error"


# ------------------------------------------------------------------ network


def test_doctor_reports_the_process_that_uses_the_rendezvous_port(workload):
    with listening() as port:
        (finding,) = found("ports", replace(workload, port=port))
        assert finding.level == "error"
        assert f"process {os.getpid()} " in finding.found
    (finding,) = found("ports", replace(workload, port=port))
    assert finding.level == "ok"


@pytest.mark.parametrize(("ahead", "words"), [(-40, " s behind"), (40, " s ahead of")])
def test_doctor_finds_a_peer_with_a_wrong_clock(workload, ahead, words):
    with machine_with_clock(ahead) as peer:
        (finding,) = found("peers", replace(workload, peers=(peer,)))
    assert finding.level == "error"
    seconds, found_words, _ = re.split(r"(?<=\d)( s behind| s ahead of)", finding.found)
    assert found_words == words
    assert 38 <= int(seconds.split()[-1]) <= 42  # a Date is in whole seconds


def test_a_peer_with_the_right_clock_is_ok_and_an_unreachable_one_is_not(workload):
    with machine_with_clock(0) as peer:
        (finding,) = found("peers", replace(workload, peers=(peer,)))
    assert (finding.level, "within" in finding.found) == ("ok", True)
    with listening() as port:
        gone = port
    (finding,) = found("peers", replace(workload, peers=(f"127.0.0.1:{gone}",)))
    assert (finding.level, "refused" in finding.found) == ("error", True)


def test_doctor_finds_missing_interfaces(workload, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    (finding,) = found("gloo's interface", workload)
    assert (finding.level, "nope0 does not exist" in finding.found) == ("error", True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (finding,) = found("gloo's interface", workload)
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("value", "level"),
    [("lo", "ok"), ("l", "ok"), ("=l", "error"), ("=lo", "ok"), ("nope", "error"), ("^nope", "ok")],
)
def test_interfaces_are_matched_by_nccl_rules(workload, monkeypatch, value, level):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    (finding,) = found("NCCL's interface", workload)
    assert finding.level == level


def test_doctor_finds_variables_that_slow_training_down(workload, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "info")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    slow, harmless = found("variables", workload)
    assert (slow.level, slow.remedy) == ("warning", "unset NCCL_DEBUG")
    assert (harmless.level, "NCCL_IB_HCA=mlx5_0" in harmless.found) == ("ok", True)


# ------------------------------------------------------------------ software


def fake_package(folder: Path, name: str, version: str, code: str = "") -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)
    (folder / f"{name}-{version}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)


def test_doctor_finds_an_old_package(workload, tmp_path):
    fake_package(tmp_path, "webdataset", "0.1")
    finding = found_elsewhere("packages", workload, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert finding["level"] == "error"
    assert "webdataset 0.1 is installed" in finding["found"]
    assert finding["remedy"].startswith("pip install 'webdataset>=")


def test_doctor_finds_a_package_that_breaks_imports(workload, tmp_path):
    name = "torch" + "vision"
    fake_package(tmp_path, name, "0.9", "raise RuntimeError('operator nms does not exist')")
    finding = found_elsewhere(name, workload, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (finding["level"], "nms does not exist" in finding["found"]) == ("error", True)
    assert finding["remedy"].startswith(f"pip uninstall {name}")


def test_doctor_finds_a_torch_that_cannot_be_imported(workload, tmp_path):
    fake_package(tmp_path, "torch", "2.13", "raise ImportError('libcudart.so.13: no such file')")
    finding = found_elsewhere("torch", workload, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (finding["level"], "libcudart" in finding["found"]) == ("error", True)


# ------------------------------------------------------------------ collectives


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_doctor_reports_the_jpeg_decoder(workload):
    (finding,) = found("JPEG decoder", workload)
    assert decoder() in finding.found
    without = (
        "import sys; sys.modules['data.images._jpeg'] = None; from pathlib import Path; "
        "from launch.doctor import CHECKS, Workload; "
        "print(*CHECKS['JPEG decoder'](Workload(Path())))"
    )
    done = subprocess.run(
        [sys.executable, "-c", without],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    assert "level='warning'" in done.stdout
    assert "OpenCV: decoding whole JPEGs" in done.stdout


def test_three_ranks_run_every_collective():
    finding = smoke_test("gloo", 3)
    assert finding.level == "ok", finding
    assert f"3 ranks: all {len(list(names()))} collectives passed" in finding.found


def test_a_hanging_rank_is_reported_and_no_process_is_left_behind():
    before = children()
    finding = smoke_test("gloo", 2, timeout_seconds=0)
    assert (finding.level, finding.found) == ("error", "rank 0, startup: hangs")
    assert children() <= before


# ------------------------------------------------------------------ the command


def test_the_workload_of_a_recipe_includes_its_loaders(glyphs, texts, tmp_path):
    with_workers = glyph_recipe(glyphs, tmp_path, data__workers=3)
    needs = workload_of(with_workers, ranks=2, port=None, peers=())
    assert needs.shared_bytes == 4 * 3 * 12 * 16 * 16  # batches x workers x batch size x pixels
    needs = workload_of(text_recipe(texts, tmp_path), ranks=2, port=None, peers=())
    assert (needs.shared_bytes, needs.run) == (0, tmp_path)


def test_without_a_terminal_each_finding_is_one_line_and_errors_set_the_exit_code(tmp_path):
    with listening() as port:
        command = [*KWAY, "doctor", "--run", str(tmp_path), "--port", str(port)]
        done = run(command)
    *lines, summary = done.stdout.splitlines()
    assert all(line.split(": ")[0] in LEVELS for line in lines), done.stdout
    assert any(line.startswith("error: ports: ") for line in lines)
    assert summary.startswith("1 error, ")
    assert (done.returncode, done.stderr) == (1, "")


def test_json_contains_every_finding_including_ranks_that_cannot_connect(
    tmp_path, monkeypatch, kway, capsys
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    code = kway("doctor", "--run", tmp_path, "--json")
    findings = json.loads(capsys.readouterr().out)
    assert {"python", "torch", "gloo", "clock", "run folder"} <= {f["topic"] for f in findings}
    for finding in findings:
        assert finding["level"] in LEVELS
        assert bool(finding["remedy"]) == (finding["level"] != "ok")
    (gloo,) = [finding for finding in findings if finding["topic"] == "gloo"]
    assert (gloo["level"], code) == ("error", 1)
    assert gloo["found"].startswith("rank ")
    assert "nope0" in gloo["found"]


def test_a_peer_without_a_port_is_rejected(kway, capsys):
    assert kway("doctor", "--peer", "node2") == 2
    assert "HOST:PORT" in capsys.readouterr().err
