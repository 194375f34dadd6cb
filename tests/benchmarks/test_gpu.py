"""Every section of `python -m benchmarks.gpu` completes at toy size."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import TOY, sections_of
from benchmarks.timing import Row, command_line, report

ROOT = Path(__file__).parents[2]
SECTIONS = sections_of(TOY, torch.device("cpu"))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_rows(name: str) -> None:
    rows = list(SECTIONS[name]())
    assert rows
    assert all(row.measured for row in rows), rows


def test_a_section_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    def fails() -> Iterator[Row]:
        yield Row("first", "case", "1")
        raise RuntimeError("CUDA out of memory")

    path = tmp_path / "rows.md"
    options = command_line("gpu", "").parse_args(["--markdown", str(path)])
    with pytest.raises(SystemExit, match="failed: a"):
        report(options, {"a": fails, "b": lambda: iter([Row("second", "case", "2")])})
    assert [line.split(" | ")[0] for line in path.read_text().splitlines()[-2:]] == [
        "| first",
        "| second",
    ]


def test_the_wheels_are_those_that_kway_is_tested_with() -> None:
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    constraints = set((ROOT / "constraints.txt").read_text().splitlines())
    peers = {"cut-cross-entropy", "liger-kernel"}
    wheels = {line for line in lines if line and not line.startswith("#")}
    assert wheels
    assert {line for line in wheels - constraints if line.split("==")[0] not in peers} == set()
