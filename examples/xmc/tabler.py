"""Writes a table of the tabler icons: the text is the name of an icon, and its labels are its tags.

    npm pack @tabler/icons@3.52.0
    python examples/xmc/tabler.py tabler-icons-3.52.0.tgz -o tabler.jsonl

The input is the package from npm, or its icons.json.

text: the name, such as `bell off`, and the category. The drawing is not used: kway does not read
SVG. Icons that differ only in their last words, such as `bell` and `bell-off`, are similar, so all
icons with the same first word are in the same split.

labels: the tags, without those that consist of words of the text.
"""

import argparse
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from rows import Row, split_of, write

_MEMBER = "package/icons.json"


def icons(package: Path) -> dict[str, dict[str, object]]:
    """Return the icons of the package by name."""
    if package.suffix == ".json":
        return json.loads(package.read_bytes())
    try:
        with tarfile.open(package) as tar:
            file = tar.extractfile(_MEMBER)
            assert file is not None
            return json.load(file)
    except (KeyError, OSError, tarfile.TarError) as error:
        sys.exit(f"error: {package} does not contain {_MEMBER} ({type(error).__name__})")


def rows(package: Path, test_fraction: float) -> Iterator[Row]:
    for name, icon in icons(package).items():
        words = [*name.split("-"), *str(icon["category"]).lower().split()]
        # A few tags are numbers or null.
        tags = {str(tag).strip().lower() for tag in icon["tags"] if tag is not None}
        labels = {tag for tag in tags if tag and not set(tag.split("-")) <= set(words)}
        yield Row(" ".join(words), labels, words[0], split_of(words[0], test_fraction))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", type=Path, help="the package of @tabler/icons, or its icons.json"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--test-fraction", type=float, default=0.2, help="of the first words")
    parser.add_argument("--min-count", type=int, default=2, help="training rows per label")
    options = parser.parse_args()
    found = rows(options.package, options.test_fraction)
    write(found, options.out, min_count=options.min_count)


if __name__ == "__main__":
    main()
