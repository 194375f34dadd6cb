"""An error of the system about the place that a command writes to gets a remedy; others do not."""

import errno
import os
from pathlib import Path

import pytest

from launch.commands.place import written_to


@pytest.mark.parametrize("name", ["a/out", "a/out/x.tar", "a/out.first-pass", "a"])
def test_an_error_about_the_place_names_the_option_for_another(name: str) -> None:
    said = r"^a/out cannot be written \(Perm.*\): name another place with --out$"
    with pytest.raises(OSError, match=said), written_to(Path("a/out"), "--out"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)


@pytest.mark.parametrize("name", ["a/outside/x.tar", "b/x.tar"])
def test_an_error_about_another_file_stays_as_it_is(name: str) -> None:
    with pytest.raises(FileNotFoundError), written_to(Path("a/out"), "--out"):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
