"""The trace that `train.profile` writes."""

import gzip
import json
import re
from pathlib import Path

import pytest

from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from trainer.__main__ import main


@pytest.mark.parametrize("first_step", [2, 4])
def test_the_selected_steps_are_traced(first_step: int, glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(
        glyphs,
        tmp_path / "run",
        train__duration={"steps": 6},
        train__profile={"first_step": first_step, "num_steps": 2},
    )
    assert main([str(write_recipe(tmp_path, recipe))]) == 0
    with gzip.open(tmp_path / "run" / "profile-rank0.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    found = (re.fullmatch(r"ProfilerStep#(\d+)", name) for name in names)
    steps = sorted(int(match[1]) for match in found if match)
    assert steps == [first_step - 1, first_step]  # the profiler counts from 0
    assert "aten::addmm" in names or "aten::mm" in names


def test_a_run_without_the_option_writes_no_trace(glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(glyphs, tmp_path / "run", train__duration={"steps": 1})
    assert main([str(write_recipe(tmp_path, recipe))]) == 0
    assert not list((tmp_path / "run").glob("profile*"))
