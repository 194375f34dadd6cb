"""The benchmarks of the trainer, at toy size."""

import pytest

from benchmarks import checkpoints, trainer, trainer_step


def test_a_step_is_compared_with_a_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_step, "STEPS", 1)
    monkeypatch.setattr(trainer_step, "SECONDS", 0.0)
    (row,) = trainer_step.rows()
    assert float(row.measured) > 0


@pytest.mark.timeout(600)
def test_checkpoints_and_imports_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "STATE_BYTES", 4 * 2**20)
    monkeypatch.setattr(checkpoints, "ROUNDS", 1)
    monkeypatch.setattr(trainer, "ROUNDS", 1)
    rows = [*checkpoints.rows(), *trainer.imports()]
    assert len(rows) == 2 + 1
    assert all(float(row.measured) >= 0 for row in rows)
