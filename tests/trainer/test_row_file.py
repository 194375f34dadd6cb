"""Rows of class weights: whatever is asked for in whatever order, from disk or from memory."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.bundle.row_file import RowFile, write_rows

ROWS, WIDTH = 2500, 5
WEIGHT = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_rows(tmp_path / "w", WEIGHT.split(700), name="weight", num_rows=ROWS, width=WIDTH)
    return tmp_path / "w"


def open_rows(path: Path, cache_bytes: int = 0) -> RowFile:
    return RowFile(path, name="weight", num_rows=ROWS, width=WIDTH, cache_bytes=cache_bytes)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each read from disk."""
    found: list[int] = []
    read = os.preadv

    def counted(descriptor: int, buffers: list, offset: int) -> int:
        found.append(len(buffers))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    return found


ASKED = [[], [7], [3, 1, 2, 3, 2499, 0], list(range(ROWS)), list(range(ROWS - 1, -1, -1)), [5] * 40]


@pytest.mark.parametrize("cache_bytes", [0, 500, 10**9])
def test_rows_come_in_the_order_asked_for_however_they_were_held(path, cache_bytes) -> None:
    rows = open_rows(path, cache_bytes)
    for asked in [*ASKED, *ASKED]:
        assert torch.equal(rows.read(asked), WEIGHT[torch.tensor(asked, dtype=torch.long)])


def test_rows_that_lie_together_are_read_in_one_call(path, calls) -> None:
    rows = open_rows(path)
    rows.read([9, 8, 20, 10, 21])
    assert sorted(calls) == [2, 3]
    calls.clear()
    rows.read(range(ROWS))
    assert calls == [1024, 1024, 452]


def test_a_row_asked_for_again_is_not_read_again(path, calls) -> None:
    rows = open_rows(path, cache_bytes=10**6)
    rows.read([3, 4, 90])
    calls.clear()
    assert torch.equal(rows.read([90, 5, 3]), WEIGHT[[90, 5, 3]])
    assert calls == [1]


def test_a_change_to_what_was_read_does_not_reach_what_is_held(path) -> None:
    rows = open_rows(path, cache_bytes=10**6)
    for _ in range(2):
        rows.read([3]).zero_()
    assert torch.equal(rows.read([3]), WEIGHT[[3]])


def test_what_is_held_stays_within_its_bytes_and_the_least_used_leaves(path, calls) -> None:
    rows = open_rows(path, cache_bytes=10 * (4 * WIDTH + 250))
    for row in (0, *range(9), 0, *range(100, 108)):
        rows.read([row])
    assert len(rows._cache) == 10
    calls.clear()
    rows.read([0])  # asked for in between
    assert calls == []
    rows.read([1])
    assert calls == [1]


def test_a_question_for_very_many_rows_does_not_drive_the_hot_ones_out(path, calls) -> None:
    rows = open_rows(path, cache_bytes=100 * (4 * WIDTH + 250))
    rows.read([3])
    rows.read(range(ROWS))
    calls.clear()
    rows.read([3])
    assert calls == []


def test_threads_may_read_together(path) -> None:
    rows = open_rows(path, cache_bytes=40 * (4 * WIDTH + 250))
    start = threading.Barrier(4)

    def work(seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        found = []
        for _ in range(300):
            asked = torch.randint(60, (4,), generator=generator)
            found.append((rows.read(asked.tolist()), WEIGHT[asked]))
        return found

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            assert all(torch.equal(got, wanted) for got, wanted in found)


@pytest.mark.parametrize("outside", [-1, ROWS])
def test_a_row_outside_is_named_and_nothing_is_read(path, calls, outside) -> None:
    with pytest.raises(ValueError, match=rf"class id {outside} is not within 0 … 2499"):
        open_rows(path).read([0, outside])
    assert calls == []


def test_a_file_cut_short_after_it_was_opened_is_named(path) -> None:
    rows = open_rows(path)
    os.truncate(path, path.stat().st_size - 4 * WIDTH - 1)
    with pytest.raises(ValueError, match="ends within row 2498: copy the bundle again"):
        rows.read([2497, 2498])
