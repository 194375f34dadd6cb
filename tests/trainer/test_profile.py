"""The trace that `train.profile` writes."""

import gzip
import json
import re
from pathlib import Path

from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from trainer.__main__ import main


def test_the_selected_steps_are_traced(glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(
        glyphs,
        tmp_path / "run",
        train__duration={"steps": 5},
        train__profile={"first_step": 4, "num_steps": 2},
    )
    assert main([str(write_recipe(tmp_path, recipe))]) == 0
    with gzip.open(tmp_path / "run" / "profile-rank0.json.gz", "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    found = (re.fullmatch(r"ProfilerStep#(\d+)", name) for name in names)
    steps = sorted(int(match[1]) for match in found if match)
    assert steps == [3, 4]  # the profiler counts from 0
    assert "aten::addmm" in names or "aten::mm" in names
