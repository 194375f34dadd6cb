"""System errors about the output path of a command name the option to change."""

import errno
import os
from pathlib import Path

import pytest

from launch.output_path import explain_write_errors


@pytest.mark.parametrize("name", ["a/out", "a/out/x.tar", "a/out.first-pass", "a"])
def test_an_error_about_the_output_path_names_the_option(name: str) -> None:
    message = r"^a/out cannot be written \(Perm.*\): .* --out$"
    with pytest.raises(OSError, match=message), explain_write_errors(Path("a/out"), "--out"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


@pytest.mark.parametrize("name", ["a/outside/x.tar", "b/x.tar"])
def test_an_error_about_another_file_is_unchanged(name: str) -> None:
    with pytest.raises(FileNotFoundError), explain_write_errors(Path("a/out"), "--out"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
