"""Benchmark tables that are written to a file have one line per row."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = ("a loader / another loader", "142 images of 104 kB", "4.19", ">= 3.00", "x" * 120)


def test_a_row_is_one_line_when_the_output_is_a_file(tmp_path: Path) -> None:
    code = f"from benchmarks.timing import Row, print_rows; print_rows([Row(*{ROW!r})])"
    with (tmp_path / "out.txt").open("w") as out:
        subprocess.run(
            [sys.executable, "-c", code],
            stdout=out,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "80"},
            check=True,
            timeout=120,
        )
    lines = (tmp_path / "out.txt").read_text().splitlines()
    assert any(all(cell in line for cell in ROW) for line in lines), lines
