"""The benchmarks of the heads, at toy size."""

import pytest

from benchmarks import cover_tree, head_step, peak_memory, smooth_topk
from heads.losses import LOSSES


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        head_step: {
            "DIM": 8,
            "ENGINE_CASES": ((20_000, 4, 128, None),),
            "TREE_CASES": ((30, 4, None),),
            "LOSS_CASE": (30, 4),
            "SAMPLED_CASE": (30, 4),
        },
        smooth_topk: {"CASES": ((20, 5, None),), "BATCH": 4},
        peak_memory: {"CLASSES": 1000, "KINDS": ("ce", "batch_ce")},
        cover_tree: {"NUM_CLASSES": 50, "DIM": 4, "MANY_CLASSES": 60, "MANY_DIM": 3},
    }
    for module, values in sizes.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


def test_head_steps_have_positive_ratios() -> None:
    rows = [*head_step.engine(), *head_step.trees(), *head_step.losses()]
    rows += smooth_topk.rows()
    assert len(rows) == 1 + 1 + len(LOSSES) + 1
    assert min(float(row.measured) for row in rows) > 0


def test_the_peak_memory_is_measured_for_each_loss() -> None:
    (row,) = peak_memory.rows()
    assert "ce " in row.details
    assert "batch_ce " in row.details


def test_cover_trees_are_measured() -> None:
    rows = list(cover_tree.rows())
    assert len(rows) == 3
    assert all(row.details.endswith(" levels") for row in rows)
