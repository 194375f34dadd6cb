"""`python -m benchmarks.gpu` at toy size: it completes, resumes, and reports failures."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.__main__ import TOY, main, slices_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", slices_of(TOY))
def test_every_slice_has_rows(name: str, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--slice", name]) == 0
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert rows
    assert all(row["measured"] for row in rows), rows


def test_missing_slices_run_in_processes_and_a_failure_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slices = slices_of(TOY)
    for name in slices.keys() - {"fused"}:
        (tmp_path / f"{name}.json").write_text('{"machine": "a machine", "rows": []}')
    assert main(["--out", str(tmp_path), "--minutes", "0"]) == 1
    assert "fused: failed, see" in capsys.readouterr().out
    assert main(["--out", str(tmp_path)]) == 0
    table = (tmp_path / "gpu.md").read_text()
    assert "fp8 rows, K = 1,000" in table
    assert table.count("a machine") == len(slices) - 1
    assert "fused: done" in capsys.readouterr().out


def test_the_wheels_are_those_that_kway_is_tested_with() -> None:
    lines = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text().splitlines()
    constraints = set((ROOT / "constraints.txt").read_text().splitlines())
    peers = {"cut-cross-entropy", "liger-kernel"}
    wheels = {line for line in lines if line and not line.startswith("#")}
    assert wheels
    assert {line for line in wheels - constraints if line.split("==")[0] not in peers} == set()
