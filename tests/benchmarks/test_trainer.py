"""The benchmarks of the trainer, at toy size."""

import pytest

from benchmarks import trainer


def test_a_step_is_compared_with_a_bare_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "STEPS", 1)
    monkeypatch.setattr(trainer, "SECONDS", 0.0)
    ratio, *_ = trainer.step()
    assert float(ratio.measured) > 0


def test_checkpoints_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "STATE_BYTES", 4 * 2**20)
    monkeypatch.setattr(trainer, "ROUNDS", 1)
    assert [float(row.measured) >= 0 for row in trainer.checkpoints()] == [True, True]
