"""Writes a table of Debian's packages: the text describes a package, and its labels are the
packages that it refers to.

    python examples/xmc/debian.py /var/lib/apt/lists/*_main_binary-amd64_Packages* -o debian.jsonl

The input is the `Packages` index of any mirror, such as
https://deb.debian.org/debian/dists/bookworm/main/binary-amd64/Packages.xz, or the indexes of an
installed system. A `.lz4` file is read with apt-helper, which is part of apt.

text: the name, the section and the short description of the package. Every other field is dropped:
relations contain the labels, Provides, Built-Using and Python-Egg-Name repeat parts of them, and
some debtags (Tag) were derived from dependencies.

labels: the names in Pre-Depends, Depends, Recommends, Suggests and Enhances, with all alternatives,
without versions and architectures, and without the package itself. Packages that share a source
package have similar relations, so all packages of a source are in the same split.
"""

import argparse
import gzip
import lzma
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rows import Row, split_of, write

_RELATIONS = ("Pre-Depends", "Depends", "Recommends", "Suggests", "Enhances")
_APT_HELPER = "/usr/lib/apt/apt-helper"


def content(path: Path) -> str:
    """Return the text of an index, which may be compressed."""
    try:
        match path.suffix:
            case ".xz":
                return lzma.decompress(path.read_bytes()).decode()
            case ".gz":
                return gzip.decompress(path.read_bytes()).decode()
            case ".lz4":
                if not Path(_APT_HELPER).exists():
                    sys.exit(f"error: {path} needs apt: decompress it first, with lz4 -d {path}")
                command = [_APT_HELPER, "cat-file", str(path)]
                return subprocess.run(command, check=True, capture_output=True).stdout.decode()
        return path.read_text(encoding="utf-8")
    except (OSError, EOFError, ValueError, lzma.LZMAError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {path} is not a Packages index: {error}")


def packages(index: str) -> Iterator[dict[str, str]]:
    """Yield the fields of each package. Continuation lines are joined by a space."""
    for paragraph in re.split(r"\n\s*\n", index):
        lines = re.sub(r"\n[ \t]+", " ", paragraph).splitlines()
        fields = dict(re.split(r":\s*", line, maxsplit=1) for line in lines if ":" in line)
        if "Package" in fields:
            yield fields


def row(fields: dict[str, str], test_fraction: float) -> Row:
    name = fields["Package"]
    parts = [fields.get(field, "") for field in ("Section", "Description")]
    items = ",".join(fields.get(relation, "") for relation in _RELATIONS)
    labels = {re.split(r"[\s:(\[<]", one.strip())[0] for one in re.split(r"[,|]", items)}
    source = (fields.get("Source") or name).split()[0]
    text = "\n".join([name, *filter(None, parts)])
    return Row(text, labels - {name, ""}, source, split_of(source, test_fraction))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("indexes", nargs="+", type=Path, help="Packages, .xz, .gz or .lz4")
    parser.add_argument("-o", "--out", type=Path, required=True, help="JSON lines to write")
    parser.add_argument("--test-fraction", type=float, default=0.2, help="of the source packages")
    parser.add_argument("--min-count", type=int, default=2, help="training rows per label")
    options = parser.parse_args()
    found = {
        fields["Package"]: row(fields, options.test_fraction)  # the last of several versions
        for path in options.indexes
        for fields in packages(content(path))
    }
    write(found.values(), options.out, min_count=options.min_count)


if __name__ == "__main__":
    main()
