"""Reads the lines of small text files that users supply, such as label files and class lists."""

from collections.abc import Iterator
from pathlib import Path

_MAX_LINE_BYTES = 1 << 20


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the text of each line, with its line break.

    Lines end in LF or CR LF. Raises FileNotFoundError if the file is missing, and ValueError, with
    the file and the line, for a line that is too long, is not UTF-8 or contains another CR.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file: pass a text file")
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            # Check this first, because a file without LF is a single line.
            if b"\r" in line.removesuffix(b"\n").removesuffix(b"\r"):
                raise ValueError(
                    f"{path}, line {number} contains a carriage return (CR): save the file with "
                    "the line endings LF or CR LF"
                )
            if len(line) == _MAX_LINE_BYTES:
                raise ValueError(
                    f"{path}, line {number} is longer than {_MAX_LINE_BYTES:,} bytes: pass a text "
                    "file with shorter lines"
                )
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number} is not UTF-8 text: save the file as UTF-8"
                ) from error
