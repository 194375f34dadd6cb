"""Undisturbed runs, which detect process groups that abort the process while they are destroyed."""

from collections.abc import Iterator
from pathlib import Path

from tests.shards import glyph_recipe, glyph_shards
from tests.soak.trials import Trial
from tests.system.processes import write_recipe
from tests.system.runs import launched

_NUM_RANKS = (1, 2, 4)


def quiet_runs(folder: Path, count: int) -> Iterator[Trial]:
    """Train `count` short runs on 1, 2 and 4 ranks in turn. Each must exit with 0 and no error."""
    folder.mkdir(parents=True)
    shards = glyph_shards(folder)
    for index in range(count):
        num, run = _NUM_RANKS[index % len(_NUM_RANKS)], folder / f"run-{index}"
        recipe = write_recipe(folder, glyph_recipe(shards, run, train__duration={"steps": 2}))
        with launched(recipe, run, num=num) as training:
            code = training.end()
            clean = "error" not in training.output and "terminate" not in training.output
        yield Trial(f"{num} ranks", code == 0 and clean, f"code {code}", None)
