"""The state folder: what it keeps, its locks and its errors."""

import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving.watches.state_file import StateFile, default_folder, held_folder
from serving.watches.watch import WatchesDownError
from tests.system.processes import ROOT
from tests.tiny_bundle import write

FILE = "state.sqlite3"

# Writes entries one by one, reports each one, and is killed in the meantime.
WRITER = """
import sys
from pathlib import Path
from serving.watches.state_file import StateFile
file = StateFile(Path(sys.argv[1]))
for index in range(10**9):
    file.apply({f"{index:09d}": b"x" * 1000, "last": str(index).encode()})
    print(index, flush=True)
"""


@contextmanager
def opened(folder: Path) -> Iterator[StateFile]:
    file = StateFile(folder, busy_seconds=0)
    try:
        yield file
    finally:
        file.close()


def test_entries_are_read_in_the_order_of_their_keys_by_the_next_process(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.apply({"b": b"1", "a": b"2", "c": b"3"})
        file.apply({"b": b"4", "c": None, "missing": None})
        assert list(file.items()) == [("a", b"2"), ("b", b"4")]
    with opened(tmp_path) as file:
        assert list(file.items()) == [("a", b"2"), ("b", b"4")]


def test_applied_entries_survive_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(last := process.stdout.readline()) < 50:
            pass
        process.kill()
        last = [last, *process.stdout.read().splitlines()][-1]
    with opened(tmp_path) as file:
        file.verify()
        found = dict(file.items())
    assert int(found.pop("last")) == len(found) - 1 >= int(last)


def test_changes_are_applied_completely_or_not_at_all(tmp_path: Path) -> None:
    with opened(tmp_path) as file:
        file.apply({"a": b"1"})
        with pytest.raises(WatchesDownError, match=FILE):
            file.apply({"a": b"2", "b": sqlite3})  # type: ignore[dict-item]
        assert list(file.items()) == [("a", b"1")]
        file.apply({"a": b"3"})


def test_only_the_owner_can_read_the_folder_and_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "state"
    with held_folder(folder), opened(folder) as file:
        file.apply({"a": b"1"})
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes == {FILE: 0o600, f"{FILE}-wal": 0o600, "lock": 0o600}


def test_a_folder_has_one_server_and_a_file_has_one_writer(tmp_path: Path) -> None:
    with held_folder(tmp_path):
        message = "another server uses the state folder"
        with pytest.raises(OSError, match=message), held_folder(tmp_path):
            pass
        with opened(tmp_path), pytest.raises(OSError, match="locked"), opened(tmp_path):
            pass
    with held_folder(tmp_path):
        pass


def _text(path: Path) -> None:
    path.write_text("not a database" * 1000)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _newer(path: Path) -> None:
    _execute(path, "PRAGMA user_version = 2")


def _foreign(path: Path) -> None:
    _execute(path, "PRAGMA application_id = 1")


def _execute(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_text, r"damaged.*start without watches"),
        (_truncated, r"damaged.*start without watches"),
        (_newer, r"format 2.*reads format 1\. Start the version that wrote it"),
        (_foreign, r"was not written by kway\. Pass another folder"),
    ],
)
def test_an_unusable_file_is_an_error_of_one_line(
    tmp_path: Path,
    kway: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    message: str,
) -> None:
    bundle = write(tmp_path / "pets")
    folder = default_folder(bundle)
    assert folder == tmp_path / "pets-state"
    with held_folder(folder), opened(folder) as file:
        file.apply({f"{index}": b"x" * 1000 for index in range(50)})
    change(folder / FILE)
    assert kway("serve", bundle, "--port", 0) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder / FILE) in line
    assert re.search(message, line), line


def test_the_default_folder_is_beside_the_path_that_names_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "current").symlink_to("v1")
    assert default_folder(tmp_path / "current") == tmp_path / "current-state"
    monkeypatch.chdir(tmp_path / "v1")
    for name in (".", "../v1", "x/.."):
        assert default_folder(Path(name)) == tmp_path / "v1-state"


@pytest.mark.slow
def test_a_folder_that_cannot_be_created_is_an_error_of_one_line(
    tmp_path: Path, kway: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    bundle = write(tmp_path / "pets")
    assert kway("serve", bundle, "--port", 0, "--state", tmp_path / "file" / "state") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Pass a writable folder with --state")
