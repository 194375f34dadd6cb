"""A file of class names, as three commands read it."""

import re
from pathlib import Path

import pytest

from data.tars.labels import read_class_names


def test_names_keep_their_order_without_space_around_them(tmp_path: Path) -> None:
    (tmp_path / "names").write_bytes("\ufeffzebra \r\n  crème brûlée\r\n東京\r\n\r\n".encode())
    assert read_class_names(tmp_path / "names") == ["zebra", "crème brûlée", "東京"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "names is empty: give one class name a line"),
        (b"a\n\nb\n", "names, line 2 is empty"),
        (b"a\nb\n a\n", "names, line 3: 'a' stands in line 1 too: make the names differ"),
        (b"caf\xe9\n", "names is not UTF-8 text: save it as UTF-8"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "names").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_class_names(tmp_path / "names")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone do not exist: give a file of one name"):
        read_class_names(tmp_path / "gone")
