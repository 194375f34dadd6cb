"""A toy-size run of the comparison of row types."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from data.sources import ImageFolder
from experiments import row_types
from experiments.row_types import ARMS, PROBLEMS, main
from tests.shards import write_images


def toy(images: Path) -> row_types.Problem:
    problem = row_types.glyphs()
    network = {**problem.recipe["backbone"]["config"], "hidden_sizes": [4, 8], "depths": [1, 1]}
    return replace(
        problem,
        opened=lambda work: ImageFolder(images, original=True, test_fraction=0.25),
        changes={"validation": 5},
        recipe={**problem.recipe, "backbone": {"config": network}},
        steps=2,
        rates=(0.1,),
        fused_rates=(1e30, 0.1),
    )


def lines(output: str) -> Iterator[list[str]]:
    for line in output.splitlines():
        if line.startswith("| glyphs"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_all_row_types_are_compared_with_float32_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_images(tmp_path)
    monkeypatch.setitem(PROBLEMS, "glyphs", lambda: toy(tmp_path))
    main(["glyphs", "--seeds", "1"])
    rows = list(lines(capsys.readouterr().out))
    assert [row[1] for row in rows] == [arm.dtype for arm in ARMS]
    assert {row[3] for row in rows} == {"0.1"}
    assert all((row[5] == "") == (row[1] == "fp32") for row in rows)


@pytest.mark.parametrize("data", ["cifar100", "glyphs=folder", "mnist=folder"])
def test_unknown_data_are_rejected(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([data])
    assert "pass glyphs, cifar100=FILE or tweets=TABLE" in capsys.readouterr().err
