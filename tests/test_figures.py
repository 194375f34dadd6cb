"""docs/heads.md: its figures are reproducible, and its examples run."""

import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from heads import LOSSES
from serving.addresses import free_port
from tests.ranks import forked, running, set_rank

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
LOADS_ALONE = "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(code, "an example", "exec"), namespace)
    return namespace


@pytest.mark.slow
def test_a_figure_is_reproduced_byte_for_byte(tmp_path):
    drawn = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        command = [sys.executable, "-B", "-m", "docs.figures", "scores", "--out", str(folder)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=240)
        assert result.stderr == b""
        (figure,) = folder.iterdir()
        assert figure.name == "heads-scores.png"
        drawn.append(figure.read_bytes())
    assert drawn[0] == drawn[1]


def test_the_table_of_losses_shows_their_alignment():
    shown = {}
    for row in re.findall(r"^\| (`.*) \|$", PAGE.partition("## Losses")[2], re.MULTILINE):
        kinds, *_, aligned = (cell.strip() for cell in row.split("|"))
        names = re.findall(r"`(\w+)`", kinds)
        each = [aligned] if len(names) == 1 else aligned.split(", ")
        shown |= dict(zip(names, each * (len(names) // len(each)), strict=True))
    losses = {kind: loss() for kind, loss in LOSSES.items()}
    assert {kind: shown.get(kind, "").replace("`", "") for kind in losses} == {
        kind: f"if {loss.aligned_if}" if loss.aligned_if else ("no", "yes")[loss.aligned]
        for kind, loss in losses.items()
    }


def test_the_self_contained_examples_of_the_readme_and_the_page_run():
    (readme,) = examples((ROOT / "README.md").read_text(encoding="utf-8"))
    for code in [readme, *examples(PAGE)]:
        run(code)


def example_on_a_rank(rank: int, port: int, folder: Path) -> None:
    """Run the example for two ranks, with the environment variables that torchrun sets."""
    set_rank(rank, 2, port)
    os.chdir(folder)
    with Path(f"printed-{rank}").open("w") as printed, redirect_stdout(printed):
        run((ROOT / "examples" / "head_on_ranks.py").read_text())


@pytest.mark.filterwarnings(LOADS_ALONE)
def test_two_ranks_train_and_save_and_one_process_loads_and_appends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    port = free_port("127.0.0.1", 0)
    ranks = [forked(example_on_a_rank, rank, port, tmp_path) for rank in range(2)]
    with running(ranks):
        for rank in ranks:
            rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    printed = "".join((tmp_path / f"printed-{rank}").read_text() for rank in range(2))
    losses = re.findall(r"rank \d: loss ([\d.]+), holds 50000 rows of 100000", printed)
    assert len(losses) == 2
    assert len(set(losses)) == 1
    ran = run((ROOT / "examples" / "append_classes.py").read_text())
    head, momentum = ran["head"], ran["state"]["weight.momentum"]
    assert head.num_classes == 100_002
    appended = ran["optimizer"].state[head.weight]["momentum_buffer"]
    assert momentum.any()
    assert appended.shape == head.weight.shape
    assert torch.equal(appended[:100_000], momentum)
    assert not appended[100_000:].any()
