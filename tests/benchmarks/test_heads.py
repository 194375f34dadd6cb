"""The benchmarks of the heads, at toy size."""

import pytest

from benchmarks import heads as benchmark
from heads.losses import LOSSES


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "DIM": 8,
        "ENGINE_CASES": ((20_000, 4, 128, None),),
        "TREE_CASES": ((30, 4, None),),
        "LOSS_CASE": (30, 4),
        "SAMPLED_CASE": (30, 4),
        "TOPK_CASES": ((20, 5, None),),
        "TOPK_BATCH": 4,
        "PEAK_CLASSES": 1000,
        "PEAK_KINDS": ("batch_ce",),
        "VECTORS": (50, 4),
        "MANY_VECTORS": (60, 3),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(benchmark, name, value)


def test_head_steps_have_positive_ratios() -> None:
    rows = [*benchmark.engine(), *benchmark.trees(), *benchmark.losses()]
    rows += benchmark.smooth_topk()
    assert len(rows) == 1 + 1 + len(LOSSES) + 1
    assert min(float(row.measured) for row in rows) > 0


def test_the_peak_memory_is_measured_for_each_loss() -> None:
    (row,) = benchmark.peak_memory()
    assert "batch_ce " in row.details


def test_cover_trees_are_measured() -> None:
    rows = list(benchmark.cover_trees())
    assert len(rows) == 3
    assert all(row.details.endswith(" levels") for row in rows)
