"""The file of class names that three commands read."""

import re
from pathlib import Path

import pytest

from data.tars.labels import read_class_names


def test_names_keep_their_order_and_are_stripped(tmp_path: Path) -> None:
    (tmp_path / "names").write_bytes("\ufeffzebra \r\n  crème brûlée\r\n東京\r\n\r\n".encode())
    assert read_class_names(tmp_path / "names") == ["zebra", "crème brûlée", "東京"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "names, line 1 is empty: write one class name per line"),
        (b"a\n\nb\n", "names, line 2 is empty"),
        (b"a\nb\n a\n", "names, line 3: 'a' is also on line 1"),
        (b"caf\xe9\n", "names is not UTF-8 text: save the file as UTF-8"),
    ],
)
def test_an_invalid_file_raises_an_error_that_names_the_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "names").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_class_names(tmp_path / "names")
