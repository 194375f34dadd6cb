"""Every section of `python -m benchmarks.gpu` completes at toy size."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import TOY, sections_of

ROOT = Path(__file__).parents[2]
SECTIONS = sections_of(TOY, torch.device("cpu"))


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_rows(name: str) -> None:
    rows = list(SECTIONS[name]())
    assert rows
    assert all(row.measured for row in rows), rows


def test_the_wheels_are_those_that_kway_is_tested_with() -> None:
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    constraints = set((ROOT / "constraints.txt").read_text().splitlines())
    peers = {"cut-cross-entropy", "liger-kernel"}
    wheels = {line for line in lines if line and not line.startswith("#")}
    assert wheels
    assert {line for line in wheels - constraints if line.split("==")[0] not in peers} == set()
