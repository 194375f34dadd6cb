"""An error of the system about the place that a command writes to gets a remedy; others do not."""

import errno
import os
from pathlib import Path

import pytest

from launch.output_path import check_writable, explain_write_errors


@pytest.mark.parametrize("name", ["a/out", "a/out/x.tar", "a/out.first-pass", "a"])
def test_an_error_about_the_place_names_the_option_for_another(name: str) -> None:
    said = r"^a/out cannot be written \(Perm.*\): name another place with --out$"
    with pytest.raises(OSError, match=said), explain_write_errors(Path("a/out"), "--out"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


@pytest.mark.parametrize("name", ["a/outside/x.tar", "b/x.tar"])
def test_an_error_about_another_file_stays_as_it_is(name: str) -> None:
    with pytest.raises(FileNotFoundError), explain_write_errors(Path("a/out"), "--out"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def test_a_place_is_tried_before_the_work_and_nothing_is_left_there(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("kept")
    check_writable(tmp_path / "new.csv", "--out")
    check_writable(tmp_path / "old.csv", "--out")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.csv", "kept")]
    with pytest.raises(OSError, match=r"new/a\.csv cannot be written \(No such .*with --out$"):
        check_writable(tmp_path / "new" / "a.csv", "--out")
    with pytest.raises(OSError, match="is a folder: name a file in it with --out"):
        check_writable(tmp_path, "--out")
