"""System errors about the output path of a command name the option to change."""

import errno
import os
from pathlib import Path

import pytest

from launch.output_path import check_writable, explain_write_errors


@pytest.mark.parametrize("name", ["a/out", "a/out/x.tar", "a/out.first-pass", "a"])
def test_an_error_about_the_output_path_names_the_option(name: str) -> None:
    message = r"^a/out cannot be written \(Perm.*\): .* --out$"
    with pytest.raises(OSError, match=message), explain_write_errors(Path("a/out"), "--out"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


@pytest.mark.parametrize("name", ["a/outside/x.tar", "b/x.tar"])
def test_an_error_about_another_file_is_unchanged(name: str) -> None:
    with pytest.raises(FileNotFoundError), explain_write_errors(Path("a/out"), "--out"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def test_check_writable_leaves_no_file_behind(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("kept")
    check_writable(tmp_path / "new.csv", "--out")
    check_writable(tmp_path / "old.csv", "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.csv", "kept")]
    with pytest.raises(OSError, match=r"new/a\.csv cannot be written \(No such .*with --out$"):
        check_writable(tmp_path / "new" / "a.csv", "--out")
    with pytest.raises(OSError, match=r"is a folder: .* --out"):
        check_writable(tmp_path, "--out")
