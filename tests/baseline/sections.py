"""`python -m tests.baseline.sections NAME FILE`: records one section.

Each section runs in its own process, because commands and heads change global state of torch.
"""

import sys
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.baseline.values import write

# The longest first, because two run at a time.
SECTIONS = ("runs", "heads", "samples", "answers")


def main() -> None:
    name, path = sys.argv[1:]
    started = time.monotonic()
    with TemporaryDirectory(prefix=f"baseline-{name}-") as folder:
        record = import_module(f"tests.baseline.{name}").record(Path(folder))
    write(Path(path), record)
    print(f"{name}: {len(record):,} entries, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
